"""Bounds the sum of callers' bytes that are in memory, here or at Triton.

Bytes count once they have arrived; what is announced counts for nothing. While the sum exceeds the
limit:

- Bodies that are not complete are paused. As bytes are released, those with the fewest bytes to
  come go on first.
- The oldest body is not paused, so that one can always finish. So the sum exceeds the limit by at
  most one body, and by what each caller had sent before it was paused.
- A body that has been paused for ten seconds is refused. Of several the largest is refused first,
  since the others may find room then.
- A body that is not paused is refused if it comes too slowly, as the paused ones wait for its room.

Until its sender is known, a body also counts in the shares of who it seems to be from. Each share
is a part of the limit, and the same rules hold in it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Protocol

from adapter.errors import AdapterError, SlowBody, TooManyWaiting
from adapter.runtime import clock
from adapter.runtime.open_streams import OpenStreams

# A paused body is resumed for one read of its connection.
_READ_BYTES = 2**18
# Frames, answers, and requests behind another one, all of which are buffered until somebody takes
# them, may be this much of the sum.
_BUFFERED_BYTES = 2**26
# A body of unknown length is judged as if this much of it were still to come.
_UNKNOWN_BYTES = 2**26
# Until its sender is known, a body counts towards shares of this part of the limit.
_SHARES = 8
_SHARE_TEXT = f"one {_SHARES}th of max_inflight_body_bytes"

_TICK_SECONDS, _WAIT_SECONDS = 0.5, 10.0
# The least rate of a body, in bytes a second, on average of so many seconds.
_LEAST_RATE, _RATE_SECONDS = 2**16, 2.0
# With more paused bodies than this, room is given out at most once in so many seconds: each time
# all of them are examined.
_FEW_PAUSED, _ROUND_SECONDS = 64, 0.05
# Refusing one body takes 0.2 ms, so only so many are refused in one turn of the event loop.
_MAX_CUTS = 64

log = logging.getLogger(__name__)


class Reason(Enum):
    """Says why a body was refused, as a label of a metric."""

    SLOW = "slow"
    WAITED = "waited"


class Holder(Protocol):
    """The receiver of a body."""

    def is_reading(self) -> bool:
        """Return whether the caller may send, and neither the adapter nor Triton holds it up."""

    def resume(self) -> None:
        """Read on, after `take` has returned False."""

    def cut(self, error: AdapterError) -> None:
        """Refuse the body with `error`; its bytes do not count any more."""


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
        """Return whether `more` bytes of that body may come."""
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
        "announced",
        "holder",
        "pools",
        "since",
        "size",
    )

    def __init__(
        self, budget: "ByteBudget", holder: Holder, announced: int | None, pools: tuple[_Pool, ...]
    ) -> None:
        self._budget = budget
        self.holder = holder
        self.announced = announced  # its length; None if unknown
        self.pools = pools
        self.size = 0
        self.since: float | None = None  # paused since then
        self._mark: tuple[float, int] | None = None  # a time, and `size` then

    @property
    def left(self) -> int:
        """Return how many bytes are still to come."""
        return _UNKNOWN_BYTES if self.announced is None else self.announced - self.size

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
                    self._budget.pause(self)
                    return False
        return self.since is None

    def arrived(self) -> None:
        """Mark the body as complete."""
        budget = self._budget
        if self not in budget.all.arriving:
            return
        for pool in self.pools:
            del pool.arriving[self]
        if self.since is not None:
            budget.resume(self)
        budget.resume_some()

    def verify(self) -> None:
        """Take the body out of the shares of senders that nobody knows."""
        self._leave(self.pools[1:])
        self.pools = self.pools[:1]
        self._budget.resume_some()

    def end(self) -> None:
        """Release all bytes of the body."""
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

    @property
    def next_bytes(self) -> int:
        """Return how many bytes come next, if the body goes on."""
        return min(self.left, _READ_BYTES)

    def paused_seconds(self, now: float) -> float:
        """Return for how long the body has been paused; 0 if it is not."""
        return 0.0 if self.since is None else now - self.since

    def measure_rate(self, now: float) -> float | None:
        """Return at how many bytes a second the body came in the latest seconds; None while too few
        of them are known. Seconds in which the caller could not send do not count.
        """
        if self.since is not None or not self.holder.is_reading():
            self._mark = None
            return None
        if self._mark is None:
            self._mark = (now, self.size)
            return None
        began_at, size = self._mark
        if now - began_at < _RATE_SECONDS:
            return None
        rate = (self.size - size) / (now - began_at)
        if rate >= _LEAST_RATE:
            self._mark = (now, self.size)
        return rate

    def stop_measuring(self) -> None:
        """Forget when the latest measurement began."""
        self._mark = None


def _call_later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


class ByteBudget:
    """Bounds the sum of callers' bytes in memory."""

    def __init__(
        self,
        limit: int,  # bytes in sum
        *,
        clock: Callable[[], float] = clock.now,
        later: Callable[[float, Callable[[], None]], None] = _call_later,  # after so many seconds
        on_cut: Callable[[Reason], None] = lambda _: None,
    ) -> None:
        self.limit = limit
        self.share = limit // _SHARES
        self.clock = clock
        self.all = _Pool(limit)
        self.buffered = 0
        self.streams = OpenStreams(self.share, self.count)
        self._later = later
        self._on_cut = on_cut
        self._no_shares = (self.all,)
        self._shares: dict[str, _Pool] = {}
        self._paused: dict[Holding, None] = {}
        self._is_ticking = False
        self._is_round_due = False

    @property
    def held(self) -> int:
        """Return the sum of all bytes."""
        return self.all.held

    @property
    def waiting(self) -> int:
        """Return how many callers wait for room."""
        return len(self._paused)

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

    # -- what is buffered for its receiver ---------------------------------------------------

    def buffer(self, size: int) -> None:
        """Count `size` bytes that are buffered for their receiver; negative when they are
        released.
        """
        self.buffered += size
        self.count(size)

    def count(self, size: int) -> None:
        """Count `size` bytes that somebody else bounds."""
        self.all.held += size
        if size < 0:
            self.resume_some()

    def has_buffer_for(self, size: int) -> bool:
        """Return whether `size` more bytes may be buffered for their receiver."""
        fits = self.all.held + size <= self.limit
        return fits and self.buffered + size <= _BUFFERED_BYTES

    @property
    def is_buffer_full(self) -> bool:
        """Return whether more is buffered than all receivers together may have."""
        return self.buffered > min(_BUFFERED_BYTES, self.limit)

    # -- for holdings -----------------------------------------------------------------------

    def drop_share(self, sender: str) -> None:
        """Forget the share of a sender that has no bodies any more."""
        self._shares.pop(sender, None)

    def forget(self, holding: Holding) -> None:
        """Stop counting a body as paused."""
        if holding.since is not None:
            del self._paused[holding]
            holding.since = None

    def pause(self, holding: Holding) -> None:
        """Count a body as paused until there is room for it."""
        holding.since = self.clock()
        self._paused[holding] = None
        if not self._is_ticking:
            self._is_ticking = True
            self._later(_TICK_SECONDS, self._tick)

    def resume(self, holding: Holding) -> None:
        """Let a paused body go on."""
        self.forget(holding)
        holding.holder.resume()

    def resume_some(self) -> None:
        """Resume the bodies that have room for one read, soon if very many are paused."""
        if len(self._paused) <= _FEW_PAUSED:
            self._resume_fitting()
        elif not self._is_round_due:
            self._is_round_due = True
            self._later(_ROUND_SECONDS, self._end_round)

    def _end_round(self) -> None:
        self._is_round_due = False
        self._resume_fitting()

    def _resume_fitting(self) -> None:
        planned: dict[_Pool, int] = {}
        fitting = []
        for holding in sorted(self._paused, key=_left):
            pools = holding.pools
            total = {pool: planned.get(pool, 0) + holding.next_bytes for pool in pools}
            if all(pool.admits(holding, total[pool]) for pool in pools):
                planned |= total
                fitting.append(holding)
        for holding in fitting:
            if holding.since is not None:
                self.resume(holding)

    # -- while bodies are paused ------------------------------------------------------------

    def _tick(self) -> None:
        seconds = _TICK_SECONDS
        try:
            if self._refuse_some(self.clock()) >= _MAX_CUTS:
                seconds = _ROUND_SECONDS
        finally:
            self._is_ticking = bool(self._paused)
            if self._paused:
                self._later(seconds, self._tick)
            else:
                for holding in self.all.arriving:
                    holding.stop_measuring()

    def _refuse_some(self, now: float) -> int:
        """Refuse bodies that were paused for too long, and slow ones that others wait for; return
        how many.
        """
        late = self._refuse_late(now)
        slow = self._refuse_slow(now, _MAX_CUTS - len(late))
        self._log(Reason.WAITED, late)
        self._log(Reason.SLOW, slow)
        return len(late) + len(slow)

    def _refuse_late(self, now: float) -> list[Holding]:
        late = [holding for holding in self._paused if holding.paused_seconds(now) >= _WAIT_SECONDS]
        late.sort(key=_size, reverse=True)
        refused: list[Holding] = []
        for holding in late[:_MAX_CUTS]:
            if holding.since is not None:  # the end of a larger one may have made room for it
                text = f"there was no room for the body for {_WAIT_SECONDS:g} s"
                error = TooManyWaiting(f"{text}: {self._figures(holding)}; try again later")
                self._refuse(holding, Reason.WAITED, error)
                refused.append(holding)
        return refused

    def _refuse_slow(self, now: float, limit: int) -> list[Holding]:
        """Refuse at most `limit` slow bodies that hold room for which others wait."""
        full = self._full_pools()
        refused: list[Holding] = []
        for holding in list(self.all.arriving):
            rate = holding.measure_rate(now)
            if rate is None or rate >= _LEAST_RATE or full.isdisjoint(holding.pools):
                continue
            if self._paused and len(refused) < limit:
                text = f"the body comes at {rate / 2**10:.1f} KiB/s, while others wait"
                error = SlowBody(f"{text}: {self._figures(holding)}; send it faster")
                self._refuse(holding, Reason.SLOW, error)
                refused.append(holding)
        return refused

    def _full_pools(self) -> set[_Pool]:
        """Return the pools that have no room for a paused body."""
        return {
            pool
            for holding in self._paused
            for pool in holding.pools
            if pool.held + holding.next_bytes > pool.limit
        }

    def _refuse(self, holding: Holding, reason: Reason, error: AdapterError) -> None:
        self._on_cut(reason)
        holding.end()
        holding.holder.cut(error)

    def _log(self, reason: Reason, refused: list[Holding]) -> None:
        """Log one line for all bodies that one turn refused: there may be hundreds a second."""
        if refused:
            log.warning(
                "body.cut",
                extra={
                    "reason": reason.value,
                    "bodies": len(refused),
                    "body_bytes": sum(map(_size, refused)),
                    "waiting": len(self._paused),
                    "held_bytes": self.held,
                    "limit_bytes": self.limit,
                },
            )

    def _figures(self, holding: Holding) -> str:
        """Return how full the pool is that kept the body waiting, or that needs its room."""
        pool = max(holding.pools, key=lambda pool: pool.held / max(1, pool.limit))
        if pool is self.all:
            whose = "callers' bodies"
            limit = "max_inflight_body_bytes"
        else:
            whose = "bodies of this caller's key, connection or address"
            limit = _SHARE_TEXT
        return f"{whose} hold {pool.held} of {pool.limit} bytes ({limit})"


def _left(holding: Holding) -> int:
    return holding.left


def _size(holding: Holding) -> int:
    return holding.size
