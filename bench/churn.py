"""Loads and unloads a model while others are measured."""

import asyncio
from dataclasses import dataclass
from time import perf_counter

from adapter.errors import BackendUnavailable
from bench.control_client import ControlClient, shown
from bench.plan import Churn

MODEL = "bench-churn"
_GOOD = 200


@dataclass(frozen=True, slots=True)
class Change:
    """Times are in seconds, `at` since the start of the run. `error` is empty after success."""

    at: float
    seconds: float
    operation: str
    error: str


class Churner:
    """Loads and unloads in turn, at the interval of the plan or slower."""

    def __init__(self, control: ControlClient, churn: Churn, run_started: float) -> None:
        self._control = control
        self._churn = churn
        self._run_started = run_started
        self._is_loaded = False
        self.changes: list[Change] = []

    async def run(self, stopped: asyncio.Event) -> None:
        """Run until `stopped`, then unload the model if it is loaded."""
        due = perf_counter()
        while not stopped.is_set():
            await self._change()
            due = max(perf_counter(), due + self._churn.every_seconds)
            try:
                await asyncio.wait_for(stopped.wait(), due - perf_counter())
            except TimeoutError:
                continue
        if self._is_loaded:
            await self._change()

    async def _change(self) -> None:
        operation = "unload" if self._is_loaded else "load"
        started = perf_counter()
        try:
            if self._is_loaded:
                status, body = await self._control.unload(MODEL)
            else:
                status, body = await self._control.load(MODEL, self._churn.package)
            error = "" if status == _GOOD else f"{status} {shown(body)}"
        except BackendUnavailable as unavailable:
            error = str(unavailable)
        if not error:
            self._is_loaded = not self._is_loaded
        self.changes.append(
            Change(started - self._run_started, perf_counter() - started, operation, error)
        )
