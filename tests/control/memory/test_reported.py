"""Sizes that Triton reports of its models are measured at once, and held to readings."""

import asyncio
import logging

import pytest
import pytest_asyncio

from adapter.core.memory import Device
from adapter.core.model import ModelId, Placement, TritonName
from adapter.errors import BackendTimeout
from tests.control.memory.steps import MIB, M, begin_load, declare, learned, room
from tests.fakes.house import House

GPU = Device("GPU-0")
CONTEXT = 150 * MIB


@pytest_asyncio.fixture
async def gpu():
    """A GPU whose Triton reports what its models take; its first load makes a CUDA context."""
    house = room()
    house.memory.device = GPU
    house.packages.backends = frozenset({"onnxruntime"})
    house = await house.open()
    yield house
    await house.close()


def reports(house, **mib):
    house.triton.reports |= {name: {0: count * MIB} for name, count in mib.items()}


async def warm(house) -> None:
    """Load a model, so that Triton has a context and the backend is known to report."""
    reports(house, first=50)
    house.sizes["first"] = 50 * MIB
    house.others += CONTEXT
    await house.load("first")


async def test_what_the_first_load_takes_beyond_its_report_is_tritons(gpu):
    reports(gpu, m=300)
    gate, load = await begin_load(gpu, "m")
    gpu.others += CONTEXT
    gate.open()
    await load
    (book,) = gpu.control.memory.ledger.snapshot().devices.values()
    assert (book.held_bytes, book.baseline_bytes) == (300 * MIB, CONTEXT)
    assert learned(gpu, "m") == 300 * MIB


async def test_the_context_of_a_triton_that_has_restarted_is_its_own_again(gpu):
    await warm(gpu)
    await gpu.unload("first")
    gpu.triton.lives += 1
    gpu.others = 0
    reports(gpu, m=300)
    gate, load = await begin_load(gpu, "m")
    gpu.others += CONTEXT
    gate.open()
    await load
    assert learned(gpu, "m") == 300 * MIB


async def test_loads_that_are_reported_go_side_by_side_and_each_is_measured(gpu):
    await warm(gpu)
    reports(gpu, m=300, n=200)
    begun = [await begin_load(gpu, name) for name in "mn"]
    for gate, load in begun:
        gate.open()
        await load
    assert (learned(gpu, "m"), learned(gpu, "n")) == (300 * MIB, 200 * MIB)
    assert all(gpu.control.memory.sizes.is_exact(f"/{name}") for name in "mn")
    gpu.check("first", "m", "n")


async def test_a_load_whose_backend_was_never_seen_to_report_runs_alone(gpu):
    gate, first = await begin_load(gpu, "m")
    second = gpu.begin(gpu.load("n"))
    await gpu.turns()
    assert "place n" not in gpu.steps.seen
    gate.open()
    await asyncio.gather(first, second)


async def test_with_a_gauge_that_lags_a_reported_size_is_final_at_once(gpu):
    await warm(gpu)
    gpu.memory.lag = 60
    reports(gpu, m=300)
    await gpu.load("m")
    assert gpu.control.memory.accounts.is_measured(M)
    assert gpu.held("m") == 300 * MIB


@pytest.mark.parametrize("usage", [{}, {0: 0}, {7: 300 * MIB}])
async def test_without_a_report_of_a_known_gpu_the_reading_counts(gpu, usage):
    gpu.triton.reports["m"] = usage
    await gpu.load("m")
    assert gpu.held("m") == 300 * MIB
    assert not gpu.control.memory.sizes.is_reported("/m")


async def test_of_an_ensemble_the_steps_are_reported(gpu):
    await warm(gpu)
    names = TritonName("m"), TritonName("n")
    gpu.packages.placements["/m"] = Placement(names[:1], along=names[1:])
    gpu.triton.along["m"] = {"n"}
    gpu.sizes["m"] = 0
    reports(gpu, n=200)
    await gpu.load("m")
    assert learned(gpu, "m") == 200 * MIB
    assert gpu.control.memory.sizes.is_reported("/m")


@pytest.mark.parametrize(("seen", "counts"), [(400, 400), (200, 300), (310, 300)])
async def test_a_reading_that_shows_more_counts_and_is_told_once_for_a_package(
    gpu, seen, counts, caplog
):
    await warm(gpu)
    gpu.sizes["m"] = seen * MIB
    reports(gpu, m=300)
    await gpu.load("m")
    assert gpu.held("m") == counts * MIB
    await gpu.unload("m")
    await gpu.load("m")
    told = [record for record in caplog.records if record.message == "memory.report_differs"]
    assert len(told) == (seen != 310)
    if told:
        assert told[0].levelno == logging.WARNING
        assert (told[0].reported_bytes, told[0].read_bytes) == (300 * MIB, seen * MIB)


async def test_growth_under_traffic_adds_to_a_reported_size(gpu):
    await warm(gpu)
    reports(gpu, m=300)
    await gpu.load("m")
    await gpu.control.memory.tick([M])
    gpu.sizes["m"] += 40 * MIB
    await gpu.control.memory.tick([M])
    assert gpu.held("m") == 340 * MIB


async def test_where_nothing_is_read_reported_sizes_are_learned_all_the_same():
    house = House(None, memory_limit=1000 * MIB)
    house.sizes["m"] = 300 * MIB
    await house.open()
    declare(house, m=100)
    reports(house, m=300)
    await house.load("m")
    assert (house.held("m"), learned(house, "m")) == (300 * MIB, 300 * MIB)
    assert house.control.memory.accounts.is_measured(ModelId("m"))
    await house.close()


async def test_a_triton_that_does_not_answer_about_memory_is_not_waited_for(gpu):
    gpu.steps.fail("gpu_bytes m", BackendTimeout("it is silent"))
    await gpu.load("m")
    assert gpu.held("m") == 300 * MIB
