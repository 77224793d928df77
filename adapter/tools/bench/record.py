"""Records one slice: latencies, failures, figures for each interval, and what a process takes."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil, exp, log
from pathlib import Path

from adapter.tools.bench.connection import Failure

_STEPS = 500.0  # a factor e
_MICROSECONDS = 1e6


class Histogram:
    """Counts durations in seconds. `largest` is exact, the rest within 0.1 % and 1 µs.

    The steps are those of HdrHistogram at three digits. Its Python version takes 2.8 µs a value,
    which is a tenth of what a whole request may cost the load generator; this takes 0.3 µs.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.largest = 0.0
        self.total = 0.0

    def add(self, seconds: float) -> None:
        key = int(log(seconds * _MICROSECONDS + 1.0) * _STEPS)
        counts = self._counts
        counts[key] = counts.get(key, 0) + 1
        self.count += 1
        self.total += seconds
        if seconds > self.largest:  # noqa: PLR1730 - max() takes three times as long
            self.largest = seconds

    def merge(self, other: "Histogram") -> None:
        for key, count in other._counts.items():  # noqa: SLF001 - of this class
            self._counts[key] = self._counts.get(key, 0) + count
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def percentiles(self, wanted: Iterable[float]) -> Iterator[float | None]:
        """Yield the seconds of each percentile, which must ascend; None while nothing was added."""
        keys = iter(sorted(self._counts))
        seen, value = 0, 0.0
        for percent in wanted:
            if not self.count:
                yield None
                continue
            rank = max(1, ceil(self.count * percent / 100.0))
            while seen < rank:
                key = next(keys)
                seen += self._counts[key]
                value = (exp((key + 0.5) / _STEPS) - 1.0) / _MICROSECONDS
            yield min(value, self.largest)

    def percentile(self, percent: float) -> float | None:
        return next(self.percentiles([percent]))


def merged(parts: Iterable[Histogram]) -> Histogram:
    whole = Histogram()
    for part in parts:
        whole.merge(part)
    return whole


@dataclass(frozen=True, slots=True)
class Interval:
    """Figures of one interval. `at` and `seconds` are seconds, `at` since the start of the run."""

    at: float
    seconds: float
    answered: int
    failed: int
    p50: float | None
    p99: float | None


@dataclass(slots=True)
class Errors:
    """Counts failures by code, with the first text of each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, failure: Failure, times: int = 1) -> None:
        self.counts[failure.code] = self.counts.get(failure.code, 0) + times
        self.examples.setdefault(failure.code, failure.text)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Recorder:
    """Records latencies of successes, and counts failures by code."""

    def __init__(self, run_started: float, now: float) -> None:
        self.latencies = Histogram()
        self.errors = Errors()
        self.intervals: list[Interval] = []
        self._run_started = run_started
        self._since = now
        self._current = Histogram()
        self._failed = 0

    def answered(self, seconds: float) -> None:
        self._current.add(seconds)

    def failed(self, failure: Failure, times: int = 1) -> None:
        self.errors.add(failure, times)
        self._failed += times

    def roll(self, now: float) -> None:
        """Close the interval, unless it is empty and without length, and start the next."""
        current, at, seconds = self._current, self._since, max(0.0, now - self._since)
        if current.count or self._failed or seconds:
            p50, p99 = current.percentiles([50, 99])
            self.intervals.append(
                Interval(at - self._run_started, seconds, current.count, self._failed, p50, p99)
            )
        self.latencies.merge(current)
        self._current, self._failed, self._since = Histogram(), 0, now


_SCHED = 2  # CPUCLOCK_SCHED of Linux: the clock of all threads of a process, exact to nanoseconds
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_seconds: float
    rss_bytes: int


def usage(pid: int) -> Usage | None:
    """Return what a process has used; None if there is no such process."""
    try:
        cpu = time.clock_gettime(~pid << 3 | _SCHED)
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return Usage(cpu, int(pages) * _PAGE_BYTES)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "gone"
