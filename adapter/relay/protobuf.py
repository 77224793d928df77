"""Scans the fields of a gRPC message that is received in pieces, and reads the name at its start.

Values, tensors above all, are skipped. Where parsers differ the scanner is stricter than protobuf,
so that Triton cannot read another value than the adapter did: it refuses groups, overlong varints
and the like.
"""

import zlib
from enum import Enum
from typing import Protocol

PREFIX_BYTES = 5  # of a gRPC message: the compressed flag, then the length
COMPRESSED = 1  # the highest flag that gRPC knows
_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}  # of zlib, by the name in `grpc-encoding`
_NAME_TAG = 0x0A  # field 1, delimited
_RAW_TAG = 0x3A  # field 7, a raw tensor
_OUTPUT_TAG = 0x2A  # field 5 of an answer to an inference, delimited
SHORT_BYTES = 128  # in a shorter message each length is one byte
VARINT = 0
_FIXED64 = 1
DELIMITED = 2
_FIXED32 = 5
FIXED = {_FIXED64: 8, _FIXED32: 4}
MIN_TAG = 1 << 3
MAX_TAG = 2**32 - 1
_MAX_VARINT_BYTES = 10
# A message of tiny fields alone would block the event loop for seconds: one of a stream is scanned
# four times, for up to 0.6 us a field.
MAX_FIELDS = 2**14
_LEAST_BYTES = PREFIX_BYTES + 2  # with the tag and length of a first field
LONG = 0x80  # a varint's byte is followed by another
_MAX_NAME_BYTES = 2**10
# Bytes outside raw tensors that are judged as a whole; of more, each part overlaps the next.
_WHOLE_BYTES = 2**16
_WINDOW_BYTES = 64
# Tags of the delimited fields 2 to 15, which most of a request consists of.
_PLAIN_TAGS = frozenset(range(0x12, 0x80, 8))


class Malformed(Exception):
    """A message that is not protobuf, or that Triton may read otherwise than the adapter."""


class FieldCheck(Protocol):
    """Judges the fields of a large message, without those of raw tensors."""

    def __call__(self, fields: bytes, /, *, is_whole: bool) -> None: ...


class Peek(Enum):
    """Says why the start of a message has no name."""

    MORE = "the name may be in bytes that were not received yet"
    COMPRESSED = "the name is in a compressed message, which is read once it is complete"
    NO = "not a message that names its model first"


def length_of(start: bytes | bytearray | memoryview) -> int:
    """Return the message's length; 0 where the prefix is incomplete."""
    if len(start) < PREFIX_BYTES:
        return 0
    return int.from_bytes(start[1:PREFIX_BYTES])


def first_name(start: bytes, max_bytes: int) -> bytes | Peek:
    """Return the name where it is the first field, as protobuf writes it. MORE is not returned for
    a start that is ten bytes longer than a name may be.
    """
    if len(start) < PREFIX_BYTES + 2:
        return Peek.MORE
    if start[0] == COMPRESSED:
        return Peek.COMPRESSED
    if start[0] != 0 or length_of(start) > max_bytes or start[PREFIX_BYTES] != _NAME_TAG:
        return Peek.NO
    length = start[PREFIX_BYTES + 1]
    at = PREFIX_BYTES + 2
    if length >= LONG:
        if len(start) <= at:
            return Peek.MORE
        length, at = length & 0x7F | start[at] << 7, at + 1
        if length > _MAX_NAME_BYTES:  # as with a third byte of the length
            return Peek.NO
    if at + length > PREFIX_BYTES + length_of(start):
        return Peek.NO
    return start[at : at + length] if len(start) >= at + length else Peek.MORE


def decompress(message: bytes, encoding: bytes, max_bytes: int) -> bytes | None:
    """Return a compressed message, with its prefix, as one that is not compressed. None if it has
    more than `max_bytes` then, or if it is not one complete stream of that encoding.
    """
    window_bits = _WINDOW_BITS.get(encoding)
    if window_bits is None or length_of(message) != len(message) - PREFIX_BYTES:
        return None
    decompressor = zlib.decompressobj(window_bits)
    try:
        plain = decompressor.decompress(message[PREFIX_BYTES:], max_bytes)
    except zlib.error:
        return None
    if not decompressor.eof or decompressor.unused_data:
        return None
    return bytes(1) + len(plain).to_bytes(PREFIX_BYTES - 1) + plain


class NameScanner:
    """Scans the fields of a message; raises Malformed where Triton may read another name than the
    first, and for more than one message. `check` judges the fields that are no raw tensors, once it
    is set.
    """

    __slots__ = (
        "_fields", "_is_cut", "_is_raw", "_left", "_names", "_rest", "_skip", "_text",
        "check",
    )  # fmt: skip

    def __init__(self, length: int) -> None:
        self._skip = 0  # bytes of the current value that are to come
        self._left = length  # bytes of the message behind those to skip
        self._rest = b""
        self._fields = 0
        self._names = 0
        self._is_raw = False  # the current value is a raw tensor
        self.check: FieldCheck | None = None
        self._text = b""
        self._is_cut = False

    def feed(self, piece: bytes | memoryview) -> None:
        """Scan the next bytes after the prefix."""
        size = len(piece)
        skip = self._skip
        if not self._is_raw:
            self._collect(piece[:skip])
        if size <= skip:
            self._skip = skip - size
            return
        self._skip = 0
        self._take(size - skip, "more than one message")
        piece = piece[skip:]
        if self._rest:
            piece = self._rest + piece
        at = start = 0
        end = len(piece)
        try:
            while at < end:
                start = at
                if piece[at] in _PLAIN_TAGS and piece[at + 1] < LONG:
                    at += 2 + piece[at + 1]
                    self._fields += 1
                else:
                    at = self._field(piece, at)
            self._rest = b""
        except IndexError:
            self._rest = bytes(piece[at:])
        self._is_raw = at > end and piece[start] == _RAW_TAG
        self._collect(piece[: start if self._is_raw else at])
        self._check_count()
        if at > end:
            self._take(at - end, "the message breaks off within a field")
            self._skip = at - end

    def end(self) -> None:
        """Check that the message is complete, and its fields. Raise Malformed if they are not as
        they should be.
        """
        if self._left or self._skip or self._rest:
            raise Malformed("the message breaks off within a field")
        if self.check is not None:
            self.check(self._text, is_whole=not self._is_cut)

    def _collect(self, fields: bytes | memoryview) -> None:
        """Collect bytes outside raw tensors for `check`, which judges too many of them in parts."""
        self._text += fields
        if self.check is not None and len(self._text) > _WHOLE_BYTES:
            self.check(self._text, is_whole=False)
            self._text = self._text[-_WINDOW_BYTES:]
            self._is_cut = True

    def _take(self, size: int, text: str) -> None:
        """Subtract received bytes from the message's length; raise Malformed if they exceed it."""
        self._left -= size
        if self._left < 0:
            raise Malformed(text)

    def _field(self, piece: bytes | memoryview, at: int) -> int:
        """Return where the field ends, if need be after this piece. IndexError: its head is cut."""
        tag, start = varint(piece, at)
        kind = tag & 7
        if kind == DELIMITED:
            size, start = varint(piece, start)
        elif kind == VARINT:
            size, start = 0, varint(piece, start)[1]
        else:
            size = FIXED.get(kind, -1)
        if size < 0 or not MIN_TAG <= tag <= MAX_TAG:
            raise Malformed(f"the message is not protobuf: it has a field with tag {tag}")
        self._fields += 1
        self._check_count()
        if tag == _NAME_TAG:
            self._names += 1
            if self._names > 1:
                raise Malformed("the message names its model more than once")
        return start + size

    def _check_count(self) -> None:
        """Raise Malformed for a message with too many fields."""
        if self._fields > MAX_FIELDS:
            raise Malformed(f"the message has more than {MAX_FIELDS} fields")


def plain_name(message: bytes, max_bytes: int) -> bytes | None:
    """Return the name in a complete message with its prefix, of the form that nearly all clients
    send: `first_name` and `NameScanner` in one pass. None for other forms, which may be valid.
    """
    end = len(message)
    if end < _LEAST_BYTES or message[0] or message[PREFIX_BYTES] != _NAME_TAG:
        return None
    length = end - PREFIX_BYTES
    at = _LEAST_BYTES + message[PREFIX_BYTES + 1]
    if length > max_bytes or length != int.from_bytes(message[1:PREFIX_BYTES]):
        return None
    if at > end or message[PREFIX_BYTES + 1] >= LONG:
        return None
    name = message[_LEAST_BYTES:at]
    try:
        while at < end:
            size = message[at + 1]
            if size >= LONG or message[at] not in _PLAIN_TAGS:
                return None
            at += 2 + size
    except IndexError:
        return None
    return name if at == end else None


def has_no_outputs(answer: bytes | memoryview, at: int = 0) -> bool:
    """Return whether the answer to an inference, a short message that begins at `at`, has none.
    False where that cannot be told.
    """
    end = len(answer)
    try:
        while at < end:
            tag = answer[at]
            if tag == _OUTPUT_TAG or tag & 7 != DELIMITED:
                return False
            at += 2 + answer[at + 1]
    except IndexError:
        return False
    return at == end


def varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return an integer and where it ends. Raise IndexError if it is cut, Malformed if it is too
    long.
    """
    value = message[at]
    if value < LONG:
        return value, at + 1
    value &= 0x7F
    for i in range(1, _MAX_VARINT_BYTES):
        byte = message[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < LONG:
            return value, at + i + 1
    raise Malformed("the message is not protobuf: it has an endless number")


def encoded_field(number: int, value: bytes) -> bytes:
    """Encode a field with a `number` below 16, whose tag is one byte."""
    size = len(value)
    digits = bytearray([number << 3 | DELIMITED])
    while size >= LONG:
        digits.append(size & 0x7F | LONG)
        size >>= 7
    digits.append(size)
    return bytes(digits) + value
