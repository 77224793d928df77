"""A chunked body has one reading, wherever its bytes are cut: what is read, h11 reads the same."""

import itertools
import os
import random

import h11
import pytest

from adapter.frontends.http.chunks import ChunkDecoder, MalformedChunks
from tests.cases import case
from tests.frontends.http.readings import CHUNKED

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
ROUNDS = int(os.environ.get("NIGHTLY_CHUNKS", "3000"))
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
SPOILERS = (b"\r", b"\n", b"\0", b" ", b"\t", b":", b";", b"Z", b"0", b"\xff", b"\r\n", b"")


def decode(pieces: list[bytes]) -> tuple[bytes, bytes] | None:
    """Return the body and what is behind it; None if its end has not come."""
    decoder = ChunkDecoder()
    body = b""
    behind = b""
    for piece in pieces:
        if decoder.is_done:
            behind += piece
            continue
        body += b"".join(decoder.feed(piece))
        behind = decoder.behind
    return (body, behind) if decoder.is_done else None


def read_by_h11(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the body and what is behind it, as h11 reads it; None if its end has not come."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    connection.receive_data(HEAD + data)
    connection.next_event()
    body = b""
    while isinstance(event := connection.next_event(), h11.Data):
        body += event.data
    if not isinstance(event, h11.EndOfMessage):
        return None
    return body, connection.trailing_data[0]


def cut(chance: random.Random, data: bytes) -> list[bytes]:
    positions = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(5)))
    return [data[a:b] for a, b in itertools.pairwise([0, *positions, len(data)])]


def make_chunks(chance: random.Random) -> bytes:
    """Make a chunked body, which is spoilt now and then."""
    form = chance.choice(CHUNKED)
    body = bytes(chance.choices(b"ab\r\n0;", k=chance.randrange(1, 40)))
    data = bytearray(form.replace(b"{x}", b"%x" % len(body)).replace(b"{b}", body))
    for _ in range(chance.choice((0, 0, 1, 2))):
        position = chance.randrange(len(data))
        data[position : position + chance.randrange(2)] = chance.choice(SPOILERS)
    return bytes(data) + chance.choice((b"", b"GET / HTTP/1.1\r\n"))


def test_chunks_are_read_as_h11_reads_them():
    chance = random.Random(SEED)
    seen = {"refused": 0, "read": 0, "open": 0}
    for number in range(ROUNDS):
        data = make_chunks(chance)
        with case(SEED, number, data):
            try:
                reading = decode([data])
            except MalformedChunks:
                seen["refused"] += 1
                continue
            if reading is None:
                seen["open"] += 1
            else:
                seen["read"] += 1
                assert reading == read_by_h11(data)
    assert min(seen.values()) > ROUNDS / 100, seen


def test_chunks_are_read_the_same_in_any_cut():
    chance = random.Random(SEED)
    for number in range(ROUNDS):
        data = make_chunks(chance)
        with case(SEED, number, data):
            assert outcome(cut(chance, data)) == outcome([data])


def outcome(pieces: list[bytes]) -> object:
    try:
        return decode(pieces)
    except MalformedChunks:
        return "refused"


def test_size_line_without_end_is_refused():
    with pytest.raises(MalformedChunks):
        decode([b"2;", *[b"a" * 100] * 100])


@pytest.mark.parametrize("name", [b"Content-Length", b"transfer-encoding", b"HOST"])
def test_trailer_that_frames_a_request_is_refused(name: bytes):
    with pytest.raises(MalformedChunks):
        decode([b"2\r\n{}\r\n0\r\n" + name + b": 9\r\n\r\n"])


@pytest.mark.parametrize("size", [b"8000000000000000", b"ffffffffffffffff", b"0" * 17])
def test_size_beyond_63_bits_is_refused(size: bytes):
    with pytest.raises(MalformedChunks):
        decode([size + b"\r\n"])
