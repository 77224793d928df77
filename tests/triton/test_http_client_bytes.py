"""Answers in whatever bytes and pieces: the same answer comes out, or the call ends."""

import asyncio
import socket
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import BackendUnavailable
from adapter.triton.connection import Connection, State


@dataclass
class Wire(asyncio.Transport):
    """What a connection asks of its transport."""

    socket: socket.socket
    is_paused: bool = False
    is_aborted: bool = False
    written: bytes = field(default=b"")

    def get_extra_info(self, name, default=None):
        return self.socket

    def write(self, data):
        self.written += data

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.is_aborted

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False

    def abort(self):
        self.is_aborted = True


class Taken:
    """What a call is told."""

    def __init__(self) -> None:
        self.pieces, self.error = [], None
        self.over = asyncio.Event()
        self.has_answer = self.is_over = False
        self.is_writing = True

    def answered(self):
        self.has_answer = True

    def received(self, piece):
        assert self.has_answer
        self.pieces.append(piece)

    def answered_whole(self, body):
        assert not self.pieces
        self.answered()
        self.received(body)
        self.ended()

    def ended(self):
        assert not self.is_over
        assert self.error is None
        self.is_over = True

    def failed(self, error):
        assert not self.is_over
        self.error = self.error or error
        self.over.set()

    def pause_writing(self):
        self.is_writing = False

    def resume_writing(self):
        self.is_writing = True

    @property
    def body(self):
        """All of it, or what it failed with."""
        if self.error is not None:
            raise self.error
        assert self.is_over
        return b"".join(self.pieces)


class Owner:
    """Stands for the pool, which the tests do not look at."""

    def free(self, _):
        pass

    def lost(self, _):
        pass


def begun(connection):
    taken = Taken()
    connection.begin(taken, None)
    connection.send(b"a request", b"")
    return taken


def played(play, seconds=60):
    """Run `play(connection, wire, taken)`, a coroutine function, with a call under way."""

    async def main():
        with socket.socket() as some:
            connection, wire = Connection(Owner(), Faults(Classifier(())), seconds), Wire(some)
            connection.connection_made(wire)
            try:
                async with asyncio.timeout(10):  # in this task: no timer comes before the play
                    return await play(connection, wire, begun(connection))
            finally:
                connection.connection_lost(None)

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


@settings(deadline=None)
@given(answers(), st.lists(st.integers(0, 1000)))
def test_answer_is_the_same_in_any_cut(answer, cuts):
    raw, body, is_kept = answer

    async def play(connection, _, taken):
        feed(connection, cut(raw, cuts))
        if not is_kept:
            connection.eof_received()
        assert (taken.body, connection.status) == (body, 200)
        assert dict(connection.headers).get(b"X-A") == b"b"
        assert b"X-Late" not in dict(connection.headers)
        assert (connection.state == State.IDLE) == is_kept

    played(play)


@settings(deadline=None)
@given(answers(), st.integers(1, 1000), st.lists(st.integers(0, 1000)))
def test_truncated_answer_is_never_whole(answer, missing, cuts):
    raw, _, is_kept = answer
    if not is_kept:
        return

    async def play(connection, wire, taken):
        feed(connection, cut(raw[: max(0, len(raw) - missing)], cuts))
        connection.eof_received()
        with pytest.raises(BackendUnavailable) as caught:
            _ = taken.body
        assert caught.value.delivered
        assert wire.is_aborted

    played(play)


@settings(deadline=None)
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
def test_call_ends_once_whatever_comes(raw, cuts):
    """Nothing is raised to the event loop."""

    async def play(connection, wire, taken):
        feed(connection, cut(raw, cuts))
        connection.eof_received()
        assert taken.is_over or isinstance(taken.error, Exception)
        assert connection.state == State.BROKEN
        assert wire.is_aborted

    played(play)


@settings(deadline=None)
@given(answers(), st.binary(min_size=1, max_size=20), st.lists(st.integers(0, 1000)))
def test_bytes_behind_an_answer_are_not_next(answer, surplus, cuts):
    raw, body, is_kept = answer
    if not is_kept or not surplus.strip(b"\r\n"):
        return

    async def play(connection, wire, taken):
        feed(connection, cut(raw + surplus, cuts))
        assert taken.body == body
        assert connection.state == State.BROKEN
        assert wire.is_aborted

    played(play)


@settings(deadline=None)
@given(
    st.lists(answers(), min_size=1, max_size=3).flatmap(
        lambda some: st.lists(st.sampled_from(some), min_size=2, max_size=8)
    ),
    st.lists(st.integers(0, 1000), max_size=3),
)
def test_repeated_answers_are_told_to_each_call(several, cuts):
    async def play(connection, _, taken):
        for raw, body, is_kept in several:
            if is_kept:
                feed(connection, cut(raw, cuts))
                assert (taken.body, connection.status, connection.state) == (body, 200, State.IDLE)
                assert dict(connection.headers).get(b"X-A") == b"b"
                taken = begun(connection)

    played(play)


ONE_BYTE = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"


def test_last_answers_bytes_are_no_answer_elsewhere():
    async def play(connection, wire, first):
        connection.data_received(ONE_BYTE)
        again = begun(connection)
        connection.data_received(ONE_BYTE)
        assert first.body == again.body == b"a"
        third = begun(connection)
        feed(connection, [b"HTTP/1.1 200 OK\r\nContent-Length: 1", ONE_BYTE])
        assert wire.is_aborted
        assert b"".join(third.pieces) == b""

    played(play)


def test_last_answers_bytes_unasked_end_the_connection():
    async def play(connection, wire, first):
        connection.data_received(ONE_BYTE)
        again = begun(connection)
        connection.data_received(ONE_BYTE)
        assert not wire.is_aborted
        connection.data_received(ONE_BYTE)
        assert (first.body, again.body, wire.is_aborted) == (b"a", b"a", True)

    played(play)


@settings(deadline=None)
@given(answers(), st.binary(max_size=100), st.binary(max_size=100))
def test_earlier_answer_is_bytes_within_a_body(inner, before, behind):
    raw, _, is_kept = inner
    if not is_kept:
        return
    body = before + raw + behind

    async def play(connection, _, first):
        connection.data_received(raw)
        assert first.is_over
        second = begun(connection)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        feed(connection, [piece for piece in (before, raw, behind) if piece])
        assert (second.body, connection.state) == (body, State.IDLE)

    played(play)


def test_who_leaves_late_leaves_the_next_call_alone():
    async def play(connection, wire, first):
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        second = begun(connection)
        connection.leave(first, None)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        assert (second.body, wire.is_aborted) == (b"a", False)

    played(play)


def test_time_limit_ends_with_its_call():
    async def play(connection, wire, taken):
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert taken.body == b""
        past = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, past.set)
        await past.wait()
        assert not wire.is_aborted

    played(play, seconds=0.02)


# -- states ----------------------------------------------------------------------------------------


def test_answer_before_the_requests_end_closes():
    async def play(connection, wire, first):
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        early = Taken()
        connection.begin(early, None)
        connection.write(b"half a request")
        assert connection.state == State.SENDING
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n")
        assert connection.state == State.READING_BODY
        connection.sent()
        connection.data_received(b"a")
        assert (early.body, wire.is_aborted) == (b"a", True)

    played(play)
