"""Admits loads to memory one after the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from adapter.telemetry.metrics import Metrics


class AdmissionQueue:
    """A load that waits for memory is not overtaken, but blocks the loads behind it for `seconds`
    at most.
    """

    def __init__(self, seconds: float, metrics: Metrics) -> None:
        self._seconds = seconds
        self._metrics = metrics
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        held = False
        with self._metrics.waiting_load("memory"):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lock.acquire(), self._seconds)
                held = True
            try:
                yield
            finally:
                if held:
                    self._lock.release()
