"""The listener: it accepts connections, looks after them, and drains them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from adapter.dataplane.proxy.context import ProxyContext
from adapter.dataplane.proxy.session import ProxySession
from adapter.protocols.http2.refusal import Refusal
from adapter.runtime import background
from adapter.runtime.threads import REPOSITORY

_LOOK_SECONDS, _LOOKS_A_SECOND = 0.1, 10
_BACKLOG = 1024  # as at the HTTP listener

log = logging.getLogger(__name__)


class ProxyListener:
    def __init__(
        self,
        context: ProxyContext,
        *,
        max_connections: int | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[NoReturn] | None = None
        self._looks = 0
        self._is_closing = False
        self._path: str | None = None
        self._sessions: set[ProxySession] = set()

    async def listen(self, host: str | None, port: int, path: str | None) -> int:
        """The port, 0 for a unix socket. OSError when it is taken."""
        loop = asyncio.get_running_loop()
        self._path, self._is_closing = path, False
        if path is not None:
            self._server = await loop.create_unix_server(self._accept, path, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        self._looking = background.begin(
            "grpc-lane-looks", background.forever(self._look, seconds=_LOOK_SECONDS)
        )
        return 0 if path is not None else int(self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        return sum(not session.downstream.is_gone for session in self._sessions)

    def _accept(self) -> asyncio.Protocol:
        most = self._max_connections
        if self._is_closing:
            return Refusal()
        if most is not None and len(self._sessions) >= most and self.connections >= most:
            self._on_refused()
            return Refusal()
        session = ProxySession(self._context)
        self._sessions.add(session)
        return session.downstream

    async def _look(self) -> None:
        self._looks += 1
        for session in list(self._sessions):
            if session.downstream.streams:
                _guarded(session.look)
        if self._looks % _LOOKS_A_SECOND == 0:
            self._sessions = {session for session in self._sessions if not session.ended.is_set()}
            for session in list(self._sessions):
                _guarded(session.look_closely)

    def hurry(self) -> None:
        """The adapter stops: requests that have not wholly come are refused, also new ones, and
        answers that are not read are dropped.
        """
        self._context.is_leaving = True
        for session in list(self._sessions):
            _guarded(session.look)

    async def close(self, grace_seconds: float) -> None:
        """Take nothing new; what is open has its time to end."""
        if self._server is None or self._looking is None:
            return
        self._is_closing = True
        self._server.close()
        if self._path is not None:
            await REPOSITORY.run(Path(self._path).unlink, missing_ok=True)
        for session in self._sessions:
            session.downstream.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                for session in list(self._sessions):
                    await session.ended.wait()
        for session in self._sessions:
            session.close()
        background.end(self._looking)
        await asyncio.wait({self._looking, *self._context.tasks}, timeout=1)


def _guarded(look: Callable[[], None]) -> None:
    """One connection's fault must not end the time limits of all."""
    try:
        look()
    except Exception:
        log.exception("request.failed", extra={"method": "http/2"})
