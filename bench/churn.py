"""A model that comes and goes while the others are measured."""

import asyncio
from dataclasses import dataclass
from time import perf_counter

from adapter.errors import BackendUnavailable
from bench.doors import Door, shown
from bench.plan import Churn

MODEL = "bench-churn"
_GOOD = 200


@dataclass(frozen=True, slots=True)
class Change:
    """Times are in seconds, `at` since the start of the run. `error` is empty when it went well."""

    at: float
    seconds: float
    operation: str
    error: str


class Churner:
    """Loads and unloads in turn, one every so many seconds, or later when they take longer."""

    def __init__(self, door: Door, churn: Churn, run_started: float) -> None:
        self._door = door
        self._churn = churn
        self._run_started = run_started
        self._is_loaded = False
        self.changes: list[Change] = []

    async def run(self, stopped: asyncio.Event) -> None:
        """Until then; what is loaded at that time is unloaded."""
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
                status, body = await self._door.unload(MODEL)
            else:
                status, body = await self._door.load(MODEL, self._churn.package)
            error = "" if status == _GOOD else f"{status} {shown(body)}"
        except BackendUnavailable as unavailable:
            error = str(unavailable)
        if not error:
            self._is_loaded = not self._is_loaded
        self.changes.append(
            Change(started - self._run_started, perf_counter() - started, operation, error)
        )
