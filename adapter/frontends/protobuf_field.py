"""Reads and writes length-delimited fields of a serialised protobuf message, without parsing it.

The rest of a message, tensors above all, is never looked at. Stricter than protobuf where parsers
differ, so that nobody behind us can read another value than we did: groups, overlong numbers and
the like are refused.
"""

from adapter.errors import InvalidRequest

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MIN_TAG, _MAX_TAG, _MAX_VARINT_BYTES = 1 << 3, 2**32 - 1, 10
# A message of nothing but tiny fields would keep the event loop busy for seconds.
_MAX_FIELDS = 2**16


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
    return at, at + (8 if kind == _FIXED64 else 4)


def _varint(message: bytes, at: int) -> tuple[int, int]:
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
