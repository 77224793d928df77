"""Reads protobuf messages without parsing them: fields of a whole message, and the model's name in
a gRPC message that comes in pieces.

The rest of a message, tensors above all, is never looked at. Stricter than protobuf where parsers
differ, so that nobody behind us can read another value than we did: groups, overlong numbers and
the like are refused.
"""

from enum import Enum

from adapter.errors import InvalidRequest

PREFIX_BYTES = 5  # compressed or not, then the length
_NAME_TAG = 0x0A  # field 1, delimited
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_MIN_TAG, _MAX_TAG, _MAX_VARINT_BYTES = 1 << 3, 2**32 - 1, 10
# A message of nothing but tiny fields would keep the event loop busy for seconds.
_MAX_FIELDS = 2**16
_LEAST_BYTES = PREFIX_BYTES + 2  # with the head of a first field
_LONG = 0x80  # the bit of a number that says: more to come
_MAX_NAME_BYTES = 2**10
# delimited fields 2 to 15: most of what a request is made of
_PLAIN_TAGS = frozenset(range(0x12, 0x80, 8))


class Peek(Enum):
    MORE = "the name may still come"
    NO = "not a message that names its model first"


def length_of(start: bytes | bytearray | memoryview) -> int:
    """0 where the prefix is not all there."""
    if len(start) < PREFIX_BYTES:
        return 0
    return int.from_bytes(start[1:PREFIX_BYTES])


def first_name(start: bytes, max_bytes: int) -> bytes | Peek:
    """The name where it comes first, as every client's protobuf writes it. MORE never comes of as
    many bytes as a name may have and ten.
    """
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


class NameScanner:
    """InvalidRequest for a message in which Triton may read another name than the first, and for
    more than one message. Fields are looked at, values are not: `skip` is what is to come of one.
    """

    __slots__ = ("_fields", "_left", "_names", "_rest", "skip")

    def __init__(self, length: int) -> None:
        self.skip = 0
        self._left = length  # behind what is to be skipped
        self._rest = b""
        self._fields = 0
        self._names = 0

    def feed(self, piece: bytes | memoryview) -> None:
        """The next bytes behind the prefix."""
        size, skip = len(piece), self.skip
        if size <= skip:
            self.skip = skip - size
            return
        self.skip = 0
        self._take(size - skip, "more than one message")
        piece = piece[skip:]
        if self._rest:
            piece = self._rest + piece
        at, end = 0, len(piece)
        try:
            while at < end:
                if piece[at] in _PLAIN_TAGS and piece[at + 1] < 0x80:  # noqa: PLR2004
                    at += 2 + piece[at + 1]
                    self._fields += 1
                else:
                    at = self._field(piece, at)
            self._rest = b""
        except IndexError:
            self._rest = bytes(piece[at:])
        self._check_count()
        if at > end:
            self._take(at - end, "the message breaks off within a field")
            self.skip = at - end

    def end(self) -> None:
        if self._left or self.skip or self._rest:
            raise InvalidRequest("the message breaks off within a field")

    def _take(self, size: int, why: str) -> None:
        self._left -= size
        if self._left < 0:
            raise InvalidRequest(why)

    def _field(self, piece: bytes | memoryview, at: int) -> int:
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
        self._fields += 1
        if tag == _NAME_TAG:
            self._names += 1
            if self._names > 1:
                raise InvalidRequest("the message names its model more than once")
        return start + size

    def _check_count(self) -> None:
        if self._fields > _MAX_FIELDS:
            raise InvalidRequest(f"the message has more than {_MAX_FIELDS} fields")


def plain_name(message: bytes, max_bytes: int) -> bytes | None:
    """The name in a whole message, its prefix with it, as nearly every client writes a small one:
    `first_name` and `NameScanner` in one pass. None says nothing against it.
    """
    end = len(message)
    if end < _LEAST_BYTES or message[0] or message[PREFIX_BYTES] != _NAME_TAG:
        return None
    length, at = end - PREFIX_BYTES, _LEAST_BYTES + message[PREFIX_BYTES + 1]
    if length > max_bytes or length != int.from_bytes(message[1:PREFIX_BYTES]):
        return None
    if at > end or message[PREFIX_BYTES + 1] >= _LONG:
        return None
    name = message[_LEAST_BYTES:at]
    try:
        while at < end:
            size = message[at + 1]
            if size >= _LONG or message[at] not in _PLAIN_TAGS:
                return None
            at += 2 + size
    except IndexError:
        return None
    return name if at == end else None


def read_field(message: bytes, number: int) -> bytes | None:
    """The last occurrence counts, as protobuf has it for a field that is not repeated."""
    found = _occurrences(message, number)
    return message[found[-1][1] : found[-1][2]] if found else None


def read_repeated(message: bytes, number: int) -> list[bytes]:
    return [message[start:end] for _, start, end in _occurrences(message, number)]


def with_field(message: bytes, number: int, value: bytes) -> bytes:
    """The message with this value, in place of the one that counted."""
    found = _occurrences(message, number)
    start, _, end = found[-1] if found else (len(message), 0, len(message))
    return b"".join((message[:start], _encoded(number, value), message[end:]))


def _occurrences(message: bytes, number: int) -> list[tuple[int, int, int]]:
    """Of each: where the field starts, where its value starts, and where both end."""
    wanted, found = number << 3 | _DELIMITED, []
    at, end = 0, len(message)
    try:
        for _ in range(_MAX_FIELDS):
            if at >= end:
                break
            start = at
            tag, at = _varint(message, at)
            value, at = _skip(message, tag, at)
            if tag == wanted:
                found.append((start, value, at))
    except IndexError:
        at = end + 1
    if at > end:
        raise InvalidRequest("the message breaks off within a field")
    if at < end:
        raise InvalidRequest(f"the message has more than {_MAX_FIELDS} fields")
    return found


def _skip(message: bytes, tag: int, at: int) -> tuple[int, int]:
    """Where the value of the field with this tag starts and ends."""
    kind = tag & 7
    if not _MIN_TAG <= tag <= _MAX_TAG or kind not in {_VARINT, _FIXED64, _DELIMITED, _FIXED32}:
        raise InvalidRequest(f"the message is not protobuf: it has a field with tag {tag}")
    if kind == _DELIMITED:
        size, start = _varint(message, at)
        return start, start + size
    if kind == _VARINT:
        return at, _varint(message, at)[1]
    return at, at + (_FIXED[kind])


def _varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    value = message[at]
    if value < 0x80:  # noqa: PLR2004 - the bit that says: more to come
        return value, at + 1
    value &= 0x7F
    for i in range(1, _MAX_VARINT_BYTES):
        byte = message[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:  # noqa: PLR2004
            return value, at + i + 1
    raise InvalidRequest("the message is not protobuf: it has an endless number")


def _encoded(number: int, value: bytes) -> bytes:
    """`number` below 16: its tag is one byte."""
    size, digits = len(value), bytearray([number << 3 | _DELIMITED])
    while size > 0x7F:  # noqa: PLR2004
        digits.append(size & 0x7F | 0x80)
        size >>= 7
    digits.append(size)
    return bytes(digits) + value
