"""Calls of Triton's HTTP port: bytes in, Triton, bytes out. No tensors, no JSON of ours."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Self

from multidict import CIMultiDict

from adapter.core.calls import MAX_LINE_BYTES, Check, Hold, ServedModel, V2Call, has_long_line
from adapter.core.model import ModelId
from adapter.core.triton_errors import Faults
from adapter.core.triton_input import HTTP_KEY_HEADER, HeaderTable
from adapter.errors import AdapterError, InvalidRequest
from adapter.runtime import clock
from adapter.runtime.turns import Turns
from adapter.runtime.unread import Unread
from adapter.telemetry.traffic import add_waited
from adapter.triton.checked_bodies import (
    AT_ONCE_BYTES,
    check_in_turns,
    check_packed_in_turns,
    checked,
    is_packed,
    json_bytes,
    unpack_small,
)
from adapter.triton.connection import Connection
from adapter.triton.http_pool import Pool
from adapter.triton.json_limits import Limits, check_whole
from adapter.triton.json_parameters import StreamedParametersCheck, check_parameters

_HEADER_LENGTH = "Inference-Header-Content-Length"
_LENGTH = "Content-Length"
_EXTERNAL = HeaderTable("--http-header-forward-pattern", None)

# Triton 2.51 reads no media type but one: a form of more than 4 MB, curl's default, ends it.
_JSON = "Content-Type: application/json"
_BINARY = "Content-Type: application/octet-stream"

# Unread bytes of an answer from which on Triton is held back.
_HELD_BYTES = 256 * 2**10


class HttpDataPlane:
    """Makes calls of Triton's HTTP port.

    A call whose caller leaves is not taken from Triton: its answer is read for nobody, and its
    model is held until then. Only a request that Triton has not got wholly ends with its caller.

    `forward` is for coroutines; the rest of the methods for callbacks (core/calls.py).
    """

    def __init__(
        self,
        faults: Faults,
        *,
        timeout_seconds: float,
        max_connections: int | None = None,  # to Triton; above it abandoned calls lose theirs
        unread: Unread,  # bounds what waits of streams for their callers
        max_unpacked_bytes: int = 2**26,  # of a body that comes compressed
        # called with the record of each model whose answer has none of its outputs
        answered_nothing: Callable[[Any], None] = lambda _: None,
        turns: Turns | None = None,
        headers: HeaderTable = _EXTERNAL,  # decides which headers Triton gets
    ) -> None:
        self.host = ""
        self._headers = headers
        self._key = ""
        self.max_unpacked = max_unpacked_bytes
        self.unread = unread
        self.turns = turns or Turns()  # of bodies that take long to check
        self._pool = Pool(
            faults,
            timeout_seconds,
            max_connections=max_connections,
            answered_nothing=answered_nothing,
        )
        self.take_idle = self._pool.take_idle

    def connect(self, address: str, key: str = "") -> None:
        """Set `host:port` of Triton's HTTP port, and the key of its restricted calls, or ""."""
        self.host = self._pool.address = address
        self._key = key

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        await self._pool.close()

    def forward(self, call: V2Call, hold: Hold | None) -> "HttpCall":
        """Return a call that is sent when its context is entered. Raises InvalidRequest."""
        body = call.body
        if isinstance(body, bytes) and is_packed(call.headers):
            body = _yield_body(body)
        if isinstance(body, bytes) and len(body) <= AT_ONCE_BYTES:
            size = json_bytes(call.path, call.headers)
            check_whole(self.max_unpacked, body, size)
            if (record := _inferring(call, hold)) is not None:
                check_parameters(body[:size], record, shares_memory=call.shares_memory)
        elif body is not None and not isinstance(body, bytes):
            body = checked(
                body,
                call.path,
                call.headers,
                self.max_unpacked,
                self.turns,
                parameters=_parameters_check_of(call, hold),
            )
            call = replace(call, body=body)
        key = self._key if call.is_restricted else ""
        return HttpCall(self, call, head_of(call, self.host, self._headers, key=key), hold)

    # -- without a task ---------------------------------------------------------------------

    async def connected(self, model_id: ModelId | None) -> Connection:
        """One that is idle, or a new one."""
        return self._pool.take_idle() or await self._pool.connect(model_id)

    def compose_head(self, call: V2Call) -> bytes:
        """Return the head of a call as Triton gets it. Raises InvalidRequest."""
        return head_of(call, self.host, self._headers)

    def check(
        self,
        body: bytes,
        json_bytes: int | None,
        record: ServedModel,
        *,
        is_packed: bool,
        shares_memory: bool,
    ) -> bool:
        """Check a whole body, unpacked if it `is_packed`, unless that takes long; return whether it
        was checked. Raises InvalidRequest for JSON that could end or block Triton, and for what
        cannot be unpacked.
        """
        unpacked = unpack_small(body, self.max_unpacked) if is_packed else body
        if unpacked is None or len(unpacked) > AT_ONCE_BYTES:
            return False
        check_whole(self.max_unpacked, unpacked, json_bytes)
        check_parameters(unpacked[:json_bytes], record, shares_memory=shares_memory)
        return True

    async def check_in_turns(
        self,
        body: bytes,
        json_bytes: int | None,
        record: ServedModel,
        *,
        is_packed: bool,
        shares_memory: bool,
    ) -> None:
        """Check a large body, also a compressed one, while others have their turns."""
        parameters = StreamedParametersCheck(record, json_bytes, shares_memory=shares_memory)
        if is_packed:
            limits = Limits(json_bytes, self.max_unpacked, parameters)
            await check_packed_in_turns(body, limits, self.max_unpacked, self.turns)
        else:
            await check_in_turns(body, json_bytes, self.max_unpacked, self.turns, parameters)

    def checking(
        self, json_bytes: int | None, length: int, record: ServedModel, *, shares_memory: bool
    ) -> Check:
        """Return a check of a body of `length` bytes that is fed piece by piece."""
        parameters = StreamedParametersCheck(record, json_bytes, shares_memory=shares_memory)
        return Limits(json_bytes, max(length, self.max_unpacked), parameters)


def _inferring(call: V2Call, hold: Hold | None) -> ServedModel | None:
    """Return the model of an inference; None for another call."""
    return hold.record if hold is not None and call.path.endswith("/infer") else None


def _parameters_check_of(call: V2Call, hold: Hold | None) -> StreamedParametersCheck | None:
    """Return a check of the parameters of an inference that comes in pieces, or None."""
    record = _inferring(call, hold)
    if record is None:
        return None
    size = json_bytes(call.path, call.headers)
    return StreamedParametersCheck(record, size, shares_memory=call.shares_memory)


async def _yield_body(body: bytes) -> AsyncIterator[bytes]:
    yield body


class HttpCall:
    """One call of a coroutine: it is sent when its context is entered, and is then its V2Answer. A
    class costs a sixth of an @asynccontextmanager.
    """

    status: int
    headers: CIMultiDict[str]
    content_length: int | None

    def __init__(self, plane: HttpDataPlane, call: V2Call, head: bytes, hold: Hold | None) -> None:
        self._plane = plane
        self._call = call
        self._head = head
        self._hold = hold
        self._record = hold.record if hold else None
        self._connection: Connection
        self._sender: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._is_taken = asyncio.Event()  # set while Triton takes what is written
        self._is_taken.set()
        self._answers = plane.unread.stream(self._cut) if call.is_stream else None
        self._pieces: list[bytes] = []
        self._held = 0
        self._is_answered = self._is_over = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        plane = self._plane
        call = self._call
        if isinstance(call.body, bytes) and len(call.body) > AT_ONCE_BYTES:
            size = json_bytes(call.path, call.headers)
            parameters = _parameters_check_of(call, self._hold)
            await check_in_turns(call.body, size, plane.max_unpacked, plane.turns, parameters)
        self._connection = await plane.connected(self._record.asked_for if self._record else None)
        begun = clock.monotonic()
        try:
            self._begin()
            while not self._is_answered:
                await self._wait()
        except BaseException:
            await self._end()
            raise
        finally:
            if not call.is_stream:
                add_waited(clock.monotonic() - begun)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    # -- V2Answer ---------------------------------------------------------------------------

    @property
    def json_header_bytes(self) -> int | None:
        """The length of the JSON part of the answer; None if all of it is JSON."""
        text = self.headers.get(_HEADER_LENGTH)
        return None if text is None else int(text)

    async def read(self) -> bytes:
        """Return the whole body."""
        whole: list[bytes] = []
        while pieces := await self._next_pieces():
            whole += pieces
        return b"".join(whole)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises the error that breaks it off."""
        while pieces := await self._next_pieces():
            for piece in pieces:
                yield piece

    # -- inside -----------------------------------------------------------------------------

    def _begin(self) -> None:
        call = self._call
        self._connection.begin(self, self._record, call.is_stream, call.is_probe)
        if call.body is None or isinstance(call.body, bytes):
            self._connection.send(self._head, call.body or b"")
            return
        self._sender = asyncio.create_task(self._send(call.body))
        self._sender.add_done_callback(self._has_sent)

    async def _next_pieces(self) -> list[bytes]:
        """Return the pieces of the body that have come, at least one; none at its end."""
        while not (pieces := self._take()) and not self._is_over:
            await self._wait()
        return pieces

    def _take(self) -> list[bytes]:
        if self._answers is not None:
            piece = self._answers.take()
            return [] if piece is None else [piece]
        pieces = self._pieces
        self._pieces = []
        self._held = 0
        if not self._is_over:
            self._connection.resume_reading()
        return pieces

    def _cut(self) -> None:
        """End a stream whose caller reads too slowly.

        The caller gets the error that says so; the rest of the answer is read and dropped.
        """
        assert self._answers is not None  # noqa: S101 - a stream has its answers
        self._connection.leave(self, self._hold)
        self._error = self._error or self._answers.error
        self._news.set()
        self._call.on_cut()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._news.clear()
        await self._news.wait()

    async def _end(self) -> None:
        self._is_over = True
        if self._answers is not None:
            self._answers.drop()
        self._connection.leave(self, self._hold)
        if self._sender is not None and not self._sender.done():
            self._sender.cancel()
            await asyncio.wait([self._sender])
        # they refer to this, which would keep the body until the garbage is collected
        self._error = self._sender = None

    # -- the body, where it is a stream -----------------------------------------------------

    async def _send(self, body: AsyncIterator[bytes]) -> None:
        """Send the body, in chunks if its length is unknown. Stops early when the call is over."""
        length = self._call.headers.get("Content-Length")
        left = None if length is None else int(length)
        self._connection.write(self._head)
        async for piece in body:
            if self._is_over or self._error is not None:
                return
            if left is not None:
                left -= len(piece)
                _check(is_right=left >= 0, length=length)
                self._connection.write(piece)
            elif piece:  # an empty chunk ends the body
                self._connection.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await self._is_taken.wait()
        _check(is_right=not left, length=length)
        if left is None:
            self._connection.write(b"0\r\n\r\n")
        if not self._is_over and self._error is None:
            self._connection.sent()

    def _has_sent(self, sender: "asyncio.Task[None]") -> None:
        error = None if sender.cancelled() else sender.exception()
        if error is not None:
            self._error = self._error or error
            self._connection.leave(self, None)
            self._news.set()

    # -- Receiver ---------------------------------------------------------------------------

    def answered(self) -> None:
        """Take over the head of the answer."""
        self.status = self._connection.status
        self.headers = CIMultiDict(
            (name.decode(), value.decode("utf-8", "surrogateescape"))
            for name, value in self._connection.headers
        )
        self.content_length = self._connection.length
        self._is_answered = True
        self._news.set()

    def answered_whole(self, body: bytes) -> None:
        """Take a whole answer."""
        self.answered()
        if body:
            self.received(body)
        self.ended()

    def received(self, piece: bytes) -> None:
        """Take a piece of the answer, and hold Triton back if many are unread."""
        if self._answers is not None:
            self._answers.put(piece)
            self._news.set()
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > _HELD_BYTES:
            self._connection.pause_reading()
        self._news.set()

    def ended(self) -> None:
        """Note that the answer is complete."""
        self._is_over = True
        self._is_taken.set()
        self._news.set()

    def failed(self, error: AdapterError) -> None:
        """Take the error that ends the call."""
        self._error = self._error or error
        self._is_taken.set()
        self._news.set()

    def pause_writing(self) -> None:
        """Note that Triton takes no more of the body."""
        self._is_taken.clear()

    def resume_writing(self) -> None:
        """Note that Triton takes more of the body."""
        self._is_taken.set()


def _check(*, is_right: bool, length: str | None) -> None:
    if not is_right:
        raise InvalidRequest(f"the body does not have the {length} bytes that were declared")


def _frame_of(call: V2Call) -> list[str]:
    """Return the header line that says where the body ends, if there is one."""
    if isinstance(call.body, bytes):
        return [f"{_LENGTH}: {len(call.body)}"]
    if call.body is None:
        return [f"{_LENGTH}: 0"] if call.method == "POST" else []
    if _LENGTH in call.headers:
        return [f"{_LENGTH}: {call.headers[_LENGTH]}"]
    return ["Transfer-Encoding: chunked"]


def head_of(call: V2Call, host: str, table: HeaderTable = _EXTERNAL, *, key: str = "") -> bytes:
    """Return the request line and headers, with the empty line. Its frame is ours: no caller says
    where the next one begins, nor what kind of body it is. `key` is that of a restricted call.
    """
    lines = [f"{call.method} /v2{call.path} HTTP/1.1", f"Host: {host}"]
    if key:
        lines.append(f"{HTTP_KEY_HEADER}: {key}")
    lines += [f"{name}: {value}" for name, value in table.rewrite(call.headers.items())]
    if call.method == "POST":
        is_binary = any(name.lower() == _HEADER_LENGTH.lower() for name in call.headers)
        lines.append(_BINARY if is_binary else _JSON)
    lines += _frame_of(call)
    head = "\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count("\n") != breaks or head.count("\r") != breaks or "\0" in head:
        raise InvalidRequest("a header has a line break or a null byte in it")
    encoded = f"{head}\r\n\r\n".encode("utf-8", "surrogateescape")
    if has_long_line(encoded):
        raise InvalidRequest(f"Triton reads no line of headers above {MAX_LINE_BYTES} bytes")
    return encoded
