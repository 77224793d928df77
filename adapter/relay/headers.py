"""Decodes and caches the HPACK header blocks (RFC 7541) of peers, and encodes ours.

Our SETTINGS_HEADER_TABLE_SIZE is 0, but a peer has a table until one of its blocks says that it is
gone, and grpc-okhttp never says so.

Without a table equal blocks mean equal headers, so the meaning of a block is cached by its bytes.
Nothing of a peer that has a table is cached.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Generic, TypeAlias, TypeVar
from urllib.parse import quote

from hpack import Decoder
from hpack.exceptions import HPACKError

from adapter.relay.frames import Code, ConnectionFault, StreamFault

T = TypeVar("T")
V = TypeVar("V")
Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

MAX_FIELDS = 128
MAX_TEXT_BYTES = 2**19  # of an error: percent-encoding takes 0.1 us a byte
# a block is decoded up to so many times the limits, for its effect on the table
_MOST_DECODED = 4
_MAX_CACHED = 512
_CACHED_BLOCK_BYTES = 2048
_CACHED_FIELD_BYTES = 256
_LITERAL_LIMIT = 0x7F  # the seven bits of an integer's first byte
_MAX_SHIFT = 28  # an integer has at most five more bytes
_SIZE_UPDATE_MASK = 0xE0
_SIZE_UPDATE = 0x20
_IS_INDEXED = 0x80
_IS_ADDED = 0x40  # a literal that goes into the table
_ENTRY_BYTES = 32  # overhead of each header, by RFC 7541 section 4.1
_SHORT_BYTES = 128
_CACHED_SHORT = 1024
_LENGTH_DIGITS = 18
# RFC 9113 section 8.2.2
_CONNECTION_SPECIFIC = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_REQUEST = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED = {b":method", b":scheme", b":path"}
_UPPER = frozenset(range(0x41, 0x5B))
_NOT_IN_NAMES = frozenset([*range(0x21), *_UPPER, *range(0x7F, 0x100)])
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte != 0x25)  # noqa: PLR2004 - not %


def _keep(cache: dict[bytes, V], encoded: bytes, meaning: V, max_bytes: int) -> None:
    """Cache what `encoded` means, unless it is long. A full cache is emptied first."""
    if len(encoded) <= max_bytes:
        if len(cache) >= _MAX_CACHED:
            cache.clear()
        cache[encoded] = meaning


class HeaderBlockCache(Generic[T]):
    """Maps the bytes of header blocks and fields of peers without a table to their meaning."""

    def __init__(self, read_meaning: Callable[[Headers], T]) -> None:
        self.read_meaning = read_meaning
        self.blocks: dict[bytes, T] = {}
        self.fields: dict[bytes, tuple[bytes, bytes]] = {}


class HeadersTooLarge(StreamFault):
    """A block exceeds a limit; its first `headers` do not. The next block can be read."""

    def __init__(self, headers: Headers, text: str) -> None:
        super().__init__(Code.ENHANCE_YOUR_CALM, text)
        self.headers = headers


class HeaderReader(Generic[T]):
    """Decodes the header blocks of one connection."""

    def __init__(self, cache: HeaderBlockCache[T], max_bytes: int) -> None:
        self._cache = cache
        self._known_fields: dict[bytes, tuple[bytes, bytes]] = {}  # empty while there is a table
        self._max_bytes = max_bytes
        self._decoder = Decoder(max_header_list_size=_MOST_DECODED * max_bytes)
        self._has_table = True
        self._is_acknowledged = False
        self.work = 0  # the cost of the latest block, in glitches
        # returns the meaning of a block that is cached
        self.cached: Callable[[bytes], T | None] = lambda _: None

    def expect_size_update(self) -> None:
        """Expect the peer's next block to start with a table size update (RFC 7541 section 4.2).

        A peer that omits it, as grpc-okhttp does, still has its table.
        """
        self._is_acknowledged = True
        self._start_caching()

    def _start_caching(self) -> None:
        """Cache every block from here on, if the peer has given up its table for good."""
        if self._is_acknowledged and self._decoder.header_table_size == 0:
            self._has_table = False
            self._known_fields = self._cache.fields
            self.cached = self._cache.blocks.get

    def read(self, block: bytes) -> T:
        """Return the meaning of a block. Raise StreamFault, after which the connection continues,
        when the headers are malformed or too large.
        """
        self.work = 0
        try:
            headers = self._fields(block)
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, str(error)) from error
        except (IndexError, UnicodeDecodeError, ValueError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, "not a header block") from error
        meaning = self._cache.read_meaning(headers)
        if not self._has_table:
            _keep(self._cache.blocks, block, meaning, _CACHED_BLOCK_BYTES)
        return meaning

    def _fields(self, block: bytes) -> Headers:
        """Decode by field: all but a timeout or an id occurred in earlier blocks. What exceeds a
        limit is decoded only where there is a table that it may change.
        """
        fields: list[tuple[bytes, bytes]] = []
        room = self._max_bytes
        over = 0
        limit = _MOST_DECODED * MAX_FIELDS if self._has_table else MAX_FIELDS + 1
        starts = field_starts(block, limit)
        self.work = len(starts) >> 2
        for start, end in pairwise(starts):
            field = block[start:end]
            header = self._known_fields.get(field) or self._decode(field, is_first=not fields)
            if header is None:
                continue
            room -= len(header[0]) + len(header[1]) + _ENTRY_BYTES
            if room >= 0 and len(fields) < MAX_FIELDS:
                fields.append(header)
                continue
            over += 1
            if not self._has_table:
                break
        is_whole = starts[-1] == len(block)
        if is_whole and not over:
            return tuple(fields)
        text = f"{self._max_bytes} bytes" if room < 0 else f"{MAX_FIELDS} headers"
        text = f"the headers are more than {text}"
        if self._has_table and (not is_whole or room < -_MOST_DECODED * self._max_bytes):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, text)
        raise HeadersTooLarge(tuple(fields), text)

    def _decode(self, field: bytes, *, is_first: bool) -> tuple[bytes, bytes] | None:
        """Decode one field; return None for an update of the table's size."""
        self.work += 1 + (len(field) >> 4)
        if field[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
            self._update_size(field, is_first=is_first)
            return None
        ((key, value),) = self._decoder.decode(field, raw=True)
        header = (bytes(key), bytes(value))
        if not self._has_table:
            _keep(self._known_fields, field, header, _CACHED_FIELD_BYTES)
        return header

    def _update_size(self, field: bytes, *, is_first: bool) -> None:
        """Apply an update of the table's size. Raise HPACKError behind a header, and for a size
        above 0 once the peer has acknowledged our settings.
        """
        if not is_first:
            raise HPACKError("a table size update after a header")
        if self._is_acknowledged:
            self._decoder.max_allowed_table_size = 0
        self._decoder.decode(field, raw=True)
        self._start_caching()


def field_starts(block: bytes, limit: int) -> list[int]:
    """Return where the first fields start (RFC 7541 section 6), at most so many, and where the last
    of them ends.
    """
    starts = [0]
    at = 0
    end = len(block)
    while at < end and len(starts) <= limit:
        first = block[at]
        if first & _SIZE_UPDATE_MASK == _SIZE_UPDATE:
            prefix = 0x1F
            strings = 0
        elif first & _IS_INDEXED:
            prefix = 0x7F
            strings = 0
        else:
            prefix = 0x3F if first & _IS_ADDED else 0x0F
            strings = 1 if first & prefix else 2
        index, at = first & prefix, at + 1
        if index == prefix:
            _, at = _long_integer(block, at, prefix)
        for _ in range(strings):
            size, at = block[at] & _LITERAL_LIMIT, at + 1
            if size == _LITERAL_LIMIT:
                size, at = _long_integer(block, at, size)
            at += size
        starts.append(at)
    if at > end:
        raise HPACKError("a header block breaks off")
    return starts


def _long_integer(block: bytes, at: int, value: int) -> tuple[int, int]:
    """Return an integer that `value` begins and the byte at `at` continues, and where it ends."""
    for shift in range(0, _MAX_SHIFT + 1, 7):
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise HPACKError("an integer is too long")


def encoded(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers as literals, which need no table."""
    return b"".join(
        _encoded_short(key, value) if len(key) + len(value) < _SHORT_BYTES else _encoded(key, value)
        for key, value in headers
    )


def _encoded(key: bytes, value: bytes) -> bytes:
    """Encode one header as a literal that is not added to the table."""
    made = bytearray(1)
    for text in (key, value):
        _add_length(made, len(text))
        made += text
    return bytes(made)


_encoded_short = lru_cache(_CACHED_SHORT)(_encoded)


def _add_length(made: bytearray, length: int) -> None:
    """Append a length as an integer of seven bits in the first byte (RFC 7541 section 5.1)."""
    if length < _LITERAL_LIMIT:
        made.append(length)
        return
    made.append(_LITERAL_LIMIT)
    length -= _LITERAL_LIMIT
    while length > 0x7F:  # noqa: PLR2004 - seven bits a byte
        made.append(length & 0x7F | 0x80)
        length >>= 7
    made.append(length)


def check_request(headers: Headers) -> None:
    """Raise StreamFault unless these are the headers of a request (RFC 9113 section 8.3.1)."""
    seen = _check(headers)
    if not seen >= _NEEDED or not seen <= _REQUEST or (b":path", b"") in headers:
        raise StreamFault(Code.PROTOCOL_ERROR, "pseudo-headers are missing or odd")


def content_length(headers: Headers) -> int | None:
    """Return the body's length (RFC 9113 section 8.1.1); raise StreamFault if it is malformed."""
    values = [value for key, value in headers if key == b"content-length"]
    if not values:
        return None
    if len(values) > 1 or not values[0].isdigit() or len(values[0]) > _LENGTH_DIGITS:
        raise StreamFault(Code.PROTOCOL_ERROR, "content-length is odd")
    return int(values[0])


def check_answer(headers: Headers) -> None:
    """Raise StreamFault unless these are headers of a response, or trailers."""
    if not _check(headers) <= {b":status"}:
        raise StreamFault(Code.PROTOCOL_ERROR, "odd pseudo-headers")


def _check(headers: Headers) -> set[bytes]:
    """Check the headers of a request or response; return the names of its pseudo-headers. Raise
    StreamFault for headers that HTTP/2 forbids.
    """
    seen: set[bytes] = set()
    are_over = False
    for key, value in headers:
        if key.startswith(b":"):
            if are_over or key in seen:
                raise StreamFault(Code.PROTOCOL_ERROR, "a pseudo-header out of place")
            seen.add(key)
        else:
            are_over = True
            _check_plain(key, value)
        if b"\0" in value or b"\r" in value or b"\n" in value:
            raise StreamFault(Code.PROTOCOL_ERROR, "a header's value has control characters")
    return seen


def _check_plain(key: bytes, value: bytes) -> None:
    """Raise StreamFault for a header name that HTTP/2 forbids, and for `te` unless it is
    trailers.
    """
    if not key or not _NOT_IN_NAMES.isdisjoint(key) or b":" in key or key in _CONNECTION_SPECIFIC:
        raise StreamFault(Code.PROTOCOL_ERROR, "a header that HTTP/2 does not have")
    if key == b"te" and value != b"trailers":
        raise StreamFault(Code.PROTOCOL_ERROR, "te is not trailers")


def plain_block(status: int) -> bytes:
    """Return the header block of a plain text response, for a request that is not gRPC."""
    return encoded([(b":status", str(status).encode()), (b"content-type", b"text/plain")])


def status_block(code: int, text: str, more: Headers = (), *, alone: bool) -> bytes:
    """Return trailers with a gRPC status, and `more`. `alone`: a Trailers-Only response."""
    top = [(b":status", b"200"), (b"content-type", b"application/grpc")] if alone else []
    message = quote(text.encode()[:MAX_TEXT_BYTES], safe=_PLAIN).encode()
    return encoded([*top, *more, (b"grpc-status", str(code).encode()), (b"grpc-message", message)])
