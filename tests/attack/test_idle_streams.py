"""Callers of streams who send large messages and then nothing: none of these stays in memory."""

from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.attack.test_control_calls import memory_kib
from tests.grpc_calls import NO_LIMITS, calls_to, infer_request
from tests.running import RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

_CALLERS = 8
_MIB = 2**20
_SENT = 30 * _MIB  # in each message
_LIMIT = 16 * _MIB


@pytest.fixture(scope="module")
def adapter() -> Iterator[RunningAdapter]:
    with embedded_adapter(f"--max-inflight-body-bytes={_LIMIT}") as adapter:
        yield adapter


def send_one(request: pb.ModelInferRequest, end: Event) -> Iterator[pb.ModelInferRequest]:
    """Yield one request, and keep the stream open until the end."""
    yield request
    end.wait()


def test_idle_streams_keep_no_message(adapter: RunningAdapter) -> None:
    """Each stream was answered, and stays open. Their messages took 240 MiB."""
    request = infer_request("zzz", 1.0)
    request.raw_input_contents[:] = [bytes(_SENT)]
    end = Event()
    streams = []
    before = memory_kib(adapter, "VmRSS")
    with ExitStack() as stack:
        stack.callback(end.set)
        for _ in range(_CALLERS):
            calls = stack.enter_context(calls_to(adapter.grpc, NO_LIMITS))
            streams.append(calls.stream(send_one(request, end)))
            assert "unknown model" in next(streams[-1]).error_message
        kept_kib = _CALLERS * _SENT // 1024
        wait_until(
            lambda: memory_kib(adapter, "VmRSS") - before < kept_kib / 3,
            20,
            "the messages are gone",
        )
