"""Layouts of frames (RFC 9113 section 6), and a shutdown at any time."""

import math

import pytest

from adapter.http2 import frames
from adapter.http2.endpoint import Endpoint
from adapter.http2.frames import Code, ConnectionFault
from adapter.http2.policy import RelayContext
from adapter.http2.session import RelaySession
from adapter.http2.transport import State
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns
from tests.unit.http2.test_transport import Wire


class Peer(Endpoint):
    def __init__(self) -> None:
        super().__init__(ByteBudget(2**30), Turns(), None, 2**16)
        self.until = math.inf
        self.handle_bytes(frames.settings({}))


Peer.__abstractmethods__ = frozenset()  # no frame here gets as far as a subclass

LENGTHS = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
CONNECTION = (frames.SETTINGS, frames.PING, frames.GOAWAY)
STREAM = (frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION)


def code_of(kind: int, stream_id: int, size: int) -> Code:
    with pytest.raises(ConnectionFault) as raised:
        Peer().handle_bytes(frames.head(size, kind, 0, stream_id) + bytes(size))
    return raised.value.code


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("difference", [-1, 1])
def test_frame_of_another_length_is_refused(kind, difference):
    stream_id = 0 if kind in CONNECTION else 1
    assert code_of(kind, stream_id, LENGTHS[kind] + difference) == Code.FRAME_SIZE_ERROR


def test_short_goaway_is_refused():
    assert code_of(frames.GOAWAY, 0, 7) == Code.FRAME_SIZE_ERROR


@pytest.mark.parametrize("kind", CONNECTION)
def test_frame_of_the_connection_on_a_stream_is_refused(kind):
    assert code_of(kind, 1, LENGTHS.get(kind, 12)) == Code.PROTOCOL_ERROR


@pytest.mark.parametrize("kind", STREAM)
def test_frame_of_no_stream_is_refused(kind):
    assert code_of(kind, 0, LENGTHS.get(kind, 12)) == Code.PROTOCOL_ERROR


async def test_session_closes_when_shut_down_before_connected():
    """Its listener closes between the accept and the first turn of the connection."""
    context = RelayContext(
        None, None, None, timeout_seconds=1, max_message_bytes=1, budget=ByteBudget(1)
    )
    session, wire = RelaySession(context), Wire()
    session.shut_down()
    assert session.state is State.CLOSED
    assert session.ended.is_set()
    session.connection_made(wire)
    assert wire.ends == ["abort"]
    assert wire.written == []
