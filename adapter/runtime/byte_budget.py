"""Bounds the sum of callers' bytes that are in memory, here or at Triton.

Bytes count once they have arrived; what is announced counts for nothing. A caller that is paused
waits for room, ten seconds at most. While one waits, the body that would take longest to finish is
cut. The oldest may go on beyond the limit, so that one can always finish: the sum exceeds the
limit by at most one body and what each caller had sent before it was paused.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from math import inf
from typing import Protocol

from adapter.errors import AdapterError, SlowBody, TooManyStreams, TooManyWaiting
from adapter.runtime import clock

# What a paused holder is resumed for: one read of its connection.
_READ_BYTES = 2**18
# Frames, answers, and requests behind another one, all of which are kept until somebody takes them,
# may be this much of the sum.
_BUFFERED_BYTES = 2**26
# What an open stream takes besides its bytes: 62 KB over gRPC, 27 KB with generate_stream. All
# streams together may take one share, and so much at most: Python keeps half of what more of them
# had taken.
_STREAM_BYTES = 2**16
_MOST_STREAM_BYTES = 2**27
# A body of unknown length is judged as if this much of it were still to come.
_UNKNOWN_BYTES = 2**26
# Until its sender is known, a body counts towards shares of this part of the limit.
_SHARES = 8
_SHARE_TEXT = f"one {_SHARES}th of max_inflight_body_bytes"

_TICK_SECONDS, _WAIT_SECONDS, _PATIENCE_SECONDS = 0.5, 10.0, 2.0
# A body that ends within the first is spared; one that would take longer than the last is slow.
_SPARED_SECONDS, _SLOW_SECONDS = 5.0, 60.0
# While more than so many wait, room is given out once in so many seconds: each time all are checked
# at. In one turn of the event loop at most so many bodies are cut, which takes 0.2 ms each.
_FEW_WAITING, _ROUND_SECONDS, _MOST_CUTS = 64, 0.05, 64
# So many cuts have a line in the log until the next tick; all are counted.
_MOST_LINES = 10
# A rate needs so much time, and forgets this part of the past with each tick.
_RATE_SECONDS, _KEPT = 1.0, 0.8

log = logging.getLogger(__name__)


class Reason(Enum):
    """Why a body was cut: a label of a metric."""

    SLOW = "slow"
    LONG = "long"
    WAITED = "waited"


class Holder(Protocol):
    """The receiver of a body."""

    def is_reading(self) -> bool:
        """Return whether the caller may send, and neither the adapter nor Triton holds it up."""

    def resume(self) -> None:
        """Read on, after `take` has returned False."""

    def cut(self, error: AdapterError) -> None:
        """Give the body up; its bytes do not count any more."""


class _Pool:
    """Bodies that share one limit."""

    __slots__ = ("arriving", "beyond", "held", "limit", "sender", "users")

    def __init__(self, limit: int, sender: str = "") -> None:
        self.limit = limit
        self.sender = sender
        self.held = 0
        self.users = 0
        self.arriving: dict[Holding, None] = {}  # oldest first
        self.beyond: Holding | None = None  # may exceed the limit until it ends

    def admits(self, holding: "Holding", more: int = 0) -> bool:
        if self.held + more <= self.limit:
            return True
        if self.beyond is None and next(iter(self.arriving), None) is holding:
            self.beyond = holding
        return self.beyond is holding


class Holding:
    """The bytes of one body. Call `end` once all are released; after that no call does anything."""

    __slots__ = (
        "_budget",
        "_mark",
        "_rated",
        "announced",
        "begun",
        "holder",
        "is_verified",
        "pools",
        "since",
        "size",
        "waited",
        "watched",
    )

    def __init__(
        self, budget: "ByteBudget", holder: Holder, announced: int | None, pools: tuple[_Pool, ...]
    ) -> None:
        self._budget = budget
        self.holder = holder
        self.announced = announced  # its length; None if unknown
        self.pools = pools
        self.is_verified = False
        self.size = 0
        self.begun = budget.clock()
        self.since: float | None = None  # it waits
        self.waited = 0.0  # before that
        self._mark: tuple[float, int] | None = None
        self._rated = (0.0, 0.0)  # seconds and bytes, the latest ones
        self.watched = 0.0

    def take(self, size: int) -> bool:
        """Count `size` bytes that have arrived; return False to pause reading until `resume`."""
        pools = self.pools
        if not pools:
            return True
        self.size += size
        for pool in pools:
            pool.held += size
        if self.announced is not None and self.size >= self.announced:
            self.arrived()
            return True
        if self.since is None:
            for pool in pools:
                if not pool.admits(self):
                    self._budget.wait(self)
                    return False
        return self.since is None

    def arrived(self) -> None:
        """Note that the body is complete."""
        budget = self._budget
        if self not in budget.all.arriving:
            return
        for pool in self.pools:
            del pool.arriving[self]
        if self.since is not None:
            budget.resume([self])
        if budget.waiting:
            budget.resume_some()

    def verify(self) -> None:
        """Take the body out of the shares of senders that nobody knows."""
        self.is_verified = True
        self._leave(self.pools[1:])
        self.pools = self.pools[:1]
        self._budget.resume_some()

    def end(self) -> None:
        pools, self.pools = self.pools, ()
        self._budget.forget(self)
        self._leave(pools)
        self._budget.resume_some()

    def _leave(self, pools: Iterable[_Pool]) -> None:
        for pool in pools:
            pool.held -= self.size
            pool.users -= 1
            pool.arriving.pop(self, None)
            if pool.beyond is self:
                pool.beyond = None
            if not pool.users:
                self._budget.drop_share(pool.sender)

    # -- how fast it comes ------------------------------------------------------------------

    @property
    def left(self) -> int:
        return _UNKNOWN_BYTES if self.announced is None else self.announced - self.size

    def observe(self, now: float) -> None:
        """Measure how fast the body comes. To be called twice a second while somebody waits."""
        is_reading = self.since is None and self.holder.is_reading()
        if is_reading and self._mark is not None:
            seconds, size = now - self._mark[0], self.size - self._mark[1]
            past, sent = self._rated
            self._rated = past * _KEPT + seconds, sent * _KEPT + size
            self.watched += seconds
        self._mark = (now, self.size) if is_reading else None

    def unobserve(self) -> None:
        self._mark = None
        self._rated = (0.0, 0.0)
        self.watched = 0.0

    @property
    def rate(self) -> float | None:
        """Return bytes a second; None while unknown."""
        seconds, size = self._rated
        if seconds >= _RATE_SECONDS:
            return size / seconds
        if self.since is None:
            return None
        return self.size / max(self.since - self.begun - self.waited, 0.1)

    @property
    def seconds_left(self) -> float:
        rate = self.rate
        if rate is None:
            return 0.0
        return self.left / rate if rate else inf

    def may_be_cut(self) -> bool:
        """Return whether the body may be cut: not if it ends soon, unless it has long seemed to."""
        least = _SPARED_SECONDS if self.watched < _PATIENCE_SECONDS + _SPARED_SECONDS else 0.0
        return self.size > 0 and self.seconds_left > least


def _later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


class ByteBudget:
    """Bounds the sum of callers' bytes in memory."""

    def __init__(
        self,
        limit: int,  # bytes in sum
        *,
        clock: Callable[[], float] = clock.now,
        later: Callable[[float, Callable[[], None]], None] = _later,  # call after so many seconds
        on_cut: Callable[[Reason], None] = lambda _: None,
    ) -> None:
        self.limit = limit
        self.share = limit // _SHARES
        self._stream_limit = min(self.share, _MOST_STREAM_BYTES)
        self.clock = clock
        self.all = _Pool(limit)
        self._no_shares = (self.all,)
        self.buffered = self._streams_held = 0
        self._later = later
        self._on_cut = on_cut
        self._shares: dict[str, _Pool] = {}
        self._waiting: dict[Holding, None] = {}
        self._is_ticking = self._is_round_due = False
        self._cuts_left = 0
        self._lines_left, self._lines_since = _MOST_LINES, 0.0

    @property
    def held(self) -> int:
        return self.all.held

    @property
    def waiting(self) -> int:
        """Return how many callers wait for room."""
        return len(self._waiting)

    def hold(self, holder: Holder, announced: int | None, senders: Iterable[str] = ()) -> Holding:
        """Begin with a body. `senders`: who it seems to be from, each with a share of its own."""
        pools: tuple[_Pool, ...] = self._no_shares
        if senders:
            pools = (self.all, *map(self._share_of, senders))
        holding = Holding(self, holder, announced, pools)
        for pool in holding.pools:
            pool.users += 1
            pool.arriving[holding] = None
        return holding

    def _share_of(self, sender: str) -> _Pool:
        if (pool := self._shares.get(sender)) is None:
            pool = self._shares[sender] = _Pool(self.share, sender)
        return pool

    # -- what is kept for its receiver ------------------------------------------------------

    def buffer(self, size: int) -> None:
        """Count `size` bytes that are kept for their receiver; negative when they are released."""
        self.buffered += size
        self.count(size)

    def count(self, size: int) -> None:
        """Count `size` bytes that somebody else bounds."""
        self.all.held += size
        if size < 0:
            self.resume_some()

    def has_buffer_for(self, size: int) -> bool:
        fits = self.all.held + size <= self.limit
        return fits and self.buffered + size <= _BUFFERED_BYTES

    @property
    def is_buffer_full(self) -> bool:
        return self.buffered > min(_BUFFERED_BYTES, self.limit)

    # -- open streams -----------------------------------------------------------------------

    def begin_stream(self) -> TooManyStreams | None:
        """Count a stream until `end_stream`, however little it sends; return why there is no room
        for it.
        """
        held, limit = self._streams_held, self._stream_limit
        if held + _STREAM_BYTES > limit:
            return TooManyStreams(
                f"{held // _STREAM_BYTES} open streams hold {held} of {limit} bytes"
                f" ({_SHARE_TEXT}, and at most {_MOST_STREAM_BYTES}); try again later"
            )
        self._count_stream(_STREAM_BYTES)
        return None

    def end_stream(self) -> None:
        self._count_stream(-_STREAM_BYTES)

    def _count_stream(self, size: int) -> None:
        self._streams_held += size
        self.count(size)

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """Count a stream while the context lasts; TooManyStreams if there is no room for it."""
        if (error := self.begin_stream()) is not None:
            raise error
        try:
            yield
        finally:
            self.end_stream()

    # -- for holdings -----------------------------------------------------------------------

    def drop_share(self, sender: str) -> None:
        self._shares.pop(sender, None)

    def forget(self, holding: Holding) -> None:
        if holding.since is not None:
            del self._waiting[holding]
            holding.since = None

    def wait(self, holding: Holding) -> None:
        holding.since = self.clock()
        self._waiting[holding] = None
        if not self._is_ticking:
            self._is_ticking = True
            self._later(_TICK_SECONDS, self._tick)

    def resume_some(self) -> None:
        """Resume those that have room for one read, first those of which least is to come."""
        if not self._waiting:
            return
        if len(self._waiting) <= _FEW_WAITING:
            self._resume_waiting()
        elif not self._is_round_due:
            self._is_round_due = True
            self._later(_ROUND_SECONDS, self._end_round)

    def _end_round(self) -> None:
        self._is_round_due = False
        self._resume_waiting()

    def _resume_waiting(self) -> None:
        if not self._waiting:
            return
        planned: dict[_Pool, int] = {}
        resumed = []
        for holding in sorted(self._waiting, key=_left):
            step, pools = min(holding.left, _READ_BYTES), holding.pools
            if all(pool.admits(holding, planned.get(pool, 0) + step) for pool in pools):
                planned |= {pool: planned.get(pool, 0) + step for pool in pools}
                resumed.append(holding)
        self.resume(resumed)

    def resume(self, holdings: list[Holding]) -> None:
        now = self.clock()
        for holding in holdings:
            if holding.since is not None:
                holding.waited += now - holding.since
                self.forget(holding)
                holding.holder.resume()

    # -- while somebody waits ---------------------------------------------------------------

    def _tick(self) -> None:
        try:
            self._judge(self.clock())
        finally:
            self._is_ticking = bool(self._waiting)
            if self._waiting:
                self._later(_TICK_SECONDS if self._cuts_left else _ROUND_SECONDS, self._tick)
            else:
                for holding in self.all.arriving:
                    holding.unobserve()

    def _judge(self, now: float) -> None:
        self._cuts_left = _MOST_CUTS
        if now - self._lines_since >= _TICK_SECONDS:
            self._lines_left, self._lines_since = _MOST_LINES, now
        for holding in self.all.arriving:
            holding.observe(now)
        for holding in list(self._waiting):
            is_late = holding.since is not None and now - holding.since >= _WAIT_SECONDS
            if is_late and self._cuts_left:
                self._cut(holding, Reason.WAITED)
        patient = [h for h in self._waiting if _has_waited(h, now) >= _PATIENCE_SECONDS]
        patient.sort(key=_left)
        for pool in dict.fromkeys(pool for holding in patient for pool in holding.pools):
            self._make_room(pool, [holding for holding in patient if pool in holding.pools])

    def _make_room(self, pool: _Pool, waiting: list[Holding]) -> None:
        """Cut the bodies that would take longest, each for one that would take less."""
        worst = sorted(filter(Holding.may_be_cut, pool.arriving), key=_badness, reverse=True)
        needed = 0
        for holding in waiting:
            needed += min(holding.left, max(self.share, _READ_BYTES))
            while worst and self._cuts_left and pool.held + needed > pool.limit:
                victim = worst[0]
                if victim is holding or victim.seconds_left <= holding.seconds_left:
                    break
                del worst[0]
                if victim.pools:
                    slow = victim.seconds_left > _SLOW_SECONDS and victim.since is None
                    self._cut(victim, Reason.SLOW if slow else Reason.LONG)

    def _cut(self, holding: Holding, reason: Reason) -> None:
        self._cuts_left -= 1
        rate, left, figures = holding.rate, holding.seconds_left, self._figures(holding)
        if self._lines_left:
            self._lines_left -= 1
            self._log(holding, reason)
        self._on_cut(reason)
        holding.end()
        holding.holder.cut(_error(reason, rate or 0.0, left, figures))

    def _log(self, holding: Holding, reason: Reason) -> None:
        rate = holding.rate
        log.warning(
            "body.cut",
            extra={
                "reason": reason.value,
                "body_bytes": holding.size,
                "announced_bytes": holding.announced,
                "bytes_a_second": None if rate is None else round(rate),
                "is_verified": holding.is_verified,
                "waiting": len(self._waiting),
                "held_bytes": self.held,
                "limit_bytes": self.limit,
            },
        )

    def _figures(self, holding: Holding) -> str:
        """Return how full the pool is that kept the body waiting, or that needs its room."""
        pool = max(holding.pools, key=lambda pool: pool.held / max(1, pool.limit))
        if pool is self.all:
            whose, limit = "callers' bodies", "max_inflight_body_bytes"
        else:
            whose = "bodies of this caller's key, connection or address"
            limit = _SHARE_TEXT
        return f"{whose} hold {pool.held} of {pool.limit} bytes ({limit})"


def _error(reason: Reason, rate: float, seconds: float, figures: str) -> AdapterError:
    if reason is Reason.WAITED:
        return TooManyWaiting(
            f"there was no room for the body for {_WAIT_SECONDS:g} s: {figures}; try again later"
        )
    speed = f"the body comes at {rate / 2**10:.1f} KiB/s"
    if seconds < inf:
        speed += f" and would take {seconds:.0f} s more"
    if reason is Reason.SLOW:
        return SlowBody(f"{speed}, while others wait: {figures}; send it faster")
    return TooManyWaiting(f"{speed}, while others wait: {figures}; try again later")


def _left(holding: Holding) -> int:
    return holding.left


def _has_waited(holding: Holding, now: float) -> float:
    return holding.waited + (0.0 if holding.since is None else now - holding.since)


def _badness(holding: Holding) -> tuple[bool, float]:
    return not holding.is_verified, holding.seconds_left
