"""Callers who open streams of large answers and read none: Triton keeps none for them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from threading import Event

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.grpc_calls import NO_LIMITS, calls_to, infer_request, write_decoupled_model
from tests.journeys.memory.models import counted, metric
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

# Answers of a mebibyte each; two of them wait for all callers together, at most.
_ANSWER = """
            import numpy
            for _ in range(int(values[0])):
                send(numpy.zeros(2**18, numpy.float32))
"""
_LARGE = "send(__import__('numpy').zeros(10 * 2**20, 'float32'))"  # 40 MiB
_CUT = "triton_adapter_streams_cut_total"
_ENDED = (
    'triton_adapter_requests_total{code="UNAVAILABLE",frontend="grpc",method="ModelStreamInfer"}'
)
_FLAGS = ("--max-inflight-body-bytes=16MiB", COMPLETE)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    root = tmp_path_factory.mktemp("models")
    write_decoupled_model(root / "m", answer=_ANSWER)
    write_decoupled_model(root / "large", answer=_LARGE)
    with (
        embedded_adapter(f"--model-roots={root}", *_FLAGS) as adapter,
        closing(adapter.client()) as client,
    ):
        for name in ("m", "large"):
            assert client.load(name, root / name).status == 200
        yield adapter


def in_flight(adapter: RunningAdapter) -> int:
    return sum(model["in_flight"] for model in adapter.state()["models"])


def read_all(caller: socket.socket) -> bytes:
    pieces = []
    with suppress(ConnectionResetError):
        while piece := caller.recv(2**20):
            pieces.append(piece)
    return b"".join(pieces)


def send_one(end: Event) -> Iterator[pb.ModelInferRequest]:
    """Yield one request, and keep the stream open until the end."""
    yield infer_request("large", 1.0)
    end.wait()


def test_stream_cut_amid_its_first_answer_ends(adapter: RunningAdapter) -> None:
    """The status follows the answer; a caller without one would wait until its deadline."""
    end = Event()
    codes = []
    before = counted(adapter, _ENDED)
    with ExitStack() as stack:
        stack.callback(end.set)
        calls = [stack.enter_context(calls_to(adapter.grpc, NO_LIMITS)) for _ in range(3)]
        streams = [each.stream(send_one(end), timeout=30) for each in calls]
        wait_until(lambda: counted(adapter, _ENDED) == before + 2, 20, "all but one are ended")
        end.set()
        for stream in streams:
            with suppress(grpc.RpcError):
                list(stream)
            codes.append(stream.code().name)
    assert sorted(codes) == ["OK", "UNAVAILABLE", "UNAVAILABLE"]


def test_unread_streams_are_cut_and_free_their_model(
    adapter: RunningAdapter,
) -> None:
    before = metric(adapter, _CUT)
    with ExitStack() as stack:
        calls = [stack.enter_context(calls_to(adapter.grpc)) for _ in range(3)]
        streams = [each.stream([infer_request("m", 20.0)]) for each in calls]
        wait_until(lambda: in_flight(adapter) == 0, 30, "Triton has answered all of them")
        for stream in streams:
            with pytest.raises(grpc.RpcError, match=r"reads too slowly|too many of them wait"):
                list(stream)
    assert metric(adapter, _CUT) == before + len(streams)


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
