"""A Triton that says, byte for byte, what a test has written down."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from adapter.core.calls import V2Call
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.triton.http import HttpDataPlane
from tests.fakes.unread import unread

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Request:
    head: bytes
    body: bytes
    is_whole: bool


@dataclass
class Talk:
    """One connection, as Triton sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    request_head: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def socket(self) -> socket.socket:
        """The same connection, past the event loop: what is done here is done at once."""
        return socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno()))

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        try:
            return await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
            return b""

    async def body(self, head: bytes) -> tuple[bytes, bool]:
        try:
            if b"\r\nTransfer-Encoding: chunked\r\n" not in head:
                _, _, rest = head.partition(b"\r\nContent-Length: ")
                return await self.reader.readexactly(int(rest.split(b"\r\n")[0] or b"0")), True
            pieces = []
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                pieces.append((await self.reader.readexactly(size + 2))[:-2])
            return b"".join(pieces), await self.reader.readexactly(2) == b"\r\n"
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.ended.set()
            return getattr(error, "partial", b""), False

    async def end(self) -> None:
        """Read to the end of the connection."""
        try:
            while await self.reader.read(2**16):
                pass
        except ConnectionError:
            pass
        self.ended.set()


Script = Callable[[Talk], Awaitable[None]]


class Upstream:
    """`script` is played on each connection for each head that comes."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or says(OK)
        self.talks: list[Talk] = []
        self.requests: list[Request] = []
        self.news = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(reader, writer)
        self.talks.append(talk)
        try:
            while (head := await talk.head()) and await self._play(talk, head):
                pass
        except ConnectionError:
            pass
        finally:
            talk.ended.set()
            writer.close()

    async def _play(self, talk: Talk, head: bytes) -> bool:
        talk.request_head = head
        if not getattr(self.script, "reads_itself", False):
            body, is_whole = await talk.body(head)
            self.requests.append(Request(head, body, is_whole))
        async with self.news:
            self.news.notify_all()
        await self.script(talk)
        return not talk.writer.is_closing()

    async def asked(self, count: int) -> None:
        async with self.news:
            await self.news.wait_for(lambda: len(self.requests) >= count)


def says(*pieces: bytes, closes: bool = False) -> Script:
    async def script(talk: Talk) -> None:
        for piece in pieces:
            await talk.say(piece)
        if closes:
            talk.writer.close()

    return script


def reads_itself(script: Script) -> Script:
    """The script is called after the head, and the body is its own to read."""
    script.reads_itself = True  # type: ignore[attr-defined]
    return script


@asynccontextmanager
async def served(
    script: Script | None = None,
    seconds: float = 60,
    *,
    unread_bytes: int = 2**28,
    max_connections: int | None = None,
) -> AsyncIterator[tuple[HttpDataPlane, Upstream]]:
    """A data plane before such a Triton. At the end neither side has a connection left."""
    upstream = Upstream(script)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, limit=2**20)
    plane = HttpDataPlane(
        Faults(Classifier(())),
        timeout_seconds=seconds,
        unread=unread(unread_bytes),
        max_connections=max_connections,
    )
    plane.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    pool = plane._pool
    try:
        yield plane, upstream
    finally:
        await plane.close()
        assert repr(pool) == "<Pool: 0 connections, 0 idle>"
        server.close()
        for talk in upstream.talks:
            await asyncio.wait_for(talk.ended.wait(), 30)


def post(body: bytes | AsyncIterator[bytes] | None = b"{}", **fields: Any) -> V2Call:
    headers = fields.pop("headers", {})
    return V2Call("POST", "/models/m/infer", headers, body, **fields)


async def ask(plane: HttpDataPlane, call: V2Call | None = None) -> bytes:
    async with plane.forward(call or post(), None) as answer:
        return await answer.read()


def connections(plane: HttpDataPlane) -> str:
    return repr(plane._pool)


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
