"""One budget of callers' bytes, by a clock of the test's."""

import heapq
import re
from collections.abc import Callable
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.errors import AdapterError, SlowBody, TooManyWaiting
from adapter.runtime.byte_budget import ByteBudget, Holding, Reason

KIB, MIB = 2**10, 2**20


class Time:
    """Passes as the test says; calls what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_turn: Callable[[], None] = lambda: None
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), act))

    def pass_(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, act = heapq.heappop(self._due)
            act()
            self.on_turn()
        self.now = end


class Site:
    def __init__(self, limit: int) -> None:
        self.time = Time()
        self.cuts: list[Reason] = []
        self.budget = ByteBudget(
            limit, clock=lambda: self.time.now, later=self.time.later, on_cut=self.cuts.append
        )

    def body(self, announced: int | None, *senders: str) -> "Body":
        return Body(self.budget, announced, senders)


class Body:
    """A caller who stops when it is told to."""

    def __init__(self, budget: ByteBudget, announced: int | None, senders: tuple[str, ...]) -> None:
        self.may_send = True
        self.is_held_back = False
        self.error: AdapterError | None = None
        self.holding: Holding = budget.hold(self, announced, senders)

    def send(self, size: int) -> bool:
        self.may_send = self.holding.take(size)
        return self.may_send

    def is_reading(self) -> bool:
        return not self.is_held_back

    def resume(self) -> None:
        self.may_send = True

    def cut(self, error: AdapterError) -> None:
        self.error = error
        self.may_send = False


def test_bytes_count_as_they_arrive() -> None:
    site = Site(10)
    first, second = site.body(2**31), site.body(2**31)
    assert first.send(4)
    assert second.send(4)
    assert site.budget.held == 8
    first.holding.end()
    first.holding.end()
    assert not first.holding.take(1) or site.budget.held == 4
    assert site.budget.held == 4


def test_only_oldest_goes_beyond_the_limit() -> None:
    site = Site(10)
    oldest, other = site.body(30), site.body(30)
    assert oldest.send(8)
    assert not other.send(8)
    assert oldest.send(20)
    assert oldest.send(2)  # it is complete, and still held
    assert not other.may_send
    oldest.holding.end()
    site.time.pass_(0.1)
    assert other.may_send
    assert other.send(22)


def test_nearly_finished_bodies_go_first() -> None:
    site = Site(100)
    first, large, small = site.body(100), site.body(100), site.body(20)
    assert first.send(85)
    assert not large.send(30)
    assert not small.send(5)
    first.holding.end()
    site.time.pass_(0.1)
    assert (small.may_send, large.may_send) == (True, True)
    again = site.body(90)
    assert not again.send(70)
    small.holding.end()
    site.time.pass_(0.1)
    assert not again.may_send


def test_promised_room_is_free_once_the_body_comes() -> None:
    """A body that is resumed has room for one read, whose bytes count when they arrive."""
    site = Site(100)
    first, late = site.body(100), site.body(50)
    assert first.send(90)
    assert not late.send(20)
    first.holding.end()
    site.time.pass_(0.1)
    assert not site.body(60).send(55)  # 20 have arrived, and 30 are promised
    assert late.send(20)
    another = site.body(60)
    assert another.send(5)


def test_bodies_are_resumed_for_the_room_there_is() -> None:
    """They send what they were promised later than others are resumed."""
    site = Site(100)
    first = site.body(200)
    waiting = [site.body(60) for _ in range(9)]
    assert first.send(100)
    admitted = [body.send(1) for body in waiting]
    assert not any(admitted)
    first.holding.end()
    site.time.pass_(1)
    assert sum(body.may_send for body in waiting) == 1


def test_nobody_waits_longer_than_ten_seconds() -> None:
    site = Site(10)
    oldest, waiting = site.body(20), site.body(10)
    oldest.is_held_back = True  # by Triton
    oldest.send(11)
    waiting.send(1)
    site.time.pass_(9)
    assert waiting.error is None
    site.time.pass_(2)
    assert isinstance(waiting.error, TooManyWaiting)
    assert "callers' bodies hold 12 of 10 bytes (max_inflight_body_bytes)" in str(waiting.error)
    assert site.cuts == [Reason.WAITED]
    assert oldest.error is None
    assert (site.budget.held, site.budget.waiting) == (11, 0)


def test_body_over_senders_share_is_told_so() -> None:
    site = Site(80)
    oldest, waiting = site.body(20, "a"), site.body(10, "a")
    oldest.is_held_back = True  # by Triton
    oldest.send(11)
    waiting.send(1)
    site.time.pass_(11)
    figures = "this caller's key, connection or address hold 12 of 10 bytes (one 8th of max_infl"
    assert figures in str(waiting.error)


def test_few_waiting_bodies_are_cut_each_turn() -> None:
    """Each is told by an answer, and nobody else is served meanwhile."""
    site = Site(MIB)
    first = site.body(None)
    first.send(MIB)
    waiting = [site.body(None) for _ in range(1000)]
    for body in waiting:
        body.send(1)
    turns: list[int] = []
    site.time.on_turn = lambda: turns.append(len(site.cuts))
    site.time.pass_(13)
    assert site.budget.waiting == 0
    assert len(site.cuts) > 900
    assert max(after - before for before, after in pairwise([0, *turns])) <= 64


def test_giving_back_does_not_scan_all_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(MIB)
    first = site.body(None)
    first.send(MIB)
    waiting = [site.body(2 * KIB) for _ in range(1000)]
    for body in waiting:
        body.send(1)
    looks = 0

    def left(_: Holding) -> int:
        nonlocal looks
        looks += 1
        return 0

    monkeypatch.setattr(Holding, "left", property(left))
    for _ in range(100):
        site.budget.buffer(1)
        site.budget.buffer(-1)
    assert looks <= 1000
    first.holding.end()
    site.time.pass_(0.1)
    assert all(body.may_send for body in waiting)


def test_body_at_the_least_rate_is_spared() -> None:
    site = Site(10 * MIB)
    slow, fast = site.body(100 * MIB), site.body(12 * MIB)
    slow.send(6 * MIB)
    fast.send(4 * MIB - 512 * KIB)
    late = site.body(2 * MIB)
    assert not late.send(MIB)
    for _ in range(40):
        site.time.pass_(0.1)
        if slow.error is None:
            slow.send(6 * KIB)
        if fast.may_send:
            fast.send(7 * KIB)
    assert isinstance(slow.error, SlowBody)
    assert re.search(r"comes at (59|60|61)\.\d KiB/s", str(slow.error))
    assert fast.error is None
    assert late.may_send


def test_slow_body_is_spared_while_nobody_waits() -> None:
    site = Site(100)
    slow = site.body(90)
    slow.send(10)
    site.time.pass_(60)
    late = site.body(200)
    late.send(95)
    assert slow.error is None
    late.holding.end()
    site.time.pass_(60)
    assert slow.error is None


def test_only_needed_slow_bodies_are_refused() -> None:
    site = Site(100)
    bodies = [site.body(200) for _ in range(2)]
    for body in bodies:
        body.send(45)
    late = site.body(40)
    assert not late.send(20)
    site.time.pass_(3)
    assert [body.error is None for body in bodies] == [False, True]
    assert late.may_send


def test_body_that_stops_coming_is_refused() -> None:
    """The seconds in which it came fast do not count for it later."""
    site = Site(100 * MIB)
    body, late = site.body(2**40), site.body(2 * MIB)
    body.send(100 * MIB)
    late.send(MIB)
    for _ in range(40):
        site.time.pass_(0.1)
        body.send(30 * KIB)
    assert body.error is None
    site.time.pass_(4)
    assert isinstance(body.error, SlowBody)


def test_slow_body_of_another_share_is_spared() -> None:
    site = Site(800)
    other = site.body(90, "key:b")
    other.send(10)
    oldest, waiting = site.body(90, "key:a"), site.body(90, "key:a")
    oldest.send(80)
    assert not waiting.send(30)
    site.time.pass_(3)
    assert (other.error is None, oldest.error is None) == (True, False)
    assert waiting.may_send


def test_of_late_bodies_the_largest_is_refused() -> None:
    """The others find room then, though they have waited for as long."""
    site = Site(100)
    small, large, oldest = site.body(20), site.body(10**6), site.body(10**6)
    oldest.is_held_back = True  # by Triton
    site.budget.all.arriving = {oldest.holding: None} | site.budget.all.arriving
    oldest.send(50)
    assert not large.send(60)
    assert not small.send(5)
    site.time.pass_(11)
    assert isinstance(large.error, TooManyWaiting)
    assert (small.error, small.may_send) == (None, True)


def test_body_blocked_by_triton_is_not_slow() -> None:
    site = Site(10)
    held, late = site.body(100), site.body(5)
    held.is_held_back = True
    held.send(10)
    late.send(1)
    site.time.pass_(9)
    assert held.error is None


def test_senders_that_nobody_knows_share_an_eighth_each() -> None:
    site = Site(80)
    bodies = [site.body(9, "key:a", f"peer:{number}") for number in range(3)]
    assert bodies[0].send(6)
    assert not bodies[1].send(5)
    assert site.body(9, "key:b", "peer:4").send(9)
    assert site.body(9).send(9)
    bodies[0].send(3)
    bodies[0].holding.verify()
    site.time.pass_(0.1)
    assert bodies[1].may_send


def test_kept_bytes_count_until_taken() -> None:
    site = Site(10)
    site.budget.buffer(8)
    site.body(10).send(2)
    late = site.body(3)
    assert not late.send(1)
    site.budget.buffer(-8)
    site.time.pass_(0.1)
    assert late.may_send
    assert site.budget.held == 3


class Play:
    """Callers who do as they like, but for pausing when they are told to."""

    def __init__(self, limit: int) -> None:
        self.site = Site(limit)
        self._bodies: list[Body] = []

    @property
    def bodies(self) -> list[Body]:
        """Those that have not ended."""
        self._bodies = [body for body in self._bodies if body.holding.pools]
        return self._bodies

    def begin(self, size: int, sender: str | None) -> None:
        self._bodies.append(self.site.body(size, *filter(None, [sender])))

    def wait(self, seconds: int, _: str | None) -> None:
        self.site.time.pass_(seconds / 10)

    def send(self, body: Body, size: int) -> None:
        if body.may_send and body.holding.left:
            body.send(min(size, body.holding.left))

    def end(self, body: Body, _: int) -> None:
        body.holding.end()

    def verify(self, body: Body, _: int) -> None:
        body.holding.verify()

    def hold_back(self, body: Body, _: int) -> None:
        body.is_held_back = not body.is_held_back

    def act(self, what: str, number: int, size: int, sender: str | None) -> None:
        if what in {"begin", "wait"}:
            getattr(self, what)(size, sender)
        elif bodies := self.bodies:
            getattr(self, what)(bodies[number % len(bodies)], size)

    def check(self) -> None:
        bodies, budget = self.bodies, self.site.budget
        assert budget.held == sum(body.holding.size for body in bodies)
        assert budget.waiting == sum(not body.may_send for body in bodies)
        oldest = next((body for body in bodies if body.holding.left), None)
        if oldest is not None and not oldest.holding.pools[1:] and budget.all.beyond is None:
            assert oldest.may_send


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "send", "send", "send", "end", "wait", "verify", "hold_back"]),
        st.integers(0, 9),
        st.integers(1, 40),
        st.sampled_from([None, "a", "b"]),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 100))
def test_sum_is_right_and_nobody_starves(
    steps: list[tuple[str, int, int, str | None]], limit: int
) -> None:
    play = Play(limit)
    for step in steps:
        play.act(*step)
        play.check()
    waiting = [body for body in play.bodies if not body.may_send]
    play.site.time.pass_(11)
    assert not [body for body in waiting if not body.may_send and body.error is None]
    for body in list(play.bodies):
        body.holding.end()
    play.check()
    budget = play.site.budget
    assert (budget.held, budget.waiting, list(budget.all.arriving)) == (0, 0, [])
    play.site.time.pass_(1)


def test_many_refusals_have_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(100)
    bodies = [site.body(1000) for _ in range(200)]
    for body in bodies:
        body.send(10)
    site.time.pass_(11)
    lines = [each for each in caplog.records if each.message == "body.cut"]
    assert len(site.cuts) > 150
    assert sum(line.bodies for line in lines) == len(site.cuts)
    assert len(lines) <= 10
