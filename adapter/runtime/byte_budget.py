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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from operator import attrgetter
from typing import Protocol
from weakref import WeakValueDictionary

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

# How often paused bodies are resumed and refused: each time all of them are examined.
_TICK_SECONDS = 0.05
_WAIT_SECONDS = 10.0
# The least rate of a body, in bytes a second, on average of so many seconds.
_LEAST_RATE = 2**16
_RATE_SECONDS = 2.0
# Refusing one body takes 0.2 ms, so only so many are refused in one turn of the event loop.
_MAX_CUTS = 32

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

    __slots__ = ("__weakref__", "arriving", "beyond", "held", "limit", "promised")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.promised = 0  # to bodies that were resumed, and have not been read since
        self.arriving: dict[Holding, None] = {}  # oldest first
        self.beyond: Holding | None = None  # may exceed the limit until it ends

    def has_room(self, more: int) -> bool:
        """Return whether `more` bytes are within the limit."""
        return self.held + self.promised + more <= self.limit

    def admits(self, holding: "Holding", more: int = 0) -> bool:
        """Return whether `more` bytes of that body may come."""
        if self.has_room(more):
            return True
        if self.beyond is None and next(iter(self.arriving), None) is holding:
            self.beyond = holding
        return self.beyond is holding


class Holding:
    """The bytes of one body. Call `end` once all are released; after that no call does anything."""

    __slots__ = ("_budget", "_mark", "announced", "holder", "pools", "promised", "size")

    def __init__(
        self, budget: "ByteBudget", holder: Holder, announced: int | None, pools: tuple[_Pool, ...]
    ) -> None:
        self._budget = budget
        self.holder = holder
        self.announced = announced  # its length; None if unknown
        self.pools = pools
        self.size = 0
        self.promised = 0
        self._mark: tuple[float, int] | None = None  # a time, and `size` then
        for pool in pools:
            pool.arriving[self] = None

    @property
    def left(self) -> int:
        """Return how many bytes are still to come."""
        return _UNKNOWN_BYTES if self.announced is None else self.announced - self.size

    @property
    def next_bytes(self) -> int:
        """Return how many bytes come next, if the body goes on."""
        return min(self.left, _READ_BYTES)

    def take(self, size: int) -> bool:
        """Count `size` bytes that have arrived; return False to pause reading until `resume`."""
        pools = self.pools
        if not pools:
            return True
        self.size += size
        if self.promised:
            self.promise(0)
        for pool in pools:
            pool.held += size
        if self.announced is not None and self.size >= self.announced:
            self.arrived()
            return True
        if self._budget.is_paused(self):
            return False
        if all(pool.admits(self) for pool in pools):
            return True
        self._budget.pause(self)
        return False

    def promise(self, size: int) -> None:
        """Keep room for `size` bytes, until the next ones arrive."""
        for pool in self.pools:
            pool.promised += size - self.promised
        self.promised = size

    def arrived(self) -> None:
        """Mark the body as complete."""
        for pool in self.pools:
            pool.arriving.pop(self, None)
        self._budget.resume(self)

    def verify(self) -> None:
        """Take the body out of the shares of senders that nobody knows."""
        self.promise(0)
        self._leave(self.pools[1:])
        self.pools = self.pools[:1]

    def end(self) -> None:
        """Release all bytes of the body."""
        self._budget.forget(self)
        self.promise(0)
        self._leave(self.pools)
        self.pools = ()

    def _leave(self, pools: Iterable[_Pool]) -> None:
        """Release the bytes in these pools."""
        for pool in pools:
            pool.held -= self.size
            pool.arriving.pop(self, None)
            if pool.beyond is self:
                pool.beyond = None

    def measure_rate(self, now: float) -> float | None:
        """Return at how many bytes a second the body came in the latest seconds; None while too few
        of them are known. Seconds in which the caller could not send do not count.
        """
        if self._budget.is_paused(self) or not self.holder.is_reading():
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
    """Call `act` after so many seconds."""
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
        self._shares: WeakValueDictionary[str, _Pool] = WeakValueDictionary()  # by sender
        self._paused: dict[Holding, float] = {}  # since when
        self._is_ticking = False

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
        shares = [self._shares.setdefault(sender, _Pool(self.share)) for sender in senders]
        return Holding(self, holder, announced, (self.all, *shares))

    # -- what is buffered for its receiver ---------------------------------------------------

    def buffer(self, size: int) -> None:
        """Count `size` bytes that are buffered for their receiver; negative when they are
        released.
        """
        self.buffered += size
        self.count(size)

    def count(self, size: int) -> None:
        """Count `size` bytes that somebody else bounds; negative when they are released."""
        self.all.held += size

    @contextmanager
    def hold_answer(self, size: int) -> Iterator[None]:
        """Count an answer of `size` bytes, all in memory, while the context lasts. Raises
        TooManyWaiting without room for it.
        """
        if self.held + size > self.limit:
            raise TooManyWaiting(
                f"there is no room for an answer of {size} bytes: {self.held} of {self.limit} "
                "bytes are in memory for all callers; ask for less at a time, or try again later",
                has_begun=True,
            )
        self.count(size)
        try:
            yield
        finally:
            self.count(-size)

    def has_buffer_for(self, size: int) -> bool:
        """Return whether `size` more bytes may be buffered for their receiver."""
        fits = self.all.held + size <= self.limit
        return fits and self.buffered + size <= _BUFFERED_BYTES

    @property
    def is_buffer_full(self) -> bool:
        """Return whether more is buffered than all receivers together may have."""
        return self.buffered > min(_BUFFERED_BYTES, self.limit)

    # -- for holdings -----------------------------------------------------------------------

    def is_paused(self, holding: Holding) -> bool:
        """Return whether a body waits for room."""
        return holding in self._paused

    def pause(self, holding: Holding) -> None:
        """Count a body as paused until there is room for it."""
        self._paused[holding] = self.clock()
        if not self._is_ticking:
            self._is_ticking = True
            self._later(_TICK_SECONDS, self._tick)

    def forget(self, holding: Holding) -> None:
        """Stop counting a body as paused."""
        self._paused.pop(holding, None)

    def resume(self, holding: Holding) -> None:
        """Let a body go on if it is paused."""
        if holding in self._paused:
            del self._paused[holding]
            holding.holder.resume()

    # -- while bodies are paused ------------------------------------------------------------

    def _tick(self) -> None:
        """Resume and refuse bodies, and come again while some are paused."""
        try:
            self._resume_fitting()
            now = self.clock()
            late = self._refuse_late(now)
            self._refuse_slow(now, _MAX_CUTS - late)
        finally:
            self._is_ticking = bool(self._paused)
            if self._paused:
                self._later(_TICK_SECONDS, self._tick)
            else:
                for holding in self.all.arriving:
                    holding.stop_measuring()

    def _resume_fitting(self) -> None:
        """Resume the bodies that have room for one read, those with the fewest bytes to come
        first.
        """
        for holding in sorted(self._paused, key=attrgetter("left")):
            if all(pool.admits(holding, holding.next_bytes) for pool in holding.pools):
                holding.promise(holding.next_bytes)
                self.resume(holding)

    def _refuse_late(self, now: float) -> int:
        """Refuse bodies that were paused for too long, the largest first, unless the end of one
        has made room for the next; return how many.
        """
        late = [body for body, since in self._paused.items() if now - since >= _WAIT_SECONDS]
        late.sort(key=attrgetter("size"), reverse=True)
        refused: list[Holding] = []
        for holding in late[:_MAX_CUTS]:
            if _full_pools([holding]):
                text = f"there was no room for the body for {_WAIT_SECONDS:g} s"
                error = TooManyWaiting(f"{text}: {self._figures(holding)}; try again later")
                self._refuse(holding, Reason.WAITED, error)
                refused.append(holding)
        self._log(Reason.WAITED, refused)
        return len(refused)

    def _refuse_slow(self, now: float, limit: int) -> None:
        """Refuse at most `limit` slow bodies that hold room for which others wait."""
        full = _full_pools(self._paused)
        refused: list[Holding] = []
        for holding in list(self.all.arriving):
            rate = holding.measure_rate(now)
            if rate is None or rate >= _LEAST_RATE or full.isdisjoint(holding.pools):
                continue
            if len(refused) < limit:
                text = f"the body comes at {rate / 2**10:.1f} KiB/s, while others wait"
                error = SlowBody(f"{text}: {self._figures(holding)}; send it faster")
                self._refuse(holding, Reason.SLOW, error)
                refused.append(holding)
                full = _full_pools(self._paused)
        self._log(Reason.SLOW, refused)

    def _refuse(self, holding: Holding, reason: Reason, error: AdapterError) -> None:
        """Count a refusal, and end the body with the error."""
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
                    "body_bytes": sum(holding.size for holding in refused),
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
            limit = f"one {_SHARES}th of max_inflight_body_bytes"
        return f"{whose} hold {pool.held} of {pool.limit} bytes ({limit})"


def _full_pools(holdings: Iterable[Holding]) -> set[_Pool]:
    """Return the pools that have no room for what comes next of one of these bodies."""
    return {
        pool
        for holding in holdings
        for pool in holding.pools
        if not pool.has_room(holding.next_bytes)
    }
