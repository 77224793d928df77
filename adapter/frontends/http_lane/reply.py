"""An answer on its way to the caller."""

import math
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import Protocol

from adapter.frontends.http_lane.request import Request

Headers = Iterable[tuple[str, str]]

# On uvloop writes are gathered, elsewhere one write is one packet: small bodies go with the head.
_JOINED_BYTES = 2**14

_CLOSE = "Connection: close"

_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


class Out(Protocol):
    """The connection, as its answer sees it."""

    @property
    def date(self) -> str: ...
    def write(self, data: bytes) -> None: ...
    async def drained(self) -> None: ...
    def is_kept_after(self, request: Request) -> bool: ...


class Reply:
    """`status` is 0 until the head is out, `is_over` set when all of it is. `is_last`: the
    connection closes behind it.
    """

    __slots__ = ("_out", "_request", "is_last", "is_over", "status")

    def __init__(self, out: Out, request: Request) -> None:
        self.status = 0
        self.is_last = False
        self.is_over = False
        self._out = out
        self._request = request

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        head = self._head(status, headers, f"Content-Length: {len(body)}")
        if len(body) <= _JOINED_BYTES:
            self._out.write(head + body)
        else:
            self._out.write(head)
            self._out.write(body)
        self.is_over = True

    async def stream(
        self, status: int, headers: Headers, length: int | None, chunks: AsyncIterator[bytes]
    ) -> None:
        """`length` None: in chunks, which HTTP/1.0 does not know: its connection ends the body.

        ConnectionResetError where the body is not `length` bytes long: the caller would take what
        comes next on its connection for a part of it.
        """
        out, is_old = self._out, self._request.head.is_old
        is_chunked = length is None and not is_old
        self.is_last = length is None and is_old
        frame = "Transfer-Encoding: chunked" if is_chunked else None
        if length is not None:
            frame = f"Content-Length: {length}"
        out.write(self._head(status, headers, frame))
        left = math.inf if length is None else length
        async for piece in chunks:
            left -= len(piece)
            if left < 0:
                raise ConnectionResetError("the answer is longer than declared")
            if is_chunked and piece:
                out.write(b"%x\r\n" % len(piece))
                out.write(piece)
                out.write(b"\r\n")
            else:
                out.write(piece)
            await out.drained()
        if length is not None and left:
            raise ConnectionResetError("the answer is shorter than declared")
        if is_chunked:
            out.write(b"0\r\n\r\n")
        self.is_over = True

    def _head(self, status: int, headers: Headers, frame: str | None) -> bytes:
        request = self._request
        self.status = status
        self.is_last = self.is_last or not self._out.is_kept_after(request)
        lines = [frame] if frame is not None else []
        lines += [f"{name}: {value}" for name, value in request.head.echoed.items()]
        if self.is_last:
            lines.append(_CLOSE)
        elif request.head.is_old:
            lines.append("Connection: keep-alive")
        return _head(status, headers, lines, self._out.date)


def last_words(status: int, body: bytes, date: str, headers: Headers = ()) -> bytes:
    """An answer to what is no request."""
    lines = ["Content-Type: application/json", f"Content-Length: {len(body)}", _CLOSE]
    return _head(status, headers, lines, date) + body


def _head(status: int, headers: Headers, lines: Iterable[str], date: str) -> bytes:
    named = [f"{name}: {value}" for name, value in headers]
    first = _LINES.get(status) or f"HTTP/1.1 {status} "
    head = "\r\n".join([first, *named, *lines, f"Date: {date}\r\n\r\n"])
    return head.encode("utf-8", "surrogateescape")
