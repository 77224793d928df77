"""Models that take more while they serve."""

import asyncio

import pytest

from adapter.core.state import ModelState
from adapter.errors import (
    StubDied,
)
from tests.control.memory.steps import (
    MIB,
    M,
    N,
    begin_load,
    learned,
)


async def test_a_model_that_grows_under_traffic_of_its_own_is_held_to_its_peak(house):
    await house.load("m")
    await house.load("n")
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB
    assert learned(house, "m") == 340 * MIB
    house.sizes["m"] -= 40 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB


async def test_to_grow_again_to_what_it_was_before_is_no_new_peak(house):
    await house.load("m")
    await house.control.memory.tick({M})
    for change in (40, -40, 40, -40, 40):
        house.sizes["m"] += change * MIB
        await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB


async def test_a_model_loaded_anew_grows_from_what_it_takes_and_not_from_its_peak(house):
    await house.load("m")
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    await house.unload("m")
    house.sizes["m"] -= 40 * MIB
    await house.load("m")
    assert house.held("m") == 340 * MIB  # it may grow to that again
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB


async def test_an_unload_waits_for_what_the_model_takes_and_not_for_its_peak(patient):
    await patient.load("m")
    await patient.control.memory.tick({M})
    patient.sizes["m"] += 400 * MIB
    await patient.control.memory.tick({M})
    await patient.unload("m")
    patient.sizes["m"] -= 400 * MIB
    await patient.load("m")
    assert patient.held("m") == 700 * MIB
    await asyncio.wait_for(patient.unload("m"), 10)
    assert learned(patient, "m") == 600 * MIB


async def test_an_unload_does_not_wait_for_the_memory_of_a_process_that_died(patient):
    await patient.load("m")
    patient.sizes["m"] = 0
    patient.server.live["m"] = False
    lease = patient.control.lease(M)
    lease.begin()
    lease.end(StubDied("gone", model_id="m"))
    await patient.until_state("m", ModelState.DEAD)
    await asyncio.wait_for(patient.load("m"), 10)


@pytest.mark.parametrize("active", [set(), {M, N}])
async def test_growth_that_nobody_can_be_told_of_is_nobodys(house, active):
    await house.load("m")
    await house.load("n")
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick(active)
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_growth_beside_an_operation_is_nobodys(house):
    await house.load("m")
    await house.control.memory.tick({M})
    gate, load = await begin_load(house, "n")
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    gate.open()
    await load
    await house.control.memory.tick({M})
    assert house.held("m") == 300 * MIB


async def test_what_a_load_between_two_looks_took_is_no_growth(house):
    await house.load("m")
    await house.control.memory.tick({M})
    await house.load("n")
    await house.control.memory.tick({M})
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_what_a_load_during_a_look_took_is_no_growth(house):
    await house.load("m")
    await house.control.memory.tick({M})
    reading = house.steps.hold("read")
    look = house.begin(house.control.memory.tick({M}))
    await reading.reached.wait()
    await house.load("n")
    reading.open()
    await look
    await house.control.memory.tick({M})
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)
