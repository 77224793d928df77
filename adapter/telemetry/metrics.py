"""Defines the Prometheus metrics, on a registry of their own. Their meanings: docs/metrics.md.

Each metric is one declaration in the body of Metrics. The tables of gauges.py declare those that
are read at each scrape, and traffic.py those of requests, which are counted there. Labels are
bounded: by listener, method, code and outcome.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from adapter.core.artifacts import CacheUse
from adapter.telemetry.gauges import PREFIX, ModelCollector, ScrapedState, StateCollector
from adapter.telemetry.history import History
from adapter.telemetry.traffic import Traffic

# SageMaker gives a load up after 360 s
_OPERATION_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 240, 300, 360, 600)
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
_SIZE_BUCKETS = tuple(4**power * 2**20 for power in range(9))  # 1 MiB to 64 GiB
_LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_RECOVERY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 2, 4, 10)
# Series that are shown before their first event, which Prometheus would not see otherwise: alerts
# and platforms read them.
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
_LOAD_OUTCOMES = (
    *("ok", "InvalidModel", "SourceMissing", "ModelTooLarge", "InsufficientMemory"),
    *("OutOfMemory", "LoadFailed", "NoRoom", "BackendUnavailable", "BackendTimeout", "bug"),
)
_UNLOAD_OUTCOMES = ("ok", "BackendUnavailable", "BackendTimeout", "bug")

_M = TypeVar("_M", Counter, Gauge, Histogram)


def own_version() -> str:
    """Return the version of the adapter."""
    return version("triton-adapter")


def about(triton: str) -> dict[str, str]:
    """Return the labels of the gauge build_info, by the value of the setting `triton`."""
    return {
        "version": own_version(),
        "python": platform.python_version(),
        "triton": triton,
    }


@dataclass(frozen=True, slots=True)
class _Declared:
    """Declares a metric of the class Metrics, of which each instance makes its own."""

    kind: type[Counter | Gauge | Histogram]
    meaning: str
    labels: Sequence[str]
    name: str  # if empty, the attribute's name
    expected: Iterable[Sequence[str]]  # labels of the series that are shown from the start on
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, attribute: str, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        """Make the metric, and register it."""
        name = PREFIX + (self.name or attribute)
        metric = self.kind(name, self.meaning, self.labels, registry=registry, **self.options)
        for values in self.expected:
            metric.labels(*values)
        return metric


def _metric(
    kind: type[_M],
    meaning: str,
    *labels: str,
    name: str = "",
    expected: Iterable[Sequence[str]] = (),
    **options: object,
) -> _M:
    """Declare a metric; typed as the metric that Metrics makes of it."""
    return cast("_M", _Declared(kind, meaning, labels, name, expected, options))


class Metrics:
    """Counts and times what happens in the adapter, and writes the page of all metrics."""

    operations = _metric(
        Counter,
        "Loads and unloads ended, by outcome: ok, or the name of the error.",
        "operation",
        "outcome",
        expected=[("load", each) for each in _LOAD_OUTCOMES]
        + [("unload", each) for each in _UNLOAD_OUTCOMES],
    )
    operation_seconds = _metric(
        Histogram,
        "Duration of loads and unloads.",
        "operation",
        buckets=_OPERATION_BUCKETS,
        expected=[["load"], ["unload"]],
    )
    load_timeout = _metric(
        Gauge,
        "The setting load_timeout_seconds, after which a load is given up.",
        name="load_timeout_seconds",
    )
    triton_exits = _metric(Counter, "Exits of Triton that the adapter has noticed.")
    retries = _metric(
        Counter,
        "Control calls sent to Triton again because they had not reached it.",
        "call",
        name="backend_retries",
    )
    operations_in_flight = _metric(
        Gauge, "Loads and unloads in progress, including waiting ones.", "operation"
    )
    loads_waiting = _metric(
        Gauge,
        "Loads that wait: for their turn (ModelMesh's, load_concurrency) or for memory.",
        "reason",
    )
    load_wait_seconds = _metric(
        Histogram,
        "How long loads waited, for the same reasons.",
        "reason",
        buckets=_WAIT_BUCKETS,
    )
    loaded_bytes = _metric(
        Histogram,
        "Bytes that a model is booked with at the end of its load.",
        name="loaded_model_bytes",
        buckets=_SIZE_BUCKETS,
    )
    connections = _metric(Gauge, "Connections that callers have open.", "listener")
    _connections_shed = _metric(
        Counter,
        "Connections above the limit: idle ones closed to make room, new ones refused. Connections"
        " closed for pipelined requests beyond the buffer, or for a flood of HTTP/2 frames."
        " Requests refused beyond the streams of their connection.",
        "listener",
        "how",
        name="connections_shed",
    )
    body_bytes = _metric(
        Gauge,
        "Bytes of request bodies, here or on their way to Triton, and of answers that wait for"
        " their callers. max_inflight_body_bytes is the limit.",
    )
    bodies_cut = _metric(
        Counter,
        "Bodies refused for lack of memory: slow, below 64 KiB/s while others waited; waited, for"
        " ten seconds.",
        "reason",
        expected=[["slow"], ["waited"]],
    )
    streams_cut = _metric(Counter, "Streams ended because their callers did not read the answers.")
    _out_of_memory = _metric(
        Counter,
        "Failures for lack of memory: refused before trying, at load, at inference.",
        "phase",
        name="oom",
        expected=[["refused"], ["load"], ["infer"]],
    )
    _out_of_memory_patterns = _metric(
        Counter,
        "The same by the pattern of the failure's text, empty without one.",
        "phase",
        "pattern",
        name="oom_patterns",
    )
    load_retries = _metric(
        Counter, "Loads tried again because memory came back after they had run out of it."
    )
    recovery_seconds = _metric(
        Histogram,
        "How long an unload waited for most of the model's memory to be free, once Triton had"
        " released it.",
        name="memory_recovery_seconds",
        buckets=_RECOVERY_BUCKETS,
    )
    prediction_ratio = _metric(
        Histogram,
        "Predicted bytes of a model divided by its measured bytes, by the basis of the prediction.",
        "basis",
        name="memory_prediction_ratio",
        buckets=_RATIO_BUCKETS,
    )
    endpoint_requests = _metric(
        Counter,
        "Calls that may load their model. hit: the model was loaded; disk: its files were in the"
        " disk cache; miss: neither.",
        "cache",
        expected=[[use.value] for use in CacheUse],
    )
    endpoint_wait_seconds = _metric(
        Histogram,
        "How long calls waited for their model to be fetched and loaded; those that found it"
        " loaded are not counted.",
        name="endpoint_model_loading_wait_seconds",
        buckets=_OPERATION_BUCKETS,
    )
    endpoint_downloading_seconds = _metric(
        Histogram,
        "How long models took to fetch from a store.",
        name="endpoint_model_downloading_seconds",
        buckets=_OPERATION_BUCKETS,
    )
    endpoint_loading_seconds = _metric(
        Histogram,
        "How long on-demand models took to load.",
        name="endpoint_model_loading_seconds",
        buckets=_OPERATION_BUCKETS,
    )
    endpoint_unloading_seconds = _metric(
        Histogram,
        "How long evicted models took to unload.",
        name="endpoint_model_unloading_seconds",
        buckets=_OPERATION_BUCKETS,
    )
    endpoint_loaded = _metric(
        Gauge,
        "Loaded on-demand models.",
        name="endpoint_loaded_models",
    )
    endpoint_waiting = _metric(
        Gauge,
        "Calls that wait for their model to be fetched and loaded.",
        name="endpoint_waiting_requests",
    )
    endpoint_evictions = _metric(
        Counter,
        "Models evicted from memory (room: for memory; disk: for room on disk; idle; changed: for"
        " a new version in the store; died: without their process) or from disk (limit: by"
        " cache_limit; disk: as the disk was full).",
        "from",
        "reason",
        expected=[("memory", each) for each in ("room", "disk", "idle", "changed")]
        + [("disk", each) for each in ("limit", "disk")],
    )
    endpoint_cache_bytes = _metric(
        Gauge,
        "Bytes of fetched models in cache_dir, and bytes reserved for fetches in progress.",
    )
    endpoint_cache_limit_bytes = _metric(Gauge, "The limit of those bytes.")
    endpoint_no_room = _metric(
        Counter, "Loads for calls that found no room, as all evictable models were in use."
    )
    endpoint_store_failures = _metric(
        Counter,
        "Calls to a store that failed, by the name of the error.",
        "error",
        expected=[["StoreDenied"], ["StoreUnavailable"]],
    )
    loop_lag = _metric(
        Histogram,
        "How late a timer of the event loop fired, measured ten times a second. All work is delayed"
        " as long while the adapter is short of CPU.",
        name="loop_lag_seconds",
        buckets=_LAG_BUCKETS,
    )

    def __init__(self, trace_id: Callable[[], str | None] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.traffic = Traffic(trace_id)
        self.registry.register(self.traffic)
        self.history = History()  # the latest events that are counted here
        ProcessCollector(registry=self.registry)
        for name, declared in vars(Metrics).items():
            if isinstance(declared, _Declared):
                setattr(self, name, declared.make(name, self.registry))
        for frontend, method, codes in _EXPECTED_CODES:
            self.traffic.served(frontend, method).expect(codes)

    def shedding(self, listener: str, *hows: str) -> Callable[[str], None]:
        """Return a function that counts one connection that is shed in one of these ways."""
        counters = {how: self._connections_shed.labels(listener, how) for how in hows}
        return lambda how: counters[how].inc()

    def count_out_of_memory(self, phase: str, pattern: str | None) -> None:
        """Count a failure for lack of memory in a phase: refused, load or infer."""
        self._out_of_memory.labels(phase).inc()
        self._out_of_memory_patterns.labels(phase, pattern or "").inc()

    @contextmanager
    def waiting_load(self, reason: str) -> Iterator[None]:
        """Count a load that waits in this block, and how long it does."""
        with (
            self.loads_waiting.labels(reason).track_inprogress(),
            self.load_wait_seconds.labels(reason).time(),
        ):
            yield

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics, and their content type.

        That is OpenMetrics where the caller's `Accept` asks for it, otherwise Prometheus's text.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # prometheus_client fails for versions that are no numbers
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type

    def bind(self, state: ScrapedState, models: ModelCollector) -> None:
        """Add the metrics that are read at each scrape."""
        self.registry.register(StateCollector(state))
        self.registry.register(models)
