"""The latency of one model while another is loaded and unloaded without a pause."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

from tests.benchmarks.figures import Json, compare, quantile, take_turns
from tests.benchmarks.generators import run_h2load
from tests.benchmarks.place import (
    IDENTITY,
    FailedError,
    RunningTriton,
    Scale,
    run_stack,
    run_triton,
)
from tests.running import RunningAdapter, wait_until

_CALLS_PER_SECOND = 100
_PAUSE_SECONDS = 0.05
_UNLOAD_SECONDS = 60
_P99 = 0.99


@dataclass
class Churner:
    """Loads and unloads a model in a thread, for the time of a block."""

    load: Callable[[], object]
    unload: Callable[[], object]

    @contextmanager
    def run(self) -> Iterator[None]:
        should_stop = threading.Event()
        failures: list[Exception] = []
        thread = threading.Thread(target=self._repeat, args=(should_stop, failures))
        thread.start()
        try:
            yield
        finally:
            should_stop.set()
            thread.join()
        if failures:
            raise FailedError(f"a load or an unload: {failures[0]!r}")

    def _repeat(self, should_stop: threading.Event, failures: list[Exception]) -> None:
        try:
            while not should_stop.is_set():
                self.load()
                should_stop.wait(_PAUSE_SECONDS)
                self.unload()
                should_stop.wait(_PAUSE_SECONDS)
        except Exception as error:  # noqa: BLE001 - of whichever client; raised by who waits
            failures.append(error)


@dataclass(frozen=True)
class ChurnSide:
    """A server that answers calls, and who loads and unloads at the Triton behind it."""

    address: str
    churner: Churner


def measure_churn(scale: Scale) -> Json:
    """Measure the p99 of `identity` over gRPC at a steady rate, while `other` comes and goes."""
    seconds = max(3.0, 3 * scale.seconds)  # for a load and an unload at least
    with run_stack() as adapter, run_triton("identity", "other") as triton:
        triton.client.load_model("identity")
        through_adapter = _churn_through(adapter)
        directly = Churner(
            load=lambda: triton.client.load_model("other"),
            unload=lambda: _unload(triton),
        )
        sides = {
            "adapter": ChurnSide(adapter.grpc, through_adapter),
            "triton": ChurnSide(triton.address, directly),
        }
        rounds = take_turns(sides, scale.rounds, partial(_measure_side, seconds))
    return {"ratio": compare(rounds, "p99", "adapter", "triton")}


def _measure_side(seconds: float, side: ChurnSide) -> Json:
    with side.churner.run():
        load = run_h2load(side.address, seconds, _CALLS_PER_SECOND)
    return {"p99": quantile(load.latencies_seconds, _P99)}


def _churn_through(adapter: RunningAdapter) -> Churner:
    def call(method: str, path: str, body: object = None) -> None:
        with closing(adapter.client()) as client:
            reply = client.request(method, path, body)
        if reply.status != 200:
            raise FailedError(f"{method} {path}: {reply.status} {reply.body!r}")

    package = {"model_name": "other", "url": str(IDENTITY)}
    return Churner(
        load=lambda: call("POST", "/models", package),
        unload=lambda: call("DELETE", "/models/other"),
    )


def _unload(triton: RunningTriton) -> None:
    """Unload `other`, and wait until it is gone: Triton answers an unload when it begins."""
    triton.client.unload_model("other")

    def is_gone() -> bool:
        index = triton.client.get_model_repository_index()
        states = {model.state for model in index.models if model.name == "other"}
        return states <= {"", "UNAVAILABLE"}

    wait_until(is_gone, _UNLOAD_SECONDS, "the model is gone")
