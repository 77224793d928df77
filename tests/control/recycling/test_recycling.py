"""When an embedded Triton is restarted to free memory, and what callers see of it."""

import asyncio
import math
from dataclasses import replace

import pytest

from adapter.control.recycling import NotRecycled
from adapter.control.recycling.lost_memory import RecyclePhase
from adapter.core.model import ModelId, ModelSource
from adapter.core.state import ModelState
from adapter.errors import BackendUnavailable, InsufficientMemory, ModelNotReady, ModelTooLarge
from tests.control.recycling.steps import AWAY_SECONDS, MIB, SECONDS, Leaking, restartable


@pytest.fixture
async def house():
    house = await Leaking().watched()
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    yield house
    await house.close()


async def test_triton_is_restarted_once_memory_is_lost_for_a_minute(house):
    await house.load("m")
    await house.leak(201)
    await house.seconds(58)
    assert house.ended_at == []
    await house.seconds(6)
    assert house.server.restarts == ["201.0 MiB of host are unaccounted for"]
    house.check("m")
    assert house.unaccounted() == 0
    await house.seconds(600)
    assert len(house.ended_at) == 1


async def test_triton_is_left_alone_while_no_more_than_the_share_is_lost(house):
    await house.load("m")
    await house.leak(199)
    await house.seconds(600)
    assert house.ended_at == []


async def test_a_load_begins_the_minute_anew(house):
    await house.load("m")
    await house.leak(300)
    await house.seconds(50)
    await house.load("n")
    await house.seconds(50)
    assert house.ended_at == []
    await house.seconds(20)
    assert len(house.ended_at) == 1


async def test_without_the_setting_triton_is_never_restarted():
    house = await Leaking(share=None).watched()
    await house.load("m")
    await house.leak(600)
    await house.seconds(600)
    assert house.ended_at == []
    await house.close()


async def test_models_come_back_the_most_recently_used_first(house):
    for name in "abcd":
        await house.load(name)
        await house.seconds(1)
    await house.call("b")
    await house.leak(300)
    await house.seconds(70)
    assert house.back == ["b", "d", "c", "a"]
    # the order outlives the restart
    await house.leak(300)
    await house.seconds(70)
    assert house.back == ["b", "d", "c", "a"]


async def draining(house: Leaking) -> None:
    recycling = house.control.recycling
    await recycling._until(lambda: recycling.phase is not RecyclePhase.OFF, math.inf)


async def test_requests_in_flight_end_first_and_new_calls_wait(house):
    await house.load("m")
    lease = house.control.lease(ModelId("m"))
    lease.begin()
    await house.leak(300)
    await draining(house)
    call = house.begin(house.call("m"))
    with pytest.raises(ModelNotReady, match="restarted to free memory"):
        house.control.lease(ModelId("m"))
    await house.seconds(5)
    assert house.ended_at == []
    assert not call.done()
    lease.end()
    waited = await call
    assert len(house.ended_at) == 1
    assert 5 + AWAY_SECONDS < waited < 5 + AWAY_SECONDS + 1


async def test_a_request_that_does_not_end_is_waited_for_until_the_time_of_a_drain_is_up(house):
    await house.load("m")
    lease = house.control.lease(ModelId("m"))
    lease.begin()
    await house.leak(300)
    await draining(house)
    begun = asyncio.get_running_loop().time()
    await house.call("m")
    assert house.ended_at[0] - begun == pytest.approx(SECONDS.drain, abs=0.5)
    lease.end()


async def test_a_request_that_nobody_waits_for_is_not_waited_for(house):
    await house.load("m")
    lease = house.control.lease(ModelId("m"))
    lease.begin()
    lease.abandon()
    await house.leak(300)
    await draining(house)
    assert await house.call("m") < AWAY_SECONDS + 1
    lease.end()


async def test_a_call_waits_no_longer_than_for_a_model(house):
    await house.load("m")
    await house.leak(300)
    await draining(house)
    gate = house.steps.hold("load m")
    begun = asyncio.get_running_loop().time()
    with pytest.raises(ModelNotReady):
        await house.call("m")
    assert asyncio.get_running_loop().time() - begun == pytest.approx(SECONDS.call, abs=0.5)
    gate.open()
    assert await house.call("m") < 1


async def test_a_load_under_way_is_not_broken_off(house):
    await house.load("m")
    gate = house.steps.hold("load n")
    load = house.begin(house.load("n"))
    await gate.reached.wait()
    asking = house.begin(house.control.recycling.ask("an operator"))
    with pytest.raises(NotRecycled, match="under way"):
        await asking
    assert house.ended_at == []
    gate.open()
    await load
    await house.control.recycling.ask("an operator")
    house.check("m", "n")


async def test_loads_and_unloads_wait_for_the_models_that_come_back(house):
    for name in "mn":
        await house.load(name)
    await house.leak(300)
    await draining(house)
    gate = house.steps.hold("load m")
    load, unload = house.begin(house.load("new")), house.begin(house.unload("n"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    await house.seconds(3)
    assert not load.done()
    gate.open()
    await asyncio.gather(load, unload)
    await house.quiet()
    house.check("m", "new")


async def test_a_model_that_hangs_as_it_comes_back_keeps_no_other_load_waiting(house):
    await house.load("m")
    house.packages.declared["/new"] = 1 * MIB
    await house.leak(300)
    await draining(house)
    gate = house.steps.hold("load m")
    load = house.begin(house.load("new"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    await asyncio.wait_for(load, 2 * SECONDS.alone)
    gate.open()
    await house.quiet()
    house.check("m", "new")


async def test_a_load_that_only_lost_memory_keeps_out_is_made_room_for(house):
    await house.load("m")
    await house.leak(150)
    house.packages.declared["/big"] = 600 * MIB
    house.sizes["big"] = 600 * MIB
    await house.load("big")
    assert house.server.restarts == ["150.0 MiB of host are unaccounted for"]
    house.check("m", "big")


async def test_a_load_that_does_not_fit_either_way_is_refused_at_once(house):
    await house.load("m")
    await house.leak(150)
    house.packages.declared["/big"] = 701 * MIB
    with pytest.raises(InsufficientMemory):
        await house.load("big")
    assert house.ended_at == []


async def test_a_model_that_was_too_large_with_what_triton_lost_is_tried_again_after_a_recycle(
    house,
):
    house.sizes["big"] = 900 * MIB
    gate = house.steps.hold("load big")
    load = house.begin(house.load("big"))
    await gate.reached.wait()
    house.lost += 150 * MIB
    gate.open()
    with pytest.raises(ModelTooLarge):
        await load
    await house.control.recycling.ask("an operator")
    await house.load("big")
    house.check("big")


async def test_a_restart_that_has_not_helped_is_not_repeated(house):
    house.keeps = True
    await house.load("m")
    await house.leak(300)
    await house.seconds(600)
    assert len(house.ended_at) == 1
    house.packages.declared["/big"] = 600 * MIB
    with pytest.raises(InsufficientMemory):
        await house.load("big")
    house.lost, house.keeps = 0, False  # whoever had it has given it back
    await house.load("n")
    await house.leak(300)
    await house.seconds(100)
    assert len(house.ended_at) == 2


async def test_no_model_is_lost_for_it(house):
    files = (("1/model.py", b""),)
    await house.control.load(ModelId("m"), replace(ModelSource("/m"), files=files))
    await house.leak(300)
    await house.seconds(600)
    with pytest.raises(NotRecycled, match="'m' came with its files"):
        await house.control.recycling.ask("an operator")
    assert house.ended_at == []
    assert house.state("m") is ModelState.READY


async def test_no_model_is_suspected_of_it(house):
    await house.load("m")
    for _ in range(3):
        await house.control.recycling.ask("an operator")
        house.check("m")
    assert house.control.desired.trials._suspects.ids() == []
    assert house.back == ["m"]


async def test_an_operator_needs_no_setting_for_it():
    house = await Leaking(share=None).watched()
    await house.load("m")
    await house.control.recycling.ask("an operator")
    assert house.server.restarts == ["an operator"]
    house.check("m")
    await house.close()


async def test_an_external_triton_is_not_restarted():
    house = await Leaking(embedded=False).watched()
    with pytest.raises(NotRecycled, match="external"):
        await house.control.recycling.ask("an operator")
    await house.close()


async def test_callers_are_told_when_the_adapter_stops_amid_it(house):
    restartable(house, asyncio.Event().wait)  # it does not come back
    await house.load("m")
    await house.leak(300)
    await draining(house)
    call, load = house.begin(house.call("m")), house.begin(house.load("n"))
    await house.turns()
    house.control.close()
    with pytest.raises(ModelNotReady):
        await asyncio.wait_for(call, 5)
    with pytest.raises(BackendUnavailable, match="stopping"):
        await asyncio.wait_for(load, 5)
