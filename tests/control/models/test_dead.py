"""The process of a model dies."""

import asyncio

import pytest

from adapter.control.ports import TimeLimits
from adapter.control.triton_status import Phase
from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    LoadFailed,
    ModelNotFound,
    StubDied,
)
from tests.control.models.steps import LOST, kill
from tests.fakes.house import House


async def test_a_dead_model_is_neither_listed_nor_served(house):
    await house.load("m")
    await kill(house, "m")
    assert house.listed() == []
    with pytest.raises(ModelNotFound, match="load it again"):
        house.control.lease(ModelId("m"))


async def test_a_dead_model_whose_unload_fails_is_still_dead(house):
    await house.load("m")
    await kill(house, "m")
    house.steps.fail("unload", LOST)
    with pytest.raises(BackendUnavailable):
        await house.unload("m")
    assert house.state("m") is ModelState.DEAD
    await house.unload("m")
    house.check()


async def say_dead(house: House, name: str) -> None:
    with pytest.raises(StubDied), house.control.lease(ModelId(name)):
        raise StubDied(f"Stub process '{name}_0_0' is not healthy.")
    await house.control.drain(5)
    house.control.triton_status.phase = Phase.OPEN


@pytest.mark.parametrize("alive", [True, None])
async def test_a_model_whose_process_lives_is_not_dead_by_a_text(house, alive):
    """A model may answer with whatever its caller wrote."""
    if alive is not None:
        house.server.live["m"] = alive
    await house.load("m")
    await say_dead(house, "m")
    house.check("m")


async def test_a_model_that_has_lost_one_of_its_processes_is_dead(house):
    house.server.live["m"] = True
    house.server.stubs["m"] = {"m_0_0", "m_0_1"}
    await house.load("m")
    await say_dead(house, "m")
    house.check("m")
    house.server.stubs["m"] = {"m_0_0"}
    await say_dead(house, "m")
    assert house.state("m") is ModelState.DEAD


async def test_with_a_triton_of_others_its_words_are_all_there_is():
    house = await House(embedded=False).open()
    await house.load("m")
    await say_dead(house, "m")
    assert house.state("m") is ModelState.DEAD
    await house.close()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("failed to poll from model repository", "perhaps because"),
        ("no such weights", "what else is odd about the package:"),
    ],
)
async def test_a_refused_load_says_what_was_odd_in_the_package(house, said, found):
    house.packages.warnings = ("config.pbtxt:3:1: field 'colour' is not known",)
    house.steps.fail("load m", LoadFailed(said))
    with pytest.raises(LoadFailed) as caught:
        await house.load("m")
    assert str(caught.value) == f"{said}; {found} config.pbtxt:3:1: field 'colour' is not known"


async def test_a_load_brings_a_dead_model_back(house):
    await house.load("m")
    await kill(house, "m")
    await house.load("m")
    house.check("m")


async def test_a_dead_model_can_be_unloaded_by_way_of_a_live_process(house):
    await house.load("m")
    await kill(house, "m")
    house.steps.seen.clear()
    await house.unload("m")
    assert house.steps.seen == [
        *("read", "unload m", "wait_gone m", "wait_gone m"),
        *("load m", "unload m", "wait_gone m"),
        *("remove m", "read"),
    ]
    assert house.triton.waited[:2] == [1.0, 1.0]
    house.check()


async def test_a_process_known_to_be_gone_is_not_waited_for(house, caplog):
    """Nobody has called the model since; only the process table knows."""
    await house.load("m")
    house.triton.stuck.add("m")
    house.server.live["m"] = False
    await house.unload("m")
    assert house.triton.waited == [1.0, 1.0, 5.0]  # two short looks, and one after the live process
    assert "model.unload_stalled" in [r.message for r in caplog.records]
    house.check()


async def test_a_live_process_is_given_its_time(house):
    await house.load("m")
    house.triton.stuck.add("m")
    house.server.live["m"] = True
    await house.unload("m")
    assert house.triton.waited == [1.0, 5.0, 5.0]
    house.check()


async def test_a_slow_end_within_the_stall_time_is_no_stall(house):
    await house.load("m")
    house.triton.stuck.add("m")
    gate = house.steps.hold("wait_gone")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    house.steps.seen.clear()
    second = house.steps.hold("wait_gone")
    gate.open()
    await second.reached.wait()
    house.triton.models.discard("m")
    second.open()
    await unload
    assert house.steps.seen == ["wait_gone m", "remove m"]
    house.check()


async def test_a_model_that_is_gone_when_it_cannot_be_loaded_anew_was_only_slow_to_go(house):
    await house.load("m")
    house.triton.stuck.add("m")
    gate = house.steps.hold("load m")
    house.steps.fail("load m", LoadFailed("the model is being unloaded"))
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    house.triton.models.discard("m")
    gate.open()
    await unload
    house.check()


async def test_a_dead_model_that_loads_for_ever_by_now_is_left_to_triton_and_its_id_is_free():
    house = await House(limits=TimeLimits(unload=0.3)).open()
    await house.load("m")
    await kill(house, "m")
    house.steps.hold("load m")
    with pytest.raises(BackendTimeout):
        await asyncio.wait_for(house.unload("m"), 5)
    await house.ended()
    assert [each.id for each in house.control.registry.stuck.values()] == ["m"]
    with pytest.raises(ModelNotFound):  # at once
        await house.unload("m")
    record = await house.load("m")
    assert record.name != "m"
    assert house.state("m") is ModelState.READY
    await house.close()


async def test_a_model_that_triton_never_lets_go_of_is_still_there(house):
    await house.load("m")
    house.triton.stuck.add("m")
    gate = house.steps.hold("load m")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    again = house.steps.hold("unload m")
    gate.open()
    await again.reached.wait()
    house.triton.stuck.add("m")
    again.open()
    with pytest.raises(BackendTimeout, match="does not release model 'm'"):
        await unload
    assert house.state("m") is ModelState.READY
