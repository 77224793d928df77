"""Connections of operators' listeners are bounded, so that they leave descriptors for callers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from adapter.frontends.listeners import MOST_PROBES, Listeners
from adapter.settings.values import parse_address

_SECONDS = 10
_REQUEST = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Probes:
    """A listener, whose /slow answers once the gate is open."""

    listeners: Listeners
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    in_flight: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def answer_slowly(self, _: web.Request) -> web.Response:
        self.in_flight += 1
        await self.gate.wait()
        return web.Response(text="slow")

    async def connect(self) -> Streams:
        host, port = self.listeners.addresses["admin"].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.writers.append(writer)
        return reader, writer

    async def wait_for_slow(self, count: int) -> None:
        while self.in_flight < count:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


async def answer_at_once(_: web.Request) -> web.Response:
    return web.Response(text="quick")


@asynccontextmanager
async def opened(grace_seconds: float = 0.1) -> AsyncIterator[Probes]:
    listeners = Listeners(grace_seconds, 2**20)
    probes = Probes(listeners)
    application = web.Application()
    application.router.add_get("/slow", probes.answer_slowly)
    application.router.add_get("/quick", answer_at_once)
    await listeners.open_probes("admin", parse_address("127.0.0.1:0"), application)
    try:
        yield probes
    finally:
        probes.gate.set()
        for writer in probes.writers:
            writer.close()
        await listeners.close_probes()


async def is_answered(streams: Streams, path: bytes) -> bool:
    reader, writer = streams
    writer.write(_REQUEST % path)
    head = await reader.readuntil(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200") and bool(await reader.read(100))


@pytest.mark.parametrize("begin", [b"", b"GET /quick HTTP/1.1\r\n"], ids=["silent", "slow head"])
async def test_connection_too_many_ends_the_oldest_idle(begin: bytes) -> None:
    async with opened() as probes, asyncio.timeout(_SECONDS):
        idle = []
        for _ in range(MOST_PROBES):
            reader, writer = await probes.connect()
            writer.write(begin)
            idle.append(reader)
        assert await is_answered(await probes.connect(), b"quick")
        assert await is_answered(await probes.connect(), b"quick")
        for reader in idle[:2]:
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
        assert not idle[2].at_eof()


async def test_connection_too_many_leaves_requests_in_flight() -> None:
    async with opened() as probes, asyncio.timeout(_SECONDS):
        busy = await probes.connect()
        busy[1].write(_REQUEST % b"slow")
        await probes.wait_for_slow(1)
        for _ in range(2 * MOST_PROBES):
            await probes.connect()
        probes.gate.set()
        assert (await busy[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_connection_answered_counts_as_idle_again() -> None:
    async with opened() as probes, asyncio.timeout(_SECONDS):
        first = await probes.connect()
        assert await is_answered(first, b"quick")
        for _ in range(MOST_PROBES):
            assert await is_answered(await probes.connect(), b"quick")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await first[0].readexactly(1)


async def test_connection_is_refused_while_all_are_busy() -> None:
    async with opened() as probes, asyncio.timeout(_SECONDS):
        for _ in range(MOST_PROBES):
            _, writer = await probes.connect()
            writer.write(_REQUEST % b"slow")
        await probes.wait_for_slow(MOST_PROBES)
        reader, _ = await probes.connect()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        probes.gate.set()


async def test_connections_that_clients_end_count_no_more() -> None:
    async with opened() as probes, asyncio.timeout(_SECONDS):
        for _ in range(2 * MOST_PROBES):
            streams = await probes.connect()
            assert await is_answered(streams, b"quick")
            streams[1].close()
            await streams[1].wait_closed()
        first = await probes.connect()
        assert await is_answered(first, b"quick")
        for _ in range(MOST_PROBES - 1):
            assert await is_answered(await probes.connect(), b"quick")
        assert await is_answered(first, b"quick")


@pytest.mark.parametrize(
    "sent",
    [b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"],
    ids=["junk", "length"],
)
async def test_misread_request_shows_neither_software_nor_traceback(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as probes, asyncio.timeout(_SECONDS):
        reader, writer = await probes.connect()
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 400 ")
    assert b"aiohttp" not in head
    assert json.loads(body) == {"error": "this is not an HTTP request"}
    assert [record for record in caplog.records if record.exc_info] == []


async def test_stop_removes_the_socket_of_operators(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    listeners = Listeners(0.1, 2**20)
    await listeners.open_probes("admin", parse_address(f"unix:{path}"), web.Application())
    assert path.is_socket()
    await listeners.close_probes()
    assert not path.exists()


async def test_close_does_not_wait_for_grace_again() -> None:
    """A stop closes these listeners last. The grace period was for the requests of callers: after
    it, another one would bring SIGKILL.
    """
    async with opened(grace_seconds=10 * _SECONDS) as probes, asyncio.timeout(_SECONDS):
        _, writer = await probes.connect()
        writer.write(_REQUEST % b"slow")
        await probes.wait_for_slow(1)
        await probes.listeners.close_probes()
