"""Bodies on their way: chunked, large, too large, given up."""

import json
from pathlib import Path

import pytest

from tests.asking import (
    RawConnection,
    background,
    binary_request,
    refusal,
    sized,
)
from tests.journeys.memory.models import metric
from tests.running import RunningAdapter, wait_until
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_PATH = "/models/echo/invoke"
_MIB = 2**20
_UNDER_WAY = 'triton_adapter_requests_in_flight{frontend="sagemaker"}'


def head(*fields: str) -> bytes:
    lines = [f"POST {_PATH} HTTP/1.1", "Host: localhost", *fields]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def in_flight(adapter: RunningAdapter) -> int:
    return sum(model["in_flight"] for model in adapter.state()["models"])


def peak_rss(pid: int) -> int:
    """In bytes, since the last `reset_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def test_expecting_client_gets_100_continue(served):
    body = json.dumps(infer_body(2.0)).encode()
    with RawConnection(served.http) as connection:
        connection.send(head(f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert connection.read_head().startswith(b"HTTP/1.1 100 Continue\r\n")
        connection.send(body)

        status, answer = connection.read_answer()
    assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [2.0])


def test_large_bodies_pass_without_being_held(served):
    callers = 3
    body, json_bytes = binary_request(60 * _MIB // 4)
    pid = served.process.pid
    reset_peak(pid)
    before = peak_rss(pid)

    with background(served, callers) as others:
        asked = [
            others.ask(lambda c: c.post(_PATH, body, sized(json_bytes))) for _ in range(callers)
        ]
        replies = [each.result() for each in asked]

    assert [reply.status for reply in replies] == [200] * callers
    assert all(reply.body.endswith(body[json_bytes:]) for reply in replies)
    # each is there once on its way in and once on its way out
    assert peak_rss(pid) - before < len(body) * callers / 3 + 16 * _MIB


def test_body_over_the_limit_is_refused_unsent(served):
    with RawConnection(served.http) as connection:
        connection.send(head(f"Content-Length: {2**31}"))

        status, body = connection.read_answer()

    assert (status, json.loads(body)["code"]) == (413, "PayloadTooLarge")
    assert str(2**31 - 1) in json.loads(body)["error"]


@pytest.mark.parametrize("length", [1000, 20 * _MIB], ids=["small", "streamed"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
def test_caller_leaving_an_upload_leaves_nothing(served, caller, length, is_chunked):
    half = b"x" * (length // 2)
    with RawConnection(served.http) as connection:
        if is_chunked:
            connection.send(head("Transfer-Encoding: chunked") + b"%x\r\n" % length + half)
        else:
            connection.send(head(f"Content-Length: {length}") + half)
        wait_until(lambda: metric(served, _UNDER_WAY) == 1, 60, "the request is under way")

    wait_until(lambda: metric(served, _UNDER_WAY) == 0, 60, "the request is forgotten")
    assert in_flight(served) == 0
    assert caller.post(_PATH, infer_body(1.0)).status == 200


def test_refused_bodies_leave_the_connection_in_step(served):
    """What was not read of a refused body must never be taken for the next request."""
    with served.client() as client:
        for _ in range(3):
            reply = client.post("/models/nobody/invoke", b"GET /ping HTTP/1.1\r\n\r\n" * 50)
            assert refusal(reply) == (404, "ModelNotFound", "nobody")
        assert client.post(_PATH, infer_body(1.0)).status == 200
