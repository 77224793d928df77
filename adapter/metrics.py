"""Prometheus metrics, on a registry of their own. Names and meanings: docs/metrics.md.

Labels are bounded: by door, method, code and outcome, never by model (an endpoint may serve
thousands).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter.core.ledger import LedgerSnapshot, MemoryReading
from adapter.core.state import ModelState

_REQUEST_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
_OPERATION_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class State:
    """What the gauges are read from at each scrape."""

    models: Callable[[], dict[ModelState, int]]
    ledger: Callable[[], LedgerSnapshot]
    memory: Callable[[], MemoryReading | None]
    triton_live: Callable[[], bool]


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operations = Counter(
            "adapter_operations",
            "Loads and unloads ended, by outcome: ok, or the name of the error.",
            ["operation", "outcome"],
            registry=self.registry,
        )
        self.operation_seconds = Histogram(
            "adapter_operation_seconds",
            "Duration of loads and unloads.",
            ["operation"],
            buckets=_OPERATION_BUCKETS,
            registry=self.registry,
        )
        self.requests = Counter(
            "adapter_requests",
            "Requests answered, by door, method and status.",
            ["frontend", "method", "code"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "adapter_request_seconds",
            "Duration of requests, from their head to the last byte of the answer.",
            ["frontend", "method"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self.out_of_memory = Counter(
            "adapter_oom",
            "Failures for lack of memory: refused before trying, at load, at inference.",
            ["phase"],
            registry=self.registry,
        )
        self.retries = Counter(
            "adapter_backend_retries",
            "Control calls sent to Triton again because they had not reached it.",
            ["call"],
            registry=self.registry,
        )

    def watch(self, state: State) -> None:
        self.registry.register(_StateCollector(state))


class _StateCollector(Collector):
    def __init__(self, state: State) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read at registration

    def collect(self) -> Iterator[Metric]:
        models = GaugeMetricFamily("adapter_models", "Models by state.", labels=["state"])
        for state, count in self._state.models().items():
            models.add_metric([state.value], count)
        yield models
        book, reading = self._state.ledger(), self._state.memory()
        used = reading.used_bytes if reading else None
        memory = GaugeMetricFamily(
            "adapter_memory_bytes",
            "Memory as the ledger knows it; a kind is missing while nobody knows it.",
            labels=["kind"],
        )
        for kind, value in (
            ("limit", book.limit_bytes),
            ("reserved", book.reserved_bytes),
            ("held", book.held_bytes),
            ("used", used),
            ("free", book.free_bytes(used)),
        ):
            if value is not None:
                memory.add_metric([kind], value)
        yield memory
        yield GaugeMetricFamily(
            "adapter_triton_live", "1 while Triton answers.", value=self._state.triton_live()
        )
