"""What is let in, what waits for room, and what is refused."""

import asyncio

import pytest

from adapter.core.memory import HOST
from adapter.errors import (
    InsufficientMemory,
    MemoryFigures,
    ModelTooLarge,
)
from tests.control.memory.steps import (
    MIB,
    begin_unload,
    declare,
    sample,
)


async def test_what_does_not_fit_is_refused_before_anything_is_touched(house):
    await house.load("m")
    declare(house, big=701)
    house.steps.seen.clear()
    with pytest.raises(InsufficientMemory) as caught:
        await house.load("big")
    assert caught.value.figures == MemoryFigures(701 * MIB, 700 * MIB, 1000 * MIB, HOST)
    assert house.steps.seen == ["prepare /big", "read", "remove big"]
    house.check("m")
    await house.unload("m")
    await house.load("big")


async def test_a_refusal_is_counted_apart(house):
    await house.load("m")
    declare(house, big=900)
    with pytest.raises(InsufficientMemory):
        await house.load("big")
    assert sample(house, "triton_adapter_oom_total", phase="refused") == 1
    assert sample(house, "triton_adapter_oom_total", phase="load") == 0
    labels = {"operation": "load", "outcome": "InsufficientMemory"}
    assert sample(house, "triton_adapter_operations_total", **labels) == 1


async def test_where_nothing_else_is_loaded_what_does_not_fit_is_tried(house):
    declare(house, big=900)
    house.others, house.sizes["big"] = 500 * MIB, 400 * MIB
    await house.load("big")
    house.check("big")


async def test_what_is_larger_than_all_memory_is_too_large_and_no_refusal(house):
    declare(house, big=1001)
    with pytest.raises(ModelTooLarge) as caught:
        await house.load("big")
    assert caught.value.figures == MemoryFigures(1001 * MIB, None, 1000 * MIB, HOST)
    assert sample(house, "triton_adapter_oom_total", phase="load") == 0  # it was not tried
    assert sample(house, "triton_adapter_oom_total", phase="refused") == 1
    house.check()


async def test_a_load_that_does_not_fit_waits_for_the_unload_that_makes_room(house):
    await house.load("m")
    declare(house, big=900)
    gate, unload = await begin_unload(house, "m")
    load = house.begin(house.load("big"))
    await house.turns()
    assert not load.done()
    assert "place big" not in house.steps.seen
    gate.open()
    await asyncio.gather(unload, load)
    house.check("big")


async def test_an_unload_that_makes_too_little_room_ends_in_a_refusal(house):
    await house.load("m")
    await house.load("n")
    declare(house, big=900)
    gate, unload = await begin_unload(house, "n")
    load = house.begin(house.load("big"))
    await house.turns()
    gate.open()
    await unload
    with pytest.raises(InsufficientMemory):
        await asyncio.wait_for(load, 5)
    house.check("m")


async def test_an_unload_that_takes_its_time_is_not_waited_for_longer_than_the_limit(hasty):
    await hasty.load("m")
    declare(hasty, big=900)
    gate, unload = await begin_unload(hasty, "m")
    with pytest.raises(InsufficientMemory):
        await asyncio.wait_for(hasty.load("big"), 5)
    assert not unload.done()
    gate.open()
    await unload
