"""One HTTP/2 connection for unary gRPC calls, without TLS.

It does only what a client of one method needs, which leaves the cores to what is measured: the
request's header block is always the same, and so are those of responses, since our header table has
size 0; each is decoded once. Section numbers are those of RFC 9113 where no other is named.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import unquote

from grpc import StatusCode

from adapter.tools.bench.connection import ClientProtocol, Failure, Finish
from adapter.tools.bench.errors import needed
from adapter.tools.bench.plan import Headers
from adapter.tools.bench.requests import Request

_DEFAULT_TABLE = 4096
_ENTRY = 32  # overhead of each entry (RFC 7541 section 4.1)
_FIRST_DYNAMIC = 62  # RFC 7541 section 2.3.3
_POST, _HTTP = b"\x83", b"\x86"  # of the static table
_CACHED_BLOCKS = 1024
_NAMES = {status.value[0]: status.name for status in StatusCode}


@dataclass(frozen=True, slots=True)
class Answer:
    """Fields of one header block of a response, "" where absent."""

    http_status: str
    grpc_status: str
    message: str

    def failure(self, http_status: str) -> Failure | None:
        if self.grpc_status == "0":
            return None
        if not self.grpc_status:
            return Failure(f"HTTP {http_status or 'unknown'}", "an answer without grpc-status")
        known = self.grpc_status.isdigit() and int(self.grpc_status) in _NAMES
        code = _NAMES[int(self.grpc_status)] if known else self.grpc_status
        return Failure(code, unquote(self.message))


class Blocks:
    """The header blocks of one connection. `decode` raises `error` for a malformed one."""

    def __init__(
        self, hpack: Any, authority: str, method: str, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.error: type[Exception] = hpack.HPACKError
        self._decoder = hpack.Decoder()
        self._decoder.header_table_size = 0
        self._decoder.max_allowed_table_size = 0
        self._known: dict[bytes, Answer] = {}
        pairs = (
            (":path", method),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *((name.lower(), value) for name, value in metadata),
        )
        sizes = itertools.accumulate(len(name) + len(value) + _ENTRY for name, value in pairs)
        kept = sum(size <= _DEFAULT_TABLE for size in sizes)  # what fits into the server's table
        rest = b"".join(_literal(b"\0", *pair) for pair in pairs[kept:])
        first = b"".join(_literal(b"\x40", *pair) for pair in pairs[:kept])
        self._first = _POST + _HTTP + first + rest
        later = bytes(0x80 | _FIRST_DYNAMIC + place for place in reversed(range(kept)))
        self._later = _POST + _HTTP + later + rest
        self._never = _POST + _HTTP + b"".join(_literal(b"\0", *pair) for pair in pairs)

    def limit(self, size: int) -> None:
        """Apply the server's table size. With less than the default the table is not used."""
        if size < _DEFAULT_TABLE:
            self._first, self._later = b"\x20" + self._never, self._never  # 6.3: size 0

    def encode(self, extra: Sequence[tuple[str, str]]) -> bytes:
        block, self._first = self._first, self._later
        if extra:
            block += b"".join(_literal(b"\0", name.lower(), value) for name, value in extra)
        return block

    def decode(self, block: bytes) -> Answer:
        answer = self._known.get(block)
        if answer is None:
            fields = dict(self._decoder.decode(block))
            wanted = (":status", "grpc-status", "grpc-message")
            answer = Answer(*(fields.get(name, "") for name in wanted))
            if len(self._known) >= _CACHED_BLOCKS:
                self._known.clear()
            self._known[block] = answer
        return answer


def _literal(kind: bytes, name: str, value: str) -> bytes:
    return kind + _text(name) + _text(value)


def _text(text: str) -> bytes:
    """Encode a string with its length (RFC 7541 section 5.1)."""
    data = text.encode()
    size, most = len(data), 127
    if size < most:
        return bytes((size,)) + data
    head, size = bytearray((most,)), size - most
    while size >= 128:  # noqa: PLR2004 - seven bits
        head.append(size % 128 | 128)
        size //= 128
    return bytes(head) + bytes((size,)) + data


_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8, 0x9,
)  # fmt: skip
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_HEAD_BYTES, _PRIORITY_BYTES = 9, 5
_CANCEL = 8
_MOST = 2**31 - 1  # of a window: section 6.9.1
_FIRST_WINDOW = 65535
_REFILL = 2**30
_TABLE_SIZE, _INITIAL_WINDOW, _MAX_FRAME = 0x1, 0x4, 0x5
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# No dynamic table, no pushes, and windows and frames so large that no answer waits for us: grpcio
# takes frames of 4 MiB, too.
_OUR_SETTINGS = b"".join(
    name.to_bytes(2) + value.to_bytes(4)
    for name, value in ((_TABLE_SIZE, 0), (0x2, 0), (_INITIAL_WINDOW, _MOST), (_MAX_FRAME, 2**22))
)


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + body


class _Stream:
    __slots__ = ("due", "http_status", "left", "number", "sent", "window")

    def __init__(self, number: int, due: float, left: memoryview, window: int) -> None:
        self.number = number
        self.due = due
        self.sent = perf_counter()
        self.left = left
        self.window = window
        self.http_status = ""


class GrpcClientProtocol(ClientProtocol):
    def __init__(self, finish: Finish, authority: str, method: str, metadata: Headers = ()) -> None:
        """`metadata` is sent with every call."""
        super().__init__(finish)
        self._blocks = Blocks(needed("hpack"), authority, method, metadata)
        self._streams: dict[int, _Stream] = {}
        self._unsent: deque[_Stream] = deque()
        self._next = 1
        self._window, self._stream_window, self._max_frame = _FIRST_WINDOW, _FIRST_WINDOW, 16384
        self._received = 0
        self._rest = b""
        self._block: tuple[int, int, bytes] | None = None  # stream, flags, fragments
        self._actions = {
            _DATA: self._on_data,
            _HEADERS: self._on_headers,
            _CONTINUATION: self._on_continuation,
            _RST_STREAM: self._on_reset,
            _SETTINGS: self._on_settings,
            _PING: self._on_ping,
            _GOAWAY: self._on_goaway,
            _WINDOW_UPDATE: self._on_window,
        }

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        update = frame(_WINDOW_UPDATE, 0, 0, (_MOST - _FIRST_WINDOW).to_bytes(4))
        self.transport.write(_PREFACE + frame(_SETTINGS, 0, 0, _OUR_SETTINGS) + update)

    def write(self, request: Request, due: float) -> None:
        number, self._next = self._next, self._next + 2
        if self._next > _MOST:  # section 5.1.1: no stream ids are left
            self.is_open = False
        message = request.parts[0]
        stream = _Stream(number, due, memoryview(message), self._stream_window)
        self._streams[number] = stream
        head = frame(_HEADERS, _END_HEADERS, number, self._blocks.encode(request.headers))
        size = len(message)
        is_whole = size <= min(self._window, stream.window, self._max_frame)
        if is_whole and not self._unsent:
            self._window -= size
            self.transport.write(head + frame(_DATA, _END_STREAM, number, message))
            return
        self.transport.write(head)
        self._unsent.append(stream)
        self._flush()

    def _flush(self) -> None:
        """Send one frame of each stream in turn, as far as the windows reach."""
        blocked: list[_Stream] = []
        while self._unsent and self._window > 0:
            stream = self._unsent.popleft()
            size = min(len(stream.left), self._window, stream.window, self._max_frame)
            if size <= 0:
                blocked.append(stream)
                continue
            part, stream.left = stream.left[:size], stream.left[size:]
            self._window -= size
            stream.window -= size
            flags = 0 if stream.left else _END_STREAM
            self.transport.write(frame(_DATA, flags, stream.number, bytes(part)))
            if stream.left:
                self._unsent.append(stream)
        self._unsent.extend(blocked)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= _HEAD_BYTES:
            size = int.from_bytes(data[at : at + 3])
            body = at + _HEAD_BYTES
            if end - body < size:
                break
            action = self._actions.get(data[at + 3])
            if action is not None:
                number = int.from_bytes(data[at + 5 : body]) & _MOST
                action(number, data[at + 4], data[body : body + size])
            at = body + size
        self._rest = data[at:]

    def _on_data(self, number: int, flags: int, body: bytes) -> None:
        self._received += len(body)
        if self._received > _REFILL:
            self.transport.write(frame(_WINDOW_UPDATE, 0, 0, self._received.to_bytes(4)))
            self._received = 0
        if flags & _END_STREAM:
            self._end(number, Failure("protocol", "an answer without trailers"))

    def _on_headers(self, number: int, flags: int, body: bytes) -> None:
        if flags & _PADDED:
            body = body[1 : len(body) - body[0]]
        if flags & _PRIORITY:
            body = body[_PRIORITY_BYTES:]
        if flags & _END_HEADERS:
            self._on_block(number, flags, body)
        else:
            self._block = (number, flags, body)

    def _on_continuation(self, _number: int, flags: int, body: bytes) -> None:
        if self._block is None:
            self.fail(Failure("protocol", "CONTINUATION without HEADERS"))
            return
        number, first, so_far = self._block
        self._block = (number, first, so_far + body)
        if flags & _END_HEADERS:
            self._block = None
            self._on_block(number, first, so_far + body)

    def _on_block(self, number: int, flags: int, block: bytes) -> None:
        try:
            answer = self._blocks.decode(block)
        except self._blocks.error as error:
            self.fail(Failure("protocol", f"{type(error).__name__}: {error}"))
            return
        stream = self._streams.get(number)
        if stream is not None and answer.http_status:
            stream.http_status = answer.http_status
        if stream is not None and flags & _END_STREAM:
            self._end(number, answer.failure(stream.http_status))

    def _end(self, number: int, failure: Failure | None) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        if stream.left and stream in self._unsent:
            self._unsent.remove(stream)
            self._reset(number)
        if not self.is_open and not self._streams:
            self.transport.close()
        self.finish(stream.due, failure)

    def _reset(self, number: int) -> None:
        self.transport.write(frame(_RST_STREAM, 0, number, _CANCEL.to_bytes(4)))

    def _on_reset(self, number: int, _flags: int, body: bytes) -> None:
        code = int.from_bytes(body)
        self._end(number, Failure("reset", f"the server reset the stream with code {code}"))

    def _on_settings(self, _number: int, flags: int, body: bytes) -> None:
        if flags & _ACK:
            return
        for at in range(0, len(body), 6):
            self._set(int.from_bytes(body[at : at + 2]), int.from_bytes(body[at + 2 : at + 6]))
        self.transport.write(frame(_SETTINGS, _ACK, 0))
        self._flush()
        if not self.ready.done():
            self.ready.set_result(None)

    def _set(self, name: int, value: int) -> None:
        if name == _TABLE_SIZE:
            self._blocks.limit(value)
        elif name == _MAX_FRAME:
            self._max_frame = value
        elif name == _INITIAL_WINDOW:
            for stream in self._streams.values():  # section 6.9.2
                stream.window += value - self._stream_window
            self._stream_window = value

    def _on_ping(self, _number: int, flags: int, body: bytes) -> None:
        if not flags & _ACK:
            self.transport.write(frame(_PING, _ACK, 0, body))

    def _on_goaway(self, _number: int, _flags: int, body: bytes) -> None:
        """Fail later streams, which the server did not process; earlier ones end as usual."""
        self.is_open = False
        last = int.from_bytes(body[:4]) & _MOST
        for number in [each for each in self._streams if each > last]:
            self._end(number, Failure("goaway", body[8:].decode(errors="replace")))
        if not self._streams:
            self.transport.close()

    def _on_window(self, number: int, _flags: int, body: bytes) -> None:
        if number == 0:
            self._window += int.from_bytes(body)
        elif (stream := self._streams.get(number)) is not None:
            stream.window += int.from_bytes(body)
        self._flush()

    def fail(self, failure: Failure) -> None:
        self.is_open = False
        self.transport.abort()
        self._unsent.clear()
        for number in list(self._streams):
            self._end(number, failure)

    def expire(self, before: float, failure: Failure) -> None:
        for stream in [each for each in self._streams.values() if each.sent < before]:
            self._reset(stream.number)
            self._end(stream.number, failure)
