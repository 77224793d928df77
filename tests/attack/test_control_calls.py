"""The real command with control calls that are made to be slow to read."""

import base64
import json
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.grpc_calls import calls_to
from tests.running import Client, RunningAdapter, wait_until

pytestmark = pytest.mark.triton

_WIDE = b"{}," * 13_000_000  # 39 MB; 1.7 GB once it is parsed
_ALLOWED_SECONDS = 2  # by SageMaker


def memory_kib(adapter: RunningAdapter, figure: str) -> int:
    """Of the adapter's process: VmRSS, or VmHWM for the most that it had."""
    status = Path(f"/proc/{adapter.process.pid}/status").read_text(encoding="utf-8")
    (row,) = [row for row in status.splitlines() if row.startswith(f"{figure}:")]
    return int(row.split()[1])


def test_wide_body_is_400_unparsed(client: Client, adapter: RunningAdapter) -> None:
    before = memory_kib(adapter, "VmHWM")
    body = b'{"parameters": {"x": [' + _WIDE + b"{}]}}"
    answer = client.post("/v2/repository/models/zzz/load", body)
    assert (answer.status, answer.json()["code"]) == (400, "InvalidRequest")
    assert memory_kib(adapter, "VmHWM") - before < 400 * 1024


_CALLS = ["/models", "/v2/repository/index", "/v2/repository/models/z/unload"]


@pytest.mark.parametrize("path", _CALLS)
def test_so_is_that_of_every_other_control_call(client: Client, path: str) -> None:
    assert client.post(path, b"[" + b"0," * 200_000 + b"0]").status == 400


def many_in_a_config(request: pb.RepositoryModelLoadRequest) -> None:
    request.parameters["config"].string_param = json.dumps({"input": [0] * 200_000})


def many_parameters(request: pb.RepositoryModelLoadRequest) -> None:
    for number in range(10_001):
        request.parameters[str(number)].bool_param = True


@pytest.mark.parametrize(
    ("fill", "told"),
    [
        (many_in_a_config, "InvalidRequest: parameter config has more"),
        (many_parameters, "10001 parameters"),
    ],
)
def test_parts_of_a_load_over_grpc_are_counted(adapter: RunningAdapter, fill, told) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="zzz")
    fill(request)
    with calls_to(adapter.grpc) as calls:
        code, text = calls.refused("RepositoryModelLoad", request)
    assert code == "INVALID_ARGUMENT"
    assert told in text


def test_others_are_answered_meanwhile(adapter: RunningAdapter) -> None:
    """In one of three rounds: what else the machine does shows in one now and then."""
    slowest = []
    while len(slowest) < 3 and (not slowest or slowest[-1] > _ALLOWED_SECONDS):
        slowest.append(slowest_ping(adapter))
    assert slowest[-1] <= _ALLOWED_SECONDS, slowest


def slowest_ping(adapter: RunningAdapter) -> float:
    def widen() -> None:
        with closing(adapter.client()) as own:
            own.post("/v2/repository/models/zzz/load", b"[" + _WIDE + b"{}]")

    widening, slowest = threading.Thread(target=widen), 0.0
    widening.start()
    with closing(adapter.client()) as client:
        while widening.is_alive():
            begun = time.monotonic()
            assert client.get("/ping").status == 200
            slowest = max(slowest, time.monotonic() - begun)
    widening.join()
    return slowest


_FILE = base64.b64encode(bytes(30_000_000)).decode()
_FAILS = "raise ValueError('no weights')"


def load_with(content: str, model: str) -> bytes:
    source = base64.b64encode(model.encode()).decode()
    files = {"file:1/model.py": source, "file:1/weights.bin": content}
    config = json.dumps({"backend": "python"})
    return json.dumps({"parameters": {"config": config, **files}}).encode()


@pytest.mark.parametrize(
    ("body", "is_cut"),
    [
        pytest.param(load_with(_FILE, _FAILS), False, id="fails in Triton"),
        pytest.param(load_with(_FILE + "====", _FAILS), False, id="is no base64"),
        pytest.param(load_with(_FILE, _FAILS), True, id="breaks off"),
    ],
)
def test_of_loads_that_go_wrong_no_body_stays(
    adapter: RunningAdapter, body: bytes, is_cut: bool
) -> None:
    """Python's garbage collector does not look at what is old for as long as this takes."""
    send_load(adapter, body, is_cut=is_cut)
    before = memory_kib(adapter, "VmRSS")
    for _ in range(3):  # bodies of 40 MB
        send_load(adapter, body, is_cut=is_cut)
        wait_until(
            lambda: memory_kib(adapter, "VmRSS") - before < 100 * 1024, 5, "the memory is back"
        )


def send_load(adapter: RunningAdapter, body: bytes, *, is_cut: bool) -> None:
    path = "/v2/repository/models/zzz/load"
    if not is_cut:
        with closing(adapter.client()) as client:
            assert client.post(path, body).status == 400
        return
    host, _, port = adapter.http.rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}\r\n".encode())
        raw.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1000])
