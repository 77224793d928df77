"""Records one slice: latencies, failures, and figures for each interval."""

from dataclasses import dataclass, field

from bench.connection import Failure
from bench.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Interval:
    """`at` and `seconds` are seconds, the first since the start of the run."""

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
