"""The gRPC client frame by frame, against bytes that a server may send."""

from typing import TYPE_CHECKING

import pytest

from adapter.tools.bench.http2 import GrpcClientProtocol, frame
from adapter.tools.bench.requests import Request

if TYPE_CHECKING:
    from adapter.tools.bench.connection import Failure

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
OK = b"\x88\x00\x0bgrpc-status\x010"
SMALL = Request((b"\0\0\0\0\3abc",))


class ClientProtocol:
    """Remembers what was written, as frames: kind, flags, stream, body."""

    def __init__(self) -> None:
        self.bytes = b""
        self.is_gone = False

    def write(self, data: bytes) -> None:
        self.bytes += bytes(data)

    def abort(self) -> None:
        self.is_gone = True

    close = abort

    def take(self) -> list[tuple[int, int, int, bytes]]:
        data, self.bytes = self.bytes.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), b""
        frames = []
        while data:
            size = int.from_bytes(data[:3])
            frames.append((data[3], data[4], int.from_bytes(data[5:9]), data[9 : 9 + size]))
            data = data[9 + size :]
        return frames


class Peer:
    def __init__(self) -> None:
        self.done: list[tuple[float, Failure | None]] = []
        self.wire = GrpcClientProtocol(
            lambda due, failure: self.done.append((due, failure)), "h:1", "/m"
        )
        self.sent = ClientProtocol()
        self.wire.connection_made(self.sent)

    def says(self, *frames: bytes) -> None:
        self.wire.data_received(b"".join(frames))

    def greets(self, *pairs: tuple[int, int]) -> None:
        body = b"".join(name.to_bytes(2) + value.to_bytes(4) for name, value in pairs)
        self.says(frame(SETTINGS, 0, 0, body))
        self.sent.take()

    @property
    def codes(self) -> list[str | None]:
        return [failure.code if failure else None for _, failure in self.done]


@pytest.fixture
async def peer():
    return Peer()


async def test_it_is_ready_when_the_settings_of_the_server_are_there(peer):
    assert not peer.wire.ready.done()
    peer.says(frame(SETTINGS, 0, 0))
    assert peer.wire.ready.done()
    assert peer.sent.take()[-1] == (SETTINGS, 1, 0, b"")


async def test_a_small_call_is_one_header_block_and_one_frame_of_data(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.wire.write(SMALL, 2.0)

    kinds = [(kind, flags, stream) for kind, flags, stream, _ in peer.sent.take()]
    assert kinds == [(HEADERS, 4, 1), (DATA, 1, 1), (HEADERS, 4, 3), (DATA, 1, 3)]


async def test_answers_may_come_in_any_order_and_byte_by_byte(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.wire.write(SMALL, 2.0)
    for byte in frame(HEADERS, 5, 3, OK) + frame(DATA, 0, 1, b"x" * 300) + frame(HEADERS, 5, 1, OK):
        peer.says(bytes((byte,)))

    assert peer.done == [(2.0, None), (1.0, None)]


async def test_a_header_block_may_be_padded_and_continued(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.says(
        frame(HEADERS, 1 | 0x8 | 0x20, 1, b"\3" + b"\0" * 5 + OK[:4] + b"\0" * 3),
        frame(CONTINUATION, 0, 1, OK[4:9]),
        frame(CONTINUATION, 4, 1, OK[9:]),
    )

    assert peer.codes == [None]


async def test_data_waits_for_the_windows(peer):
    peer.greets((4, 10))
    peer.wire.write(Request((b"x" * 25,)), 1.0)
    assert [len(body) for kind, *_, body in peer.sent.take() if kind == DATA] == [10]
    peer.says(frame(WINDOW, 0, 1, (4).to_bytes(4)))
    assert [len(body) for *_, body in peer.sent.take()] == [4]
    peer.says(frame(SETTINGS, 0, 0, (4).to_bytes(2) + (30).to_bytes(4)))  # counts for open streams
    assert peer.sent.take() == [(SETTINGS, 1, 0, b""), (DATA, 1, 1, b"x" * 11)]


async def test_a_ping_is_answered(peer):
    peer.greets()
    peer.says(frame(PING, 0, 0, b"12345678"))
    assert peer.sent.take() == [(PING, 1, 0, b"12345678")]


async def test_data_of_one_stream_does_not_hold_up_another(peer):
    peer.greets((4, 10))
    peer.wire.write(Request((b"x" * 25,)), 1.0)
    peer.wire.write(Request((b"y" * 9,)), 2.0)

    last = peer.sent.take()[-1]
    assert last == (DATA, 1, 3, b"y" * 9)


async def test_the_window_of_the_connection_is_kept(peer):
    peer.greets((4, 2**20), (5, 2**20))
    peer.wire.write(Request((b"x" * 70_000,)), 1.0)
    assert sum(len(body) for kind, *_, body in peer.sent.take() if kind == DATA) == 65_535
    peer.says(frame(WINDOW, 0, 0, (2**20).to_bytes(4)))
    assert peer.sent.take() == [(DATA, 1, 1, b"x" * 4_465)]


async def test_a_reset_ends_its_call_alone(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.wire.write(SMALL, 2.0)
    peer.says(frame(RESET, 0, 1, (7).to_bytes(4)), frame(HEADERS, 5, 3, OK))

    assert peer.codes == ["reset", None]
    assert peer.wire.is_open


async def test_goaway_lets_earlier_calls_end_and_takes_no_more(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.wire.write(SMALL, 2.0)
    peer.says(frame(GOAWAY, 0, 0, (1).to_bytes(4) + bytes(4) + b"bye"))
    assert peer.codes == ["goaway"]
    assert not peer.wire.is_open
    assert not peer.sent.is_gone
    peer.says(frame(HEADERS, 5, 1, OK))
    assert peer.codes == ["goaway", None]
    assert peer.sent.is_gone


async def test_a_lost_connection_fails_all_calls(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.wire.write(SMALL, 2.0)
    peer.wire.connection_lost(None)

    assert peer.codes == ["connection", "connection"]


async def test_an_answer_without_trailers_is_an_error(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.says(frame(HEADERS, 4, 1, b"\x88"), frame(DATA, 1, 1, b"abc"))

    assert peer.codes == ["protocol"]


async def test_a_plain_http_error_is_told_by_its_status(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.says(frame(HEADERS, 5, 1, b"\x8d"))  # :status 404

    assert peer.codes == ["HTTP 404"]


async def test_a_header_block_that_is_none_ends_the_connection(peer):
    peer.greets()
    peer.wire.write(SMALL, 1.0)
    peer.says(frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff"))

    assert peer.codes == ["protocol"]
    assert not peer.wire.is_open


async def test_a_call_that_failed_early_is_reset_when_data_is_left(peer):
    peer.greets((4, 10))
    peer.wire.write(Request((b"x" * 25,)), 1.0)
    peer.sent.take()
    peer.says(frame(HEADERS, 5, 1, b"\x88\x00\x0bgrpc-status\x018"))

    assert peer.codes == ["RESOURCE_EXHAUSTED"]
    assert peer.sent.take() == [(RESET, 0, 1, (8).to_bytes(4))]
