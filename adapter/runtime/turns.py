"""Gives out turns of the event loop to those whose work takes long.

However many they are, a turn has some milliseconds of their work, and others are served in between.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial

from adapter.runtime import clock

# Of work that takes long, in each turn.
_SECONDS = 0.002


class Turns:
    """Limits how much slow work each turn of the event loop does."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self.until = math.inf  # when this turn's time is up; inf before any slow work in it
        self._next_turn: asyncio.Handle | None = None

    def has_time(self) -> bool:
        """Return whether this turn of the event loop has time left for work that takes long."""
        now = clock.monotonic()
        if self.until == math.inf:
            self.until = now + _SECONDS
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)
        return now < self.until

    def _begin_turn(self) -> None:
        self.until = math.inf
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None

    def wait(self, go_on: Callable[[], object]) -> None:
        """Call `go_on` in a later turn of the event loop, behind those that wait already."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(go_on)

    async def turn(self) -> None:
        """Return in a later turn of the event loop."""
        turn = asyncio.get_running_loop().create_future()
        self.wait(partial(_begin, turn))
        await turn

    def _next(self) -> None:
        go_on = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._begin_turn()  # whose own call comes after this one
        self.has_time()  # begin to count the time of `go_on`
        go_on()


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # as one is that was cancelled
        turn.set_result(None)
