"""Counts what is left of connections that have ended, however they did: nothing."""

import asyncio
import gc
import sys
from collections import Counter
from contextlib import suppress

from adapter.relay import frames
from adapter.relay.frames import Code
from tests.frontends.grpc.proxy_listener import (
    STREAM,
    begin,
    frame,
    head_of,
    prefixed,
    request_of,
    wire_to,
)
from tests.frontends.grpc.test_proxy_floods import continuations, heads, settings, tiny_data

PACKAGES = ("adapter.relay", "adapter.runtime", "adapter.frontends.grpc")
CACHED = {"Call", "Answer"}  # the meanings of header blocks, of which at most 512 are kept
LARGE = prefixed(request_of("m", *([1.0] * 100_000)))
SMALL = prefixed(request_of("m"))


def call(i: int, message: bytes = SMALL, path: str | None = None, *, end: bool = True) -> bytes:
    head = frames.header_block(i, head_of(path) if path else head_of(), end=False)
    pieces = [message[at : at + 2**14] for at in range(0, len(message), 2**14)]
    data = [frame(frames.DATA, int(end and piece is pieces[-1]), i, piece) for piece in pieces]
    return b"".join([head, *data])


WAYS = {
    "answered": b"".join(map(call, range(1, 41, 2))),
    "reset": b"".join(begin(i) + frames.reset(i, Code.CANCEL) for i in range(1, 201, 2)),
    "reset behind the request": b"".join(
        call(i) + frames.reset(i, Code.CANCEL) for i in range(1, 41, 2)
    ),
    "cut within a large message": call(1, LARGE[:200_000], end=False),
    "large answers that are not read": b"".join(call(i, LARGE) for i in (1, 3)),
    "open streams": b"".join(call(i, path=STREAM, end=False) for i in range(1, 41, 2)),
    "unknown methods": b"".join(call(i, path="/x/y") for i in range(1, 41, 2)),
    "fields": b"".join(map(heads, range(20))),
    "data of one byte": b"".join(map(tiny_data, range(20))),
    "settings": settings(1, 2) * 2000,
    "continuations": continuations(300, 1),
    "a broken frame": frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
}


async def connect_once(address: str, flood: bytes) -> None:
    """Send a flood, read a little of what comes, and cut the connection."""
    async with wire_to(address) as wire:
        wire.greet()
        wire.send(flood)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.2):
                await wire.writer.drain()
                await wire.reader.read(1000)
        wire.writer.transport.abort()


def count_objects() -> tuple[Counter[str], int]:
    """Return the relay's objects by type, and the blocks of Python's allocator."""
    gc.collect()
    ours = Counter(
        type(one).__name__
        for one in gc.get_objects()
        if type(one).__module__.startswith(PACKAGES) and type(one).__name__ not in CACHED
    )
    return ours, sys.getallocatedblocks()


async def test_connections_leave_nothing_behind_however_they_end(proxy, caplog):
    """A first round fills what is made once and kept; a second one must add nothing."""

    async def play(rounds: int) -> tuple[Counter[str], int]:
        for _ in range(rounds):
            await asyncio.gather(*(connect_once(proxy.address, way) for way in WAYS.values()))
        await proxy.until_at_rest()
        async with asyncio.timeout(20):
            while proxy.server._sessions:  # noqa: ASYNC110 - the listener forgets in its tick
                await asyncio.sleep(0.05)
        return count_objects()

    first = await play(4)
    second = await play(8)
    assert second[0] == first[0]
    assert second[1] <= first[1] * 1.01
    assert [record for record in caplog.records if record.exc_info] == []
