"""Writes answers: heads and bodies, whole or as they come, to the connection of their request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from adapter.frontends.http.chunks import write_chunk
from adapter.frontends.http.connection import Connection, Request
from adapter.frontends.http.instrumentation import encoded, write_fields
from adapter.runtime import clock

# To join a head with so short a body costs less than a second write.
JOINED_BYTES = 2**14
# Answers up to this size are written when they are whole: until then they may still fail.
_WHOLE_BYTES = 2**20
# The phrases of all statuses, with the one that only AWS has.
_PHRASES = {one.value: one.phrase for one in HTTPStatus} | {530: "Internal Dependency"}
_LINES = {status: f"HTTP/1.1 {status} {text}\r\n".encode() for status, text in _PHRASES.items()}
_JSON = {"Content-Type": "application/json"}
JSON_LINE = b"Content-Type: application/json\r\n"
CHUNKED_LINE = b"Transfer-Encoding: chunked\r\n"
_NO_CONTENT = 204
_KEEP_ALIVE = b"Connection: keep-alive\r\n"


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200


def answer_json(body: Mapping[str, Any] | list[Any], status: int = 200) -> Answer:
    """Return an answer of JSON, which ends its line."""
    return Answer(encoded(json.dumps(body)), _JSON, status)


def first_line(status: int) -> bytes:
    """Return the first line of an answer."""
    line = _LINES.get(status)
    return f"HTTP/1.1 {status} \r\n".encode() if line is None else line


def begin_answer(
    request: Request,
    status: int,
    lines: bytes,  # of its head, besides those that any answer of the contract has
    length: int | None,
) -> bytes:
    """Return the head of an answer; set its status, and whether it is the last of the connection.

    Without a length the body goes in chunks, or at HTTP/1.0 to the end of the connection.
    """
    connection = request.connection
    is_http_1_0 = request.head.is_http_1_0
    request.status = status
    request.is_last = not connection.can_be_kept() or (is_http_1_0 and length is None)
    frame = b""
    if length is None:
        frame = b"" if is_http_1_0 else CHUNKED_LINE
    elif status != _NO_CONTENT:  # which must have no length
        frame = b"Content-Length: %d\r\n" % length
    own_lines = _list_own_lines(request)
    return first_line(status) + lines + own_lines + frame + end_of_head(request)


def _list_own_lines(request: Request) -> bytes:
    """Return the header lines that any answer of the request's contract has."""
    plan = request.head.plan
    if plan is not None:
        return plan.contract.answer_lines(request)
    if request.call_info is not None:
        return write_fields(request.call_info.headers())
    return request.echoed_lines


def end_of_head(request: Request) -> bytes:
    """Return the last lines of an answer's head: whether the connection is kept, and the time."""
    clock = request.connection.parts.clock
    if request.is_last:
        return clock.last
    return _KEEP_ALIVE + clock.line if request.head.is_http_1_0 else clock.line


def write_answer(request: Request, answer: Answer) -> None:
    """Write a whole answer."""
    transport = request.connection.transport
    body = answer.body
    head = begin_answer(request, answer.status, write_fields(answer.headers), len(body))
    if request.method == "HEAD" or not body:
        transport.write(head)
    elif len(body) <= JOINED_BYTES:
        transport.write(head + body)
    else:
        transport.writelines((head, body))


async def write_large_answer(request: Request, answer: Answer) -> None:
    """Write a whole answer in a task. Its bytes count in the budget of callers' bytes until the
    client has taken them. Raises TooManyWaiting without room for them.
    """
    with request.connection.parts.budget.hold_answer(len(answer.body)):
        write_answer(request, answer)
        started_at = clock.monotonic()
        await request.connection.drain()
        request.callers_seconds += clock.monotonic() - started_at


class StreamedAnswer:
    """An answer whose body comes in pieces.

    A short one of known length is written when it is whole; until then it can be refused instead.
    """

    def __init__(
        self,
        connection: Connection,
        head: bytes,
        length: int | None,  # of the body, if it is known
        *,
        is_chunked: bool,
    ) -> None:
        self._connection = connection
        self._budget = connection.parts.budget
        self._pieces = [head]
        self._is_chunked = is_chunked
        self._reserved_bytes = 0
        if length is not None and length <= _WHOLE_BYTES and self._budget.has_buffer_for(length):
            self._reserved_bytes = length
            self._budget.buffer(length)

    def add(self, piece: bytes) -> bool:
        """Add a piece; return whether something was written."""
        if self._is_chunked:
            piece = write_chunk(piece)
        self._pieces.append(piece)
        if self._reserved_bytes:
            return False
        self._write()
        return True

    def end(self) -> None:
        """Write the last of the answer."""
        if self._is_chunked:
            self._pieces.append(b"0\r\n\r\n")
        if self._pieces:
            self._write()

    def release(self) -> None:
        """Drop what is kept of the answer."""
        self._budget.buffer(-self._reserved_bytes)
        self._reserved_bytes = 0
        self._pieces = []

    def _write(self) -> None:
        """Write the pieces that were gathered to the client."""
        pieces = self._pieces
        self._pieces = []
        if self._reserved_bytes <= JOINED_BYTES:
            self._connection.transport.write(b"".join(pieces))
        else:
            self._connection.transport.writelines(pieces)
        self._connection.note_progress()


class Writer:
    """An answer that a task writes piece by piece, as fast as its client takes it.

    Its head is written when it begins. Without a length the body goes in chunks, or at HTTP/1.0 to
    the end of the connection.
    """

    def __init__(
        self,
        request: Request,
        headers: Mapping[str, str],
        length: int | None,
    ) -> None:
        self._connection = request.connection
        self._is_chunked = length is None and not request.head.is_http_1_0
        head = begin_answer(request, 200, write_fields(headers), length)
        self._connection.transport.write(head)

    async def write(self, piece: bytes) -> None:
        """Write a piece, and wait until the client takes more."""
        if piece:
            if self._is_chunked:
                piece = write_chunk(piece)
            self._connection.transport.write(piece)
            self._connection.note_progress()
        await self._connection.drain()

    def end(self) -> None:
        """Write the end of the body."""
        if self._is_chunked:
            self._connection.transport.write(b"0\r\n\r\n")
