"""Sends requests in a closed loop, where a response triggers the next request, or an open loop.

There is no task or future per request: a connection calls back with a response, and gets its next
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
class LoadOptions:
    """`slots` has each connection once for every request that it may have in flight. `requests`
    does not end. `tick` is called after every interval.
    """

    slots: Sequence[Connection]
    requests: Iterator[Request]
    recorder: Recorder
    timeout_seconds: float
    interval_seconds: float
    tick: Callable[[Recorder], None]


class Load:
    """One slice of load against one target."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._next_request = options.requests.__next__
        self._busy = 0
        self._is_stopped = False
        self._over = asyncio.Event()
        self.recorder = options.recorder
        self.last_answer = self.started = perf_counter()

    async def run(self) -> None:
        """Return when every request is answered, has failed or was given up."""
        ticker = asyncio.ensure_future(self._ticks())
        try:
            self._begin()
            await self._over.wait()
        finally:
            ticker.cancel()
            self._end()
            self.recorder.roll(self.last_answer)

    def stop(self) -> None:
        """Send no more, and wait a moment for requests in flight."""
        self._is_stopped = True
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._over.set)
        self._check_done()

    def done(self, connection: Connection, due: float, failure: Failure | None) -> None:
        now = perf_counter()
        self.last_answer = now
        if failure is None:
            self.recorder.answered(now - due)
        else:
            self.recorder.failed(failure)
        self._busy -= 1
        self._connection_free(connection, now)

    def _send(self, connection: Connection, due: float) -> None:
        self._busy += 1
        connection.send(self._next_request(), due)

    def _check_done(self) -> None:
        if self._busy == 0 and (self._is_stopped or self._is_exhausted()):
            self._over.set()

    async def _ticks(self) -> None:
        options, number = self._options, 0
        failure = Failure("timeout", f"no answer within {options.timeout_seconds:g} s")
        while True:
            number += 1
            await asyncio.sleep(self.started + number * options.interval_seconds - perf_counter())
            now = perf_counter()
            for connection in set(options.slots):
                connection.expire(now - options.timeout_seconds, failure)
            self._give_up(now - options.timeout_seconds)
            self.recorder.roll(now)
            options.tick(self.recorder)

    def _begin(self) -> None:
        raise NotImplementedError

    def _connection_free(self, connection: Connection, now: float) -> None:
        """Use a connection that has room for a request."""
        raise NotImplementedError

    def _is_exhausted(self) -> bool:
        raise NotImplementedError

    def _give_up(self, before: float) -> None:
        """Called after every interval: drop what was due before that moment."""

    def _end(self) -> None:
        """Called once, at the end."""


class ClosedLoop(Load):
    """Ends after `seconds` or `count` requests, whichever is first; None is without limit."""

    def __init__(self, options: LoadOptions, seconds: float | None, count: int | None) -> None:
        super().__init__(options)
        self._end_at = float("inf") if seconds is None else self.started + seconds
        self._left = float("inf") if count is None else count

    def _begin(self) -> None:
        for connection in self._options.slots:
            self._connection_free(connection, perf_counter())

    def _connection_free(self, connection: Connection, now: float) -> None:
        if self._is_stopped or self._left <= 0 or now >= self._end_at:
            self._left = 0
            self._check_done()
            return
        self._left -= 1
        self._send(connection, now)

    def _is_exhausted(self) -> bool:
        return self._left <= 0


class OpenLoop(Load):
    """Requests are due by a schedule, whether or not a connection is free.

    Latency counts from when a request was due, so that waiting for a stalled server shows (no
    coordinated omission).
    """

    def __init__(self, options: LoadOptions, schedule: Callable[[float], Iterator[float]]) -> None:
        """`schedule` gets the moment of its start."""
        super().__init__(options)
        self._schedule = schedule(self.started)
        self._due = next(self._schedule, None)
        self._idle = list(options.slots)
        self._timer = Timer(self._pump)
        self._timed: float | None = None  # what the timer is set to

    def _begin(self) -> None:
        self._pump()

    def _connection_free(self, connection: Connection, now: float) -> None:  # noqa: ARG002 - closed loops need it
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
        self._check_done()

    def _is_exhausted(self) -> bool:
        return self._due is None

    def _give_up(self, before: float) -> None:
        """Drop requests that waited for as long as a response may take."""
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
