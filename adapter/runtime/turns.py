"""Gives out turns of the event loop, one to each of those whose work takes long.

However many they are, a turn has the work of one of them, and others are served in between.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial


class Turns:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def is_busy(self) -> bool:
        """Somebody waits."""
        return bool(self._waiting)

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
        go_on()


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # as one is that was cancelled
        turn.set_result(None)
