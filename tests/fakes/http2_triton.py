"""A Triton of frames: it says over HTTP/2 what a test tells it to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from adapter.relay import frames
from adapter.relay.headers import encoded
from tests.frontends.grpc.proxy_listener import SECONDS, ProxySetup, Wire, frame

HEAD = encoded([(b":status", b"200"), (b"content-type", b"application/grpc")])
GOOD = encoded([(b"grpc-status", b"0")])


def answer(stream_id: int, message: bytes = b"") -> bytes:
    return (
        frames.header_block(stream_id, HEAD, end=False)
        + frame(frames.DATA, 0, stream_id, b"\0" + len(message).to_bytes(4, "big") + message)
        + frames.header_block(stream_id, GOOD, end=True)
    )


async def pour(wire: Wire, stream_id: int, whole: bytes) -> None:
    """An answer, as fast as our windows allow: of the stream and of the connection."""
    values = {frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW}
    rooms = {0: frames.DEFAULT_WINDOW, stream_id: 0}
    seen, at = 0, 0
    wire.send(frames.header_block(stream_id, HEAD, end=False))
    while at < len(whole):
        for kind, flags, of, payload in wire.got[seen:]:
            if kind == frames.WINDOW_UPDATE and of in rooms:
                rooms[of] += int.from_bytes(payload)
            elif kind == frames.SETTINGS and not flags & frames.ACK:
                values |= dict(frames.read_settings(payload))
        seen = len(wire.got)
        size = min(rooms[0], rooms[stream_id] + values[frames.INITIAL_WINDOW_SIZE], 2**14)
        if size <= 0:
            assert await wire.next() is not None
            continue
        size = min(size, len(whole) - at)
        wire.send(frame(frames.DATA, 0, stream_id, whole[at : at + size]))
        await wire.writer.drain()
        for of in rooms:
            rooms[of] -= size
        at += size
    wire.send(frames.header_block(stream_id, GOOD, end=True))


async def untouched(wire: Wire) -> None:
    """Nothing was reset, and the connection is open: what was sent last came to an answer."""
    wire.send(frame(frames.PING, 0, 0, b"untouch?"))
    await wire.until(frames.PING)
    kinds = {got[0] for got in wire.got}
    assert not kinds & {frames.RST_STREAM, frames.GOAWAY}, wire.got


class ScriptedTriton:
    """`accepted` gives a Wire for each connection, in order; the preface has been read."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.pairs: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._wires: asyncio.Queue[Wire] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.pairs.append((reader, writer))
        assert await reader.readexactly(len(frames.PREFACE)) == frames.PREFACE
        self._wires.put_nowait(Wire(reader, writer))

    async def accepted(self, settings: dict[int, int] | None = None) -> Wire:
        """It has said its settings; nothing else."""
        async with asyncio.timeout(SECONDS):
            wire = await self._wires.get()
        wire.send(frames.settings(settings or {}))
        return wire

    async def asked(self) -> Wire:
        """Wait for the DATA of the first request on a new connection."""
        wire = await self.accepted()
        await wire.until(frames.DATA, 1)
        return wire


@asynccontextmanager
async def scripted_triton(proxy: ProxySetup) -> AsyncIterator[ScriptedTriton]:
    """Behind that proxy, for connections from now on."""
    triton = ScriptedTriton()
    server = await asyncio.start_server(triton.serve, "127.0.0.1", 0)
    before, proxy.triton = proxy.triton, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield triton
    finally:
        proxy.triton = before
        server.close()
        for writer in triton.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
