"""States of a stream, and the frames that a peer may send in each: RFC 9113 section 5.1."""

from enum import IntEnum

from adapter.http2 import frames
from adapter.http2.frames import Code


class State(IntEnum):
    IDLE = 0
    OPEN = 1
    HALF_CLOSED_LOCAL = 2  # we have sent END_STREAM
    HALF_CLOSED_REMOTE = 3  # the peer has sent END_STREAM
    CLOSED = 4  # both have, or the peer has sent RST_STREAM
    RESET = 5  # closed by our RST_STREAM, which the peer may not have received


_BOTH_WAYS = frozenset(
    {frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.WINDOW_UPDATE}
)
_ENDED = frozenset({frames.PRIORITY, frames.RST_STREAM, frames.WINDOW_UPDATE})

TAKES = {
    State.IDLE: frozenset({frames.HEADERS, frames.PRIORITY}),
    State.OPEN: _BOTH_WAYS,
    State.HALF_CLOSED_LOCAL: _BOTH_WAYS,
    State.HALF_CLOSED_REMOTE: _ENDED,
    State.CLOSED: _ENDED,  # in flight when it closed
    State.RESET: _BOTH_WAYS,  # the same; they are ignored
}

# for any other frame; a connection error but for HALF_CLOSED_REMOTE
FAULTS = {
    State.IDLE: Code.PROTOCOL_ERROR,
    State.HALF_CLOSED_REMOTE: Code.STREAM_CLOSED,
    State.CLOSED: Code.STREAM_CLOSED,
}
