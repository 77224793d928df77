"""The exposition: names, labels, and gauges that are read at each scrape."""

import logging
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from adapter.core.memory import HOST, Device, DeviceState
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.registry import Registry
from adapter.core.states import ModelEvent
from adapter.errors import OutOfMemory
from adapter.frontends.http.instrumentation import Instrumentation
from adapter.telemetry.gauges import ModelCollector, ScrapedState
from adapter.telemetry.metrics import Metrics, about
from tests.cases import rows


def scrape(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "_created" not in name}


def show_device(limit: int, used: int | None = None, **figures: int) -> DeviceState:
    state = DeviceState(limit, used, limit, 0, 0, 0, 0, None)
    return replace(state, **figures)


class World:
    def __init__(self) -> None:
        self.registry = Registry(lambda: 0.0)
        self.devices: dict[Device, DeviceState] = {}
        self.live = True
        self.metrics = Metrics()
        self.metrics.bind(
            ScrapedState(
                abandoned=lambda: 0,
                models=self.registry.counts,
                devices=lambda: self.devices,
                gpu_unread=lambda: not self.devices,
                triton_live=lambda: self.live,
                ready=lambda: self.live,
                lost_lines=lambda: 0,
                wanted=dict[str, int],
                idle_seconds=lambda: self.registry.longest_idle_seconds(1000.0),
                about=about("external"),
            ),
            ModelCollector(self.registry, lambda _: {}, 100),
        )


@rows(
    "series",
    [
        'triton_adapter_requests_total{code="507",frontend="sagemaker",method="load"}',
        'triton_adapter_requests_total{code="503",frontend="v2",method="infer"}',
        'triton_adapter_requests_total{code="RESOURCE_EXHAUSTED",frontend="modelmesh",method="loadModel"}',
        'triton_adapter_requests_total{code="INTERNAL",frontend="grpc_data",method="ModelInfer"}',
        'triton_adapter_operations_total{operation="load",outcome="OutOfMemory"}',
        'triton_adapter_operations_total{operation="unload",outcome="ok"}',
        'triton_adapter_operation_seconds_count{operation="load"}',
        'triton_adapter_oom_total{phase="refused"}',
        'triton_adapter_oom_total{phase="load"}',
        'triton_adapter_oom_total{phase="infer"}',
    ],
)
def test_a_series_is_there_before_its_first_event(series):
    """Prometheus does not see an event that its series begins with."""
    assert scrape(Metrics())[series] == 0


@pytest.mark.parametrize(("operation", "count"), [("invoke", 1), ("load", 0)])
async def test_refused_load_is_no_inference_out_of_memory(operation, count):
    """The load itself has counted it already, as phase "load"."""
    metrics = Metrics()
    error = OutOfMemory("full")
    Instrumentation(metrics).record_refusal(error, lambda: ("POST", "/models", {}), operation)
    assert scrape(metrics)['triton_adapter_oom_total{phase="infer"}'] == count


def test_models_are_counted_by_state():
    world = World()
    source = ModelSource("/")
    record = ModelRecord(ModelId("a"), TritonName("a"), source, LoadedFor.PLATFORM)
    world.registry.add(record)
    world.registry.apply(record, ModelEvent.LOAD_SENT)
    assert scrape(world.metrics)['triton_adapter_models{state="LOADING"}'] == 1
    world.registry.apply(record, ModelEvent.LOADED)
    found = scrape(world.metrics)
    assert found['triton_adapter_models{state="LOADING"}'] == 0
    assert found['triton_adapter_models{state="READY"}'] == 1


@pytest.mark.parametrize("seconds", [120.5, 299, 359])
def test_minutes_have_a_finite_bucket(seconds):
    """As long as an inference may take, and a load that SageMaker asked for."""
    metrics = Metrics()
    metrics.traffic.served("v2", "infer").count(200, seconds, seconds)
    metrics.operation_seconds.labels("load").observe(seconds)
    found = scrape(metrics)
    request = 'triton_adapter_request_seconds_bucket{frontend="v2",le="%s",method="infer"}'
    load = 'triton_adapter_operation_seconds_bucket{le="%s",operation="load"}'
    for series in (request, load):
        steps = [found[series % le] for le in ("120.0", "240.0", "300.0", "360.0")]
        assert steps == [0, seconds < 240, seconds < 300, 1]


@rows(
    "accept",
    [
        "application/openmetrics-text;version=%s",
        "text/plain;version=%s",
        "text/plain;version=1.0.0;escaping=%s",
    ],
)
@rows("word", ["", "abc", "1..0", "9" * 5000, "\xe9", '"', "="])
def test_no_accept_header_keeps_scrape_from_its_answer(accept, word):
    body, content_type = Metrics().page(accept % word)
    assert b"triton_adapter_requests_total{" in body
    assert content_type.startswith(("text/plain; version=", "application/openmetrics-text; "))


def exposed(metrics: Metrics) -> str:
    body, _ = metrics.page("application/openmetrics-text;version=1.0.0")
    return body.decode()


def test_last_trace_of_bucket_is_its_exemplar():
    traces = iter(["a" * 32, "b" * 32, None])
    metrics = Metrics(lambda: next(traces))
    for _ in range(3):
        metrics.traffic.served("v2", "infer").count(200, 0.3, 0.2)
    [line] = [line for line in exposed(metrics).splitlines() if "trace_id" in line]
    assert line.startswith(
        'triton_adapter_request_seconds_bucket{frontend="v2",le="0.5",method="infer"} 3.0 # '
        f'{{trace_id="{"b" * 32}"}} 0.3 '
    )


def test_unknown_memory_is_missing_not_zero():
    world = World()
    world.devices[HOST] = show_device(1000)
    found = scrape(world.metrics)
    names = {name.split("{")[0] for name in found if "adapter_memory" in name and "{device" in name}
    kinds = ("limit", "reserved", "used_by_models", "free")
    assert names == {f"triton_adapter_memory_{kind}_bytes" for kind in kinds}


class Unrounded(float):
    """A duration that nobody may put into a line."""

    def __round__(self, *_):
        raise AssertionError("a line was put together")


def test_requests_build_no_log_above_debug(caplog):
    served = Metrics().traffic.served("sagemaker", "invoke")
    caplog.set_level(logging.INFO)
    served.count(200, Unrounded(0.1), Unrounded(0.05), model_id="m")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(AssertionError, match="put together"):
        served.count(200, Unrounded(0.1), model_id="m")
