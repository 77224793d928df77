"""Follows one gRPC message with a model's name in it, however it is cut into pieces."""

from enum import Enum

from adapter.errors import InvalidRequest

PREFIX_BYTES = 5  # compressed or not, then the length
_NAME_TAG = 0x0A  # field 1, delimited
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MIN_TAG, _MAX_TAG, _MAX_VARINT_BYTES = 1 << 3, 2**32 - 1, 10
_MAX_FIELDS = 2**16
_MAX_NAME_BYTES = 2**10


class Peek(Enum):
    MORE = "the name may still come"
    NO = "not a message that names its model first"


def length_of(start: bytes) -> int:
    return int.from_bytes(start[1:PREFIX_BYTES])


def first_name(start: bytes, max_bytes: int) -> bytes | Peek:
    """The name where it comes first, as every client's protobuf writes it."""
    if len(start) < PREFIX_BYTES + 2:
        return Peek.MORE
    if start[0] != 0 or length_of(start) > max_bytes or start[PREFIX_BYTES] != _NAME_TAG:
        return Peek.NO
    length, at = start[PREFIX_BYTES + 1], PREFIX_BYTES + 2
    if length >= 0x80:  # noqa: PLR2004 - the bit that says: more to come
        if len(start) <= at:
            return Peek.MORE
        length, at = length & 0x7F | start[at] << 7, at + 1
        if length > _MAX_NAME_BYTES:  # or a third byte of the length
            return Peek.NO
    if at + length > PREFIX_BYTES + length_of(start):
        return Peek.NO
    return start[at : at + length] if len(start) >= at + length else Peek.MORE


class MessageWatch:
    """InvalidRequest for a message in which Triton may read another name than the first, and for
    more than one message. Fields are looked at, values are not.
    """

    __slots__ = ("_fields", "_left", "_names", "_rest", "_skip")

    def __init__(self, length: int) -> None:
        self._left = length
        self._skip = 0
        self._rest = b""
        self._fields = 0
        self._names = 0

    def feed(self, piece: bytes) -> None:
        """The next bytes behind the prefix."""
        self._left -= len(piece)
        if self._left < 0:
            raise InvalidRequest("more than one message")
        if len(piece) <= self._skip:
            self._skip -= len(piece)
            return
        piece = self._rest + piece[self._skip :]
        at, self._skip = 0, 0
        try:
            while at < len(piece):
                after = self._field(piece, at)
                self._skip, at = max(0, after - len(piece)), after
            self._rest = b""
        except IndexError:
            self._rest = piece[at:]

    def end(self) -> None:
        if self._left or self._skip or self._rest:
            raise InvalidRequest("the message breaks off within a field")

    def _field(self, piece: bytes, at: int) -> int:
        """Where it ends, in this piece or behind it. IndexError when its head is not here yet."""
        tag, start = _varint(piece, at)
        kind = tag & 7
        if kind == _DELIMITED:
            size, start = _varint(piece, start)
        elif kind == _VARINT:
            size, start = 0, _varint(piece, start)[1]
        else:
            size = _FIXED.get(kind, -1)
        if size < 0 or not _MIN_TAG <= tag <= _MAX_TAG:
            raise InvalidRequest(f"the message is not protobuf: it has a field with tag {tag}")
        self._count(tag)
        return start + size

    def _count(self, tag: int) -> None:
        self._fields += 1
        if self._fields > _MAX_FIELDS:
            raise InvalidRequest(f"the message has more than {_MAX_FIELDS} fields")
        if tag == _NAME_TAG:
            self._names += 1
            if self._names > 1:
                raise InvalidRequest("the message names its model more than once")


def _varint(piece: bytes, at: int) -> tuple[int, int]:
    value = piece[at]
    if value < 0x80:  # noqa: PLR2004
        return value, at + 1
    value &= 0x7F
    for i in range(1, _MAX_VARINT_BYTES):
        byte = piece[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:  # noqa: PLR2004
            return value, at + i + 1
    raise InvalidRequest("the message is not protobuf: it has an endless number")
