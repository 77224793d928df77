"""Shows that the oracle of the soak objects to each kind of wrong answer, and to no right one."""

import pytest

from tests.nightly.endpoint_oracle import Oracle

KEY = "model.tar.gz"


class Play:
    """An oracle with a clock that advances by a second with each act."""

    def __init__(self) -> None:
        self.time = 0.0
        self.oracle = Oracle(self._tick)

    def _tick(self) -> float:
        self.time += 1
        return self.time

    def put(self, contents: int | None, *, is_named: bool = True) -> None:
        """Put contents into the store, which names them at once, 4 s before anything else."""
        self.oracle.expect_put(KEY, contents)
        if is_named:
            self.oracle.record_name(KEY)
            self.time += 4

    def begin_outage(self) -> None:
        """Have the store away from now on."""
        self.oracle.record_break()
        self.oracle.outages.begin()

    def answer(self, contents: int, cache: str = "hit") -> str | None:
        """Return the objection to an answer to a call of now."""
        call = self.oracle.begin_call(KEY)
        call.ended = self._tick()
        call.cache = cache
        return self.oracle.judge(call, contents)


@pytest.fixture
def play() -> Play:
    return Play()


def test_oracle_objects_to_an_older_version(play: Play) -> None:
    play.put(0)
    play.put(1)
    assert play.answer(0) is None, "nobody has seen the new one"
    assert play.answer(1) is None
    assert play.answer(0) == "answered by version 0; right are [1]"


def test_oracle_accepts_the_earlier_version_after_rollback(play: Play) -> None:
    for contents in (0, 1, 0):
        play.put(contents)
    assert play.answer(1) is None
    assert play.answer(0) is None
    assert play.answer(1) is not None


def test_oracle_accepts_an_answer_that_was_overtaken(play: Play) -> None:
    """A call that began before the first answer of a new version may be of the old one."""
    play.put(0)
    play.put(1)
    slow = play.oracle.begin_call(KEY)
    assert play.answer(1) is None
    slow.ended = play.time + 1
    assert play.oracle.judge(slow, 0) is None


def test_oracle_objects_to_a_version_of_the_future(play: Play) -> None:
    play.put(0)
    call = play.oracle.begin_call(KEY)
    call.ended = play.time
    play.put(1)
    assert play.oracle.judge(call, 1) is not None


@pytest.mark.parametrize(("contents", "is_right"), [(0, False), (1, True), (2, False)])
def test_oracle_allows_in_outage_what_was_named_last(
    play: Play, contents: int, is_right: bool
) -> None:
    play.put(0)
    play.put(1)
    play.begin_outage()
    play.put(2, is_named=False)
    assert (play.answer(contents, "disk") is None) is is_right


def test_oracle_judges_hits_after_restart_in_outage(play: Play) -> None:
    play.put(0)
    play.put(1)
    play.begin_outage()
    assert play.answer(0) is None, "it may have been loaded before"
    play.oracle.record_start()
    assert play.answer(0) is not None


def test_oracle_allows_both_versions_where_a_kill_followed(play: Play) -> None:
    """Nobody knows whether the adapter has noted what it was told a moment before its end."""
    play.put(0)
    play.oracle.expect_put(KEY, 1)
    play.oracle.record_name(KEY)
    play.begin_outage()
    assert play.answer(0, "disk") is None
    assert play.answer(1, "disk") is None


def test_oracle_knows_when_a_model_was_deleted(play: Play) -> None:
    play.put(0)
    before = play.oracle.begin_call(KEY)
    before.ended = play.time
    play.put(None)
    play.put(1)
    after = play.oracle.begin_call(KEY)
    assert not play.oracle.was_deleted(before, 0)
    assert not play.oracle.was_deleted(after, 0)
    assert play.oracle.was_deleted(after, 30)
