"""SIGTERM and SIGINT: the adapter ends with 0, in a bounded time, whatever Triton does.

SageMaker sends SIGKILL after 30 s.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.asking import background, refusal
from tests.constants import NEVER, TRITON_HANG
from tests.grpc_calls import calls_to
from tests.processes import descendants, is_alive, suspend, tritonserver
from tests.running import EMBEDDED, EXAMPLES, RunningAdapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_DRAIN_SECONDS = 2
# what Triton's own end and the rest may take: a drain of 18 s, the default, leaves so much of 30
_END_SECONDS = 12


@pytest.fixture
def running(tmp_path, request) -> Iterator[RunningAdapter]:
    """Its parameter is the time for a drain."""
    seconds = getattr(request, "param", _DRAIN_SECONDS)
    flags = (f"--model-roots={tmp_path}", f"--drain-timeout-seconds={seconds}")
    adapter = RunningAdapter(*EMBEDDED, *flags, constants={TRITON_HANG: NEVER})
    adapter.wait_for("adapter.started")
    yield adapter
    if adapter.process.poll() is None:
        adapter.process.kill()
    adapter.stop()


def ends(adapter: RunningAdapter, number: signal.Signals = signal.SIGTERM) -> float:
    """How long it took to end with 0 and leave no process."""
    family, begun = descendants(adapter.process.pid), time.monotonic()
    adapter.process.send_signal(number)
    assert adapter.process.wait(30) == 0
    seconds = time.monotonic() - begun
    wait_until(lambda: not [pid for pid in family if is_alive(pid)], 60, "no process is left")
    assert len(adapter.events("adapter.stopped")) == 1
    return seconds


def test_an_idle_adapter_ends_at_once(running):
    """At SIGTERM, too: as each adapter of the tests does."""
    with running.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
    assert ends(running, signal.SIGINT) < _DRAIN_SECONDS + _END_SECONDS
    assert running.events("triton.exited") == []


@pytest.mark.parametrize("running", [60], indirect=True)
def test_standing_triton_is_killed_at_the_end(running):
    suspend(tritonserver(running))
    # neither the drain nor the 8 s for an end in good order are used up
    assert ends(running) < 8


def test_requests_in_flight_learn_of_the_end(running, tmp_path, gate):
    package = write_python_model(tmp_path / "endless", answer=gate.statements)
    with background(running) as others:
        with running.client() as client:
            client.load_model("endless", package)
        over_http = others.ask(lambda c: c.invoke("endless"))
        gate.wait_reached()
        over_grpc = others.ask(lambda _: infer_over_grpc(running.grpc))
        wait_until(lambda: in_flight(running) == 2, 30, "both are in flight")
        seconds = ends(running)
        reply = over_http.result()
        assert refusal(reply)[:2] == (503, "BackendUnavailable")
        assert over_grpc.result() == "UNAVAILABLE"
    assert seconds < _DRAIN_SECONDS + _END_SECONDS


def in_flight(adapter: RunningAdapter) -> int:
    return sum(model["in_flight"] for model in adapter.state()["models"])


def infer_over_grpc(address: str) -> str:
    with calls_to(address) as calls:
        return calls.refused_infer("endless", 1.0)[0]


@pytest.mark.parametrize(
    ("when", "number"), [("adapter.listening", signal.SIGTERM), ("triton.log", signal.SIGINT)]
)
def test_an_adapter_that_is_starting_ends_as_well(when, number):
    adapter = RunningAdapter(*EMBEDDED)
    try:
        adapter.wait_for(when)
        assert ends(adapter, number) < _END_SECONDS
        assert adapter.events("adapter.started") == []
    finally:
        with suppress(ProcessLookupError):
            adapter.process.kill()
        adapter.stop()


def test_ongoing_load_does_not_delay_the_end(running, tmp_path, gate):
    package = write_python_model(tmp_path / "endless", initialize=gate.statements)
    with background(running) as others:
        loading = others.ask(lambda c: c.load("endless", package))
        gate.wait_reached()
        assert ends(running) < _DRAIN_SECONDS + _END_SECONDS
        with suppress(ConnectionError):
            assert loading.result().status == 503
