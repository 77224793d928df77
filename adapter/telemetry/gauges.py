"""Defines the metrics that are read at each scrape: of this process, and of each model.

Names of models are callers' text, and an endpoint may serve thousands of models one after another:
the series of a model end with its unload, and there are none at all while too many are loaded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter.core.memory import Bytes, Device, DeviceState
from adapter.runtime import clock

PREFIX = "triton_adapter_"
MOST_MODELS = 100
# States of models that Triton has not loaded yet, or lost, in the words of the metrics.
_NOT_LOADED = frozenset({"PREPARING", "LOADING", "LOST"})


@dataclass(frozen=True, slots=True)
class State:
    """The functions that `_READINGS` calls at each scrape."""

    models: Callable[[], Mapping[Any, int]]  # by the state of a model
    devices: Callable[[], Mapping[Device, DeviceState]]
    gpu_unread: Callable[[], bool]
    triton_live: Callable[[], bool]
    ready: Callable[[], bool]
    abandoned: Callable[[], int]
    lost_lines: Callable[[], int]
    idle_seconds: Callable[[], float | None]  # None without models
    wanted: Callable[[], Mapping[str, int]]  # models of load_at_start and preload, by state
    about: Mapping[str, str]  # labels that describe this build and how it runs


_Series = Iterable[tuple[Sequence[str], float]]


def _one(value: float | None) -> _Series:
    return () if value is None else [((), value)]


def _of_devices(read: Callable[[DeviceState], int | None]) -> Callable[[State], _Series]:
    """Return what reads one figure of each device."""

    def series(state: State) -> _Series:
        found = ((device, read(figures)) for device, figures in state.devices().items())
        return [((device,), value) for device, value in found if value is not None]

    return series


class _Reading(NamedTuple):
    name: str
    meaning: str
    labels: Sequence[str]
    read: Callable[[State], _Series]


_READINGS = (
    _Reading(
        "models",
        "Models by state.",
        ["state"],
        lambda state: [((each.value,), count) for each, count in state.models().items()],
    ),
    _Reading(
        "models_wanted",
        "Models of load_at_start and preload: loaded, missing for any reason, or unloaded by a"
        " caller.",
        ["state"],
        lambda state: [((name,), count) for name, count in state.wanted().items()],
    ),
    _Reading(
        "memory_limit_bytes",
        "Bytes of each device that all models together may use.",
        ["device"],
        _of_devices(lambda device: device.limit_bytes),
    ),
    _Reading(
        "memory_reserved_bytes",
        "Bytes that loads in progress are expected to use, by device.",
        ["device"],
        _of_devices(lambda device: device.reserved_bytes),
    ),
    _Reading(
        "memory_used_by_models_bytes",
        "Bytes that loaded models are booked with, by device.",
        ["device"],
        _of_devices(lambda device: device.used_by_models_bytes),
    ),
    _Reading(
        "memory_free_bytes",
        "Bytes that the next load may use, by device.",
        ["device"],
        _of_devices(lambda device: device.free_bytes),
    ),
    _Reading(
        "memory_used_bytes",
        "Bytes that all programs use of each device, at most 2 seconds old; missing while they"
        " cannot be read.",
        ["device"],
        _of_devices(lambda device: device.used_bytes),
    ),
    _Reading(
        "memory_not_attributed_bytes",
        "Bytes of each device that neither an empty Triton nor a loaded model accounts for: growth,"
        " leaks, other programs, memory that allocators keep.",
        ["device"],
        _of_devices(lambda device: device.not_attributed_bytes),
    ),
    _Reading(
        "gpu_unread",
        "1 while a GPU is visible and its memory cannot be read.",
        (),
        lambda state: _one(state.gpu_unread()),
    ),
    _Reading("triton_live", "1 while Triton answers.", (), lambda state: _one(state.triton_live())),
    _Reading("ready", "1 while /readyz returns 200.", (), lambda state: _one(state.ready())),
    _Reading(
        "abandoned_requests",
        "Requests that Triton still works on after their callers have left or timed out.",
        (),
        lambda state: _one(state.abandoned()),
    ),
    _Reading(
        "least_recently_used_seconds",
        "Seconds since the last use of the least recently used model; missing without models.",
        (),
        lambda state: _one(state.idle_seconds()),
    ),
)


def _family(
    name: str,
    meaning: str,
    labels: Sequence[str],
    series: _Series,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = kind(PREFIX + name, meaning, labels=labels)
    for values, value in series:
        family.add_metric(values, value)
    return family


class _Scraped(Collector):
    """Collects what is read at each scrape, and so not at registration."""

    def describe(self) -> Iterable[Metric]:
        return []


class StateCollector(_Scraped):
    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        for each in _READINGS:
            yield _family(each.name, each.meaning, each.labels, each.read(self._state))
        yield _family(
            "log_lines_dropped",
            "Lines of the log dropped because stdout was not read in time.",
            (),
            _one(self._state.lost_lines()),
            CounterMetricFamily,
        )
        about = self._state.about
        yield _family("build_info", "Always 1.", [*about], [([*about.values()], 1)])


class Models(Protocol):
    """Lists the models whose metrics are read."""

    def __len__(self) -> int: ...

    def records(self) -> Sequence[Any]:
        """Return the record of each model."""


class ModelCollector(_Scraped):
    """Reads registry and ledger at each scrape; an inference pays nothing for it.

    With more than `most` models loaded, none has series.
    """

    def __init__(
        self,
        registry: Models,
        bytes_of: Callable[
            [Any], Bytes
        ],  # what the model of a record has reserved or is booked with
        most: int = MOST_MODELS,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._registry = registry
        self._bytes_of = bytes_of
        self._most = most
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        count, now = len(self._registry), self._clock()
        is_left_out = count > self._most
        records = [] if is_left_out else self._registry.records()
        loaded = [record for record in records if record.state.value not in _NOT_LOADED]
        yield _family(
            "models_without_series",
            "Models without triton_adapter_model_... series, once more than"
            f" {MOST_MODELS} are loaded; else 0.",
            (),
            _one(count if is_left_out else 0),
        )
        yield _family(
            "model_bytes",
            "Bytes of each model by the ledger and by device: reserved while its state is LOADING,"
            " then booked.",
            ["model", "device", "state"],
            [
                ((record.id, device, record.state.value), taken)
                for record in records
                for device, taken in self._bytes_of(record).items()
            ],
        )
        yield _family(
            "model_last_used_seconds",
            "Seconds since the last inference of each model began, or its load ended; 0 while one"
            " is in flight.",
            ["model"],
            [
                ((each.id,), 0.0 if each.usage.in_flight else now - each.usage.used_at)
                for each in loaded
            ],
        )
        yield _family(
            "model_requests",
            "Inferences of each model begun since its load.",
            ["model"],
            [((each.id,), each.usage.served) for each in loaded],
            CounterMetricFamily,
        )
