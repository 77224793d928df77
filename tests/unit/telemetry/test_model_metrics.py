"""Series of single models: there while a model is, and while there are few."""

from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.registry import Registry
from adapter.core.states import ModelEvent
from adapter.telemetry.gauges import ModelCollector

Labels = tuple[tuple[str, str], ...]


class World:
    """Some models at 1000 s of the clock, and at most `most` that have series."""

    def __init__(self, most: int = 100) -> None:
        self.registry = Registry(lambda: 0.0)
        self.booked: dict[ModelId, dict[Device, int]] = {}
        bytes_of = lambda record: self.booked.get(record.id, {})  # noqa: E731
        self.collector = ModelCollector(self.registry, bytes_of, most, lambda: 1000.0)

    def begin(self, name: str, size: int = 100) -> ModelRecord:
        source = ModelSource("/")
        record = ModelRecord(ModelId(name), TritonName(name), source, LoadedFor.PLATFORM)
        self.booked[record.id] = {HOST: size}
        self.registry.add(record)
        self.registry.apply(record, ModelEvent.LOAD_SENT)
        return record

    def load(self, name: str, size: int = 100) -> ModelRecord:
        record = self.begin(name, size)
        self.registry.apply(record, ModelEvent.LOADED)
        record.usage.used_at = 990.0
        return record

    def unload(self, record: ModelRecord) -> None:
        self.registry.apply(record, ModelEvent.UNLOAD_STARTED)
        self.registry.apply(record, ModelEvent.UNLOADED)
        del self.booked[record.id]

    def series(self) -> dict[str, dict[Labels, float]]:
        return {
            family.name.removeprefix("triton_adapter_"): {
                tuple(sample.labels.items()): sample.value for sample in family.samples
            }
            for family in self.collector.collect()
        }


def of(name: str) -> Labels:
    return (("model", name),)


def test_the_bytes_of_each_device_are_told():
    world = World()
    record = world.load("m")
    world.booked[record.id] = {Device("GPU-1"): 5, Device("GPU-2"): 6}

    found = world.series()["model_bytes"]
    assert {labels[1][1]: count for labels, count in found.items()} == {"GPU-1": 5, "GPU-2": 6}


def test_loading_model_shows_reservation_and_no_use():
    world = World()
    world.begin("m", 300)
    found = world.series()

    assert found["model_bytes"] == {(("model", "m"), ("device", "host"), ("state", "LOADING")): 300}
    assert found["model_last_used_seconds"] == found["model_requests"] == {}


def test_too_many_models_have_no_series():
    world = World(most=2)
    records = [world.load(name) for name in ("a", "b", "c")]
    found = world.series()
    assert found.pop("models_without_series") == {(): 3}
    assert not any(found.values())

    world.unload(records[0])
    found = world.series()
    assert found["models_without_series"] == {(): 0}
    assert found["model_requests"].keys() == {of("b"), of("c")}
