"""Encodes messages of AWS's event stream, `application/vnd.amazon.eventstream`:

    total length u32 | length of the headers u32 | CRC-32 of these 8 bytes
    headers: length of the name u8 | name | type u8 = 7, a string | length u16 | value
    payload
    CRC-32 of all before

All numbers are big-endian.
"""

import struct
from collections.abc import Mapping
from zlib import crc32

CONTENT_TYPE = "application/vnd.amazon.eventstream"

_STRING = 7
_FRAME_BYTES = 16  # two lengths and two sums
# botocore refuses a message with more
MAX_PAYLOAD_BYTES = 24 * 2**20


def message(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Return one message of the stream: its lengths, headers and payload, each with a sum."""
    lines = b"".join(_header(name.encode(), value.encode()) for name, value in headers.items())
    lengths = struct.pack(">II", _FRAME_BYTES + len(lines) + len(payload), len(lines))
    begin = b"".join((lengths, struct.pack(">I", crc32(lengths)), lines, payload))
    return begin + struct.pack(">I", crc32(begin))


def _header(name: bytes, value: bytes) -> bytes:
    return struct.pack(f">B{len(name)}sBH", len(name), name, _STRING, len(value)) + value


def event(kind: str, payload: bytes) -> bytes:
    """Return an event. `payload` has MAX_PAYLOAD_BYTES at most."""
    headers = {
        ":event-type": kind,
        ":content-type": "application/octet-stream",
        ":message-type": "event",
    }
    return message(headers, payload)


def exception(kind: str, payload: bytes) -> bytes:
    """Return the message that ends a stream with an error; `payload` is JSON."""
    headers = {
        ":exception-type": kind,
        ":content-type": "application/json",
        ":message-type": "exception",
    }
    return message(headers, payload)
