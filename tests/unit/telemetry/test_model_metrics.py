"""Series of single models: there while a model is, and while there are few."""

from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId, ModelSource
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

    def make_record(self, name: str) -> ModelRecord:
        model_id = ModelId(name)
        free_name = self.registry.free_name(model_id)
        return ModelRecord(model_id, free_name, ModelSource("/"), LoadedFor.PLATFORM)

    def begin(self, name: str, size: int = 100) -> ModelRecord:
        record = self.make_record(name)
        self.booked[record.id] = {HOST: size}
        self.registry.add(record)
        self.registry.apply(record, ModelEvent.LOAD_SENT)
        return record

    def load(self, name: str, size: int = 100) -> ModelRecord:
        record = self.begin(name, size)
        self.registry.apply(record, ModelEvent.LOADED)
        record.usage.used_at = 990.0
        return record

    def replace(self, old: ModelRecord) -> ModelRecord:
        """Load another version beside the old one, and give it to callers."""
        new = self.make_record(old.id)
        self.registry.add_beside(new)
        self.registry.apply(new, ModelEvent.LOAD_SENT)
        self.registry.apply(new, ModelEvent.LOADED)
        self.registry.switch(old, new)
        return new

    def get_stuck(self, name: str) -> ModelRecord:
        """Load a model in vain, so that Triton keeps it."""
        record = self.begin(name)
        for event in (ModelEvent.LOAD_FAILED, ModelEvent.GIVEN_UP):
            self.registry.apply(record, event)
        return record

    def unload(self, record: ModelRecord) -> None:
        self.registry.apply(record, ModelEvent.UNLOAD_STARTED)
        self.registry.apply(record, ModelEvent.UNLOADED)
        del self.booked[record.id]

    def series(self) -> dict[str, dict[Labels, float]]:
        found: dict[str, dict[Labels, float]] = {}
        for family in self.collector.collect():
            values = [(tuple(one.labels.items()), one.value) for one in family.samples]
            of_family = dict(values)
            assert len(of_family) == len(values), f"{family.name} has two series with equal labels"
            found[family.name.removeprefix("triton_adapter_")] = of_family
        return found


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


def test_update_leaves_one_series_of_a_model():
    """Prometheus drops one of two series with equal labels, and complains of each scrape."""
    world = World()
    old = world.load("m")
    old.usage.served = 5
    new = world.replace(old)
    new.usage.served = 2
    found = world.series()
    assert found["model_bytes"] == {(("model", "m"), ("device", "host"), ("state", "READY")): 200}
    assert found["model_requests"] == {of("m"): 2}

    world.registry.apply(old, ModelEvent.UNLOAD_STARTED)
    assert world.series()["model_requests"] == {of("m"): 2}


def test_stuck_models_share_their_series():
    """The next load of a model that Triton is stuck with may become stuck, too."""
    world = World()
    world.get_stuck("m")
    world.get_stuck("m")
    world.load("m")
    found = world.series()
    assert {labels[2][1]: count for labels, count in found["model_bytes"].items()} == {
        "STUCK": 200,
        "READY": 100,
    }
    assert found["model_requests"] == {of("m"): 0}
