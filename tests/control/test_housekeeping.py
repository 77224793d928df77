"""What is looked at now and then: memory, what was learned, and whether Triton has its models."""

import asyncio
from collections.abc import Callable

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.model import ModelId, Placement, StagedModel, TritonName
from adapter.errors import BackendError, BackendUnavailable
from tests.fakes.house import House

MIB = 2**20
QUICK = TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=5)
M = ModelId("m")


@pytest_asyncio.fixture
async def house():
    """Watched, with one model that was seen to take 300 MiB."""
    house = await House(1000 * MIB, QUICK).open()
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    await house.load("m")
    watching = house.begin(house.control.run_housekeeping())
    yield house
    assert not watching.done()
    await house.close()


async def passed(house: House, step: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait for the next such step of the watch, and let it go on."""
    gate = house.steps.hold(step)
    await asyncio.wait_for(gate.reached.wait(), 5)
    meanwhile()
    gate.open()
    await house.turns()


async def test_what_was_learned_of_sizes_is_kept_and_noted_with_the_model(house):
    house.packages.folders[TritonName("m")] = StagedModel(TritonName("m"), M, Placement(()))
    await passed(house, "confirm")
    assert house.store.saved == [house.control.memory.sizes.as_dict()]
    noted = house.packages.folders[TritonName("m")]
    assert (noted.held, noted.content_key) == ({HOST: 300 * MIB}, "/m")
    assert noted.source.url == "/m"


async def test_nothing_new_is_not_kept_again(house):
    await passed(house, "confirm")
    await passed(house, "ready")
    assert len(house.store.saved) == 1


async def test_what_could_not_be_kept_is_tried_again(house):
    house.steps.fail("save", BackendError("disk full"))
    await passed(house, "confirm")
    assert len(house.store.saved) == 1


async def test_what_could_not_be_noted_is_tried_again(house):
    house.steps.fail("confirm", BackendError("disk full"))
    await passed(house, "confirm m")
    await passed(house, "confirm m")
    assert house.packages.folders[TritonName("m")].held == {HOST: 300 * MIB}


async def test_models_that_vanished_are_noticed_with_nobody_asking(house):
    house.triton.models.clear()
    await passed(house, "remove m")
    house.check()


async def test_a_triton_that_cannot_be_reached_is_asked_again(house):
    house.steps.fail("ready", BackendUnavailable("Triton does not answer", delivered=False))
    await passed(house, "ready")
    house.check("m")
    house.triton.models.clear()
    await passed(house, "remove m")
    house.check()


async def test_a_disk_that_refuses_does_not_keep_the_watch_from_triton(house):
    house.triton.models.clear()
    looks = house.begin(passed(house, "remove m"))
    while not looks.done():
        house.steps.fail("save", BackendError("disk full"))
        await asyncio.wait({looks}, timeout=0.1)
    house.check()


async def test_growth_of_the_only_model_with_requests_is_learned(house):
    with house.control.lease(M):
        await passed(house, "read")
        house.sizes["m"] = 340 * MIB
    await passed(house, "read")  # the last request has ended since the look before
    assert house.held("m") == 340 * MIB


async def test_memory_is_looked_at_all_the_time_while_an_operation_runs(house):
    gate = house.steps.hold("load n")
    load = house.begin(house.load("n"))
    await gate.reached.wait()
    begun = len(house.control.memory.readings.samples)
    await passed(house, "read")
    await passed(house, "read")
    assert len(house.control.memory.readings.samples) - begun >= 1
    gate.open()
    await load


async def test_nothing_is_noted_of_a_model_that_is_being_unloaded(house):
    """What is half gone must not be taken over by the next run."""
    gate = house.steps.hold("remove m")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    house.control.memory.relearned |= {*house.control.registry.records()}
    house.steps.seen.clear()
    await passed(house, "save")
    assert "confirm m" not in house.steps.seen
    gate.open()
    await unload
    house.check()


async def test_nothing_is_noted_of_a_model_whose_load_is_being_undone(house):
    house.steps.fail("confirm n", BackendError("disk full"))
    gate = house.steps.hold("unload n")
    load = house.begin(house.load("n"))
    await gate.reached.wait()
    # a slow load's may have been saved already
    house.control.memory.relearned |= {*house.control.registry.records()}
    house.steps.seen.clear()
    await passed(house, "save")
    assert "confirm n" not in house.steps.seen
    gate.open()
    with pytest.raises(BackendError):
        await load
    house.check("m")


async def test_an_unload_waits_until_its_model_has_been_noted(house):
    gate = house.steps.hold("confirm m")
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    assert "unload m" not in house.steps.seen
    gate.open()
    await unload
    house.check()


async def test_what_could_not_be_noted_for_now_is_noted_later(house):
    house.steps.seen.clear()
    async with house.control.operations.lock(M):
        await passed(house, "save")
        assert "confirm m" not in house.steps.seen
    await passed(house, "confirm m")
    assert house.packages.folders[TritonName("m")].held == {HOST: 300 * MIB}


async def test_what_was_learned_is_kept_at_the_stop(house):
    await house.control.drain(1)
    assert len(house.store.saved) == 1


async def test_a_disk_that_refuses_does_not_spoil_the_stop(house):
    house.steps.fail("save", BackendError("disk full"))
    await house.control.drain(1)
    assert house.store.saved == []
