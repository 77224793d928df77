"""Memory that neither Triton at its start nor a model accounts for."""

import pytest

from adapter.core.memory import HOST
from adapter.errors import LoadFailed
from tests.control.memory.steps import MIB, begin_load
from tests.fakes.house import House


def unaccounted(house: House) -> int | None:
    return house.control.memory.ledger.snapshot().devices[HOST].unaccounted_bytes


async def test_what_a_failed_load_leaks_is_seen_without_any_traffic(house):
    await house.load("n")
    house.steps.fail("load m", LoadFailed("bad"))
    house.others += 50 * MIB
    with pytest.raises(LoadFailed):
        await house.load("m")
    await house.control.memory.tick(())
    assert unaccounted(house) == 50 * MIB


async def test_nothing_is_concluded_while_a_load_goes_on(house):
    await house.load("n")
    await house.control.memory.tick(())
    gate, load = await begin_load(house, "m")
    house.others += 50 * MIB
    await house.control.memory.tick(())
    assert unaccounted(house) == 0
    gate.open()
    await load


async def test_a_leak_counts_on_after_all_models_are_gone(house):
    await house.load("m")
    house.others += 50 * MIB
    await house.unload("m")
    await house.load("m")
    await house.control.memory.tick(())
    assert unaccounted(house) == 50 * MIB
