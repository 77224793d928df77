"""Loads that are stuck in Triton."""

import asyncio

import pytest

from adapter.control.ports import TimeLimits
from adapter.core.state import ModelState
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    LoadFailed,
    UnloadedMeanwhile,
)
from tests.control.reconciler.steps import LOST, QUICK
from tests.fakes.house import House

MIB = 2**20


async def stick(house: House, *names: str) -> None:
    """These loads never end: their processes were killed, and Triton does not answer."""
    for name in names:
        house.server.live[name] = True
        house.server.dies.add(name)
        house.triton.loading.add(name)
        house.steps.hold(f"load {name}")
        with pytest.raises(LoadFailed):
            await asyncio.wait_for(house.load(name), 5)


def come_back(house: House) -> None:
    """Triton is there again, with nothing in it."""
    house.triton.models.clear()
    house.triton.loading.clear()
    house.server.live.clear()


async def test_triton_is_not_stuck_while_a_thread_is_left(house):
    await stick(house, "a")
    assert house.control.why_stuck() is None


async def test_triton_is_restarted_when_stuck_loads_keep_all_its_threads(house):
    await house.load("m")
    await stick(house, "a", "b")
    reason = "2 loads are stuck in Triton and keep all of its 2 threads"
    assert house.control.why_stuck() == reason
    watching = house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    assert house.server.restarts == [reason]
    come_back(house)
    await house.control.triton_restarted()
    watching.cancel()
    await house.quiet()
    assert house.control.why_stuck() is None
    house.check("m")  # loaded again, and the folders of the stuck ones are cleared
    await house.load("a")
    house.check("a", "m")


async def test_a_restart_is_asked_for_once(house):
    await stick(house, "a", "b")
    house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    house.server.restarted.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(house.server.restarted.wait(), 0.3)


async def test_a_restart_that_fails_on_the_way_still_loads_everything_again(house):
    await house.load("m")
    await stick(house, "a", "b")
    watching = house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    watching.cancel()
    come_back(house)
    house.steps.fail("ready", LOST)
    with pytest.raises(BackendUnavailable):
        await house.control.triton_restarted()
    await house.control.triton_restarted()
    await house.quiet()
    house.check("m")


async def test_a_later_restart_of_tritons_own_loads_nothing_again(house):
    await house.load("m")
    await stick(house, "a", "b")
    watching = house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    watching.cancel()
    come_back(house)
    await house.control.triton_restarted()
    await house.quiet()
    come_back(house)
    await house.control.triton_restarted()
    await house.quiet()
    house.check()


async def test_a_triton_of_somebody_elses_is_only_said_to_be_stuck():
    house = await House(limits=QUICK, embedded=False).open()
    for name in "ab":
        for call in ("load", "unload"):
            house.steps.fail(f"{call} {name}", BackendTimeout("Triton did not answer in time"))
        with pytest.raises(BackendTimeout):
            await house.load(name)
        house.triton.loading.add(name)
    assert house.control.why_stuck() is not None
    watching = house.begin(house.control.run_housekeeping())
    looked = house.steps.hold("ready")
    await asyncio.wait_for(looked.reached.wait(), 5)
    assert not watching.done()
    watching.cancel()
    come_back(house)
    await house.control.triton_restarted()
    assert house.control.why_stuck() is None
    house.check()
    await house.close()


async def test_the_bytes_of_a_load_that_an_external_triton_goes_on_with_stay_booked():
    house = await House(1000 * MIB, QUICK, embedded=False).open()
    house.packages.declared["/a"] = 300 * MIB
    for call in ("load", "unload"):
        house.steps.fail(f"{call} a", BackendTimeout("Triton did not answer in time"))
    with pytest.raises(BackendTimeout):
        await house.load("a")
    assert house.control.memory.ledger.snapshot().held_bytes == 300 * MIB
    house.triton.loading.add("a")
    assert (await house.load("a")).name != "a"  # booked twice: both may be there
    assert house.control.memory.ledger.snapshot().held_bytes >= 300 * MIB
    await house.unload("a")
    assert house.control.memory.ledger.snapshot().held_bytes == 300 * MIB
    come_back(house)
    await house.control.triton_restarted()
    assert house.control.memory.ledger.snapshot().models == 0
    await house.close()


async def test_an_unload_of_what_an_external_triton_loads_says_why_and_leaves_others_alone():
    limits = TimeLimits(load=10, unload=0.3, stall=5, recovery=0.4, alone=5)
    house = await House(1000 * MIB, limits, embedded=False).open()
    house.packages.declared |= {"/a": 300 * MIB, "/b": 100 * MIB}
    gates = [house.steps.hold(f"{call} a") for call in ("load", "unload")]
    load = house.begin(house.load("a"))
    await asyncio.wait_for(gates[0].reached.wait(), 5)
    house.triton.loading.add("a")
    with pytest.raises(BackendTimeout, match="Triton has been loading it for"):
        await asyncio.wait_for(house.unload("a"), 5)
    with pytest.raises(UnloadedMeanwhile):
        await load
    assert [r.id for r in house.control.registry.stuck.values()] == ["a"]
    assert house.control.memory.ledger.snapshot().held_bytes == 300 * MIB
    await asyncio.wait_for(house.load("b"), 5)
    house.triton.loading.clear()
    await house.control.triton_restarted()
    await house.close()


async def test_a_stuck_load_that_begins_to_serve_is_ended(house):
    """Its process may not be killed before: Triton would never answer."""
    await stick(house, "m")
    house.server.endable.add("m")
    watching = house.begin(house.control.run_housekeeping())
    for _ in range(500):
        if house.server.ended == ["m"]:
            break
        await asyncio.sleep(0.01)
    assert house.server.ended == ["m"]
    watching.cancel()
    come_back(house)
    await house.control.triton_restarted()


async def test_what_ends_loading_after_all_is_unloaded_and_its_name_is_free_again(house):
    await stick(house, "m")
    second = await house.load("m")
    house.begin(house.control.run_housekeeping())
    look = house.steps.hold("present")
    await asyncio.wait_for(look.reached.wait(), 5)
    look.open()
    await house.turns()
    assert "m" in house.packages.folders
    house.triton.loading.discard("m")
    house.triton.models.add("m")
    gate = house.steps.hold("remove m")
    await asyncio.wait_for(gate.reached.wait(), 5)
    gate.open()
    await house.turns()
    assert house.triton.models == {second.name}
    assert list(house.packages.folders) == [second.name]
    house.server.live.clear()
    await house.unload("m")
    assert (await house.load("m")).name == "m"
    house.check("m")


async def test_clearing_away_does_not_wait_for_a_load_under_another_name(house):
    await stick(house, "m")
    house.triton.loading.discard("m")
    house.server.live.clear()
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    house.begin(house.control.run_housekeeping())
    for step in ("present", "read"):  # after the look at Triton comes one at memory again
        look = house.steps.hold(step)
        await asyncio.wait_for(look.reached.wait(), 5)
        look.open()
        await house.turns()
    gate.open()
    await load


async def test_two_looks_at_once_clear_each_stuck_load_away_once(house):
    await stick(house, "a", "b")
    come_back(house)
    gate = house.steps.hold("remove a")
    first = house.begin(house.control.triton_restarted())
    await asyncio.wait_for(gate.reached.wait(), 5)
    await house.control.triton_restarted()
    gate.open()
    await first
    assert house.control.why_stuck() is None
    house.check()


async def test_no_load_takes_the_name_of_a_stuck_one_before_its_folder_is_cleared(house):
    await stick(house, "m")
    house.triton.loading.discard("m")
    house.server.live.clear()
    house.begin(house.control.run_housekeeping())
    gate = house.steps.hold("remove m")
    await asyncio.wait_for(gate.reached.wait(), 5)
    load = house.begin(house.load("m"))
    await house.turns()
    gate.open()
    await asyncio.wait_for(load, 5)
    house.check("m")
    assert house.state("m") is ModelState.READY


async def test_a_model_of_a_triton_that_has_ended_is_loaded_anew_before_anybody_has_looked(house):
    await house.load("m")
    house.triton.models.clear()
    house.triton.lives += 1
    house.server.pid += 1
    await house.load("m")
    house.check("m")
    assert house.triton.models == {"m"}
