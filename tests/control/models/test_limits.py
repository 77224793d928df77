"""Callers that go away, time limits, and what the log says of it."""

import asyncio
import logging

import pytest

from adapter.control import operations as control_operations
from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId, ModelSource
from adapter.core.residency.terms import Terms
from adapter.core.state import ModelState, WaitsFor
from adapter.errors import (
    AlreadyLoaded,
    BackendTimeout,
    BackendUnavailable,
    InvalidModel,
    LoadFailed,
    Overloaded,
)
from adapter.telemetry.log import EVENTS
from tests.control.models.steps import MIB, operations
from tests.fakes.house import House


async def test_a_load_outlives_its_caller(house):
    gate = house.steps.hold("load")
    caller = house.begin(house.load("m"))
    await gate.reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(AlreadyLoaded):
        await house.load("m")
    gate.open()
    await house.quiet()
    house.check("m")


async def test_a_load_that_fails_after_its_caller_has_gone_is_undone_and_logged(house, caplog):
    gate = house.steps.hold("load")
    house.steps.fail("load", LoadFailed("no weights"))
    caller = house.begin(house.load("m"))
    await gate.reached.wait()
    caller.cancel()
    gate.open()
    await house.quiet()
    house.check()
    assert "model.load_failed" in [r.message for r in caplog.records]


async def test_an_unload_outlives_its_caller(house):
    await house.load("m")
    gate = house.steps.hold("unload")
    caller = house.begin(house.unload("m"))
    await gate.reached.wait()
    caller.cancel()
    gate.open()
    await house.quiet()
    house.check()


async def test_a_caller_gets_a_timeout_while_the_undo_goes_on():
    """As when Triton still loads after the time limit: its unload waits for that."""
    hasty = await House(limits=TimeLimits(load=0.6, unload=10)).open()
    hasty.steps.fail("load", BackendTimeout("Triton did not answer in time"))
    gate = hasty.steps.hold("unload")
    with pytest.raises(BackendTimeout, match=r"did not load within 0\.6 s") as caught:
        await hasty.load("m")
    assert caught.value.model_id == "m"
    assert hasty.state("m") is ModelState.LOADING
    with pytest.raises(AlreadyLoaded):
        await hasty.load("m")
    gate.open()
    await hasty.quiet()
    hasty.check()
    await hasty.load("m")
    hasty.check("m")


@pytest.mark.parametrize("step", ["prepare", "place", "load", "confirm"])
async def test_the_time_limit_ends_a_load_at_every_step_and_undoes_it(step):
    hasty = await House(limits=TimeLimits(load=0.6, unload=10)).open()
    gate = hasty.steps.hold(step)
    with pytest.raises(BackendTimeout, match=r"did not load within 0\.6 s"):
        await hasty.load("m")
    gate.open()  # a load goes on in Triton
    await hasty.quiet()
    hasty.check()


async def test_the_time_limit_ends_a_load_that_waits_for_its_turn(hasty):
    gate = hasty.steps.hold("unload")
    await hasty.load("m")
    unload = hasty.begin(hasty.unload("m"))
    await gate.reached.wait()
    with pytest.raises(BackendTimeout, match=r"did not load within 0\.6 s"):
        await hasty.load("m")
    gate.open()
    await asyncio.wait({unload})
    await hasty.quiet()
    hasty.check()


@pytest.mark.parametrize("step", ["prepare", "place", "load", "confirm"])
async def test_at_the_end_of_the_drain_loads_are_ended_and_their_callers_told(house, step):
    gate = house.steps.hold(step)
    undo = house.steps.hold("remove")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    await house.control.drain(0.01)
    with pytest.raises(BackendUnavailable, match="before the adapter stopped"):
        await load
    gate.open()  # a load goes on in Triton
    undo.open()
    await house.control.undone()
    house.check()


async def test_a_caller_gets_a_timeout_while_the_unload_goes_on(hasty):
    await hasty.load("m")
    gate = hasty.steps.hold("unload")
    with pytest.raises(BackendTimeout, match="was not gone within 0 s") as caught:
        await hasty.unload("m")
    assert caught.value.model_id == "m"
    assert hasty.state("m") is ModelState.UNLOADING
    gate.open()
    await hasty.quiet()
    hasty.check()


@pytest.mark.parametrize("operation", ["load", "unload"])
@pytest.mark.parametrize("kind", [LoadFailed, InvalidModel, RuntimeError])
async def test_an_operation_that_fails_leaves_a_line_with_a_documented_event(
    house, caplog, operation, kind
):
    caplog.set_level(logging.INFO)
    await house.load("m")
    caplog.clear()
    house.steps.fail("prepare" if operation == "load" else "unload", kind("x"))
    with pytest.raises(kind):
        await (house.load("n") if operation == "load" else house.unload("m"))
    lines = [r for r in caplog.records if r.message.startswith("model.")]
    assert [r.message for r in lines if r.message not in EVENTS] == []
    beginning, line = lines
    assert beginning.message == f"model.{operation}ing"
    refused = kind is InvalidModel
    assert line.message == f"model.{operation}_{'refused' if refused else 'failed'}"
    assert operations(house, operation, "bug" if kind is RuntimeError else kind.__name__) == 1


async def test_loads_beyond_a_bound_are_refused_at_once(house, monkeypatch):
    """They outlive their callers, who may come again and again."""
    monkeypatch.setattr(control_operations, "_MAX_OPERATIONS", 3)
    gate = house.steps.hold("prepare")
    loads = [house.begin(house.load(name)) for name in ("a", "b", "c")]
    await asyncio.wait_for(gate.reached.wait(), 5)
    with pytest.raises(Overloaded, match="3 loads and unloads"):
        await house.load("d")
    gate.open()
    await asyncio.gather(*loads)
    await house.load("d")
    house.check("a", "b", "c", "d")


async def test_of_loads_that_hang_the_one_that_has_taken_nothing_for_longest_ends_for_another():
    house = await House(1000 * MIB, TimeLimits()).open()
    gates, begun = {name: house.steps.hold(f"load {name}") for name in "ab"}, []
    house.begin(house.control.run_housekeeping())  # which reads memory
    for name, gate in gates.items():
        house.packages.declared[f"/{name}"] = 10 * MIB
        load = house.control.load_on_terms(
            ModelId(name), ModelSource(f"/{name}"), Terms(is_on_demand=True)
        )
        begun.append(house.begin(load))
        await gate.reached.wait()
        await asyncio.sleep(10)
    third = house.begin(house.load("c"))
    with pytest.raises(BackendTimeout, match="was ended for others"):
        await begun[0]
    gates["a"].open()  # Triton has ended it
    await third
    gates["b"].open()
    await begun[1]
    house.check("b", "c")
    await house.close()


async def test_a_load_that_triton_has_not_answered_keeps_its_thread_until_it_is_unloaded(house):
    house.steps.fail("load a", BackendTimeout("Triton did not answer within 30 s", model_id="a"))
    unload, gate = house.steps.hold("unload a"), house.steps.hold("load b")
    first, second = house.begin(house.load("a")), house.begin(house.load("b"))
    await unload.reached.wait()
    await gate.reached.wait()
    third = house.begin(house.load("c"))
    await house.turns()
    assert house.control.registry.get(ModelId("c")).waits_for is WaitsFor.THREAD
    unload.open()
    await third
    with pytest.raises(BackendTimeout, match="did not answer"):
        await first
    gate.open()
    await second
    house.check("b", "c")
