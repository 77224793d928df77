"""The connections to Triton's HTTP port: taken for one call, given back, used again."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from adapter.core.model import ModelId
from adapter.core.triton_errors import Faults
from adapter.errors import BackendUnavailable
from adapter.triton.connection import Connection, State

_CONNECT_SECONDS = 5
_KEEP_SECONDS = 300


class Pool:
    """Keeps a connection for each concurrent call. There are none before `address` is set,
    host:port of Triton.

    The one used last is used next, so that those too many grow old and are closed. `connections`
    are all that are open, `unused` those without a call.

    Each connection takes a descriptor, and one of an abandoned call lasts as long as Triton needs
    for it. Above `max_connections` a new one has the oldest of these closed.
    """

    def __init__(
        self,
        faults: Faults,
        seconds: float,  # limits a call
        *,
        max_connections: int | None = None,
        answered_nothing: Callable[[Any], None],
        keep_seconds: float = _KEEP_SECONDS,
    ) -> None:
        self.address = ""
        self._faults = faults
        self._seconds = seconds
        self._keep_seconds = keep_seconds
        self.answered_nothing = answered_nothing
        self.connections: set[Connection] = set()
        self.unused: list[Connection] = []  # the one last used is the last
        self._max_connections = max_connections
        # the oldest is the first; some may have had their answer since
        self._abandoned: dict[Connection, None] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._all_lost: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Pool: {len(self.connections)} connections, {len(self.unused)} idle>"

    def take_idle(self) -> Connection | None:
        """Return a connection on which a call may begin at once, out of `unused`; None if none is
        open.
        """
        while self.unused:
            connection = self.unused.pop()
            if connection.is_quiet():
                return connection
            connection.abort()
        return None

    def free(self, connection: Connection) -> None:
        """Take a connection back on which another call may follow."""
        self.unused.append(connection)
        if self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self._keep_seconds, self._sweep)

    def abandoned(self, connection: Connection) -> None:
        """Record that the caller has left before the answer came.

        The oldest connection of this kind is closed when a new one would be too many.
        """
        self._abandoned.pop(connection, None)
        self._abandoned[connection] = None

    def _close_oldest_abandoned(self) -> None:
        while self._abandoned:
            oldest = next(iter(self._abandoned))
            del self._abandoned[oldest]
            if oldest.close_abandoned():
                return

    async def close(self) -> None:
        """Calls under way fail; no connection is left."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in self.connections:
            connection.abort()
        if self.connections:
            self._all_lost = asyncio.get_running_loop().create_future()
            await self._all_lost

    async def connect(self, model_id: ModelId | None) -> Connection:
        """Open a connection. Raises BackendUnavailable, with the model's id."""
        if not self.address:
            raise BackendUnavailable("Triton is not up yet", model_id=model_id, delivered=False)
        most = self._max_connections
        if most is not None and len(self.connections) >= most:
            self._close_oldest_abandoned()
        loop = asyncio.get_running_loop()
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, protocol = await loop.create_connection(self._new, host.strip("[]"), int(port))
                connection = cast("Connection", protocol)
        except (OSError, TimeoutError) as error:
            raise _unreachable(str(error) or "it does not answer", model_id) from error
        if connection.state == State.BROKEN:
            raise _unreachable("it closed a new connection at once", model_id)
        self.connections.add(connection)
        if self._is_closed:
            connection.abort()
            raise _unreachable("the adapter is stopping", model_id)
        return connection

    def _new(self) -> asyncio.Protocol:
        # a Connection has the methods of a Protocol without being one
        return cast("asyncio.Protocol", Connection(self, self._faults, self._seconds))

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        self._abandoned.pop(connection, None)
        if connection in self.unused:
            self.unused.remove(connection)
        if self._all_lost is not None and not self.connections and not self._all_lost.done():
            self._all_lost.set_result(None)

    def _sweep(self) -> None:
        """Close the unused connections on which Triton has been silent for `keep_seconds`."""
        self._sweeper = None
        loop = asyncio.get_running_loop()
        while self.unused:
            left = self.unused[0].heard + self._keep_seconds - loop.time()
            if left > 0:
                self._sweeper = loop.call_later(left, self._sweep)
                return
            self.unused.pop(0).abort()


def _unreachable(why: str, model_id: ModelId | None) -> BackendUnavailable:
    return BackendUnavailable(
        f"Triton cannot be reached: {why}", model_id=model_id, delivered=False
    )
