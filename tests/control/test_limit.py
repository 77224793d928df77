"""Loads of unknown size against the limit: before, amid and after what they take."""

import asyncio
import logging
from typing import Any

import pytest
import pytest_asyncio

from adapter.core.memory import HOST
from adapter.core.model import ModelId
from adapter.errors import InsufficientMemory, LoadFailed, MemoryFigures, ModelTooLarge
from tests.fakes.house import House

MIB = 2**20


@pytest_asyncio.fixture(params=[True, False], ids=["apart", "totals"])
async def house(request):
    """1000 MiB, of which 50 are to be kept free; readings that tell processes apart, or do not."""
    house = House(1000 * MIB, headroom=50 * MIB)
    house.memory.tells_apart = request.param
    await house.open()
    yield house
    await house.close()


async def refusal(house: House, name: str, kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as caught:
        await house.load(name)
    return caught.value


def learned(house: House, name: str) -> int | None:
    return house.control.memory.sizes.of_url(f"/{name}")


# -- before -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken", "is_tried"), [(886, True), (887, False)])
async def test_a_load_of_unknown_size_is_tried_while_64_mebibytes_are_free(house, taken, is_tried):
    house.sizes |= {"m": taken * MIB, "n": 1}
    await house.load("m")
    if is_tried:
        await house.load("n")
        return
    error = await refusal(house, "n", InsufficientMemory)
    assert error.figures == MemoryFigures(64 * MIB, 63 * MIB, 1000 * MIB, HOST)
    assert "load n" not in house.steps.seen
    house.check("m")


async def test_a_larger_default_size_must_be_free(house):
    house.control.memory.sizes.default_bytes = 200 * MIB
    house.sizes["m"] = 800 * MIB
    await house.load("m")
    error = await refusal(house, "n", InsufficientMemory)
    assert error.figures.needed_bytes == 200 * MIB


async def test_with_nothing_free_and_nothing_else_loaded_a_load_is_tried(house):
    house.others = 980 * MIB
    await house.load("m")
    house.check("m")


# -- after --------------------------------------------------------------------------------------


async def test_a_load_that_took_more_than_there_was_is_undone_and_its_size_is_known(house):
    house.sizes |= {"m": 600 * MIB, "n": 500 * MIB}
    await house.load("m")
    error = await refusal(house, "n", InsufficientMemory)
    assert error.figures == MemoryFigures(500 * MIB, 400 * MIB, 1000 * MIB, HOST)
    assert learned(house, "n") == 500 * MIB
    house.check("m")
    house.steps.seen.clear()
    await refusal(house, "n", InsufficientMemory)
    assert "load n" not in house.steps.seen
    await house.unload("m")
    await house.load("n")
    house.check("n")


async def test_a_load_that_was_undone_has_failed_and_one_that_was_not_tried_was_refused(
    house, caplog
):
    """What was refused is everyday life and no warning."""
    caplog.set_level(logging.INFO)
    house.sizes |= {"m": 600 * MIB, "n": 500 * MIB}
    await house.load("m")
    for _ in range(2):
        await refusal(house, "n", InsufficientMemory)
    lines = [(r.message, r.levelname) for r in caplog.records if r.model_id == "n"]
    ends = [line for line in lines if line[0].startswith("model.load_")]
    assert ends == [("model.load_failed", "WARNING"), ("model.load_refused", "INFO")]


async def test_a_load_that_took_more_than_there_was_stays_if_an_unload_makes_room(house):
    house.sizes |= {"m": 600 * MIB, "n": 500 * MIB}
    await house.load("m")
    gates = {step: house.steps.hold(step) for step in ("load n", "unload m")}
    load = house.begin(house.load("n"))
    await gates["load n"].reached.wait()
    unload = house.begin(house.unload("m"))
    await gates["unload m"].reached.wait()
    gates["load n"].open()
    await house.turns()
    gates["unload m"].open()
    await asyncio.gather(load, unload)
    house.check("n")


async def test_what_passes_the_reserve_and_not_the_limit_stays(house):
    house.sizes |= {"m": 600 * MIB, "n": 390 * MIB}
    await house.load("m")
    await house.load("n")
    house.check("m", "n")


async def test_what_others_took_is_no_reason_to_undo_a_load(house):
    house.sizes |= {"m": 600 * MIB, "n": 100 * MIB}
    await house.load("m")
    gate = house.steps.hold("load n")
    load = house.begin(house.load("n"))
    await gate.reached.wait()
    house.sizes["m"] = 1001 * MIB
    gate.open()
    if house.memory.tells_apart:
        await load
        assert learned(house, "n") == 100 * MIB


async def test_what_alone_takes_more_than_there_is_is_too_large_and_tried_no_more(house):
    house.sizes["m"] = 1100 * MIB
    for _ in range(3):
        error = await refusal(house, "m", ModelTooLarge)
        assert error.figures.needed_bytes == 1100 * MIB
    assert house.steps.seen.count("load m") == 1
    house.check()


async def test_the_same_model_is_tried_again_under_another_limit(house):
    house.sizes["m"] = 1100 * MIB
    await refusal(house, "m", ModelTooLarge)
    await house.close()
    other = House(2000 * MIB)
    other.sizes["m"] = 1100 * MIB
    other.control.memory.sizes.restore(house.control.memory.sizes.as_dict())
    await other.open()
    await other.load("m")
    other.check("m")
    await other.close()


# -- what was learned and is wrong --------------------------------------------------------------


async def test_a_learned_size_above_the_limit_is_tried_once_and_corrected(house):
    house.control.memory.sizes.learn("/m", {HOST: 1200 * MIB}, exact=True)
    house.sizes["m"] = 150 * MIB
    await house.load("m")
    assert (learned(house, "m"), house.held("m")) == (150 * MIB, 150 * MIB)


async def test_a_learned_size_above_the_limit_is_not_tried_beside_others(house):
    house.control.memory.sizes.learn("/m", {HOST: 1200 * MIB}, exact=True)
    await house.load("n")
    await refusal(house, "m", ModelTooLarge)
    assert "load m" not in house.steps.seen


async def test_a_learned_size_above_the_limit_is_tried_once_in_a_run(house):
    house.control.memory.sizes.learn("/m", {HOST: 1200 * MIB}, exact=True)
    house.steps.fail("load m", LoadFailed("no weights"))
    await refusal(house, "m", LoadFailed)
    await refusal(house, "m", ModelTooLarge)
    assert house.steps.seen.count("load m") == 1


async def test_a_declared_size_above_the_limit_is_not_tried(house):
    house.packages.declared["/m"] = 1200 * MIB
    await refusal(house, "m", ModelTooLarge)
    assert "load m" not in house.steps.seen


# -- amid ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def apart():
    house = House(1000 * MIB, headroom=50 * MIB)
    house.memory.tells_apart = True
    await house.open()
    yield house
    await house.close()


async def begin_load(house: House, name: str):
    gate = house.steps.hold(f"load {name}")
    task = house.begin(house.load(name))
    await asyncio.wait_for(gate.reached.wait(), 5)
    return gate, task


async def until_ended(house: House, gate: Any) -> None:
    """Wait until the processes of the load of `n` are ended, and have Triton fail it."""
    for _ in range(200):
        if house.server.ended:
            break
        await asyncio.sleep(0.02)
    assert house.server.ended == ["n"]
    del house.loading["n"]
    house.steps.fail("load n", LoadFailed("Stub process 'n_0_0' is not healthy."))
    gate.open()


async def test_a_load_that_passes_limit_and_reserve_is_ended(apart):
    apart.sizes["m"] = 300 * MIB
    await apart.load("m")
    gate, task = await begin_load(apart, "n")
    apart.loading["n"] = 800 * MIB
    await until_ended(apart, gate)
    with pytest.raises(InsufficientMemory, match="at which its load was ended") as caught:
        await task
    assert caught.value.figures.needed_bytes == 800 * MIB
    assert learned(apart, "n") == 800 * MIB
    apart.check("m")


async def test_a_load_that_is_ended_below_its_declared_size_is_expected_to_take_that_size(apart):
    apart.packages.declared["/n"] = 500 * MIB
    apart.sizes["m"] = 300 * MIB
    await apart.load("m")
    gate, task = await begin_load(apart, "n")
    apart.loading["n"], apart.others = 400 * MIB, 400 * MIB
    await until_ended(apart, gate)
    with pytest.raises(InsufficientMemory, match="at which its load was ended"):
        await task
    with pytest.raises(InsufficientMemory, match=r"500\.0 MiB"):
        await apart.load("n")


async def test_a_load_beside_one_that_grew_is_not_ended(apart):
    apart.sizes["m"] = 300 * MIB
    await apart.load("m")
    gate, task = await begin_load(apart, "n")
    apart.loading["n"] = 10 * MIB
    apart.sizes["m"] = 1100 * MIB
    seen = len(apart.control.memory.readings.samples)
    for _ in range(200):
        if len(apart.control.memory.readings.samples) > seen + 2:
            break
        await asyncio.sleep(0.02)
    assert len(apart.control.memory.readings.samples) > seen + 2
    assert apart.server.ended == []
    gate.open()
    await task


async def test_what_loads_under_way_have_taken_is_not_counted_twice(apart):
    apart.packages.declared |= {"/m": 600 * MIB, "/n": 300 * MIB}
    gate, task = await begin_load(apart, "m")
    apart.loading["m"] = 500 * MIB
    await asyncio.wait_for(apart.load("n"), 5)
    del apart.loading["m"]
    gate.open()
    await task
    apart.check("m", "n")


async def test_what_triton_itself_takes_is_no_models_and_leaves_less_for_them(apart):
    apart.sizes |= {"m": 100 * MIB, "n": 300 * MIB}
    await apart.load("n")
    await apart.unload("n")
    await apart.load("m")
    apart.others = 700 * MIB
    await apart.control.memory.tick({ModelId("m")})
    assert apart.held("m") == 100 * MIB
    assert apart.control.memory.ledger.snapshot().baseline_bytes == 700 * MIB
    await refusal(apart, "n", InsufficientMemory)


# -- GPUs whose reader lags ---------------------------------------------------------------------


async def test_with_a_reader_that_lags_a_load_is_judged_where_only_the_adapter_holds_the_limit():
    house = House(2000 * MIB, memory_limit=1000 * MIB)
    house.memory.lag = 0.1
    house.sizes |= {"m": 600 * MIB, "n": 500 * MIB}
    await house.open()
    await house.load("m")
    await refusal(house, "n", InsufficientMemory)
    house.check("m")
    await house.close()
