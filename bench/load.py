"""Drives connections: closed loop, where an answer brings the next request, or open loop.

No task and no future per request: a connection calls back when it has an answer, and gets its next
request within that call.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from bench.connection import Connection, Failure
from bench.record import Recorder
from bench.requests import Request
from bench.schedule import Timer

_GRACE_SECONDS = 1.0  # for what is in flight when the user stops the run


@dataclass(frozen=True, slots=True)
class Means:
    """`slots` has a connection once for each request that it may have in flight. `requests` never
    ends. `tick` is called at the end of every interval.
    """

    slots: Sequence[Connection]
    requests: Iterator[Request]
    recorder: Recorder
    timeout_seconds: float
    interval_seconds: float
    tick: Callable[[Recorder], None]


class Load:
    """One stretch against one target."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._next_request = means.requests.__next__
        self._busy = 0
        self._is_stopped = False
        self._over = asyncio.Event()
        self.recorder = means.recorder
        self.last_answer = self.started = perf_counter()

    async def run(self) -> None:
        """Return when all that was to be sent is answered, has failed or was given up."""
        ticker = asyncio.ensure_future(self._ticks())
        try:
            self._begin()
            await self._over.wait()
        finally:
            ticker.cancel()
            self._end()
            self.recorder.roll(self.last_answer)

    def stop(self) -> None:
        """Send no more, and wait a moment for what is in flight."""
        self._is_stopped = True
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._over.set)
        self._look()

    def done(self, connection: Connection, due: float, failure: Failure | None) -> None:
        now = perf_counter()
        self.last_answer = now
        if failure is None:
            self.recorder.answered(now - due)
        else:
            self.recorder.failed(failure)
        self._busy -= 1
        self._go_on(connection, now)

    def _send(self, connection: Connection, due: float) -> None:
        self._busy += 1
        connection.send(self._next_request(), due)

    def _look(self) -> None:
        if self._busy == 0 and (self._is_stopped or self._is_exhausted()):
            self._over.set()

    async def _ticks(self) -> None:
        means, number = self._means, 0
        failure = Failure("timeout", f"no answer within {means.timeout_seconds:g} s")
        while True:
            number += 1
            await asyncio.sleep(self.started + number * means.interval_seconds - perf_counter())
            now = perf_counter()
            for connection in set(means.slots):
                connection.expire(now - means.timeout_seconds, failure)
            self._give_up(now - means.timeout_seconds)
            self.recorder.roll(now)
            means.tick(self.recorder)

    def _begin(self) -> None:
        raise NotImplementedError

    def _go_on(self, connection: Connection, now: float) -> None:
        """That connection can take another request."""
        raise NotImplementedError

    def _is_exhausted(self) -> bool:
        raise NotImplementedError

    def _give_up(self, before: float) -> None:
        """Called in every interval, for what was due before that moment."""

    def _end(self) -> None:
        """Called once, at the end."""


class ClosedLoop(Load):
    """For so many seconds or requests, whichever is over first; None is without limit."""

    def __init__(self, means: Means, seconds: float | None, count: int | None) -> None:
        super().__init__(means)
        self._end_at = float("inf") if seconds is None else self.started + seconds
        self._left = float("inf") if count is None else count

    def _begin(self) -> None:
        for connection in self._means.slots:
            self._go_on(connection, perf_counter())

    def _go_on(self, connection: Connection, now: float) -> None:
        if self._is_stopped or self._left <= 0 or now >= self._end_at:
            self._left = 0
            self._look()
            return
        self._left -= 1
        self._send(connection, now)

    def _is_exhausted(self) -> bool:
        return self._left <= 0


class OpenLoop(Load):
    """A request is due when the schedule says so, whether or not a connection is free for it.

    It is sent when one is, and its latency counts from when it was due, so that what waits behind
    a stalled server shows (no coordinated omission).
    """

    def __init__(self, means: Means, schedule: Callable[[float], Iterator[float]]) -> None:
        """`schedule` is given the moment at which it begins."""
        super().__init__(means)
        self._schedule = schedule(self.started)
        self._due = next(self._schedule, None)
        self._idle = list(means.slots)
        self._timer = Timer(self._pump)
        self._timed: float | None = None  # what the timer is set to

    def _begin(self) -> None:
        self._pump()

    def _go_on(self, connection: Connection, now: float) -> None:  # noqa: ARG002 - closed loops need it
        self._idle.append(connection)
        self._pump()

    def _pump(self) -> None:
        now = perf_counter()
        while self._due is not None and self._idle and not self._is_stopped:
            if self._due > now and self._due > (now := perf_counter()):
                if self._timed != self._due:
                    self._timed = self._due
                    self._timer.set(self._due)
                return
            due, self._due = self._due, next(self._schedule, None)
            self._send(self._idle.pop(), due)
        self._look()

    def _is_exhausted(self) -> bool:
        return self._due is None

    def _give_up(self, before: float) -> None:
        """What waited for as long as an answer may take is not sent any more."""
        late = 0
        while self._due is not None and self._due < before:
            late += 1
            self._due = next(self._schedule, None)
        if late:
            text = "no connection was free within the time limit"
            self.recorder.failed(Failure("unsent", text), late)
            self._pump()

    def _end(self) -> None:
        self._timer.close()
