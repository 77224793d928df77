"""The listener: it accepts connections, looks after them, and drains them."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from adapter import lasting
from adapter.dataplane.relay.refusal import Refusal
from adapter.dataplane.relay.relay import Relay
from adapter.dataplane.relay.site import Site
from adapter.threads import REPOSITORY

_LOOK_SECONDS, _LOOKS_A_SECOND = 0.1, 10
_BACKLOG = 1024  # as at the HTTP listener

log = logging.getLogger(__name__)


class RelayServer:
    def __init__(
        self,
        site: Site,
        *,
        max_connections: int | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._site = site
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[NoReturn] | None = None
        self._looks = 0
        self._is_closing = False
        self._path: str | None = None
        self._relays: set[Relay] = set()

    async def listen(self, host: str | None, port: int, path: str | None) -> int:
        """The port, 0 for a unix socket. OSError when it is taken."""
        loop = asyncio.get_running_loop()
        self._path, self._is_closing = path, False
        if path is not None:
            self._server = await loop.create_unix_server(self._accept, path, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        self._looking = lasting.begin(
            "grpc-lane-looks", lasting.forever(self._look, seconds=_LOOK_SECONDS)
        )
        return 0 if path is not None else int(self._server.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        return sum(not relay.caller.is_gone for relay in self._relays)

    def _accept(self) -> asyncio.Protocol:
        most = self._max_connections
        if self._is_closing:
            return Refusal()
        if most is not None and len(self._relays) >= most and self.connections >= most:
            self._on_refused()
            return Refusal()
        relay = Relay(self._site)
        self._relays.add(relay)
        return relay.caller

    async def _look(self) -> None:
        self._looks += 1
        for relay in list(self._relays):
            if relay.caller.streams:
                _guarded(relay.look)
        if self._looks % _LOOKS_A_SECOND == 0:
            self._relays = {relay for relay in self._relays if not relay.ended.is_set()}
            for relay in list(self._relays):
                _guarded(relay.look_closely)

    def hurry(self) -> None:
        """The adapter stops: requests that have not wholly come are refused, also new ones, and
        answers that are not read are dropped.
        """
        self._site.is_leaving = True
        for relay in list(self._relays):
            _guarded(relay.look)

    async def close(self, patience_seconds: float) -> None:
        """Take nothing new; what is open has its time to end."""
        if self._server is None or self._looking is None:
            return
        self._is_closing = True
        self._server.close()
        if self._path is not None:
            await REPOSITORY.run(Path(self._path).unlink, missing_ok=True)
        for relay in self._relays:
            relay.caller.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_seconds):
                for relay in list(self._relays):
                    await relay.ended.wait()
        for relay in self._relays:
            relay.close()
        lasting.end(self._looking)
        await asyncio.wait({self._looking, *self._site.tasks}, timeout=1)


def _guarded(look: Callable[[], None]) -> None:
    """One connection's fault must not end the time limits of all."""
    try:
        look()
    except Exception:
        log.exception("request.failed", extra={"method": "http/2"})
