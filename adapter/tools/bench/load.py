"""Sends requests in a closed loop, where a response triggers the next request, or an open loop.

There is no task or future per request: a connection calls back with a response, and gets its next
request within that call.
"""

import asyncio
import ctypes
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from adapter.tools.bench.connection import (
    ClientProtocol,
    Connection,
    Failure,
    Finish,
    HttpClientProtocol,
)
from adapter.tools.bench.errors import BenchError
from adapter.tools.bench.http2 import GrpcClientProtocol
from adapter.tools.bench.payload import Payload
from adapter.tools.bench.plan import Headers, Plan, Protocol, Target
from adapter.tools.bench.record import Recorder
from adapter.tools.bench.requests import Request, build, is_in_all, renewed

_MONOTONIC = 1  # CLOCK_MONOTONIC, which is time.perf_counter on Linux
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


def arrivals(
    rate: float, start: float, *, poisson: bool, seconds: float | None, count: int | None, seed: int
) -> Iterator[float]:
    """Yield moments of time.perf_counter from `start`, `rate` a second."""
    source = random.Random(seed)  # noqa: S311 - a schedule
    end = math.inf if seconds is None else start + seconds
    most = math.inf if count is None else count
    due, number = start, 0
    while due < end and number < most:
        yield due
        number += 1
        due = due + source.expovariate(rate) if poisson else start + number / rate


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Timer:
    """A timerfd: timers of asyncio and uvloop are in whole milliseconds, which is more than an
    inference takes. (os.timerfd_create is there from Python 3.13 on.)
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_MONOTONIC, _FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._call = call
        self._spec = _Itimerspec()
        asyncio.get_running_loop().add_reader(self._file, self._fired)

    def set(self, moment: float) -> None:
        """Call at that moment of time.perf_counter; at once when it has passed."""
        nanoseconds = max(1, int(moment * 1e9))
        self._spec.value.seconds, self._spec.value.nanoseconds = divmod(nanoseconds, 10**9)
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._spec), None)

    def _fired(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # was set again meanwhile
            return
        self._call()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)


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
        """Drop requests that were due before that moment; called after every interval."""

    def _end(self) -> None:
        """Release what the load uses; called once."""


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
        """Begin the schedule; `schedule` gets the moment of its start."""
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


_INFER = "/inference.GRPCInferenceService/ModelInfer"
_PICKS = 4096
_SEED = 1  # a repeated run asks for the same models in the same order


class TargetLoad:
    def __init__(self, plan: Plan, target: Target, payloads: Mapping[str, Payload]) -> None:
        self.target = target
        self.requests = _mixed(plan, target, payloads)
        self._connections = [
            Connection(target.address, _protocol(target, plan.headers), self._done)
            for _ in range(plan.pace.connections)
        ]
        self.slots = self._connections * plan.pace.streams
        self.load: Load | None = None  # what uses the connections at present

    async def open(self) -> None:
        """Open every connection, or raise an error after all attempts have ended."""
        opening = (connection.open() for connection in self._connections)
        for error in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(error, OSError):
                text = f"{self.target.url}: {str(error) or 'no answer'}"
                raise BenchError(text) from error
            if error is not None:
                raise error

    def _done(self, connection: Connection, due: float, failure: Failure | None) -> None:
        if self.load is not None:
            self.load.done(connection, due, failure)

    def close(self) -> None:
        self.load = None
        for connection in self._connections:
            connection.close()


def _protocol(target: Target, headers: Headers) -> Callable[[Finish], ClientProtocol]:
    if target.protocol is Protocol.GRPC:
        metadata = tuple(header for header in headers if is_in_all(header))
        return lambda finish: GrpcClientProtocol(finish, target.address.authority, _INFER, metadata)
    return HttpClientProtocol


def _mixed(plan: Plan, target: Target, payloads: Mapping[str, Payload]) -> Iterator[Request]:
    """Yield requests for ever: each recorded head in turn, each with models by popularity."""
    found = []
    for head in plan.heads or ((),):
        requests = [
            build(target, model, payload, plan.headers, head) for model, payload in payloads.items()
        ]
        is_fixed = not any(request.differs for request in requests)
        picked = popular(requests, plan.zipf)
        found.append(picked if is_fixed else map(renewed, picked))
    return found[0] if len(found) == 1 else itertools.chain.from_iterable(zip(*found, strict=True))


def popular(requests: Sequence[Request], exponent: float) -> Iterator[Request]:
    """Yield requests for ever, the k-th with a weight of 1 / k^exponent (Zipf)."""
    if len(requests) == 1:
        return itertools.repeat(requests[0])
    weights = [1 / rank**exponent for rank in range(1, len(requests) + 1)]
    return _picks(requests, list(itertools.accumulate(weights)))


def _picks(requests: Sequence[Request], weights: Sequence[float]) -> Iterator[Request]:
    source = random.Random(_SEED)  # noqa: S311 - a popularity
    while True:
        yield from source.choices(requests, cum_weights=weights, k=_PICKS)
