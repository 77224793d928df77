"""Drains the adapter before it stops: new loads are refused, open requests are answered."""

import asyncio
from collections.abc import Callable

from adapter.control.door import ControlState, Models
from adapter.telemetry.traffic import Traffic

_POLL_SECONDS = 0.02


class Drain:
    """A drain, once on, stays on: probes say not ready, loads are refused, and HTTP responses have
    `Connection: close`. Inferences are answered to the end, since load balancers notice late: they
    have `min_seconds` for it.
    """

    def __init__(
        self, models: Models, state: ControlState, traffic: Traffic, min_seconds: float
    ) -> None:
        self.is_on = False
        self._models = models
        self._state = state
        self._traffic = traffic
        self._min_seconds = min_seconds
        self._beginnings: list[Callable[[], None]] = []
        self._refusals: list[Callable[[], None]] = []
        self._noticed_at = 0.0  # when `min_seconds` are over, by the event loop's clock

    def begin(self) -> None:
        """Begin the drain, unless it has begun."""
        if not self.is_on:
            self.is_on = True
            self._noticed_at = asyncio.get_running_loop().time() + self._min_seconds
            self._models.close()
            for act in self._beginnings:
                act()
            asyncio.get_running_loop().call_at(self._noticed_at, self._refuse)

    def run_at_once(self, act: Callable[[], None]) -> None:
        """Call `act` when the drain begins."""
        self._beginnings.append(act)

    def then_refuse(self, refuse: Callable[[], None]) -> None:
        """Call `refuse` after `min_seconds`: incomplete requests are waited for no longer."""
        self._refusals.append(refuse)

    def _refuse(self) -> None:
        for refuse in self._refusals:
            refuse()

    async def noticed(self) -> None:
        """Wait until `min_seconds` are over."""
        await asyncio.sleep(max(0.0, self._noticed_at - asyncio.get_running_loop().time()))

    async def finished(self, seconds: float) -> int:
        """Wait until `min_seconds` are over and nothing is in flight, for `seconds` at most; return
        how many requests and operations are left.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := self._left()) or loop.time() < self._noticed_at:
            if loop.time() >= end:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return left

    def _left(self) -> int:
        return max(self._traffic.in_flight, self._state.pending_operations)
