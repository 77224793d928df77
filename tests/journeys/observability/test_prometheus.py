"""A real Prometheus that scrapes a real adapter: what it sees of first events, and of all rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.observability.prometheus import Prometheus, prometheus_in, triton_metrics
from tests.journeys.observability.promtool import needs_promtool
from tests.journeys.observability.test_rules import (
    ALERTS,
    expressions,
    filled_in,
    shown_by_panel,
)
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import CONFIG, write_python_model

pytestmark = [pytest.mark.triton, needs_promtool, pytest.mark.timeout(400)]

LARGE = CONFIG + 'parameters { key: "memory_bytes" value { string_value: "1000MiB" } }\n'
# fits alone
WHOLE = CONFIG + 'parameters { key: "memory_bytes" value { string_value: "960MiB" } }\n'


@pytest.fixture
def adapter(tmp_path) -> Iterator[RunningAdapter]:
    flags = ("--memory-limit=1GiB", f"--model-roots={tmp_path}")
    for name in ("one", "two"):
        write_python_model(tmp_path / "store" / name, config=WHOLE)
    store = (f"--model-store={tmp_path}/store", f"--cache-dir={tmp_path}/cache")
    with embedded_adapter(*flags, *store, COMPLETE) as running:
        yield running


@pytest.fixture
def prometheus(adapter, tmp_path) -> Iterator[Prometheus]:
    with prometheus_in(tmp_path, ALERTS.read_text()) as running:
        running.watch(adapter.admin, pod="p")
        yield running


def test_prometheus_sees_the_first_507_of_an_adapter(adapter, prometheus, tmp_path):
    play(adapter, prometheus, tmp_path)
    for what in (
        'triton_adapter_requests_total{method="load",code="507"}',
        'triton_adapter_requests_total{method="invoke",code="404"}',
        'triton_adapter_requests_total{method="invoke",code="200"}',
        'triton_adapter_operations_total{outcome="InsufficientMemory"}',
        'triton_adapter_oom_total{phase="refused"}',
    ):
        assert prometheus.ask(f"increase({what}[5m]) > 0.5"), what


def play(adapter: RunningAdapter, prometheus: Prometheus, folder: Path) -> None:
    """The first loads, inferences and refusals of a pod, until Prometheus has seen them all."""
    first, gone = write_python_model(folder / "a"), write_python_model(folder / "gone")
    large = write_python_model(folder / "b", config=LARGE)
    with adapter.client() as client:
        wait_until(lambda: bool(prometheus.ask("triton_adapter_ready == 1")), 30, "a scrape")
        for _ in range(2):  # the second time its size is predicted
            client.load_model("gone", gone)
            client.unload_model("gone")
        client.load_model("a", first)
        for _ in range(5):
            assert client.invoke("a").status == 200
        assert client.load("b", large).status == 507
        assert client.invoke("none").status == 404
    last = 'increase(triton_adapter_requests_total{method="invoke",code="404"}[5m]) > 0.5'
    wait_until(lambda: bool(prometheus.ask(last)), 60, "all is seen")


def play_endpoint(adapter: RunningAdapter) -> None:
    """Calls of models of the store: cold and hot ones, and one that needs an eviction."""
    with adapter.client() as client:
        client.unload_model("a")
        for target, use in (("one", "miss"), ("one", "hit"), ("two", "miss"), ("one", "disk")):
            reply = client.call_endpoint(target)
            assert (reply.status, reply.headers["X-Triton-Adapter-Cache"]) == (200, use)


# panels that show nothing while nobody waits, nothing is tried again or fails, and models are few
_WITHOUT_EVENTS = {
    *("Load wait time", "Loads waiting", "Retries", "Models without series"),
    "Store failures",
}


def test_every_panel_has_data_and_no_alert_fires(adapter, prometheus, tmp_path):
    prometheus.watch(triton_metrics(adapter), pod="p")
    play(adapter, prometheus, tmp_path)
    play_endpoint(adapter)
    wait_until(lambda: bool(prometheus.ask("nv_inference_count")), 30, "Triton is scraped")

    def empty() -> set[str]:
        asked = {
            title: [prometheus.ask(filled_in(each, "5m")) for each in exprs]
            for title, exprs in shown_by_panel().items()
        }
        return {title for title, series in asked.items() if not all(series)}

    wait_until(lambda: empty() <= _WITHOUT_EVENTS, 60, "data in all others")
    for expression in expressions():
        prometheus.ask(filled_in(expression, "5m"))
    assert prometheus.firing() == set()


HOSTILE = [
    '"',
    "\\",
    'a"} 1\n# EOF\nup 0\nx{y="',
    "\\n",
    "\r\t\x01\x7f",
    "日本 🜁",
    "{{ .Value }}",
    "\u2028",
]


def test_prometheus_keeps_any_model_name(adapter, prometheus, tmp_path):
    package = write_python_model(tmp_path / "a")
    with adapter.client() as client:
        for name in HOSTILE:
            client.load_model(name, package)

    def names() -> set[str]:
        found = prometheus.ask("triton_adapter_model_bytes")
        return {each["metric"]["model"] for each in found}

    # a scrape that is not answered within the second of its interval is a failed one
    wait_until(lambda: names() == set(HOSTILE) and prometheus.ask("up == 0") == [], 60, "all names")
