"""Makes series for each model that is loaded, as long as there are few models.

Names of models are callers' text, and an endpoint may serve thousands of models one after another:
the series of a model end with its unload, and there are none at all while too many are loaded.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adapter.core.memory import Bytes
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelState
from adapter.runtime import clock

MOST_MODELS = 100
_NOT_LOADED_YET = {ModelState.LOADING, ModelState.RETURNING}


class ModelCollector(Collector):
    """Reads registry and ledger at each scrape; an inference pays nothing for it.

    `bytes_of`: what the ledger has of a model, reserved or held. With more than `most` models
    loaded, none has series.
    """

    def __init__(
        self,
        registry: Registry,
        bytes_of: Callable[[ModelId], Bytes],
        most: int = MOST_MODELS,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._registry = registry
        self._bytes_of = bytes_of
        self._most = most
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read at registration

    def collect(self) -> Iterator[Metric]:
        count = len(self._registry)
        is_left_out = count > self._most
        yield GaugeMetricFamily(
            "triton_adapter_models_without_series",
            "Models that have no triton_adapter_model_... series, as there are more than"
            f" {MOST_MODELS} of them; 0 while each model has its own.",
            value=count if is_left_out else 0,
        )
        records = [] if is_left_out else self._registry.records()
        yield self._bytes(records)
        loaded = [record for record in records if record.state not in _NOT_LOADED_YET]
        yield self._last_used(loaded)
        yield self._requests(loaded)

    def _bytes(self, records: Iterable[ModelRecord]) -> Metric:
        family = GaugeMetricFamily(
            "triton_adapter_model_bytes",
            "What each model takes of each device, by the ledger: reserved while its state is"
            " LOADING, then held.",
            labels=["model", "device", "state"],
        )
        for record in records:
            for device, count in self._bytes_of(record.id).items():
                family.add_metric([record.id, device, record.state.value], count)
        return family

    def _last_used(self, records: Iterable[ModelRecord]) -> Metric:
        family = GaugeMetricFamily(
            "triton_adapter_model_last_used_seconds",
            "Since the last inference of each model began, or its load ended; 0 while one is in"
            " flight.",
            labels=["model"],
        )
        now = self._clock()
        for record in records:
            family.add_metric([record.id], 0.0 if record.in_flight else now - record.used_at)
        return family

    def _requests(self, records: Iterable[ModelRecord]) -> Metric:
        family = CounterMetricFamily(
            "triton_adapter_model_requests",
            "Inferences of each model that were begun since it was loaded.",
            labels=["model"],
        )
        for record in records:
            family.add_metric([record.id], record.served)
        return family
