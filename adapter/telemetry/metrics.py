"""Defines the Prometheus metrics, on a registry of their own. Their meanings: docs/metrics.md.

Labels are bounded: by listener, method, code and outcome. Only the series of model_metrics.py name
models, and only while few are loaded.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from adapter.core.artifacts import CacheUse
from adapter.core.ledger import LedgerSnapshot
from adapter.core.memory import MemoryReading
from adapter.core.state import ModelState
from adapter.telemetry.history import History
from adapter.telemetry.model_metrics import ModelCollector
from adapter.telemetry.traffic import Traffic

# SageMaker gives a load up after 360 s
_OPERATION_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 240, 300, 360, 600)
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZE_BUCKETS = tuple(4**power * 2**20 for power in range(9))  # 1 MiB to 64 GiB
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RECOVERY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5)
# Series that are shown before their first event, which Prometheus would not see otherwise: what
# alerts and platforms go by.
_HTTP_CODES = (200, 400, 404, 500, 503, 504, 507)
_GRPC_CODES = (
    *("OK", "NOT_FOUND", "INVALID_ARGUMENT", "INTERNAL", "UNAVAILABLE"),
    *("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"),
)
_EXPECTED_CODES: tuple[tuple[str, str, Sequence[int | str]], ...] = (
    ("sagemaker", "invoke", _HTTP_CODES),
    ("sagemaker", "load", (*_HTTP_CODES, 409)),
    ("v2", "infer", _HTTP_CODES),
    ("grpc", "ModelInfer", _GRPC_CODES),
    ("grpc_data", "ModelInfer", _GRPC_CODES),
    ("modelmesh", "loadModel", _GRPC_CODES),
)
_EXPECTED_OUTCOMES = {
    "load": (
        *("ok", "InvalidModel", "SourceMissing", "ModelTooLarge", "InsufficientMemory"),
        *("OutOfMemory", "LoadFailed", "BackendUnavailable", "BackendTimeout", "bug"),
    ),
    "unload": ("ok", "BackendUnavailable", "BackendTimeout", "bug"),
}
_MEMORY = {
    "limit": "What models may take of each device, all together.",
    "reserved": "What loads in progress are expected to take of each device.",
    "held": "What the loaded models take of each device, by the ledger.",
    "free": "What the next load may take of each device.",
    "used": "What all programs take of each device, as seen at most 2 seconds before; missing while"
    " nobody knows.",
}
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 2, 4, 10)


def own_version() -> str:
    return version("triton-adapter")


def about(triton: str) -> dict[str, str]:
    """Describe this process; `triton`: the setting of that name."""
    return {"version": own_version(), "python": platform.python_version(), "triton": triton}


@dataclass(frozen=True, slots=True)
class State:
    """The functions that the gauges are read from at each scrape.

    `abandoned`: requests that Triton works on and whose callers have gone.
    `idle_seconds`: time since the least recently used model was used; None without models.
    `wanted`: how many models of load_at_start and preload there are by state.
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
    wanted: Callable[[], dict[str, int]]
    about: Mapping[str, str]


class Metrics:
    """All metrics but those of State. `traffic` counts requests, with exemplars by `trace_id`;
    `history` has the latest of what is counted of models, one by one.
    """

    def __init__(self, trace_id: Callable[[], str | None] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.traffic = Traffic(trace_id)
        self.registry.register(self.traffic)
        self.history = History()
        ProcessCollector(registry=self.registry)
        self._count_operations()
        self._count_waits()
        self._count_connections()
        self._count_bodies()
        self._count_memory()
        self._count_on_demand()
        self._count_evictions()
        self.triton_log_dropped = self._counter(
            "triton_adapter_triton_log_lines_dropped",
            "Lines of the embedded tritonserver's output that were too many a second to be logged.",
        )

        self.loop_lag = self._histogram(
            "triton_adapter_loop_lag_seconds",
            "How late the event loop came to what was due, measured ten times a second: while the"
            " adapter is short of CPU, all that it does waits so long.",
            (),
            _LAG_BUCKETS,
        )
        self._expect_first_events()

    def _expect_first_events(self) -> None:
        for frontend, method, codes in _EXPECTED_CODES:
            self.traffic.served(frontend, method).expect(codes)
        for operation, outcomes in _EXPECTED_OUTCOMES.items():
            self.operation_seconds.labels(operation)
            for outcome in outcomes:
                self.operations.labels(operation, outcome)
        for phase in ("refused", "load", "infer"):
            self._out_of_memory.labels(phase)

    def _count_operations(self) -> None:
        self.operations = self._counter(
            "triton_adapter_operations",
            "Loads and unloads ended, by outcome: ok, or the name of the error.",
            ("operation", "outcome"),
        )
        self.operation_seconds = self._histogram(
            "triton_adapter_operation_seconds",
            "Duration of loads and unloads.",
            ("operation",),
            _OPERATION_BUCKETS,
        )
        self.load_timeout = Gauge(
            "triton_adapter_load_timeout_seconds",
            "After how long a load is given up: the setting load_timeout_seconds.",
            registry=self.registry,
        )
        self.processes_killed = self._counter(
            "triton_adapter_processes_killed",
            "Processes of models that did not end with them and were killed.",
        )
        self.left_running = Gauge(
            "triton_adapter_models_left_running",
            "Models that are gone, or whose unload does not end, of which something still runs in"
            " Triton. No size is learned meanwhile.",
            registry=self.registry,
        )
        self.retries = self._counter(
            "triton_adapter_backend_retries",
            "Control calls sent to Triton again because they had not reached it.",
            ("call",),
        )

    def _count_waits(self) -> None:
        self.operations_in_flight = Gauge(
            "triton_adapter_operations_in_flight",
            "Loads and unloads under way, those that wait among them.",
            ("operation",),
            registry=self.registry,
        )
        self.loads_waiting = Gauge(
            "triton_adapter_loads_waiting",
            "Loads that wait: for their turn (ModelMesh's, load_concurrency) or for memory.",
            ("reason",),
            registry=self.registry,
        )
        self.load_wait_seconds = self._histogram(
            "triton_adapter_load_wait_seconds",
            "How long loads waited, for the same reasons.",
            ("reason",),
            _WAIT_BUCKETS,
        )
        self.loaded_bytes = self._histogram(
            "triton_adapter_loaded_model_bytes",
            "What the ledger held for a model when its load had ended.",
            (),
            _SIZE_BUCKETS,
        )

    def _count_connections(self) -> None:
        self.connections = Gauge(
            "triton_adapter_connections",
            "Connections that callers have open.",
            ("listener",),
            registry=self.registry,
        )
        self._connections_shed = self._counter(
            "triton_adapter_connections_shed",
            "Connections that were one too many: idle ones closed to make room, new ones refused."
            " Those closed for what they sent: pipelined, more than there was room for; flood of"
            " HTTP/2 frames. And requests refused beyond the streams of their connection.",
            ("listener", "how"),
        )

    def shedding(self, listener: str, *hows: str) -> Callable[[str], None]:
        """Return what counts connections that are shed, in one of these ways."""
        shed = {how: self._connections_shed.labels(listener, how) for how in hows}
        return lambda how: shed[how].inc()

    def _count_bodies(self) -> None:
        self.body_bytes = Gauge(
            "triton_adapter_body_bytes",
            "Callers' bytes in memory, here or on their way to Triton: of bodies, and of answers"
            " that wait for their callers. max_inflight_body_bytes is the limit.",
            registry=self.registry,
        )
        self.kept_bytes = Gauge(
            "triton_adapter_kept_bytes",
            "Those of them that wait for whoever takes them: answers, frames of gRPC, and requests"
            " behind another one on their connection. Beyond 64 MiB they are turned away.",
            registry=self.registry,
        )
        self.bodies_waiting = Gauge(
            "triton_adapter_bodies_waiting",
            "Callers who are not read from until there is room.",
            registry=self.registry,
        )
        self.bodies_cut = self._counter(
            "triton_adapter_bodies_cut",
            "Bodies refused for want of room: slow, while others waited; long, which would have"
            " taken longer than those that waited; waited, for ten seconds.",
            ("reason",),
        )
        for reason in ("slow", "long", "waited"):
            self.bodies_cut.labels(reason)
        self.streams_cut = self._counter(
            "triton_adapter_streams_cut",
            "Streams ended because their callers did not take the answers.",
        )

    def count_out_of_memory(self, phase: str, pattern: str | None) -> None:
        """Count a failure for lack of memory; `phase`: refused, load or infer."""
        self._out_of_memory.labels(phase).inc()
        self._out_of_memory_patterns.labels(phase, pattern or "").inc()

    @contextmanager
    def waiting_load(self, reason: str) -> Iterator[None]:
        with (
            self.loads_waiting.labels(reason).track_inprogress(),
            self.load_wait_seconds.labels(reason).time(),
        ):
            yield

    def _count_memory(self) -> None:
        self._out_of_memory = self._counter(
            "triton_adapter_oom",
            "Failures for lack of memory: refused before trying, at load, at inference.",
            ("phase",),
        )
        self._out_of_memory_patterns = self._counter(
            "triton_adapter_oom_patterns",
            "The same by the pattern of the failure's text, empty without one.",
            ("phase", "pattern"),
        )
        self.load_retries = self._counter(
            "triton_adapter_load_retries",
            "Loads tried again because memory came back after they had run out of it.",
        )
        self.recovery_seconds = self._histogram(
            "triton_adapter_memory_recovery_seconds",
            "How long an unload waited for most of the model's memory to be free, once Triton had"
            " let go.",
            (),
            _RECOVERY_BUCKETS,
        )
        self.prediction_ratio = self._histogram(
            "triton_adapter_memory_prediction_ratio",
            "Bytes that a model was predicted to take over those that it was measured to, by what"
            " the prediction stood on.",
            ("basis",),
            _RATIO_BUCKETS,
        )

    def _count_on_demand(self) -> None:
        prefix, buckets = "triton_adapter_endpoint_model", _OPERATION_BUCKETS
        self.endpoint_requests = self._counter(
            "triton_adapter_endpoint_requests",
            "Calls that may load their model, by what they found: hit, the model loaded; disk, its"
            " files in the disk cache; miss, neither.",
            ("cache",),
        )
        self.endpoint_wait_seconds = self._histogram(
            f"{prefix}_loading_wait_seconds",
            "How long calls waited for their model to be fetched and loaded; those that found it"
            " loaded are not counted.",
            (),
            buckets,
        )
        self.endpoint_downloading_seconds = self._histogram(
            f"{prefix}_downloading_seconds",
            "How long models took to fetch from a store.",
            (),
            buckets,
        )
        self.endpoint_loading_seconds = self._histogram(
            f"{prefix}_loading_seconds",
            "How long models that calls asked for took to load.",
            (),
            buckets,
        )
        self.endpoint_unloading_seconds = self._histogram(
            f"{prefix}_unloading_seconds", "How long evicted models took to unload.", (), buckets
        )
        self.endpoint_loaded = Gauge(
            "triton_adapter_endpoint_loaded_models",
            "Models that are loaded since calls asked for them.",
            registry=self.registry,
        )
        self.endpoint_waiting = Gauge(
            "triton_adapter_endpoint_waiting_requests",
            "Calls that wait for their model to be fetched and loaded.",
            registry=self.registry,
        )

    def _count_evictions(self) -> None:
        self.endpoint_evictions = self._counter(
            "triton_adapter_endpoint_evictions",
            "Models that were evicted from memory (for room there: room; for room on disk: disk;"
            " since they were idle; since the store has another version: changed) or from disk (by"
            " cache_limit: limit; since the disk was full: disk).",
            ("from", "reason"),
        )
        self.endpoint_cache_bytes = Gauge(
            "triton_adapter_endpoint_cache_bytes",
            "What fetched models take in cache_dir, and what is reserved for those on their way.",
            registry=self.registry,
        )
        self.endpoint_cache_limit_bytes = Gauge(
            "triton_adapter_endpoint_cache_limit_bytes",
            "What they may take.",
            registry=self.registry,
        )
        self.endpoint_no_room = self._counter(
            "triton_adapter_endpoint_no_room",
            "Loads that calls asked for and that found no room: all that could go was in use.",
        )
        self.endpoint_store_failures = self._counter(
            "triton_adapter_endpoint_store_failures",
            "Calls to a store that failed, by the name of the error.",
            ("error",),
        )
        for use in CacheUse:
            self.endpoint_requests.labels(use.value)
        for reason in ("room", "disk", "idle", "changed"):
            self.endpoint_evictions.labels("memory", reason)
        for reason in ("limit", "disk"):
            self.endpoint_evictions.labels("disk", reason)
        for error in ("StoreDenied", "StoreUnavailable"):
            self.endpoint_store_failures.labels(error)

    def _counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(
        self, name: str, meaning: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type: OpenMetrics where the caller's `Accept` asks
        for it, else Prometheus's text format.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # prometheus_client trips over versions that are none
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type

    def bind(self, state: State, models: ModelCollector) -> None:
        self.registry.register(_StateCollector(state))
        self.registry.register(models)


class _StateCollector(Collector):
    def __init__(self, state: State) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read at registration

    def collect(self) -> Iterator[Metric]:
        models = GaugeMetricFamily("triton_adapter_models", "Models by state.", labels=["state"])
        for state, count in self._state.models().items():
            models.add_metric([state.value], count)
        yield models
        wanted = GaugeMetricFamily(
            "triton_adapter_models_wanted",
            "Models of load_at_start and preload: loaded, missing for whatever reason, or unloaded"
            " by a caller and wanted no more.",
            labels=["state"],
        )
        for name, count in self._state.wanted().items():
            wanted.add_metric([name], count)
        yield wanted
        yield from self._memory()
        yield GaugeMetricFamily(
            "triton_adapter_triton_live", "1 while Triton answers.", value=self._state.triton_live()
        )
        yield GaugeMetricFamily(
            "triton_adapter_ready", "1 while /readyz says so.", value=self._state.ready()
        )
        yield GaugeMetricFamily(
            "triton_adapter_abandoned_requests",
            "Requests that Triton still works on and whose callers have left or had no answer in"
            " time.",
            value=self._state.abandoned(),
        )
        yield self._idle()
        yield CounterMetricFamily(
            "triton_adapter_log_lines_dropped",
            "Lines of the log that were dropped because nobody read it.",
            value=self._state.lost_lines(),
        )
        about = GaugeMetricFamily(
            "triton_adapter_build_info", "Always 1.", labels=[*self._state.about]
        )
        about.add_metric([*self._state.about.values()], 1)
        yield about

    def _idle(self) -> Metric:
        seconds = self._state.idle_seconds()
        return GaugeMetricFamily(
            "triton_adapter_least_recently_used_seconds",
            "Since the last use of the model that was used least recently; missing without models.",
            value=seconds,
        )

    def _memory(self) -> Iterable[Metric]:
        book, reading = self._state.ledger(), self._state.memory()
        read = reading.used if reading else {}
        families = {kind: _memory_gauge(kind, meaning) for kind, meaning in _MEMORY.items()}
        for device, figures in book.devices.items():
            used = read.get(device)
            families["limit"].add_metric([device], figures.limit_bytes)
            families["reserved"].add_metric([device], figures.reserved_bytes)
            families["held"].add_metric([device], figures.held_bytes)
            families["free"].add_metric([device], figures.free_bytes(used))
            if used is not None:
                families["used"].add_metric([device], used)
        return families.values()


def _memory_gauge(kind: str, meaning: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"triton_adapter_memory_{kind}_bytes", meaning, labels=["device"])
