"""The exposition: names, labels, and gauges that are read at each scrape."""

from prometheus_client import generate_latest

from adapter.core.ledger import Ledger
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import Registry
from adapter.telemetry.metrics import Metrics, State


def scrape(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "_created" not in name}


class World:
    def __init__(self, limit: int | None) -> None:
        self.registry = Registry()
        self.ledger = Ledger(limit, lambda _: 0)
        self.ledger.open(None)
        self.reading: MemoryReading | None = None
        self.live = True
        self.metrics = Metrics()
        self.metrics.bind(
            State(
                abandoned=lambda: 0,
                models=self.registry.counts,
                ledger=self.ledger.snapshot,
                memory=lambda: self.reading,
                triton_live=lambda: self.live,
                ready=lambda: self.live,
                lost_lines=lambda: 0,
                idle_seconds=lambda: self.registry.idle_seconds(1000.0),
                about={"version": "1.2.3"},
            )
        )


def test_counters_and_histograms_have_their_documented_names_and_labels():
    metrics = Metrics()
    metrics.operations.labels("load", "ok").inc()
    metrics.operation_seconds.labels("load").observe(1.3)
    metrics.traffic.served("sagemaker", "invoke").count(200, 0.002, 0.0015)
    metrics.out_of_memory.labels("load", "bad_alloc").inc()
    metrics.load_retries.inc()
    metrics.recovery_seconds.observe(0.3)
    metrics.prediction_ratio.labels("learned").observe(1.02)
    metrics.retries.labels("load_model").inc()
    found = scrape(metrics)
    assert found['adapter_operations_total{operation="load",outcome="ok"}'] == 1
    assert found['adapter_operation_seconds_sum{operation="load"}'] == 1.3
    assert found['adapter_operation_seconds_bucket{le="2.5",operation="load"}'] == 1
    assert found['adapter_operation_seconds_bucket{le="1.0",operation="load"}'] == 0
    request = 'code="200",frontend="sagemaker",method="invoke"'
    assert found[f"adapter_requests_total{{{request}}}"] == 1
    assert found['adapter_request_seconds_count{frontend="sagemaker",method="invoke"}'] == 1
    assert found['adapter_upstream_seconds_sum{frontend="sagemaker",method="invoke"}'] == 0.0015
    overhead = 'adapter_overhead_seconds_bucket{frontend="sagemaker",le="%s",method="invoke"}'
    assert (found[overhead % 0.00025], found[overhead % 0.0005]) == (0, 1)
    assert found['adapter_oom_total{pattern="bad_alloc",phase="load"}'] == 1
    assert found["adapter_load_retries_total"] == 1
    assert found['adapter_memory_recovery_seconds_bucket{le="0.5"}'] == 1
    assert found['adapter_memory_prediction_ratio_bucket{basis="learned",le="1.05"}'] == 1
    assert found['adapter_memory_prediction_ratio_bucket{basis="learned",le="1.0"}'] == 0
    assert found['adapter_backend_retries_total{call="load_model"}'] == 1


def test_two_sets_of_metrics_do_not_share_counts():
    first, second = Metrics(), Metrics()
    first.out_of_memory.labels("load", "bad_alloc").inc()
    assert not any("oom" in name for name in scrape(second))


def test_models_are_counted_by_state_and_never_named():
    world = World(None)
    record = world.registry.begin_load(ModelId("secret"), TritonName("secret"), ModelSource("/"))
    assert scrape(world.metrics)['adapter_models{state="LOADING"}'] == 1
    world.registry.finish_load(record)
    found = scrape(world.metrics)
    assert found['adapter_models{state="LOADING"}'] == 0
    assert found['adapter_models{state="READY"}'] == 1
    assert not any("secret" in name for name in found)


def test_memory_is_read_from_book_and_reader_at_each_scrape():
    world = World(None)
    world.reading = MemoryReading({HOST: DeviceReading(1000, 300)})
    world.ledger.open(world.reading)
    world.ledger.reserve(ModelId("a"), {HOST: 100})
    world.ledger.reserve(ModelId("b"), {HOST: 50})
    world.ledger.settle(ModelId("b"), None)
    found = scrape(world.metrics)
    memory = {
        kind: found[f'adapter_memory_bytes{{device="host",kind="{kind}"}}']
        for kind in ("limit", "reserved", "held", "used", "free")
    }
    assert memory == {"limit": 1000, "reserved": 100, "held": 50, "used": 300, "free": 600}


def test_each_device_has_its_own_figures():
    world = World(None)
    one, two = Device("GPU-1"), Device("GPU-2")
    world.reading = MemoryReading({one: DeviceReading(1000, 300), two: DeviceReading(500, 0)})
    world.ledger.open(world.reading)
    world.ledger.hold(ModelId("a"), {two: 200})
    found = scrape(world.metrics)
    assert found['adapter_memory_bytes{device="GPU-1",kind="free"}'] == 700
    assert found['adapter_memory_bytes{device="GPU-2",kind="free"}'] == 300


def test_a_kind_of_memory_that_nobody_knows_is_missing_and_not_zero():
    found = scrape(World(1000).metrics)
    kinds = {name.split('kind="')[1][:-2] for name in found if "adapter_memory_bytes" in name}
    assert kinds == {"limit", "reserved", "held", "free"}


def test_without_a_device_there_is_no_figure():
    assert not any("adapter_memory_bytes" in name for name in scrape(World(None).metrics))


def test_triton_that_does_not_answer_is_shown():
    world = World(None)
    assert scrape(world.metrics)["adapter_triton_live"] == 1
    world.live = False
    assert scrape(world.metrics)["adapter_triton_live"] == 0
