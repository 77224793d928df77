"""The schedule of an open loop, and a timer that is exact enough for it."""

import asyncio
import ctypes
import math
import os
import random
from collections.abc import Callable, Iterator

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
