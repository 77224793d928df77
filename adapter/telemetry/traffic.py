"""Counts requests by listener, method and code, and measures how long they took, also in Triton.

Only the event loop's thread counts, and therefore without locks. Requests are noted as they end and
added up by the hundred, so that a request pays for one append.
"""

import logging
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from operator import sub

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from adapter.runtime import clock

log = logging.getLogger(__name__)
_ROOT = logging.getLogger()

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    # an inference may take 300 s by default, a load that SageMaker asked for 360 s
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 240, 300, 360),
)
_GOOD = {200, "OK"}
_NOTED = 256  # requests that are added up at once, in 0.07 ms
_OWN_SECONDS = (0.000025, 0.00005, 0.0001, 0.00025, *_SECONDS[:9], 0.5, 1, 2.5, 5, 10, 30)


class _Histogram:
    """Counts values in buckets, many at once."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = [*(float(bound) for bound in bounds), inf]
        self._counts = [0] * len(self._bounds)  # of values up to each bound
        self._exemplars: dict[int, Exemplar] = {}  # by bucket: the last request with a trace
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count the values.

        Sorting many and searching for each bound takes half as long as searching for each value.
        """
        ordered = sorted(values)
        self._sum += sum(ordered)
        for bucket, bound in enumerate(self._bounds):
            self._counts[bucket] += bisect_right(ordered, bound)

    def keep(self, exemplar: Exemplar) -> None:
        """Show this request as the example of its bucket."""
        self._exemplars[bisect_left(self._bounds, exemplar.value)] = exemplar

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the series of these labels to a metric, unless there are no values yet."""
        buckets = [
            (str(bound), float(self._counts[bucket]), self._exemplars.get(bucket))
            for bucket, bound in enumerate((*self._bounds[:-1], "+Inf"))
        ]
        if self._counts[-1]:
            # typed as if each bucket needed an exemplar or none were allowed
            family.add_metric(labels, buckets, self._sum)  # type: ignore[arg-type]


class InFlight:
    """Counts the requests of one frontend that are not answered yet."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Served:
    """Counts the answers of one method of one frontend. The figures are complete after `add_up`.

    Callers keep a reference: a look-up costs as much as a count.
    """

    __slots__ = (
        "_names",
        "_noted",
        "_trace_id",
        "answers",
        "callers",
        "codes",
        "in_flight",
        "own",
        "total",
        "upstream",
    )

    def __init__(
        self,
        in_flight: InFlight,
        frontend: str,
        method: str,
        trace_id: Callable[[], str | None] | None,
    ) -> None:
        self._names = {"frontend": frontend, "method": method}
        self._trace_id = trace_id
        self.in_flight = in_flight
        self._noted: list[tuple[int | str, float, float | None, float, Exemplar | None]] = []
        self.codes: dict[int | str, int] = {}
        self.answers = 0
        self.total = _Histogram(_SECONDS)
        self.upstream = _Histogram(_SECONDS)
        self.own = _Histogram(_OWN_SECONDS)
        self.callers = _Histogram(_SECONDS)

    def expect(self, codes: Iterable[int | str]) -> None:
        """Show these codes from the start.

        Prometheus does not see the first event of a series that begins with it.
        """
        self.codes = dict.fromkeys(codes, 0) | self.codes

    def count(
        self,
        code: int | str,
        seconds: float,
        # that the request waited for Triton; None if Triton was not asked, or for a stream
        upstream_seconds: float | None = None,
        # that it waited for its caller to send the body and to take the answer
        callers_seconds: float = 0.0,
        model_id: str | None = None,  # for the log
    ) -> None:
        """Count one answer."""
        if _ROOT.level <= logging.DEBUG:  # a quarter of what isEnabledFor takes
            self._log(code, seconds, upstream_seconds, model_id)
        exemplar = None if self._trace_id is None else _make_exemplar(self._trace_id(), seconds)
        self._noted.append((code, seconds, upstream_seconds, callers_seconds, exemplar))
        if len(self._noted) == _NOTED:
            self.add_up()

    def _log(
        self, code: int | str, seconds: float, triton_seconds: float | None, model_id: str | None
    ) -> None:
        """Log one answer, at debug."""
        fields: dict[str, object] = {**self._names, "status": code, "seconds": round(seconds, 6)}
        if model_id is not None:
            fields["model_id"] = model_id
        if triton_seconds is not None:
            fields["triton_seconds"] = round(triton_seconds, 6)
        log.debug("request.answered", extra=fields)

    def add_up(self) -> None:
        """Count what was noted, by the column: that takes half as long as request by request."""
        noted = self._noted
        if not noted:
            return
        self._noted = []
        codes, totals, upstreams, callers, exemplars = zip(*noted, strict=True)
        counts = Counter(codes)
        for code, count in counts.items():
            self.codes[code] = self.codes.get(code, 0) + count
        self.total.observe(totals)
        if exemplars.count(None) < len(noted):
            for exemplar in filter(None, exemplars):
                self.total.keep(exemplar)
        if None in upstreams:
            noted = [each for each in noted if each[2] is not None]
            if not noted:
                return
            codes, totals, upstreams, callers, _ = zip(*noted, strict=True)
            counts = Counter(codes)
        self.answers += sum(map(counts.__getitem__, _GOOD))
        self.upstream.observe(upstreams)
        self.callers.observe(callers)
        own = map(sub, map(sub, totals, upstreams), callers)
        self.own.observe([seconds if seconds > 0 else 0.0 for seconds in own])


def _make_exemplar(trace_id: str | None, seconds: float) -> Exemplar | None:
    return None if trace_id is None else Exemplar({"trace_id": trace_id}, seconds, clock.wall())


class Traffic(Collector):
    """Counts and times all requests."""

    def __init__(self, trace_id: Callable[[], str | None] | None = None) -> None:
        self._trace_id = trace_id  # of the current request, if it is recorded
        self._frontends: dict[str, InFlight] = {}
        self._served: dict[tuple[str, str], Served] = {}

    @property
    def in_flight(self) -> int:
        """Return how many requests are not answered yet."""
        return sum(each.count for each in self._frontends.values())

    @property
    def answers(self) -> int:
        """Return how many successful answers came from Triton, without streams."""
        return sum(served.answers for served in self._add_up().values())

    def find_in_flight(self, frontend: str) -> InFlight:
        """Return the count of a frontend's requests that are not answered yet."""
        return self._frontends.setdefault(frontend, InFlight())

    def served(self, frontend: str, method: str) -> Served:
        """Return what counts the answers of a method."""
        served = self._served.get((frontend, method))
        if served is None:
            in_flight = self.find_in_flight(frontend)
            served = Served(in_flight, frontend, method, self._trace_id)
            self._served[frontend, method] = served
        return served

    def _add_up(self) -> dict[tuple[str, str], Served]:
        """Return all counts, after they are complete."""
        for served in self._served.values():
            served.add_up()
        return self._served

    def describe(self) -> Iterable[Metric]:
        """Return nothing: no other collector has these names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of requests."""
        requests = CounterMetricFamily(
            "triton_adapter_requests",
            "Requests answered, by listener, method and status.",
            labels=("frontend", "method", "code"),
        )
        total = _make_histogram(
            "triton_adapter_request_seconds",
            "Duration of requests, from their head to the last byte of the answer.",
        )
        upstream = _make_histogram(
            "triton_adapter_upstream_seconds",
            "Part of a request that waited for Triton, from the first byte sent to it to the head"
            " of its answer. Streams are left out.",
        )
        own = _make_histogram(
            "triton_adapter_overhead_seconds",
            "The rest of the same requests: the time in the adapter itself.",
        )
        callers = _make_histogram(
            "triton_adapter_caller_seconds",
            "Part of the same requests that waited for the caller: while bodies arrive that are"
            " buffered first, and while answers are sent.",
        )
        for names, served in self._add_up().items():
            for code, count in served.codes.items():
                requests.add_metric((*names, str(code)), count)
            served.total.add_to(total, names)
            served.upstream.add_to(upstream, names)
            served.own.add_to(own, names)
            served.callers.add_to(callers, names)
        yield from (requests, total, upstream, own, callers, self._collect_in_flight())

    def _collect_in_flight(self) -> Metric:
        gauge = GaugeMetricFamily(
            "triton_adapter_requests_in_flight", "Requests not answered yet.", labels=("frontend",)
        )
        for frontend, in_flight in self._frontends.items():
            gauge.add_metric((frontend,), in_flight.count)
        return gauge


def _make_histogram(name: str, meaning: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, meaning, labels=("frontend", "method"))


class Waited:
    """Records how long one request waited for Triton and for its caller.

    The code that calls Triton and the frontends add to it; whoever counts the answer reads it.
    """

    __slots__ = ("callers_seconds", "is_left_out", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None  # None before any call whose duration is meaningful
        self.callers_seconds = 0.0
        self.is_left_out = False  # the request waited for its model, so no duration is meaningful

    def add(self, seconds: float) -> None:
        """Add how long the request has waited for Triton."""
        if not self.is_left_out:
            self.seconds = (self.seconds or 0.0) + seconds


# The record of the request that the current task serves; tasks that it starts share the record.
WAITED: ContextVar[Waited | None] = ContextVar("waited", default=None)


@contextmanager
def waiting_for_caller() -> Iterator[None]:
    """Count the time of this block as one in which the current request waits for its caller."""
    started_at = clock.monotonic()
    try:
        yield
    finally:
        if (waited := WAITED.get()) is not None:
            waited.callers_seconds += clock.monotonic() - started_at


def add_waited(seconds: float) -> None:
    """Add how long the current request, if there is one, has waited for Triton."""
    if (waited := WAITED.get()) is not None:
        waited.add(seconds)


def leave_out() -> None:
    """Leave the current request, if there is one, out of the figures about the adapter's own time.

    Such a request waits for its model.
    """
    if (waited := WAITED.get()) is not None:
        waited.seconds = None
        waited.is_left_out = True
