"""States of a stream, and what may come from the peer in each: RFC 9113 section 5.1."""

from enum import IntEnum

from adapter.protocols.http2 import frames
from adapter.protocols.http2.frames import Code


class State(IntEnum):
    IDLE = 0  # nothing has been said of it
    OPEN = 1
    HALF_CLOSED_LOCAL = 2  # we have ended
    HALF_CLOSED_REMOTE = 3  # the peer has ended
    CLOSED = 4  # both have, or the peer has reset it
    RESET = 5  # closed by us, and the peer may not have heard of it


_BOTH_WAYS = frozenset(
    {frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.WINDOW_UPDATE}
)
_ENDED = frozenset({frames.PRIORITY, frames.RST_STREAM, frames.WINDOW_UPDATE})

TAKES = {
    State.IDLE: frozenset({frames.HEADERS, frames.PRIORITY}),
    State.OPEN: _BOTH_WAYS,
    State.HALF_CLOSED_LOCAL: _BOTH_WAYS,
    State.HALF_CLOSED_REMOTE: _ENDED,
    State.CLOSED: _ENDED,  # what was under way when it closed
    State.RESET: _BOTH_WAYS,  # the same; nothing is made of it
}

# of whatever else comes; an error of the connection but for HALF_CLOSED_REMOTE
FAULTS = {
    State.IDLE: Code.PROTOCOL_ERROR,
    State.HALF_CLOSED_REMOTE: Code.STREAM_CLOSED,
    State.CLOSED: Code.STREAM_CLOSED,
}

# by the state before
AFTER_OUR_END = (
    State.IDLE,
    State.HALF_CLOSED_LOCAL,
    State.HALF_CLOSED_LOCAL,
    State.CLOSED,
    State.CLOSED,
    State.RESET,
)
AFTER_PEERS_END = (
    State.IDLE,
    State.HALF_CLOSED_REMOTE,
    State.CLOSED,
    State.HALF_CLOSED_REMOTE,
    State.CLOSED,
    State.RESET,
)
