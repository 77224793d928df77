"""Triton is restarted to free memory, and has models that calls have loaded."""

import asyncio
from functools import partial

import pytest

from adapter.core.artifacts import CacheUse
from adapter.core.residency.waiting import WaitLimits
from tests.control.recycling.steps import SECONDS, come_back, restartable
from tests.fakes.residence import Residence


@pytest.fixture
async def residence():
    residence = await Residence(2, limits=SECONDS).open("a", "b", "c")
    restartable(residence.house, partial(come_back, residence.house))
    residence.house.begin(residence.control.run_housekeeping())
    yield residence
    await residence.close()


async def test_as_many_calls_as_there_are_wait_for_what_was_loaded(residence):
    await residence.call("a")
    lease = await residence.hold("a")
    asking = residence.house.begin(residence.control.recycling.ask("an operator"))
    await asyncio.sleep(1)
    count = WaitLimits().for_one + 1
    calls = [residence.house.begin(residence.call("a")) for _ in range(count)]
    await asyncio.sleep(1)
    lease.end()
    assert set(await asyncio.gather(*calls)) <= {CacheUse.DISK, CacheUse.HIT}
    await asking
    residence.check("a")


async def test_a_load_that_has_not_come_to_triton_yet_comes_after_it(residence):
    gate = residence.steps.hold("prepare /b")
    call = residence.house.begin(residence.call("b"))
    await gate.reached.wait()
    asking = residence.house.begin(residence.control.recycling.ask("an operator"))
    await asyncio.sleep(1)
    gate.open()
    await call
    await asking
    residence.check("b")


async def test_a_model_that_nobody_calls_is_loaded_by_its_next_call(residence):
    await residence.call("a")
    await residence.control.recycling.ask("an operator")
    assert residence.house.listed() == []
    assert await residence.call("a") is CacheUse.DISK
