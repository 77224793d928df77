"""What the gauges of GPUs say, late, wrongly or not at all, before a real Triton."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapter.core.memory import NO_BYTES
from tests.fakes.metrics_endpoint import MIB
from tests.fakes.scripted_gpus import ScriptedGpus, ServedPage, adapter_beside, served
from tests.journeys.memory.models import metric
from tests.running import Client, RunningAdapter, unload_all, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.timeout(180)]

LAG = 2.8  # within the 3 s that the adapter allows for
_TOTAL = 1000  # MiB
_MODEL = 400  # MiB; two fit
_GPU = "GPU-a"


@dataclass(frozen=True)
class GaugedAdapter:
    """An adapter, what it reads of memory, and one package that takes 400 MiB of the first GPU."""

    adapter: RunningAdapter
    client: Client
    gpus: ScriptedGpus
    gauge: ServedPage
    package: Path

    def load(self, *names: str) -> list[int]:
        return [self.client.load(name, self.package).status for name in names]

    def unload(self, name: str) -> float:
        """How many seconds it took."""
        begun = time.monotonic()
        self.client.unload_model(name)
        return time.monotonic() - begun

    def waited(self) -> float:
        """How many seconds all unloads have waited for memory once Triton had let go."""
        return metric(self.adapter, "triton_adapter_memory_recovery_seconds_sum")

    def refused(self, name: str) -> dict[str, Any]:
        reply = self.client.load(name, self.package)
        body = reply.json()
        assert (reply.status, body["code"]) == (507, "InsufficientMemory"), body
        return body

    def let_the_gauge_catch_up(self) -> None:
        """Wait until the gauge shows what there is, and the adapter has booked all loads by that:
        it takes a reading for older than this gauge is.
        """
        wait_until(lambda: self.gauge.page.has_caught_up, 60, "the gauge shows what there is")
        wait_until(lambda: self.reserved_bytes() == 0, 10, "all loads are booked")

    def reserved_bytes(self) -> int:
        devices = self.adapter.state()["memory"]["devices"]
        return sum(book["reserved_bytes"] for book in devices.values())

    def held(self) -> dict[str, dict[str, int]]:
        return {m["model_id"]: m["bytes"] for m in self.adapter.state()["models"]}


@contextmanager
def gauged(
    triton: RunningAdapter,
    root: Path,
    *flags: str,
    gpus: tuple[str, ...] = (_GPU,),
    declares: str = f"{_MODEL}MiB",
    is_broken: bool = False,
    neighbours: Mapping[str, int] = NO_BYTES,  # bytes that others have from the start, by GPU
) -> Iterator[GaugedAdapter]:
    with ExitStack() as stack:
        scripted = ScriptedGpus(root / "gpus")
        for uuid in gpus:
            scripted.add(uuid, _TOTAL * MIB)
            scripted.others_take(uuid, neighbours.get(uuid, 0))
        gauge = stack.enter_context(served(scripted, LAG))
        gauge.page.is_broken = is_broken
        package = scripted.write_model(root / "models" / "taker", gpus[-1], _MODEL, declares)
        metrics = f"--triton-metrics={gauge.page.address}"
        adapter = stack.enter_context(
            adapter_beside(triton, scripted, root / "models", metrics, *flags)
        )
        client = stack.enter_context(adapter.client())
        stack.callback(unload_all, adapter)
        yield GaugedAdapter(adapter, client, scripted, gauge, package)


def test_third_behind_lagging_gauge_is_refused(triton, tmp_path):
    """It fits once one has gone."""
    with gauged(triton, tmp_path, "--memory-source=triton", declares="") as at:
        assert at.load("a", "b") == [200, 200]

        body = at.refused("c")

        assert body["needed_bytes"] == _MODEL * MIB  # learned, once the gauge had caught up
        assert body["free_bytes"] == (_TOTAL - 2 * _MODEL) * MIB
        assert (body["limit_bytes"], body["device"]) == (_TOTAL * MIB, _GPU)
        at.unload("a")
        assert at.waited() <= LAG + 5
        assert at.load("c") == [200]
        assert at.gpus.used == {_GPU: 2 * _MODEL * MIB}


def test_unload_is_answered_when_gauge_shows_it(triton, tmp_path):
    """No later than allowed."""
    with gauged(triton, tmp_path, "--memory-source=triton") as at:
        assert at.load("a", "b") == [200, 200]
        at.let_the_gauge_catch_up()

        seconds = at.unload("a")

        assert seconds > LAG
        assert at.gauge.page.used == {_GPU: _MODEL * MIB}
        at.gauge.page.is_frozen = True
        assert at.unload("b") >= 5


@pytest.mark.parametrize("declares", [f"{_MODEL}MiB", ""], ids=["declared", "unknown"])
@pytest.mark.nightly
def test_nothing_of_nothing_is_not_a_full_gpu(triton, tmp_path, declares):
    flag = "--memory-source=triton"
    with gauged(triton, tmp_path, flag, declares=declares, is_broken=True) as at:
        assert at.load("a", "b") == [200, 200]
        assert at.client.load("c", at.package).code == "OutOfMemory"


@pytest.mark.nightly
def test_gauge_frozen_at_empty_hides_no_shortage(triton, tmp_path):
    with gauged(triton, tmp_path, "--memory-source=triton") as at:
        at.gauge.page.is_frozen = True

        assert at.load("a", "b", "c") == [200, 200, 507]


@pytest.mark.nightly
def test_vanishing_and_returning_gauge_is_noticed(triton, tmp_path):
    with gauged(triton, tmp_path, "--memory-source=triton") as at:
        assert at.load("a") == [200]
        at.gauge.stop()

        assert at.load("b") == [200]
        assert at.refused("c")["free_bytes"] == (_TOTAL - 2 * _MODEL) * MIB
        at.adapter.wait_for("memory.source", was="triton", source="none")
        at.gauge.start()
        at.refused("d")
        at.adapter.wait_for("memory.source", was="none", source="triton")
        at.unload("a")
        assert at.load("c") == [200]


def test_nvml_shows_each_load_and_unload_at_once(triton, tmp_path):
    with gauged(triton, tmp_path, declares="") as at:
        assert at.adapter.started["memory_source"] == "nvml"
        assert at.load("a", "b") == [200, 200]
        assert at.held() == {name: {_GPU: _MODEL * MIB} for name in ("a", "b")}
        body = at.refused("c")
        assert (body["needed_bytes"], body["free_bytes"]) == (_MODEL * MIB, 200 * MIB)

        at.unload("a")
        assert at.waited() < LAG
        assert at.load("c") == [200]


@pytest.mark.nightly
def test_what_others_take_counts_as_well(triton, tmp_path):
    with gauged(triton, tmp_path) as at:
        assert at.load("a") == [200]
        at.gpus.others_take(_GPU, 300 * MIB)

        assert at.refused("b")["free_bytes"] == 300 * MIB
        at.gpus.others_take(_GPU, 0)
        assert at.load("b") == [200]


@pytest.mark.nightly
def test_nvml_and_tritons_metrics_replace_each_other(triton, tmp_path):
    with gauged(triton, tmp_path) as at:
        assert at.load("a") == [200]
        at.let_the_gauge_catch_up()

        at.gpus.has_driver = False
        assert at.load("b") == [200]
        assert at.refused("c")["free_bytes"] == (_TOTAL - 2 * _MODEL) * MIB
        at.adapter.wait_for("memory.source", was="nvml", source="triton")

        at.gpus.has_driver = True
        at.unload("a")
        assert at.load("c") == [200]
        at.refused("d")
        at.adapter.wait_for("memory.source", was="triton", source="nvml")


@pytest.mark.parametrize("source", ["nvml", pytest.param("triton", marks=pytest.mark.nightly)])
def test_two_gpus_have_their_own_figures(triton, tmp_path, source):
    """The package says nothing of either: the first load tells where it goes and what it takes.

    The neighbour is there from the start. The model could be booked with memory of one that comes
    later, as allocators may have kept that for it (adapter/core/ledger.py).
    """
    with gauged(
        triton,
        tmp_path,
        f"--memory-source={source}",
        gpus=("GPU-a", "GPU-b"),
        declares="",
        neighbours={"GPU-a": 900 * MIB},
    ) as at:
        at.let_the_gauge_catch_up()
        assert at.load("a", "b") == [200, 200]

        body = at.refused("c")

        assert at.held() == {name: {"GPU-b": _MODEL * MIB} for name in ("a", "b")}
        assert (body["device"], body["needed_bytes"]) == ("GPU-b", _MODEL * MIB)
        assert body["free_bytes"] == (_TOTAL - 2 * _MODEL) * MIB
