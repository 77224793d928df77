"""Callers who open streams of large answers and read none: Triton keeps none for them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import grpc
import pytest

from tests.grpc_calls import calls_to, infer_request, write_decoupled_model
from tests.journeys.memory.models import metric
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

# Answers of a mebibyte each; two of them wait for all callers together, at most.
_ANSWER = """
            import numpy
            for _ in range(int(values[0])):
                send(numpy.zeros(2**18, numpy.float32))
"""
_CUT = "triton_adapter_streams_cut_total"
_FLAGS = ("--max-inflight-body-bytes=16MiB", COMPLETE)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    root = tmp_path_factory.mktemp("models")
    write_decoupled_model(root / "m", answer=_ANSWER)
    with (
        embedded_adapter(f"--model-roots={root}", *_FLAGS) as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.load("m", root / "m").status == 200
        yield adapter


def in_flight(adapter: RunningAdapter) -> int:
    (model,) = adapter.state()["models"]
    return model["in_flight"]


def read_all(caller: socket.socket) -> bytes:
    pieces = []
    with suppress(ConnectionResetError):
        while piece := caller.recv(2**20):
            pieces.append(piece)
    return b"".join(pieces)


def test_unread_streams_are_cut_and_free_their_model(
    adapter: RunningAdapter,
) -> None:
    with ExitStack() as stack:
        calls = [stack.enter_context(calls_to(adapter.grpc)) for _ in range(3)]
        streams = [each.stream([infer_request("m", 20.0)]) for each in calls]
        wait_until(lambda: in_flight(adapter) == 0, 30, "Triton has answered all of them")
        for stream in streams:
            with pytest.raises(grpc.RpcError, match=r"reads too slowly|too many of them wait"):
                list(stream)
    assert metric(adapter, _CUT) == len(streams)


def test_unread_event_stream_is_broken_off(adapter: RunningAdapter) -> None:
    before = metric(adapter, _CUT)
    host, _, port = adapter.http.rpartition(":")
    body = b'{"IN": [50]}'
    head = (
        f"POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: {adapter.http}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(head.encode() + body)
        wait_until(lambda: metric(adapter, _CUT) > before, 30, "it is cut")
        assert not read_all(caller).endswith(b"0\r\n\r\n")
    wait_until(lambda: in_flight(adapter) == 0, 30, "Triton has answered")
