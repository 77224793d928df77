"""Defines the metrics that are read at each scrape: of this process, and of each model.

Names of models are callers' text, and an endpoint may serve thousands of models one after another:
the series of a model end with its unload, and there are none at all while too many are loaded.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter.core.memory import Bytes, Device, DeviceState
from adapter.runtime import clock

PREFIX = "triton_adapter_"
MOST_MODELS = 100
# States of models that Triton has not loaded yet, or lost.
_NOT_LOADED = frozenset({"PREPARING", "LOADING", "LOST"})
_ABOUT = ("version", "python", "triton")  # the labels of build_info


@dataclass(frozen=True, slots=True)
class ScrapedState:
    """Holds the functions that `_STATE_METRICS` calls at each scrape; app/parts.py fills it."""

    models: Callable[[], Mapping[Any, int]]  # by the state of a model
    devices: Callable[[], Mapping[Device, DeviceState]]
    gpu_unread: Callable[[], bool]
    triton_live: Callable[[], bool]
    ready: Callable[[], bool]
    abandoned: Callable[[], int]
    lost_lines: Callable[[], int]
    idle_seconds: Callable[[], float | None]  # None without models
    wanted: Callable[[], Mapping[str, int]]  # models of load_at_start and preload, by state
    about: Mapping[str, str]  # the labels of build_info


@dataclass(frozen=True, slots=True)
class Models:
    """Holds what `_MODEL_METRICS` reads at one scrape."""

    records: Sequence[Any]  # of all models; none if too many are loaded
    loaded: Sequence[Any]  # records that callers get, of the models that Triton has: one a model
    left_out: int  # models without series
    bytes_of: Callable[[Any], Bytes]
    now: float


_Series: TypeAlias = Iterable[tuple[Sequence[str], float]]
_Source = TypeVar("_Source")


class _Scraped(NamedTuple, Generic[_Source]):
    """Declares a metric that is read at each scrape, without its prefix."""

    name: str
    meaning: str
    labels: Sequence[str]
    read: Callable[[_Source], _Series]
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily

    def collect(self, source: _Source) -> Metric:
        """Return the metric with its series of now."""
        family = self.kind(PREFIX + self.name, self.meaning, labels=self.labels)
        for labels, value in self.read(source):
            family.add_metric(labels, value)
        return family


def _sum_bytes(models: Models) -> _Series:
    """Return the bytes of each model by device and state.

    Another version of a model, or one that Triton is stuck with, has the same labels in that state.
    """
    sums = Counter[tuple[str, str, str]]()
    for record in models.records:
        for device, count in models.bytes_of(record).items():
            sums[record.id, device, record.state.value] += count
    return sums.items()


def _single(value: float | None) -> _Series:
    """Return the only series of a metric without labels; none if the value is not known."""
    return () if value is None else [((), value)]


def _per_device(read: Callable[[DeviceState], int | None]) -> Callable[[ScrapedState], _Series]:
    """Return a function that reads one figure of each device."""

    def read_series(state: ScrapedState) -> _Series:
        figures = ((name, read(device)) for name, device in state.devices().items())
        return [((name,), value) for name, value in figures if value is not None]

    return read_series


_STATE_METRICS: tuple[_Scraped[ScrapedState], ...] = (
    _Scraped(
        "models",
        "Models by state.",
        ["state"],
        lambda state: [((name.value,), count) for name, count in state.models().items()],
    ),
    _Scraped(
        "models_wanted",
        "Models of load_at_start and preload: loaded, missing for any reason, or unloaded by a"
        " caller.",
        ["state"],
        lambda state: [((name,), count) for name, count in state.wanted().items()],
    ),
    _Scraped(
        "memory_limit_bytes",
        "Bytes of each device that all models together may use.",
        ["device"],
        _per_device(lambda device: device.limit_bytes),
    ),
    _Scraped(
        "memory_reserved_bytes",
        "Bytes that loads in progress are expected to use, by device.",
        ["device"],
        _per_device(lambda device: device.reserved_bytes),
    ),
    _Scraped(
        "memory_used_by_models_bytes",
        "Bytes that loaded models are booked with, by device.",
        ["device"],
        _per_device(lambda device: device.used_by_models_bytes),
    ),
    _Scraped(
        "memory_free_bytes",
        "Bytes that the next load may use, by device.",
        ["device"],
        _per_device(lambda device: device.free_bytes),
    ),
    _Scraped(
        "memory_used_bytes",
        "Bytes that all programs use of each device, at most 2 seconds old; missing while they"
        " cannot be read.",
        ["device"],
        _per_device(lambda device: device.used_bytes),
    ),
    _Scraped(
        "memory_not_attributed_bytes",
        "Bytes of each device that neither an empty Triton nor a loaded model accounts for: growth,"
        " leaks, other programs, memory that allocators keep.",
        ["device"],
        _per_device(lambda device: device.not_attributed_bytes),
    ),
    _Scraped(
        "gpu_unread",
        "1 while a GPU is visible and its memory cannot be read.",
        (),
        lambda state: _single(state.gpu_unread()),
    ),
    _Scraped(
        "triton_live", "1 while Triton answers.", (), lambda state: _single(state.triton_live())
    ),
    _Scraped("ready", "1 while /readyz returns 200.", (), lambda state: _single(state.ready())),
    _Scraped(
        "abandoned_requests",
        "Requests that Triton still works on after their callers have left or timed out.",
        (),
        lambda state: _single(state.abandoned()),
    ),
    _Scraped(
        "least_recently_used_seconds",
        "Seconds since the last use of the least recently used model; missing without models.",
        (),
        lambda state: _single(state.idle_seconds()),
    ),
    _Scraped(
        "log_lines_dropped",
        "Lines of the log dropped because stdout was not read in time.",
        (),
        lambda state: _single(state.lost_lines()),
        CounterMetricFamily,
    ),
    _Scraped(
        "build_info",
        "Always 1.",
        _ABOUT,
        lambda state: [([state.about[label] for label in _ABOUT], 1)],
    ),
)
_MODEL_METRICS: tuple[_Scraped[Models], ...] = (
    _Scraped(
        "models_without_series",
        "Models without triton_adapter_model_... series, once more than"
        f" {MOST_MODELS} are loaded; else 0.",
        (),
        lambda models: _single(models.left_out),
    ),
    _Scraped(
        "model_bytes",
        "Bytes of each model by the ledger and by device: reserved while its state is LOADING,"
        " then booked.",
        ["model", "device", "state"],
        _sum_bytes,
    ),
    _Scraped(
        "model_last_used_seconds",
        "Seconds since the last inference of each model began, or its load ended; 0 while one"
        " is in flight.",
        ["model"],
        lambda models: [
            ((record.id,), 0.0 if record.usage.in_flight else models.now - record.usage.used_at)
            for record in models.loaded
        ],
    ),
    _Scraped(
        "model_requests",
        "Inferences of each model begun since its load.",
        ["model"],
        lambda models: [((record.id,), record.usage.served) for record in models.loaded],
        CounterMetricFamily,
    ),
)


class _ScrapeCollector(Collector):
    """Collects metrics at each scrape, and so not at registration."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: no other collector has these names."""
        return []


class StateCollector(_ScrapeCollector):
    """Collects the metrics about the adapter, its devices and Triton."""

    def __init__(self, state: ScrapedState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, read now."""
        return (metric.collect(self._state) for metric in _STATE_METRICS)


class Registry(Protocol):
    """Lists the models whose metrics are read."""

    def __len__(self) -> int: ...

    def records(self) -> Sequence[Any]:
        """Return the records of all models, several of one model included."""

    def get(self, model_id: Any, /) -> Any:
        """Return the record that callers of a model get; None without one."""


class ModelCollector(_ScrapeCollector):
    """Collects the metrics of each model; an inference pays nothing for it."""

    def __init__(
        self,
        registry: Registry,
        bytes_of: Callable[[Any], Bytes],  # reserved by a record, or booked for it
        limit: int = MOST_MODELS,  # with more models loaded, none has series
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._registry = registry
        self._bytes_of = bytes_of
        self._limit = limit
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, read now."""
        count = len(self._registry)
        is_left_out = count > self._limit
        records = [] if is_left_out else self._registry.records()
        models = Models(
            records=records,
            loaded=[record for record in records if self._is_loaded(record)],
            left_out=count if is_left_out else 0,
            bytes_of=self._bytes_of,
            now=self._clock(),
        )
        return (metric.collect(models) for metric in _MODEL_METRICS)

    def _is_loaded(self, record: Any) -> bool:
        """Return whether Triton has the model, and callers get this record of it."""
        is_given = self._registry.get(record.id) is record
        return is_given and record.state.value not in _NOT_LOADED
