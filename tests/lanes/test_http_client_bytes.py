"""Answers in whatever bytes and pieces: the same answer comes out, or the call ends."""

import asyncio
import socket
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.dataplane.http1 import Connection
from adapter.errors import BackendUnavailable


@dataclass
class Wire(asyncio.Transport):
    """What a connection asks of its transport."""

    socket: socket.socket
    is_paused: bool = False
    is_aborted: bool = False
    written: bytes = field(default=b"")

    def get_extra_info(self, name, default=None):
        return self.socket

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False

    def abort(self):
        self.is_aborted = True


def played(play):
    """Run `play(connection, wire)`, a coroutine function, with a call under way."""

    async def main():
        with socket.socket() as some:
            connection, wire = Connection(lambda _: None), Wire(some)
            connection.connection_made(wire)
            connection.begin(None, 60, is_head=False, is_stream=False)
            connection.is_sent = True
            try:
                return await asyncio.wait_for(play(connection, wire), 10)
            finally:
                connection.end()

    return asyncio.run(main())


def cut(raw, cuts):
    places = sorted({min(place, len(raw)) for place in cuts})
    starts = [0, *places]
    return [raw[a:b] for a, b in zip(starts, [*places, len(raw)], strict=True) if a < b]


def feed(connection, pieces):
    for piece in pieces:
        connection.data_received(piece)


@st.composite
def answers(draw):
    """(bytes on the wire, body, whether the connection may be kept)"""
    body = draw(st.binary(max_size=300))
    kind = draw(st.sampled_from(["length", "chunked", "closed"]))
    head = b"HTTP/1.1 200 OK\r\nX-A: b\r\n"
    if draw(st.booleans()):
        head = b"HTTP/1.1 100 Continue\r\n\r\n" + head
    if kind == "length":
        return head + b"content-length: %d\r\n\r\n" % len(body) + body, body, True
    if kind == "closed":
        return head + b"\r\n" + body, body, False
    pieces = [piece for piece in cut(body, draw(st.lists(st.integers(0, 300)))) if piece]
    extension = draw(st.sampled_from([b"", b";a=b"]))
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in pieces)
    trailer = draw(st.sampled_from([b"", b"X-Late: 1\r\n"]))
    raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"
    return raw, body, True


@given(answers(), st.lists(st.integers(0, 1000)))
def test_an_answer_is_the_same_however_it_is_cut(answer, cuts):
    raw, body, is_kept = answer

    async def play(connection, _):
        reading = asyncio.create_task(connection.read())
        for piece in cut(raw, cuts):
            connection.data_received(piece)
            await asyncio.sleep(0)
        if not is_kept:
            connection.eof_received()
        assert (await reading, connection.status) == (body, 200)
        assert dict(connection.headers).get("X-A") == "b"
        assert "X-Late" not in connection.headers
        assert connection.end() == is_kept

    played(play)


@given(answers(), st.integers(1, 1000), st.lists(st.integers(0, 1000)))
def test_an_answer_cut_short_is_never_taken_for_a_whole_one(answer, missing, cuts):
    raw, _, is_kept = answer
    if not is_kept:
        return

    async def play(connection, wire):
        feed(connection, cut(raw[: max(0, len(raw) - missing)], cuts))
        connection.eof_received()
        with pytest.raises(BackendUnavailable) as caught:
            await connection.read()
        assert caught.value.delivered
        assert wire.is_aborted

    played(play)


@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda answer, at, noise: answer[0][:at] + noise + answer[0][at + 1 :],
            *(answers(), st.integers(0, 400), st.binary(max_size=5)),
        ),
    ),
    st.lists(st.integers(0, 1000)),
)
def test_whatever_comes_the_call_ends_and_nothing_is_raised_to_the_event_loop(raw, cuts):
    async def play(connection, wire):
        feed(connection, cut(raw, cuts))
        connection.eof_received()
        connection.connection_lost(None)
        try:
            assert isinstance(await connection.read(), bytes)
        except BackendUnavailable:
            assert wire.is_aborted
        assert not connection.end()

    played(play)


@given(answers(), st.binary(min_size=1, max_size=20), st.lists(st.integers(0, 1000)))
def test_no_byte_behind_an_answer_is_taken_for_a_part_of_the_next(answer, surplus, cuts):
    raw, body, is_kept = answer
    if not is_kept or not surplus.strip(b"\r\n"):
        return

    async def play(connection, _):
        feed(connection, cut(raw + surplus, cuts))
        assert await connection.read() == body
        assert not connection.end()

    played(play)


@given(answers(), st.binary(max_size=100), st.binary(max_size=100))
def test_an_answer_that_came_before_is_nothing_but_bytes_within_a_body(inner, before, behind):
    raw, _, is_kept = inner
    if not is_kept:
        return
    body = before + raw + behind

    async def play(connection, _):
        connection.data_received(raw)
        await connection.read()
        assert connection.end()
        connection.begin(None, 60, is_head=False, is_stream=False)
        connection.is_sent = True
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        feed(connection, [piece for piece in (before, raw, behind) if piece])
        assert (await connection.read(), connection.end()) == (body, True)

    played(play)


@pytest.mark.parametrize("stray", [b"\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_any_byte_between_two_calls_ends_the_connection(stray):
    async def play(connection, wire):
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        assert await connection.read() == b"a"
        assert connection.end()
        connection.data_received(stray)
        assert wire.is_aborted

    played(play)


def test_an_answer_that_nobody_read_ends_the_connection():
    async def play(connection, wire):
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        assert not connection.end()
        assert wire.is_aborted

    played(play)


def test_the_time_limit_of_a_call_ends_with_it():
    async def play(connection, wire):
        connection.end()
        wire.is_aborted = False
        connection.begin(None, 0.02, is_head=False, is_stream=False)
        connection.is_sent = True
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert await connection.read() == b""
        assert connection.end()
        past = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, past.set)
        await past.wait()
        assert not wire.is_aborted

    played(play)


def test_reading_is_paused_while_much_is_unread():
    piece = bytes(2**16)

    async def play(connection, wire):
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 2**30)
        fed = 0
        while not wire.is_paused:
            connection.data_received(piece)
            fed += len(piece)
        assert fed < 2**20
        assert sum(map(len, await connection.pieces())) == fed
        assert not wire.is_paused

    played(play)


def test_a_writer_waits_while_the_transport_is_full():
    async def play(connection, _):
        await connection.drained()
        connection.pause_writing()
        waiting = asyncio.create_task(connection.drained())
        await asyncio.sleep(0)
        connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0)
        assert not waiting.done()
        connection.resume_writing()
        await waiting
        connection.pause_writing()
        waiting = asyncio.create_task(connection.drained())
        await asyncio.sleep(0)
        connection.connection_lost(None)
        await waiting

    played(play)
