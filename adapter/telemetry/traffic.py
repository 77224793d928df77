"""Counts requests by listener, method and code, and measures how long they took, also in Triton.

Only the event loop's thread counts, and therefore without locks. Requests are noted as they end and
added up by the hundred, so that a request pays for one append.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
_GOOD = {200, "OK"}
_NOTED = 256  # are added up at once: 0.13 ms
_OWN_SECONDS = (0.000025, 0.00005, 0.0001, 0.00025, *_SECONDS[:9], 1)


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        if total:
            family.add_metric(labels, buckets, self._sum)


class InFlight:
    """Counts the requests of one frontend that are not answered yet."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        self.count += 1

    def end(self) -> None:
        self.count -= 1


class Served:
    """The answers of one method of one frontend. Keep a reference: a look-up costs as much as a
    count. The figures are complete after `add_up`.
    """

    __slots__ = ("_noted", "answers", "codes", "fast", "in_flight", "own", "total", "upstream")

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self._noted: list[tuple[int | str, float, float | None, bool]] = []
        self.fast = 0
        self.codes: dict[int | str, int] = {}
        self.answers = 0
        self.total = _Histogram(_SECONDS)
        self.upstream = _Histogram(_SECONDS)
        self.own = _Histogram(_OWN_SECONDS)

    def count(
        self,
        code: int | str,
        seconds: float,
        upstream_seconds: float | None = None,
        *,
        is_fast: bool = False,
    ) -> None:
        """Count one answer. `upstream_seconds`: how long the request waited for Triton; None if it
        was not asked, or for a stream. `is_fast`: the request took the fast path.
        """
        self._noted.append((code, seconds, upstream_seconds, is_fast))
        if len(self._noted) == _NOTED:
            self.add_up()

    def add_up(self) -> None:
        for code, seconds, upstream_seconds, is_fast in self._noted:
            self.fast += is_fast
            self.codes[code] = self.codes.get(code, 0) + 1
            self.total.observe(seconds)
            if upstream_seconds is not None:
                self.upstream.observe(upstream_seconds)
                self.own.observe(max(0.0, seconds - upstream_seconds))
                self.answers += code in _GOOD
        self._noted.clear()


class Traffic(Collector):
    def __init__(self) -> None:
        self._frontends: dict[str, InFlight] = {}
        self._served: dict[tuple[str, str], Served] = {}

    @property
    def in_flight(self) -> int:
        return sum(each.count for each in self._frontends.values())

    @property
    def answers(self) -> int:
        """How many successful answers came from Triton, streams excluded."""
        return sum(served.answers for served in self._added_up().values())

    def in_flight_of(self, frontend: str) -> InFlight:
        return self._frontends.setdefault(frontend, InFlight())

    def served(self, frontend: str, method: str) -> Served:
        found = self._served.get((frontend, method))
        if found is None:
            found = self._served[frontend, method] = Served(self.in_flight_of(frontend))
        return found

    def added_up(self, frontend: str, method: str) -> Served:
        found = self.served(frontend, method)
        found.add_up()
        return found

    def _added_up(self) -> dict[tuple[str, str], Served]:
        for served in self._served.values():
            served.add_up()
        return self._served

    def describe(self) -> Iterable[Metric]:
        return []  # no other collector has these names

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "adapter_requests",
            "Requests answered, by listener, method and status.",
            labels=("frontend", "method", "code"),
        )
        total = _seconds(
            "adapter_request_seconds",
            "Duration of requests, from their head to the last byte of the answer.",
        )
        upstream = _seconds(
            "adapter_upstream_seconds",
            "How long of a request Triton was waited for, from the first byte sent to it to the"
            " head of its answer. Streams are left out.",
        )
        own = _seconds(
            "adapter_overhead_seconds",
            "The rest of the same requests: the adapter, and the caller's sending and taking.",
        )
        fast = CounterMetricFamily(
            "adapter_requests_fast",
            "Those of them that took the fast path of the http listener.",
            labels=("frontend", "method"),
        )
        for names, served in self._added_up().items():
            if served.fast:
                fast.add_metric(names, served.fast)
            for code, count in served.codes.items():
                requests.add_metric((*names, str(code)), count)
            served.total.add_to(total, names)
            served.upstream.add_to(upstream, names)
            served.own.add_to(own, names)
        yield from (requests, fast, total, upstream, own, self._in_flight())

    def _in_flight(self) -> Metric:
        gauge = GaugeMetricFamily(
            "adapter_requests_in_flight", "Requests not answered yet.", labels=("frontend",)
        )
        for frontend, in_flight in self._frontends.items():
            gauge.add_metric((frontend,), in_flight.count)
        return gauge


def _seconds(name: str, meaning: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, meaning, labels=("frontend", "method"))
