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
        self._on_begin: list[Callable[[], None]] = []
        self._on_noticed: list[Callable[[], None]] = []
        self._noticed_at = 0.0  # when `min_seconds` are over, by the event loop's clock

    def begin(self) -> None:
        """Begin the drain, unless it has begun."""
        if not self.is_on:
            self.is_on = True
            self._noticed_at = asyncio.get_running_loop().time() + self._min_seconds
            self._models.close()
            for act in self._on_begin:
                act()
            asyncio.get_running_loop().call_at(self._noticed_at, self._refuse_incomplete)

    def on_begin(self, act: Callable[[], None]) -> None:
        """Have `act` called when the drain begins."""
        self._on_begin.append(act)

    def on_noticed(self, refuse: Callable[[], None]) -> None:
        """Have `refuse` called `min_seconds` later: from then on incomplete requests are not waited
        for.
        """
        self._on_noticed.append(refuse)

    def _refuse_incomplete(self) -> None:
        for refuse in self._on_noticed:
            refuse()

    async def wait_until_noticed(self) -> None:
        """Wait until load balancers have noticed the drain: until `min_seconds` are over."""
        await asyncio.sleep(max(0.0, self._noticed_at - asyncio.get_running_loop().time()))

    async def wait_until_finished(self, limit_seconds: float) -> int:
        """Wait until `min_seconds` are over and nothing is in flight, for `limit_seconds` at most.
        Return how many requests or operations are still in flight.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_seconds
        while True:
            in_flight = self._count_in_flight()
            is_finished = in_flight == 0 and loop.time() >= self._noticed_at
            if is_finished or loop.time() >= deadline:
                return in_flight
            await asyncio.sleep(_POLL_SECONDS)

    def _count_in_flight(self) -> int:
        """Return the number of requests in flight, or that of operations if it is larger: a load
        that a request asks for is one of each.
        """
        return max(self._traffic.in_flight, self._state.pending_operations)
