"""DATA frames however the network cuts them: what is in them, their windows, what is kept."""

import itertools
import math
import random

import pytest

from adapter.relay import frames
from adapter.relay.endpoint import Endpoint
from adapter.relay.flow_control import MAX_FRAME, STREAM_WINDOW, Stream
from adapter.relay.frames import Code, ConnectionFault
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns

SIZES = (0, 1, 2**14 - 1, 2**14, 2**14 + 1, 2**16, 300_000)
KIB = 2**10


class Peer(Endpoint):
    """Takes what comes for its one stream, and notes what of it is the last."""

    def __init__(self) -> None:
        super().__init__(ByteBudget(2**30), Turns(), None, 2**16)
        self.stream = self.streams[1] = Stream(1, 0)
        self.pieces: list[bytes] = []
        self.has_ended = False
        self.credited = 0
        self.faults: list[int] = []
        self.until = math.inf
        self.handle_bytes(frames.settings({}))

    def handle_data(self, stream, piece, end):
        assert not self.has_ended
        self.pieces.append(bytes(piece))
        self.has_ended = end

    def credit(self, stream, size):
        self.credited += size

    def handle_stream_error(self, _, code):
        self.faults.append(code)

    def handle_closed_stream(self, stream_id, kind):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "no such stream")


Peer.__abstractmethods__ = frozenset()  # what DATA does not lead to is not here


def frame(payload: bytes, padding: int | None = None, flags: int = frames.END_STREAM) -> bytes:
    if padding is not None:
        payload, flags = bytes([padding]) + payload + bytes(padding), flags | frames.PADDED
    return frames.head(len(payload), frames.DATA, flags, 1) + payload


def cuts(raw: bytes, chance: random.Random, most: int) -> list[bytes]:
    found, at = [], 0
    while at < len(raw):
        size = chance.choice([1, 2, 9, 10, 11, chance.randint(1, most)])
        found.append(raw[at : at + size])
        at += size
    return found


@pytest.mark.parametrize("size", SIZES)
def test_frame_is_same_however_it_is_cut(size):
    mosts = (20, 5000, 200_000) if size < 300_000 else (5000, 200_000)
    for most, padding in itertools.product(mosts, (None, 0, 1, 255)):
        check_cut(size, most, padding)


def check_cut(size, most, padding):
    chance = random.Random(size + most)
    content = chance.randbytes(size)
    for _ in range(3 if most > 20 else 1):
        peer = Peer()
        raw = frame(content, padding) + frames.ping(b"8 bytes.")
        for piece in cuts(raw, chance, most):
            peer.handle_bytes(piece)
        assert b"".join(peer.pieces) == content
        assert peer.has_ended
        assert bool(peer.out), "the PING behind it was read"
        extra = 0 if padding is None else padding + 1
        assert peer.unannounced == size + extra
        assert peer.credited == extra


def test_large_frame_is_handled_before_whole():
    peer, raw = Peer(), frame(bytes(300 * KIB))
    for at in range(0, len(raw), 1448):
        peer.handle_bytes(raw[at : at + 1448])
        handled = sum(map(len, peer.pieces))
        assert at + 1448 - handled <= 18 * KIB
        assert len(peer._rest) + len(peer._few) < 18 * KIB
    assert peer.has_ended
    assert len(peer.pieces) < 300 / 16 + 2, "few bytes are not handled one by one"


def test_what_comes_in_large_pieces_is_not_copied():
    peer, raw = Peer(), frame(bytes(300 * KIB))
    peer.handle_bytes(raw[:100])
    peer.handle_bytes(raw[100 : 200 * KIB])
    peer.handle_bytes(raw[200 * KIB :])
    assert [len(piece) for piece in peer.pieces] == [91, 200 * KIB - 100, 100 * KIB + 9]


@pytest.mark.parametrize("start", [9, 10, 20_000])
def test_frame_over_limit_is_refused_by_its_head(start):
    raw = frames.head(MAX_FRAME + 1, frames.DATA, 0, 1) + bytes(start)
    with pytest.raises(ConnectionFault) as raised:
        Peer().handle_bytes(raw[:start])
    assert raised.value.code == Code.FRAME_SIZE_ERROR


def test_no_other_frame_may_be_that_large():
    raw = frames.head(2**16 + 1, 0x77, 0, 0)
    with pytest.raises(ConnectionFault) as raised:
        Peer().handle_bytes(raw)
    assert raised.value.code == Code.FRAME_SIZE_ERROR


def test_frame_over_window_is_stream_error():
    peer = Peer()
    peer.handle_bytes(frame(bytes(1), flags=0) + frame(bytes(STREAM_WINDOW)))
    assert peer.faults == [Code.FLOW_CONTROL_ERROR]


def test_padding_without_room_is_an_error():
    head = frames.head(20, frames.DATA, frames.PADDED, 1)
    with pytest.raises(ConnectionFault):
        Peer().handle_bytes(head + bytes([20]) + bytes(19))
