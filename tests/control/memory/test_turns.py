"""Which loads go side by side, and which wait for their turn."""

import asyncio

import pytest

from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId
from adapter.core.state import WaitsFor
from adapter.errors import LoadFailed, UnloadedMeanwhile
from tests.control.memory.steps import (
    MIB,
    begin_load,
    begin_unload,
    declare,
    room,
)
from tests.fakes.house import QUICK, House


async def test_a_load_of_unknown_footprint_waits_until_no_other_is_under_way(house):
    gate, first = await begin_load(house, "m")
    second = house.begin(house.load("n"))
    await house.turns()
    assert "place n" not in house.steps.seen
    gate.open()
    await asyncio.gather(first, second)
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_a_known_load_waits_for_an_unknown_one(house):
    declare(house, a=100)
    gate, first = await begin_load(house, "m")
    second = house.begin(house.load("a"))
    await house.turns()
    assert "place a" not in house.steps.seen
    gate.open()
    await asyncio.gather(first, second)


async def test_known_loads_go_side_by_side(house):
    declare(house, a=400, b=400)
    begun = [await begin_load(house, name) for name in "ab"]
    assert house.control.memory.ledger.snapshot().reserved_bytes == 800 * MIB
    for gate, _ in begun:
        gate.open()
    await asyncio.gather(*(task for _, task in begun))
    house.check("a", "b")


async def test_known_loads_go_side_by_side_only_up_to_their_sum(house):
    declare(house, a=400, b=400, c=400)
    (gate_a, load_a), (gate_b, load_b) = [await begin_load(house, name) for name in "ab"]
    third = house.begin(house.load("c"))
    await house.turns()
    assert "place c" not in house.steps.seen
    house.steps.fail("load b", LoadFailed("no weights"))
    gate_b.open()
    with pytest.raises(LoadFailed):
        await load_b
    await third
    gate_a.open()
    await load_a
    house.check("a", "c")


async def test_who_waits_is_not_overtaken_by_who_would_fit(house):
    declare(house, a=500, b=700, c=100)
    gate, first = await begin_load(house, "a")
    second = house.begin(house.load("b"))
    await house.turns()
    third = house.begin(house.load("c"))
    await house.turns()
    assert "prepare /c" in house.steps.seen
    assert "place c" not in house.steps.seen
    house.steps.fail("load a", LoadFailed("no weights"))
    gate.open()
    await asyncio.gather(first, second, third, return_exceptions=True)
    seen = house.steps.seen
    assert seen.index("place b") < seen.index("place c")
    house.check("b", "c")


async def test_nobody_waits_for_long_to_run_alone_not_even_behind_another(hasty):
    hasty.sizes |= {"k": 10 * MIB}
    gate, first = await begin_load(hasty, "m")
    await asyncio.gather(hasty.load("n"), hasty.load("k"))  # else they are ended by their limit
    assert not first.done()
    gate.open()
    await first
    hasty.check("k", "m", "n")


async def test_nobody_waits_for_long_behind_one_who_waits_for_memory():
    limits = TimeLimits(load=10, unload=10, stall=5, recovery=5, alone=0.2)
    house = await room(limits).open()
    await house.load("m")
    declare(house, big=900, small=10)
    gate, unload = await begin_unload(house, "m")
    big = house.begin(house.load("big"))
    await house.turns()
    await house.load("small")
    assert not big.done()
    gate.open()
    await asyncio.gather(unload, big)
    house.check("big", "small")
    await house.close()


async def test_nobody_waits_for_a_load_that_takes_nothing_and_is_measured_all_the_same(house):
    """As one that hangs; far below the time that a load waits to run alone."""
    gate, hanging = await begin_load(house, "m")
    await asyncio.wait_for(house.load("n"), 3)
    assert house.held("n") == 200 * MIB
    assert not house.control.memory.sizes.is_exact(record_key(house, "n"))  # m may have gone on
    assert not hanging.done()
    gate.open()
    await hanging
    house.check("m", "n")
    assert not house.control.memory.sizes.is_exact(record_key(house, "m"))  # of it nothing is known


async def test_the_waits_for_loads_that_hang_do_not_add_up(house):
    gates = [house.steps.hold(f"place {name}") for name in "mnop"]
    loads = [house.begin(house.load(name)) for name in "mnop"]
    await asyncio.wait_for(asyncio.gather(*(gate.reached.wait() for gate in gates[1:])), 5)
    known = house.control.memory.accounts.models
    still = [known[ModelId(name)].still_since is not None for name in "mnop"]
    assert still == [True, False, False, False]
    for gate in gates:
        gate.open()
    await asyncio.gather(*loads)
    house.check("m", "n", "o", "p")


async def test_a_load_that_takes_memory_is_waited_for(house):
    gate, growing = await begin_load(house, "m")
    second = house.begin(house.load("n"))
    for step in range(10):
        house.loading["m"] = 20 * MIB * step
        await asyncio.sleep(0.05)
        assert "place n" not in house.steps.seen
    house.loading.clear()
    gate.open()
    await asyncio.gather(growing, second)
    house.check("m", "n")


async def test_a_load_that_imports_before_it_takes_memory_of_a_gpu_is_waited_for(house):
    gate, importing = await begin_load(house, "m")
    second = house.begin(house.load("n"))
    for step in range(40):
        house.server.resident["m"] = 10 * MIB * step
        await asyncio.sleep(0.1)
        assert "place n" not in house.steps.seen
    gate.open()
    await asyncio.gather(importing, second)
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_a_load_on_a_gpu_may_pause_for_half_the_time_that_others_wait_for_it(house):
    gate, pausing = await begin_load(house, "m")
    second = house.begin(house.load("n"))
    await asyncio.sleep(QUICK.alone / 2 - 0.1)
    assert "place n" not in house.steps.seen
    gate.open()
    await asyncio.gather(pausing, second)
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_a_load_beyond_tritons_threads_waits_for_those_that_have_one(house, caplog):
    declare(house, a=100, b=100, c=100)
    (gate_a, load_a), (gate_b, load_b) = [await begin_load(house, name) for name in "ab"]
    third = house.begin(house.load("c"))
    await until_waits(house, "c", WaitsFor.THREAD)
    assert house.control.registry.get("c").awaits == ("a", "b")
    assert "load c" not in house.steps.seen
    gate_b.open()
    await asyncio.gather(load_b, third)
    assert house.control.registry.get("c").awaits == ()
    gate_a.open()
    await load_a
    house.check("a", "b", "c")


async def test_a_load_that_is_being_unloaded_is_awaited_once(house):
    gate, load = await begin_load(house, "m")
    unload = house.begin(house.unload("m"))
    await house.turns()
    second = house.begin(house.load("n"))
    await until_waits(house, "n", WaitsFor.TURN)
    assert house.control.registry.get("n").awaits == ("m",)
    gate.open()
    with pytest.raises(UnloadedMeanwhile):
        await load
    await asyncio.gather(unload, second)
    house.check("n")


async def test_a_load_has_its_thread_until_an_unload_has_ended_it(house):
    declare(house, a=100, b=100, c=100)
    begun = [await begin_load(house, name) for name in "ab"]
    unload_gate = house.steps.hold("unload a")
    unload = house.begin(house.unload("a"))
    await house.turns()
    begun[0][0].open()
    await asyncio.wait_for(unload_gate.reached.wait(), 5)
    third = house.begin(house.load("c"))
    await until_waits(house, "c", WaitsFor.THREAD)
    unload_gate.open()
    await asyncio.gather(unload, third)
    begun[1][0].open()
    await begun[1][1]
    with pytest.raises(UnloadedMeanwhile):
        await begun[0][1]
    house.check("b", "c")


async def until_waits(house: House, name: str, what: WaitsFor) -> None:
    for _ in range(500):
        record = house.control.registry.get(ModelId(name))
        if record is not None and record.waits_for is what:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} does not wait for {what}")


def record_key(house: House, name: str) -> str:
    return house.control.registry.get(ModelId(name)).package_key


async def test_without_a_reader_unknown_loads_do_not_wait():
    house = await House().open()
    gate, first = await begin_load(house, "m")
    await asyncio.wait_for(house.load("n"), 30)
    gate.open()
    await first
    await house.close()


async def test_loads_side_by_side_do_not_share_the_same_free_bytes(hasty):
    await hasty.load("m")
    declare(hasty, a=400, b=400)
    both = (hasty.begin(hasty.load("a")), hasty.begin(hasty.load("b")))
    done = await asyncio.gather(*both, return_exceptions=True)
    assert [type(d).__name__ for d in done] == ["ModelRecord", "InsufficientMemory"]
