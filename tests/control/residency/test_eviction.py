"""Who is evicted for another model, and that everybody gets through."""

import asyncio

import pytest

from adapter.control.residency import Options
from adapter.core.model import ModelId
from adapter.core.residency.policies import POLICIES
from adapter.core.state import ModelState
from adapter.runtime import clock
from tests.fakes.residence import Residence


def record(residence, name):
    return residence.control.registry.get(ModelId(name))


async def loaded(residence, **load_seconds):
    """Have these models loaded, one after the other."""
    for name, seconds in load_seconds.items():
        await residence.call(name)
        record(residence, name).load_seconds = seconds


@pytest.mark.parametrize(("eviction", "stays"), [("cost", "a"), ("lru", "b")])
async def test_by_cost_a_model_that_takes_long_to_load_stays_by_lru_one_that_was_called_later(
    eviction, stays
):
    options = Options(eviction=eviction, min_residency_seconds=0)
    residence = await Residence(2, options).open("a", "b", "c")
    await loaded(residence, a=60, b=1)
    await residence.call("c")
    residence.check(stays, "c")
    await residence.close()


async def test_by_cost_what_its_fetch_took_counts_as_well():
    residence = await Residence(2, Options(min_residency_seconds=0)).open("a", "b", "c")
    await loaded(residence, a=1, b=1)
    residence.control.registry.get(ModelId("a")).files.fetch_seconds = 60
    await residence.call("c")
    residence.check("a", "c")
    await residence.close()


async def test_what_a_fetch_and_a_load_take_is_known_after_them(residence):
    await residence.call("a")
    assert residence.control.registry.get(ModelId("a")).files.fetch_seconds > 0
    assert record(residence, "a").load_seconds > 0


@pytest.mark.parametrize("waits_for_others", [True, False])
async def test_the_wait_for_other_fetches_to_end_does_not_count(residence, waits_for_others):
    residence.artifacts.waits_for_others = waits_for_others
    gate = residence.steps.hold("fetch a")
    call = asyncio.create_task(residence.call("a"))
    await asyncio.wait_for(gate.reached.wait(), 5)
    reached = clock.monotonic()
    await asyncio.sleep(0.05)
    gate.open()
    held = clock.monotonic() - reached
    await call
    taken = residence.control.registry.get(ModelId("a")).files.fetch_seconds
    assert (taken < held) is waits_for_others


async def test_by_cost_a_model_that_has_died_goes_first():
    residence = await Residence(2, Options(min_residency_seconds=1000)).open("a", "b", "c")
    await loaded(residence, a=1, b=60)
    residence.control.registry.died(record(residence, "b"))
    await residence.call("c")
    residence.check("a", "c")
    await residence.close()


async def test_a_model_that_has_died_stays_while_it_has_requests(residence):
    lease = await residence.hold("a")
    await residence.call("b")
    residence.control.registry.died(record(residence, "a"))
    async with asyncio.timeout(5):
        await residence.call("c")
    assert residence.house.triton.models == {"a", "c"}
    lease.end()


@pytest.mark.parametrize(("min_seconds", "stays"), [(1000, "b"), (0, "a")])
async def test_a_model_that_was_just_loaded_stays_where_another_can_go(min_seconds, stays):
    options = Options(min_residency_seconds=min_seconds)
    residence = await Residence(2, options).open("a", "b", "c")
    await loaded(residence, a=60, b=1)
    record(residence, "a").state_since -= 2000
    await residence.call("c")
    residence.check(stays, "c")
    await residence.close()


@pytest.mark.parametrize("eviction", POLICIES)
async def test_more_models_than_room_are_all_served_and_no_load_is_for_nothing(eviction):
    """No model is evicted before a call of it was answered, and none waits for others to age."""
    names, rounds = "abcdef", 5
    options = Options(eviction=eviction, min_residency_seconds=1000, model_wait_seconds=30)
    residence = await Residence(2, options).open(*names)

    async def calls(name):
        for _ in range(rounds):
            await residence.call(name)

    async with asyncio.timeout(30):
        await asyncio.gather(*map(calls, names * 2))
    loads = sum(step.startswith("prepare ") for step in residence.steps.seen)
    assert loads <= 2 * rounds * len(names)
    await residence.close()


async def test_a_model_that_has_just_come_is_not_evicted_before_its_caller_has_it():
    """Else two models that need the same room evict each other for ever."""
    residence = await Residence(1).open("a", "b")
    gate = residence.steps.hold("confirm a")  # the last step before it is ready
    call = asyncio.create_task(residence.hold("a"))
    await asyncio.wait_for(gate.reached.wait(), 5)
    gate.open()
    await residence.house.until_state("a", ModelState.READY)
    assert record(residence, "a").usage.in_flight == 0
    assert not await residence.residency.eviction.evict(ModelId("a"), "room")
    assert "unload a" not in residence.steps.seen
    (await call).end()
    await residence.close()


async def test_nothing_is_evicted_for_a_model_that_fits_only_without_one_in_use_all_the_time():
    residence = await Residence(3).open("busy", "a", "b")
    residence.have("large", 300 * 2**20)
    lease = await residence.hold("busy")
    lease.record.usage.busy_since -= 60
    for name in "ab":
        await residence.call(name)
    large = asyncio.create_task(residence.call("large"))
    await asyncio.wait_for(residence.waits_for_room.wait(), 5)
    assert not {"unload a", "unload b"} & {*residence.steps.seen}
    lease.end()
    await asyncio.wait_for(large, 5)
    await residence.close()


async def test_models_that_are_idle_at_different_times_make_room_one_by_one():
    residence = await Residence(2).open("a", "b")
    residence.have("large", 200 * 2**20)
    first, second = await residence.hold("a"), await residence.hold("b")
    large = asyncio.create_task(residence.call("large"))
    await asyncio.wait_for(residence.waits_for_room.wait(), 5)
    first.end()
    await residence.house.until_state("a", None)
    second.end()
    await asyncio.wait_for(large, 5)
    residence.check("large")
    await residence.close()


async def test_requests_of_other_models_are_no_reason_to_try_a_load_again_that_lacks_room():
    residence = await Residence(2).open("busy", "other")
    residence.have("large", 200 * 2**20)
    lease = await residence.hold("busy")
    lease.record.usage.busy_since -= 60
    await residence.call("other")
    large, begun = asyncio.create_task(residence.call("large")), clock.monotonic()
    await asyncio.wait_for(residence.waits_for_room.wait(), 5)
    for _ in range(100):
        await residence.call("other")
        await residence.house.turns(20)
    tries = residence.steps.seen.count("prepare /large")
    assert tries <= 2 + 4 * (clock.monotonic() - begun)
    lease.end()
    await asyncio.wait_for(large, 5)
    await residence.close()
