"""Long reads wait for their turn, and their callers are read no further meanwhile."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from adapter.frontends.http.connection import Connection
from tests.frontends.http.listener import PLANNED, Listener, opened, request, until


class Scripted(asyncio.Transport):
    """A scripted transport: tests feed its connection; `written` holds what the connection sent."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = socket.socket()
        self.is_paused = self.is_closed = False
        self.written = b""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.socket if name == "socket" else default

    def is_reading(self) -> bool:
        return not self.is_paused

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


@contextmanager
def connected(listener: Listener) -> Iterator[tuple[Connection, Scripted]]:
    connection, transport = Connection(listener.server), Scripted()
    connection.connection_made(transport)
    try:
        yield connection, transport
    finally:
        connection.connection_lost(None)
        transport.socket.close()


async def test_resumed_caller_is_held_until_its_turn():
    async with opened() as listener:
        with connected(listener) as (connection, transport):
            body = b"x" * 20_000
            whole = request(PLANNED, body)
            listener.server.turns.until = 0.0  # this turn has no time left
            connection.data_received(whole[:-1])
            assert not transport.is_reading()
            transport.resume_reading()  # as an end of a pause for another reason does
            connection.data_received(whole[-1:])
            assert not transport.is_reading()
            assert listener.upstream.requests == []
            await until(lambda: transport.written.startswith(b"HTTP/1.1 200 OK"))
            assert [asked.body for asked in listener.upstream.requests] == [body]
            assert transport.is_reading()
