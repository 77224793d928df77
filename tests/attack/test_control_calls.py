"""The real command with control calls that are made to be slow to read."""

import base64
import json
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.running import Client, RunningAdapter, wait_until

pytestmark = pytest.mark.triton

_WIDE = b"{}," * 13_000_000  # 39 MB; 1.7 GB once it is parsed
_ALLOWED_SECONDS = 2  # by SageMaker
_LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"


def most_memory(adapter: RunningAdapter) -> int:
    """Of the adapter's process, in KiB."""
    with open(f"/proc/{adapter.process.pid}/status") as status:  # noqa: PTH123
        (row,) = [row for row in status if row.startswith("VmHWM:")]
    return int(row.split()[1])


def test_a_wide_body_is_400_and_is_not_parsed(client: Client, adapter: RunningAdapter) -> None:
    before = most_memory(adapter)
    body = b'{"parameters": {"x": [' + _WIDE + b"{}]}}"
    answer = client.post("/v2/repository/models/zzz/load", body)
    assert (answer.status, answer.json()["code"]) == (400, "InvalidRequest")
    assert most_memory(adapter) - before < 400 * 1024


_CALLS = ["/models", "/v2/repository/index", "/v2/repository/models/z/unload"]


@pytest.mark.parametrize("path", _CALLS)
def test_so_is_that_of_every_other_control_call(client: Client, path: str) -> None:
    assert client.post(path, b"[" + b"0," * 200_000 + b"0]").status == 400


def test_config_text_within_a_call_has_the_same_bound(adapter: RunningAdapter) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="zzz")
    request.parameters["config"].string_param = json.dumps({"input": [0] * 200_000})
    with pytest.raises(grpc.RpcError) as failed:
        load(adapter, request)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "InvalidRequest: parameter config has more" in failed.value.details()


def test_parameters_over_grpc_are_counted(adapter: RunningAdapter) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="zzz")
    for number in range(10_001):
        request.parameters[str(number)].bool_param = True
    with pytest.raises(grpc.RpcError) as failed:
        load(adapter, request)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "10001 parameters" in failed.value.details()


def load(adapter: RunningAdapter, request: pb.RepositoryModelLoadRequest) -> None:
    with grpc.insecure_channel(adapter.grpc) as channel:
        channel.unary_unary(_LOAD)(request.SerializeToString(), timeout=20)


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
    before = resident(adapter)
    for _ in range(3):  # bodies of 40 MB
        send_load(adapter, body, is_cut=is_cut)
        wait_until(lambda: resident(adapter) - before < 100 * 1024, 5, "the memory is back")


def resident(adapter: RunningAdapter) -> int:
    """Of the adapter's process, in KiB."""
    status = Path(f"/proc/{adapter.process.pid}/status").read_text(encoding="utf-8")
    (row,) = [row for row in status.splitlines() if row.startswith("VmRSS:")]
    return int(row.split()[1])


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
