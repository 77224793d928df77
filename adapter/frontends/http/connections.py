"""The connections of the listener, and what becomes of one too many."""

import asyncio
import heapq
import resource
from collections.abc import Callable, Iterator
from typing import cast

from adapter.frontends.http.connection import Connection

# Of those there may be, so many are closed at once: to find them takes a look at all.
_SHARE = 64
_NO_NEW_LOOK_SECONDS = 0.1
_LINGER_SECONDS = 1.0
_OTHER_DESCRIPTORS = 100
_FEWEST, _MOST = 16, 10_000


def bearable_connections(http_listeners: int, grpc_listeners: int) -> int:
    """Return how many connections each listener may have. With all at their limit, descriptors are
    left for files, Triton's processes, memory readings and the admin listener: a connection over
    HTTP takes two, with its connection to Triton; one over gRPC takes four.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bearable = (descriptors - _OTHER_DESCRIPTORS) // (2 * http_listeners + 4 * grpc_listeners)
    return min(max(bearable, _FEWEST), _MOST)


class Connections:
    """`most`: with more, idle ones are closed, at first those that never had a request; where each
    has one in hand, new ones are refused. `shed` is told which: `closed` or `refused`.
    """

    def __init__(
        self, most: int | None = None, on_shed: Callable[[str], None] = lambda _: None
    ) -> None:
        self._most = most
        self.shed = on_shed
        self._open: set[Connection] = set()
        self._lingering = 0
        self._no_look_before = 0.0

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def accept(
        self, new: Callable[[], Connection], refusal: Callable[[], bytes]
    ) -> asyncio.Protocol:
        """What serves a connection that has come: a new one, or who says the refusal."""
        if self._most is None or len(self._open) < self._most or self._close_idle(self._most):
            return new()
        self.shed("refused")
        is_patient = self._lingering <= self._most // 8
        return _Refusal(self, refusal(), is_patient=is_patient)

    def add(self, connection: Connection) -> None:
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)

    def lingers(self, change: int) -> None:
        self._lingering += change

    def _close_idle(self, most: int) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._no_look_before:
            return False
        idle = [one for one in self._open if one.is_idle]
        if not idle:
            self._no_look_before = now + _NO_NEW_LOOK_SECONDS
            return False
        for one in heapq.nsmallest(1 + most // _SHARE, idle, key=lambda one: one.worth):
            self.shed("closed")
            one.close()
        return True


class _Refusal(asyncio.Protocol):
    """`is_patient`: the caller has a second to send its request, which nobody reads, and to see the
    answer; bytes that come to a closed connection may reset it before that.
    """

    def __init__(self, connections: Connections, words: bytes, *, is_patient: bool) -> None:
        self._connections = connections
        self._words = words
        self._is_patient = is_patient

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        own = cast("asyncio.Transport", transport)
        self._connections.lingers(1)
        own.write(self._words)
        if self._is_patient:
            own.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, own.abort)
        else:
            own.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.lingers(-1)
