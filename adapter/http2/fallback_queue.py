"""Shares the fallback server among connections: it begins calls in the order of their arrival."""

from collections import deque
from collections.abc import Callable, Hashable

MAX_NOT_BEGUN = 64


class FallbackQueue:
    """Bounds the calls that the server has and has not begun. Further ones wait in the relay, and
    the connections take turns.
    """

    def __init__(self) -> None:
        self._not_begun = 0
        self._has_begun = False  # with any call since the last look
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}

    @property
    def has_room(self) -> bool:
        """Return whether a call may go to the server at once."""
        return self._not_begun < MAX_NOT_BEGUN and not self._waiting

    def sent(self) -> None:
        """Count a call that goes to the server."""
        self._not_begun += 1

    def wait(self, connection: Hashable, send: Callable[[], object]) -> None:
        """Call `send` when it is this connection's turn."""
        self._waiting.setdefault(connection, deque()).append(send)

    def begun(self) -> None:
        """Note that the server begins with a call."""
        self._has_begun = True
        self._not_begun = max(0, self._not_begun - 1)
        self._send_more()

    def tick(self) -> None:
        """Forget calls that were cancelled before the server began with them; called ten times a
        second.
        """
        if not self._has_begun:
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
