"""The way to the end: no more work is asked for, what there is is answered."""

import asyncio
from collections.abc import Callable

from adapter.control.models import ModelControl
from adapter.telemetry.traffic import Traffic

_POLL_SECONDS = 0.02


class Drain:
    """Once it `is_on` it stays on: probes say not ready, loads are refused, and answers over HTTP
    say `Connection: close`. Inferences are answered to the last, as callers learn of it late.

    `min_seconds`: for so long they have time to learn of it.
    """

    def __init__(self, control: ModelControl, traffic: Traffic, min_seconds: float) -> None:
        self.is_on = False
        self._control = control
        self._traffic = traffic
        self._min_seconds = min_seconds
        self._beginnings: list[Callable[[], None]] = []
        self._refusals: list[Callable[[], None]] = []
        self._noticed_at = 0.0  # when the least time is over; of the event loop's clock

    def begin(self) -> None:
        if not self.is_on:
            self.is_on = True
            self._noticed_at = asyncio.get_running_loop().time() + self._min_seconds
            self._control.close()
            for act in self._beginnings:
                act()
            asyncio.get_running_loop().call_at(self._noticed_at, self._refuse)

    def at_once(self, act: Callable[[], None]) -> None:
        """To be called when the drain begins."""
        self._beginnings.append(act)

    def then_refuse(self, refuse: Callable[[], None]) -> None:
        """To be called when the least time is over: what has not wholly come is not waited for."""
        self._refusals.append(refuse)

    def _refuse(self) -> None:
        for refuse in self._refusals:
            refuse()

    async def noticed(self) -> None:
        """Wait until the least time is over."""
        await asyncio.sleep(max(0.0, self._noticed_at - asyncio.get_running_loop().time()))

    async def finished(self, seconds: float) -> int:
        """Wait until the least time is over and nothing is in flight, `seconds` at most; returns
        how many requests and operations then still are.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := self._left()) or loop.time() < self._noticed_at:
            if loop.time() >= end:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return left

    def _left(self) -> int:
        return max(self._traffic.in_flight, self._control.operations.in_flight)
