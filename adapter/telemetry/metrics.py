"""Defines the Prometheus metrics, on a registry of their own. Their meanings: docs/metrics.md.

Labels are bounded: by listener, method, code and outcome, never by model (an endpoint may serve
thousands).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter.core.ledger import LedgerSnapshot
from adapter.core.memory import MemoryReading
from adapter.core.state import ModelState
from adapter.telemetry.traffic import Traffic

_OPERATION_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZE_BUCKETS = tuple(4**power * 2**20 for power in range(9))  # 1 MiB to 64 GiB
_RECOVERY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 2, 4, 10)


@dataclass(frozen=True, slots=True)
class State:
    """The functions that the gauges are read from at each scrape.

    `abandoned`: requests that Triton works on and whose callers have gone.
    `idle_seconds`: time since the least recently used model was used; None without models.
    `about`: labels that describe this build and how it runs.
    """

    models: Callable[[], dict[ModelState, int]]
    ledger: Callable[[], LedgerSnapshot]
    memory: Callable[[], MemoryReading | None]
    triton_live: Callable[[], bool]
    ready: Callable[[], bool]
    abandoned: Callable[[], int]
    lost_lines: Callable[[], int]
    idle_seconds: Callable[[], float | None]
    about: Mapping[str, str]


class Metrics:
    """All metrics but those of State. `traffic` counts requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.traffic = Traffic()
        self.registry.register(self.traffic)
        ProcessCollector(registry=self.registry)
        self._count_operations()
        self._count_waits()
        self._count_connections()
        self._count_memory()
        self.triton_log_dropped = self._counter(
            "adapter_triton_log_lines_dropped",
            "Lines of the embedded tritonserver's output that were too many a second to be logged.",
        )

    def _count_operations(self) -> None:
        self.operations = self._counter(
            "adapter_operations",
            "Loads and unloads ended, by outcome: ok, or the name of the error.",
            ("operation", "outcome"),
        )
        self.operation_seconds = self._histogram(
            "adapter_operation_seconds",
            "Duration of loads and unloads.",
            ("operation",),
            _OPERATION_BUCKETS,
        )
        self.processes_killed = self._counter(
            "adapter_processes_killed",
            "Processes of models that did not end with them and were killed.",
        )
        self.left_running = Gauge(
            "adapter_models_left_running",
            "Models that are gone, or whose unload does not end, of which something still runs in"
            " Triton. No size is learned meanwhile.",
            registry=self.registry,
        )
        self.retries = self._counter(
            "adapter_backend_retries",
            "Control calls sent to Triton again because they had not reached it.",
            ("call",),
        )

    def _count_waits(self) -> None:
        self.operations_in_flight = Gauge(
            "adapter_operations_in_flight",
            "Loads and unloads under way, those that wait among them.",
            ("operation",),
            registry=self.registry,
        )
        self.loads_waiting = Gauge(
            "adapter_loads_waiting",
            "Loads that wait: for their turn (ModelMesh's, load_concurrency) or for memory.",
            ("reason",),
            registry=self.registry,
        )
        self.load_wait_seconds = self._histogram(
            "adapter_load_wait_seconds",
            "How long loads waited, for the same reasons.",
            ("reason",),
            _WAIT_BUCKETS,
        )
        self.loaded_bytes = self._histogram(
            "adapter_loaded_model_bytes",
            "What the ledger held for a model when its load had ended.",
            (),
            _SIZE_BUCKETS,
        )

    def _count_connections(self) -> None:
        self.connections = Gauge(
            "adapter_connections",
            "Connections that callers have open.",
            ("listener",),
            registry=self.registry,
        )
        self.connections_shed = self._counter(
            "adapter_connections_shed",
            "Connections that were one too many: idle ones closed to make room, new ones refused.",
            ("listener", "how"),
        )

    @contextmanager
    def waiting_load(self, reason: str) -> Iterator[None]:
        with (
            self.loads_waiting.labels(reason).track_inprogress(),
            self.load_wait_seconds.labels(reason).time(),
        ):
            yield

    def _count_memory(self) -> None:
        self.out_of_memory = self._counter(
            "adapter_oom",
            "Failures for lack of memory: refused before trying, at load, at inference; and by the"
            " pattern of the failure's text.",
            ("phase", "pattern"),
        )
        self.load_retries = self._counter(
            "adapter_load_retries",
            "Loads tried again because memory came back after they had run out of it.",
        )
        self.recovery_seconds = self._histogram(
            "adapter_memory_recovery_seconds",
            "How long an unload waited for most of the model's memory to be free, once Triton had"
            " let go.",
            (),
            _RECOVERY_BUCKETS,
        )
        self.prediction_ratio = self._histogram(
            "adapter_memory_prediction_ratio",
            "Bytes that a model was predicted to take over those that it was measured to, by what"
            " the prediction stood on.",
            ("basis",),
            _RATIO_BUCKETS,
        )

    def _counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)

    def bind(self, state: State) -> None:
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
        yield self._memory()
        yield GaugeMetricFamily(
            "adapter_triton_live", "1 while Triton answers.", value=self._state.triton_live()
        )
        yield GaugeMetricFamily(
            "adapter_ready", "1 while /readyz says so.", value=self._state.ready()
        )
        yield GaugeMetricFamily(
            "adapter_abandoned_requests",
            "Requests that Triton still works on and whose callers have left or had no answer in"
            " time.",
            value=self._state.abandoned(),
        )
        yield self._idle()
        yield CounterMetricFamily(
            "adapter_log_lines_dropped",
            "Lines of the log that were dropped because nobody read it.",
            value=self._state.lost_lines(),
        )
        about = GaugeMetricFamily("adapter_build_info", "Always 1.", labels=[*self._state.about])
        about.add_metric([*self._state.about.values()], 1)
        yield about

    def _idle(self) -> Metric:
        seconds = self._state.idle_seconds()
        return GaugeMetricFamily(
            "adapter_least_recently_used_seconds",
            "Since the last use of the model that was used least recently; missing without models.",
            value=seconds,
        )

    def _memory(self) -> Metric:
        book, reading = self._state.ledger(), self._state.memory()
        read = reading.used if reading else {}
        memory = GaugeMetricFamily(
            "adapter_memory_bytes",
            "Memory of each device as the ledger knows it; a kind is missing while nobody knows."
            " `used` was seen at most 2 seconds before.",
            labels=["device", "kind"],
        )
        for device, figures in book.devices.items():
            used = read.get(device)
            memory.add_metric([device, "limit"], figures.limit_bytes)
            memory.add_metric([device, "reserved"], figures.reserved_bytes)
            memory.add_metric([device, "held"], figures.held_bytes)
            memory.add_metric([device, "free"], figures.free_bytes(used))
            if used is not None:
                memory.add_metric([device, "used"], used)
        return memory
