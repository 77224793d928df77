"""Triton restarts; the adapter starts and stops."""

import asyncio

import pytest

from adapter.core.model import ModelId, Placement, StagedModel, TritonName
from adapter.core.state import ModelState
from adapter.errors import (
    BackendUnavailable,
    ModelNotFound,
    StubDied,
)
from tests.control.models.steps import LOST, UNDO, kill
from tests.fakes.house import House


async def test_models_that_triton_no_longer_has_are_forgotten(measured, caplog):
    await measured.load("m")
    await measured.load("n")
    measured.triton.models.discard("m")
    await measured.control.reconcile()
    await measured.quiet()
    measured.check("n")
    (line,) = [r for r in caplog.records if r.message == "triton.models_vanished"]
    assert line.models == ["m"]


async def test_where_nothing_vanished_nothing_is_said(house, caplog):
    await house.load("m")
    await house.control.reconcile()
    house.check("m")
    assert "triton.models_vanished" not in caplog.messages


async def test_a_model_that_became_ready_while_triton_was_asked_is_kept(house):
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    await house.load("m")
    gate.open()
    await looking
    house.check("m")


async def test_a_model_that_was_loaded_anew_while_triton_was_asked_is_kept(house):
    await house.load("m")
    house.triton.models.clear()
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    await house.unload("m")
    await house.load("m")
    gate.open()
    await looking
    house.check("m")


async def test_a_dead_model_that_vanished_is_forgotten(house):
    await house.load("m")
    await kill(house, "m")
    house.triton.models.clear()
    await house.control.reconcile()
    await house.quiet()
    house.check()


async def test_two_looks_at_once_forget_a_model_once(house):
    """The supervisor and the watch both notice a restart."""
    for name in "abc":
        await house.load(name)
    house.triton.models.discard("a")
    first = house.steps.hold("ready")
    one = house.begin(house.control.reconcile())
    await first.reached.wait()
    second = house.steps.hold("ready")
    two = house.begin(house.control.reconcile())
    await second.reached.wait()
    first.open()
    second.open()
    await asyncio.gather(one, two)
    await house.quiet()
    house.check("b", "c")


async def test_an_inference_of_before_a_restart_that_ends_after_it_hurts_no_other_model(house):
    await house.load("a")
    await house.load("b")
    lease = house.control.lease(ModelId("a"))
    lease.__enter__()
    house.triton.models.discard("a")
    await house.control.reconcile()
    died = StubDied("Stub process 'a_0_0' is not healthy.")
    lease.__exit__(type(died), died, None)
    await house.quiet()
    house.check("b")


async def test_a_load_right_after_a_restart_keeps_its_folder(house):
    """What is lost is removed from the disk in the model's own turn."""
    await house.load("m")
    house.triton.models.clear()
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    gate.open()
    await house.until_state("m", None)
    await house.load("m")
    await looking
    await house.quiet()
    house.check("m")


async def test_a_load_that_comes_first_keeps_what_it_staged(house):
    for name in ("m", "n"):
        await house.load(name)
    house.triton.models.clear()
    gate = house.steps.hold("present")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    await house.load("n")  # has its turn before the clearing of `n`
    gate.open()
    await looking
    await house.quiet()
    house.check("n")


async def test_a_load_that_hangs_holds_up_no_look_at_triton_and_no_clearing_of_others(house):
    for name in ("m", "n"):
        await house.load(name)
    house.triton.models.clear()
    gate, hanging = house.steps.hold("present"), house.steps.hold("load m")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    load = house.begin(house.load("m"))
    await hanging.reached.wait()
    gate.open()
    await asyncio.wait_for(looking, 5)
    for _ in range(500):
        if "n" not in house.packages.folders:
            break
        await asyncio.sleep(0.01)
    assert [*house.packages.folders] == ["m"]
    hanging.open()
    await load
    await house.quiet()
    house.check("m")


async def test_a_not_found_of_triton_makes_it_look_once(house):
    await house.load("m")
    house.triton.models.clear()
    gate = house.steps.hold("ready")
    for _ in range(3):
        with pytest.raises(ModelNotFound), house.control.lease(ModelId("m")):
            raise ModelNotFound("Request for unknown model: 'm' is not found")
    await gate.reached.wait()
    gate.open()
    await house.quiet()
    assert house.steps.seen.count("ready") == 1
    house.check()
    await house.load("m")
    with pytest.raises(ModelNotFound), house.control.lease(ModelId("m")):
        raise ModelNotFound("Request for unknown model: 'm' is not found")
    await house.quiet()
    assert house.steps.seen.count("ready") == 2
    house.check("m")


async def test_a_look_that_finds_no_triton_forgets_nothing(house):
    await house.load("m")
    house.steps.fail("ready", LOST)
    with pytest.raises(BackendUnavailable):
        await house.control.reconcile()
    house.check("m")


def left_over(name: str, model_id: str) -> StagedModel:
    alone = Placement((TritonName(name),))
    return StagedModel(TritonName(name), ModelId(model_id), alone)


async def test_before_the_first_load_what_an_earlier_run_left_is_taken_down():
    house = House(limit=1000)
    house.others = 70
    for name, model_id in (("m", "m"), ("ta.u._20", " ")):
        house.packages.folders[TritonName(name)] = left_over(name, model_id)
    house.triton.models = {"m", "ta.u._20", "foreign"}
    await house.control.open()
    assert house.steps.seen == [
        *("staged", "ready"),
        *UNDO,
        *(f"{verb} ta.u._20" for verb in ("unload", "wait_gone", "remove")),
        *("read", "read"),  # how late readings are, and what is left
    ]
    assert house.triton.models == {"foreign"}
    assert house.packages.folders == {}
    assert house.control.memory.ledger.snapshot().baseline_bytes == 70
    assert house.control.is_open


async def test_what_memory_holds_at_the_start_is_unknown_without_a_reader(house):
    assert house.control.memory.ledger.snapshot().baseline_bytes == 0


@pytest.mark.parametrize("operation", ["load", "unload"])
async def test_nothing_begins_before_the_start_and_after_the_stop(operation):
    house = House()
    call = getattr(house, operation)
    with pytest.raises(BackendUnavailable, match="starting or stopping"):
        await call("m")
    await house.open()
    await house.load("m")
    await house.control.drain(1)
    with pytest.raises(BackendUnavailable, match="starting or stopping"):
        await call("m")


async def test_a_stop_waits_for_the_operations_under_way(house):
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    stop = house.begin(house.control.drain(30))
    await asyncio.sleep(0)
    assert not stop.done()
    gate.open()
    await stop
    await load
    house.check("m")


async def test_a_stop_waits_no_longer_than_it_was_told(house):
    gate = house.steps.hold("load")
    house.begin(house.load("m"))
    await gate.reached.wait()
    await house.control.drain(0.01)
    assert house.state("m") is ModelState.LOADING
    gate.open()
