"""The door of the relay: it listens, looks after its connections, and drains them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from adapter.dataplane.relay.connection import Relay
from adapter.dataplane.relay.links import Connect, Site
from adapter.dataplane.relay.peer import Peer

_LOOK_SECONDS = 1.0


class RelayServer:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        self._relays: set[Relay] = set()

    async def listen(self, host: str | None, port: int, path: str | None) -> int:
        """The port, 0 for a unix socket. OSError when it is taken."""
        loop = asyncio.get_running_loop()
        if path is not None:
            self._server = await loop.create_unix_server(self._accept, path)
        else:
            self._server = await loop.create_server(self._accept, host, port)
        self._looking = asyncio.create_task(self._look())
        return 0 if path is not None else int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> Peer:
        relay = Relay(self._site)
        self._relays.add(relay)
        return relay.caller

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._relays = {relay for relay in self._relays if not relay.ended.is_set()}
            for relay in self._relays:
                relay.look()

    async def close(self, patience_seconds: float) -> None:
        """Take nothing new; what is open has its time to end."""
        if self._server is None or self._looking is None:
            return
        self._server.close()
        for relay in self._relays:
            relay.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_seconds):
                for relay in self._relays:
                    await relay.ended.wait()
        for relay in self._relays:
            relay.caller.close()
        self._looking.cancel()
        await asyncio.wait({self._looking, *self._site.tasks}, timeout=1)


def connect_to(address: Callable[[], str | None]) -> Connect:
    """`host:port` or `unix:/path`, None while there is none; OSError when nobody is there."""

    async def connect(peer: Peer) -> None:
        found = address()
        if found is None:
            raise ConnectionRefusedError("not up yet")
        loop = asyncio.get_running_loop()
        if found.startswith("unix:"):
            await loop.create_unix_connection(lambda: peer, found.removeprefix("unix:"))
        else:
            host, _, port = found.rpartition(":")
            await loop.create_connection(lambda: peer, host.strip("[]"), int(port))

    return connect
