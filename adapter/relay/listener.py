"""Accepts gRPC clients' connections, applies their time limits, and drains them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, cast

from adapter.relay.policy import Connect, RelayContext
from adapter.relay.session import RelaySession
from adapter.relay.transport import State
from adapter.runtime import background, sockets
from adapter.runtime.threads import REPOSITORY

_TICK_SECONDS = 0.1
_TICKS_A_SECOND = 10
_BACKLOG = 1024  # as at the HTTP listener

log = logging.getLogger(__name__)


class RelayListener:
    """Listens for gRPC clients, and checks the time limits of their connections."""

    def __init__(self, context: RelayContext, *, max_connections: int | None = None) -> None:
        self._context = context
        self._max_connections = max_connections
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[NoReturn] | None = None
        self._forgetting: asyncio.Task[NoReturn] | None = None
        self._ticks = 0
        self._is_closing = False
        self._file: sockets.SocketFile | None = None  # of a unix socket
        self._sessions: set[RelaySession] = set()

    async def listen(self, host: str, port: int, path: str | None) -> int:
        """Listen; return the port, 0 for a unix socket. Raises OSError if the address is taken."""
        loop = asyncio.get_running_loop()
        self._is_closing = False
        if path is not None:
            self._server = await loop.create_unix_server(self._accept, path, backlog=_BACKLOG)
            self._file = sockets.SocketFile(path)
        else:
            self._server = await sockets.listen(self._accept, host, port, _BACKLOG)
        self._ticking = background.begin(
            "grpc-relay-ticks", background.forever(self._tick, seconds=_TICK_SECONDS)
        )
        forget_cancelled = self._context.fallback_queue.forget_cancelled
        self._forgetting = background.begin(
            "grpc-relay-queue", background.forever(forget_cancelled, seconds=_TICK_SECONDS)
        )
        return 0 if path is not None else int(self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return sum(s.state is not State.CLOSED for s in self._sessions)

    def _accept(self) -> asyncio.Protocol:
        """Return the protocol of a new connection: a session, or a refusal at the limit of
        connections and while the listener closes.
        """
        limit = self._max_connections
        if self._is_closing:
            return _Refusal()
        if limit is not None and len(self._sessions) >= limit and self.connections >= limit:
            self._context.on_shed("refused")
            return _Refusal()
        session = RelaySession(self._context)
        self._sessions.add(session)
        return session

    def fallback_began(self) -> None:
        """Note that the fallback server begins with a call."""
        _guarded(self._context.fallback_queue.count_begun)

    async def _tick(self) -> None:
        """Check the requests of each session; once a second also each connection. Called ten times
        a second.
        """
        self._ticks += 1
        for session in list(self._sessions):
            if session.streams:
                _guarded(session.check_requests)
        if self._ticks % _TICKS_A_SECOND == 0:
            self._sessions = {session for session in self._sessions if not session.ended.is_set()}
            for session in list(self._sessions):
                _guarded(session.check_connection)

    def renew_connections(self) -> None:
        """Shut the present connections down gracefully, so that their clients connect anew, and go
        on accepting new ones. A unix socket leads to no other server: its connections stay.
        """
        if self._file is None:
            for session in self._sessions:
                session.shut_down()

    def start_drain_deadline(self) -> None:
        """Refuse incomplete requests, also later ones, and reset streams whose responses are not
        read: the adapter stops.
        """
        self._context.is_stopping = True
        for session in list(self._sessions):
            _guarded(session.check_requests)

    async def close(self, grace_seconds: float) -> None:
        """Accept no connections; let open streams end within `grace_seconds`."""
        if self._server is None or self._ticking is None or self._forgetting is None:
            return
        self._is_closing = True
        if self._file is not None:
            await REPOSITORY.run(self._file.remove)
        self._server.close()
        for session in self._sessions:
            session.shut_down()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                for session in list(self._sessions):
                    await session.wait_until_done()
        for session in self._sessions:
            session.close_all()
        ending = {self._ticking, self._forgetting}
        for task in ending:
            background.end(task)
        await asyncio.wait({*ending, *self._context.tasks}, timeout=1)


class _Refusal(asyncio.Protocol):
    """Closes a connection without a byte. A gRPC client takes that for a failed connection:
    its calls are UNAVAILABLE, and it backs off. After SETTINGS and GOAWAY it would reconnect at
    once, and its calls would wait for their deadline.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        cast("asyncio.Transport", transport).close()


def _guarded(check: Callable[[], None]) -> None:
    """Call `check`, and log a bug in it: it must not end the time limits of all sessions."""
    try:
        check()
    except Exception:
        log.exception("request.failed", extra={"method": "http/2"})


def connect_to(address: Callable[[], str | None]) -> Connect:
    """Return what connects to `host:port` or `unix:/path`. It raises OSError when nobody listens,
    or while the address is None.
    """

    async def connect(protocol: asyncio.Protocol) -> None:
        target = address()
        if target is None:
            raise ConnectionRefusedError("not up yet")
        loop = asyncio.get_running_loop()
        if target.startswith("unix:"):
            await loop.create_unix_connection(lambda: protocol, target.removeprefix("unix:"))
        else:
            host, _, port = target.rpartition(":")
            made, _ = await loop.create_connection(lambda: protocol, host.strip("[]"), int(port))
            sockets.keep_alive(made)

    return connect
