"""One model and many callers: who waits, who is refused, what inferences meet."""

import asyncio

import pytest

from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import (
    AlreadyLoaded,
    BackendUnavailable,
    InferenceFailed,
    ModelNotFound,
    ModelNotReady,
    UnloadedMeanwhile,
)
from tests.control.models.steps import LOAD, UNLOAD


async def test_a_second_load_of_a_loaded_model_is_a_conflict(house):
    await house.load("m")
    with pytest.raises(AlreadyLoaded, match="'m' is loaded already") as caught:
        await house.load("m")
    assert caught.value.model_id == "m"
    house.check("m")


async def test_a_second_load_is_refused_at_once_while_the_first_goes_on(house):
    gate = house.steps.hold("load")
    first = house.begin(house.load("m"))
    await gate.reached.wait()
    with pytest.raises(AlreadyLoaded, match="'m' is being loaded"):
        await house.load("m")
    assert not first.done()
    gate.open()
    await first
    house.check("m")


async def test_a_second_load_is_refused_before_the_first_has_taken_a_step(house):
    first = house.begin(house.load("m"))
    second = house.begin(house.load("m"))
    done = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(d).__name__ for d in done] == ["ModelRecord", "AlreadyLoaded"]


async def test_a_model_being_loaded_cannot_be_invoked_yet(house):
    gate = house.steps.hold("load")
    first = house.begin(house.load("m"))
    await gate.reached.wait()
    with pytest.raises(ModelNotReady):
        house.control.lease(ModelId("m"))
    gate.open()
    await first


@pytest.mark.parametrize("step", ["prepare", "place", "load", "confirm"])
async def test_an_unload_ends_a_load_at_every_step_and_undoes_it(house, step):
    gate = house.steps.hold(step)
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    gate.open()  # a load goes on in Triton
    await unload
    with pytest.raises(UnloadedMeanwhile, match="was unloaded while it was being loaded"):
        await load
    house.check()
    await house.load("m")
    house.check("m")


async def test_triton_is_asked_for_an_unload_only_once_it_has_answered_the_load(house):
    """It may take up the unload first; one that waits for several loads may end it with SIGSEGV."""
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    assert "unload m" not in house.steps.seen
    gate.open()
    await unload
    with pytest.raises(UnloadedMeanwhile):
        await load
    assert "unload m" in house.steps.seen
    house.check()


async def test_an_unload_ends_a_load_that_waits_for_an_earlier_unload(house):
    await house.load("m")
    gate = house.steps.hold("unload")
    first = house.begin(house.unload("m"))
    await gate.reached.wait()
    load = house.begin(house.load("m"))
    await asyncio.sleep(0)
    second = house.begin(house.unload("m"))
    with pytest.raises(UnloadedMeanwhile):
        await load
    gate.open()
    await asyncio.gather(first, second)
    house.check()


async def test_a_load_that_fails_while_it_is_ended_leaves_nothing_to_unload(house):
    gate = house.steps.hold("load")
    house.steps.fail("unload", BackendUnavailable("the connection broke", delivered=True))
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    gate.open()
    await unload
    with pytest.raises(UnloadedMeanwhile):
        await load
    await house.quiet()
    assert house.control.memory.ledger.snapshot().models == 0


async def test_of_two_unloads_at_once_the_second_finds_nothing(house):
    await house.load("m")
    both = (house.begin(house.unload("m")), house.begin(house.unload("m")))
    done = await asyncio.gather(*both, return_exceptions=True)
    assert [type(d) for d in done] == [type(None), ModelNotFound]
    house.check()


async def test_a_load_during_an_unload_waits_and_then_loads(house):
    await house.load("m")
    house.steps.seen.clear()
    gate = house.steps.hold("unload")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    load = house.begin(house.load("m"))
    await asyncio.sleep(0)
    assert house.steps.seen == ["read", "unload m"]
    gate.open()
    await unload
    await load
    assert house.steps.seen == UNLOAD + LOAD
    house.check("m")


async def test_unload_of_an_unknown_model_is_not_found_and_starts_nothing(house):
    with pytest.raises(ModelNotFound):
        await house.unload("m")
    assert house.steps.seen == []


async def test_models_do_not_wait_for_each_other(house):
    await house.load("c")
    gates = [house.steps.hold("load a"), house.steps.hold("unload c")]
    slow = [house.begin(house.load("a")), house.begin(house.unload("c"))]
    for gate in gates:
        await gate.reached.wait()
    await house.load("b")
    await house.unload("b")
    assert not any(task.done() for task in slow)
    for gate in gates:
        gate.open()
    await asyncio.gather(*slow)
    house.check("a")


async def test_an_unload_waits_for_the_inferences_under_way_and_new_ones_are_refused(house):
    await house.load("m")
    house.steps.seen.clear()
    with house.control.lease(ModelId("m")) as record, house.control.lease(ModelId("m")):
        assert record.usage.in_flight == 2
        unload = house.begin(house.unload("m"))
        await house.until_state("m", ModelState.UNLOADING)
        with pytest.raises(ModelNotFound):
            house.control.lease(ModelId("m"))
        assert house.steps.seen == []
    await unload
    assert house.steps.seen == UNLOAD
    house.check()


async def test_the_last_of_several_inferences_lets_the_unload_go_on(house):
    await house.load("m")
    house.steps.seen.clear()
    first, second = (house.control.lease(ModelId("m")) for _ in range(2))
    first.__enter__()
    second.__enter__()
    unload = house.begin(house.unload("m"))
    await house.until_state("m", ModelState.UNLOADING)
    first.__exit__(None, None, None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert house.steps.seen == []
    second.__exit__(None, None, None)
    await unload


async def test_an_unload_does_not_wait_for_ever(hasty, caplog):
    await hasty.load("m")
    with hasty.control.lease(ModelId("m")):
        await hasty.unload("m")
    hasty.check()
    assert "model.drain_timed_out" in [r.message for r in caplog.records]


async def test_an_inference_that_failed_says_nothing_about_the_model(house):
    await house.load("m")
    with pytest.raises(InferenceFailed), house.control.lease(ModelId("m")) as record:
        raise InferenceFailed("bad label")
    assert record.usage.in_flight == 0
    house.check("m")
