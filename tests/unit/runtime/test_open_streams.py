"""Streams that are open at once, of several connections."""

from adapter.errors import TooManyStreams
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.open_streams import STREAM_BYTES, OpenStreams

MIB = 2**20


class Caller:
    """A connection whose streams end as they are told to."""

    def __init__(self, streams: OpenStreams) -> None:
        self._streams = streams
        self.errors: list[TooManyStreams] = []
        self.count = 0

    def open(self, count: int = 1) -> list[bool]:
        """Return for each of `count` streams whether it was admitted."""
        return [self._open() for _ in range(count)]

    def _open(self) -> bool:
        if self._streams.begin(self) is not None:
            return False
        self.count += 1
        return True

    def end_latest_stream(self, error: TooManyStreams) -> None:
        self.errors.append(error)
        self.count -= 1
        self._streams.end(self)


def test_open_streams_take_128_mib_at_most():
    budget = ByteBudget(2**40)
    caller = Caller(budget.streams)
    assert caller.open(2049) == [True] * 2048 + [False]
    for _ in range(2048):
        budget.streams.end(caller)
    assert budget.held == 0


def test_largest_connection_makes_room_until_shares_are_equal():
    streams = OpenStreams(9 * STREAM_BYTES, lambda _: None)
    greedy, other, third = (Caller(streams) for _ in range(3))
    assert all(greedy.open(9))
    assert other.open(6) == [True] * 4 + [False] * 2
    assert third.open(6) == [True] * 3 + [False] * 3
    assert (greedy.count, other.count, third.count) == (3, 3, 3)
    assert all(error.has_begun for error in greedy.errors)
