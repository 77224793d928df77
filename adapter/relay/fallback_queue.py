"""Shares the fallback server among connections: it begins calls in the order of their arrival."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

MAX_NOT_BEGUN = 64
_TURNS = 20  # of the event loop; the server begins with a call every fifth turn


class FallbackQueue:
    """Bounds the calls that the server has and has not begun. Further ones wait in the relay, and
    the connections take turns.
    """

    def __init__(self) -> None:
        self._not_begun = 0
        self._has_begun = False  # with any call since `forget_cancelled` ended
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}

    @property
    def has_room(self) -> bool:
        """Return whether a call may go to the server at once."""
        return self._not_begun < MAX_NOT_BEGUN and not self._waiting

    def count_sent(self) -> None:
        """Count a call that goes to the server."""
        self._not_begun += 1

    def wait(self, connection: Hashable, send: Callable[[], object]) -> None:
        """Call `send` when it is this connection's turn."""
        self._waiting.setdefault(connection, deque()).append(send)

    def count_begun(self) -> None:
        """Count a call that the server begins with, and send calls that have waited for that."""
        self._has_begun = True
        self._not_begun = max(0, self._not_begun - 1)
        self._send_more()

    async def forget_cancelled(self) -> None:
        """Forget calls that were cancelled before the server began with them: it does not report
        those. Called ten times a second.

        Turns of the event loop are counted because the server runs in this loop. When a turn takes
        as long as the pause between two calls, the server has begun with nothing although it works:
        if its calls were forgotten, hundreds more would wait in it, for longer than clients do.
        """
        for _ in range(_TURNS):
            if self._has_begun or not self._not_begun:
                break
            await asyncio.sleep(0)
        else:
            self._not_begun = 0
            self._send_more()
        self._has_begun = False

    def _send_more(self) -> None:
        """Send waiting calls while the server has room, one of each connection in turn."""
        while self._waiting and self._not_begun < MAX_NOT_BEGUN:
            connection = next(iter(self._waiting))
            calls = self._waiting.pop(connection)
            send = calls.popleft()
            if calls:
                self._waiting[connection] = calls
            send()
