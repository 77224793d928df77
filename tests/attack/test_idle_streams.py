"""Callers of streams who send large messages, or get large answers, and then send nothing: none of
these stays in memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.attack.test_control_calls import memory_kib
from tests.grpc_calls import NO_LIMITS, calls_to, infer_request
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_CALLERS = 8
_MIB = 2**20
_SENT = 30 * _MIB  # in each message
_LIMIT = 512 * _MIB  # of all messages


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    root = tmp_path_factory.mktemp("models")
    grow = f"import numpy; values = numpy.zeros({_SENT // 4}, numpy.float32)"
    write_python_model(root / "m", answer=grow)
    flags = (f"--model-roots={root}", f"--max-inflight-body-bytes={_LIMIT}")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        with adapter.client() as client:
            client.load_model("m", root / "m")
        yield adapter


def send_one(request: pb.ModelInferRequest, end: Event) -> Iterator[pb.ModelInferRequest]:
    """Yield one request, and keep the stream open until the end."""
    yield request
    end.wait()


def check_idle(adapter: RunningAdapter, request: pb.ModelInferRequest, error: str) -> None:
    """Have streams answered, and look at the memory while they stay open."""
    end = Event()
    streams = []
    before = memory_kib(adapter, "VmRSS")
    with ExitStack() as stack:
        stack.callback(end.set)
        for _ in range(_CALLERS):
            calls = stack.enter_context(calls_to(adapter.grpc, NO_LIMITS))
            streams.append(calls.stream(send_one(request, end)))
            assert error in next(streams[-1]).error_message
        limit_kib = before + _CALLERS * _SENT // 1024 // 3
        wait_until(lambda: memory_kib(adapter, "VmRSS") < limit_kib, 20, "the messages are gone")


def test_idle_streams_keep_no_message(adapter: RunningAdapter) -> None:
    """Their messages took 240 MiB."""
    request = infer_request("zzz", 1.0)
    request.raw_input_contents[:] = [bytes(_SENT)]
    check_idle(adapter, request, "unknown model")


def test_idle_streams_keep_no_answer(adapter: RunningAdapter) -> None:
    """Their answers took as much."""
    check_idle(adapter, infer_request("m", 1.0), "")
