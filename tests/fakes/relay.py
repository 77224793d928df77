"""A network between a client and a server, which goes away, comes back and falls silent."""

import asyncio
from contextlib import suppress


class Relay:
    """Relays connections at a port of its own to the server at `address`."""

    def __init__(self, address: str, port: int = 0) -> None:
        self.port = port
        self.is_silent = False  # loses what either side sends, and keeps the connections
        self._host, _, self._port = address.rpartition(":")
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, other_writer]
        await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(2**16):
                if not self.is_silent:
                    writer.write(piece)
        writer.close()
