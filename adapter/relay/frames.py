"""HTTP/2 frames as bytes: numbers and layouts of RFC 9113 sections 4 to 7."""

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# types of frames
DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

# flags
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# settings
HEADER_TABLE_SIZE = 1
ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

HEAD_BYTES = 9
FRAME_BYTES = 2**14  # every peer accepts a payload of so many bytes
MAX_FRAME_BYTES = 2**24 - 1
MAX_WINDOW = MAX_STREAM = 2**31 - 1
DEFAULT_WINDOW = 2**16 - 1

# length (upper and lower part), type, flags, stream
_HEAD = Struct(">HBBBL")
_SETTING = Struct(">HL")
_NUMBER = Struct(">L")

SETTING_BYTES = _SETTING.size

read_head = _HEAD.unpack_from
read_number = _NUMBER.unpack_from


class Code(IntEnum):
    """The error codes of RFC 9113 section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """A connection error (section 5.4.1): the connection is closed."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """A stream error (section 5.4.2): the stream is reset."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the header of a frame (section 4.1)."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(key, value) for key, value in values.items())
    return head(len(payload), SETTINGS, 0, 0) + payload


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Parse SETTINGS; raise ConnectionFault for values that section 6.5.2 does not allow."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS of an odd length")
    values = list(_SETTING.iter_unpack(payload))
    for key, value in values:
        if key == ENABLE_PUSH and value > 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
        if key == MAX_FRAME_SIZE and not FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of bounds")
    return values


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return head(4, WINDOW_UPDATE, 0, stream_id) + _NUMBER.pack(increment)


def reset(stream_id: int, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return head(4, RST_STREAM, 0, stream_id) + _NUMBER.pack(code)


def ping(payload: bytes, flags: int = 0) -> bytes:
    """Return a PING frame; its payload has eight bytes."""
    return head(8, PING, flags, 0) + payload


def goaway(last_stream_id: int, code: int, text: str = "") -> bytes:
    """Return a GOAWAY frame, with a text for whoever debugs the peer."""
    payload = _NUMBER.pack(last_stream_id) + _NUMBER.pack(code) + text.encode()
    return head(len(payload), GOAWAY, 0, 0) + payload


def header_block(stream_id: int, block: bytes, *, end: bool) -> bytes:
    """Return HEADERS, and CONTINUATION for what exceeds one frame."""
    ending = END_STREAM if end else 0
    if len(block) <= FRAME_BYTES:
        return head(len(block), HEADERS, ending | END_HEADERS, stream_id) + block
    parts = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    made = [head(len(parts[0]), HEADERS, ending, stream_id), parts[0]]
    for part in parts[1:]:
        flags = END_HEADERS if part is parts[-1] else 0
        made += (head(len(part), CONTINUATION, flags, stream_id), part)
    return b"".join(made)


def without_padding(payload: bytes | memoryview) -> bytes | memoryview:
    """Return the payload of a PADDED frame without its padding."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def without_padding_and_priority(payload: bytes, flags: int) -> bytes:
    """Return the header block fragment of a HEADERS frame with these flags."""
    if flags & PADDED:
        payload = bytes(without_padding(payload))
    if not flags & HAS_PRIORITY:
        return payload
    if len(payload) < 5:  # noqa: PLR2004 - a stream and a weight
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "no room for the priority")
    return payload[5:]
