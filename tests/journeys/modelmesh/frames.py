"""A gRPC caller that chooses the order of its frames, as no library lets one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import hpack

DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
_ACK = END_STREAM = 1
_END_HEADERS = 4
_DEADLINE_EXCEEDED = "4"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


# so that no answer waits for this side
_WINDOWS = frame(SETTINGS, 0, 0, b"\0\4" + (2**31 - 1).to_bytes(4))


@dataclass
class Answer:
    message: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Caller:
    """One connection. Streams are numbered by whoever sends: odd, and never a lower one again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._encoder.header_table_size = 0  # what every peer allows
        self._answers: dict[int, Answer] = {}

    def headers(
        self,
        stream: int,
        method: str,
        *metadata: tuple[str, str],
        deadline_seconds: float | None = None,
    ) -> None:
        self._answers[stream] = Answer()
        limit = () if deadline_seconds is None else (("grpc-timeout", f"{deadline_seconds:g}S"),)
        if deadline_seconds is not None and deadline_seconds < 1:
            limit = (("grpc-timeout", f"{deadline_seconds * 1000:.0f}m"),)
        pairs = [
            *((":method", "POST"), (":scheme", "http"), (":path", f"/{method}")),
            *((":authority", "localhost"), ("content-type", "application/grpc")),
            *(("te", "trailers"), *limit, *metadata),
        ]
        self._writer.write(frame(HEADERS, _END_HEADERS, stream, self._encoder.encode(pairs)))

    def data(self, stream: int, message: bytes) -> None:
        body = b"\0" + len(message).to_bytes(4) + message
        self._writer.write(frame(DATA, END_STREAM, stream, body))

    async def answer(self, stream: int, seconds: float) -> bytes:
        """The message, where the call ended with OK. TimeoutError when it did not end in time."""
        answer = self._answers[stream]
        async with asyncio.timeout(seconds):
            await answer.is_over.wait()
        if answer.headers["grpc-status"] == _DEADLINE_EXCEEDED:
            raise TimeoutError
        assert answer.headers["grpc-status"] == "0", answer.headers
        return answer.message[5:]

    async def read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
            body = await self._reader.readexactly(size)
            self._take(kind, flags, int.from_bytes(head[5:]), body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & _ACK:
            self._writer.write(frame(SETTINGS, _ACK, 0))
        elif kind == PING and not flags & _ACK:
            self._writer.write(frame(PING, _ACK, 0, body))
        elif kind == DATA:
            self._answers[stream].message += body
        elif kind == HEADERS:
            assert flags & _END_HEADERS
            self._answers[stream].headers |= dict(self._decoder.decode(body))
        assert kind != GOAWAY, body
        if kind in {DATA, HEADERS} and flags & END_STREAM:
            self._answers[stream].is_over.set()


@asynccontextmanager
async def calling(path: str) -> AsyncIterator[Caller]:
    """A connection to the unix socket at `path`."""
    reader, writer = await asyncio.open_unix_connection(path)
    caller = Caller(reader, writer)
    writer.write(_PREFACE + _WINDOWS)
    reading = asyncio.create_task(caller.read())
    try:
        yield caller
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
            await reading
        writer.close()
        await writer.wait_closed()
