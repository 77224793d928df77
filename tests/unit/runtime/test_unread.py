"""Answers that callers of streams have not taken: bounded in sum, by cutting the longest queue."""

import pytest

from adapter.errors import NotTaken
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.unread import Answers, Unread

ANSWER = bytes(1000)


class Streams:
    """`cut`: the names of those that were cut."""

    def __init__(self, limit: int) -> None:
        self.budget = ByteBudget(2**30)
        self.cuts = 0
        self.cut: list[str] = []
        self.unread = Unread(self.budget, limit, self._count)

    def _count(self) -> None:
        self.cuts += 1

    def begin(self, name: str, answers: int = 0) -> Answers:
        stream = self.unread.stream(lambda: self.cut.append(name))
        for _ in range(answers):
            stream.put(ANSWER)
        return stream


def test_taken_bytes_count_until_the_next():
    streams = Streams(10_000)
    stream = streams.begin("one", 2)
    both = streams.unread.held
    assert stream.take() == ANSWER
    assert streams.unread.held == streams.budget.held == both
    assert stream.take() == ANSWER
    assert streams.unread.held == both / 2
    assert stream.take() is None
    assert streams.unread.held == streams.budget.held == 0


def test_stream_with_most_unread_is_cut():
    """The others go on."""
    streams = Streams(10_000)
    short, long = streams.begin("short", 2), streams.begin("long", 7)
    short.put(ANSWER)
    assert (streams.cut, streams.cuts) == (["long"], 1)
    assert isinstance(long.error, NotTaken)
    assert long.take() is None
    assert [short.take() for _ in range(4)] == [ANSWER] * 3 + [None]
    long.put(ANSWER)  # is dropped
    assert streams.unread.held == streams.budget.held == 0


@pytest.mark.parametrize("others", [0, 1])
def test_large_answer_is_cut_for_other_streams(others):
    streams = Streams(10_000)
    for _ in range(others):
        streams.begin("other", 1)
    stream = streams.begin("large")
    stream.put(bytes(20_000))
    assert streams.cut == ["large"] * others


def test_of_many_cuts_in_second_one_is_logged(caplog):
    streams = Streams(3000)
    for number in range(20):
        streams.begin(str(number), 10)
    assert streams.cuts == 20
    assert len(caplog.records) <= 2
