"""A load that runs out of memory, or never ends; and memory that comes back, or does not."""

import asyncio
import logging

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.state import ModelState
from adapter.errors import (
    BackendTimeout,
    LoadFailed,
    MemoryFigures,
    ModelTooLarge,
    OutOfMemory,
    UnloadedMeanwhile,
)
from tests.contract.shelf import until
from tests.fakes.house import House

MIB = 2**20
QUICK = TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=5, stub_gone=0, stub_unseen=0)
FULL = OutOfMemory("CUDA out of memory", model_id="m", pattern="torch")
REPLACEMENT = "ta.r.1.62c66a7a5dd70c3146618063c344e531e6d4b59e379808443ce962b3abd63c5a"  # of "m"


@pytest_asyncio.fixture
async def house():
    """1000 MiB; strangers hold 600 of them."""
    house = House(1000 * MIB, QUICK)
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB, REPLACEMENT: 300 * MIB}
    await house.open()
    house.others = 600 * MIB
    yield house
    await house.close()


def sample(house: House, name: str, **labels: str) -> float | None:
    return house.metrics.registry.get_sample_value(name, labels)


async def held_at(house: House, step: str, work):
    gate = house.steps.hold(step)
    task = house.begin(work)
    await asyncio.wait_for(gate.reached.wait(), 5)
    return gate, task


# -- out of memory at load ----------------------------------------------------------------------


async def test_a_load_out_of_memory_is_not_tried_again_while_nothing_came_back(house):
    house.steps.fail("load m", FULL)
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        await house.load("m")
    assert house.steps.seen.count("load m") == 1
    house.check()
    assert sample(house, "triton_adapter_load_retries_total") == 0


async def test_a_load_out_of_memory_is_undone_and_tried_once_more_when_memory_came_back(
    house, caplog
):
    caplog.set_level(logging.INFO)
    house.steps.fail("load m", FULL)
    gate, load = await held_at(house, "unload m", house.load("m"))
    house.others -= 100 * MIB  # somebody else lets go
    gate.open()
    await load
    steps = [s for s in house.steps.seen if s.split()[0] in {"load", "unload", "wait_gone"}]
    assert steps == ["load m", "unload m", "wait_gone m", "load m"]
    assert sample(house, "triton_adapter_load_retries_total") == 1
    assert "model.load_retried" in [r.message for r in caplog.records]
    house.check("m")


async def test_what_fails_again_is_not_tried_a_third_time(house):
    house.steps.fail("load m", FULL)
    gate, load = await held_at(house, "unload m", house.load("m"))
    house.others -= 100 * MIB
    house.steps.fail("load m", FULL)
    gate.open()
    with pytest.raises(OutOfMemory):
        await load
    assert house.steps.seen.count("load m") == 2
    house.check()


async def test_a_load_is_tried_again_when_an_unload_has_ended_since(house):
    await house.load("n")
    load_gate, load = await held_at(house, "load m", house.load("m"))
    house.others += 200 * MIB  # what it frees, others take
    await house.unload("n")
    house.steps.fail("load m", FULL)
    load_gate.open()
    await load
    house.check("m")


async def test_a_load_that_ran_out_of_memory_waits_for_an_unload_in_progress(house):
    await house.load("n")
    gate, unload = await held_at(house, "wait_gone n", house.unload("n"))
    house.triton.models.add("n")  # not gone yet
    house.steps.fail("load m", FULL)
    load = house.begin(house.load("m"))
    await house.turns()
    assert house.steps.seen.count("load m") == 1
    assert not load.done()
    house.triton.models.discard("n")
    gate.open()
    await asyncio.gather(load, unload)
    assert house.steps.seen.count("load m") == 2
    house.check("m")


async def test_an_unload_that_does_not_end_is_waited_for_only_so_long(house):
    await house.load("n")
    gate, unload = await held_at(house, "unload n", house.unload("n"))
    house.steps.fail("load m", FULL)
    with pytest.raises(OutOfMemory):
        await asyncio.wait_for(house.load("m"), 5)
    assert house.steps.seen.count("load m") == 1
    gate.open()
    await unload


# -- what only may be a lack of memory ----------------------------------------------------------


SUSPECTED = LoadFailed(
    "Stub process 'm_0_0' is not healthy.", model_id="m", suspected="is not healthy"
)


async def test_a_suspected_failure_while_memory_is_low_is_out_of_memory(house):
    house.others = 980 * MIB
    house.steps.fail("load m", SUSPECTED)
    with pytest.raises(OutOfMemory, match="memory was low") as caught:
        await house.load("m")
    assert caught.value.matched == "is not healthy"
    assert caught.value.figures == MemoryFigures(None, 20 * MIB, 1000 * MIB, HOST)
    assert (
        sample(house, "triton_adapter_oom_patterns_total", phase="load", pattern="suspected") == 1
    )


async def test_a_failure_shows_low_memory_also_by_what_the_model_needed(house):
    house.packages.declared["/m"] = 500 * MIB
    house.steps.fail("load m", SUSPECTED)
    with pytest.raises(OutOfMemory):
        await house.load("m")


async def test_a_suspected_failure_with_memory_enough_is_the_models_own(house):
    house.steps.fail("load m", SUSPECTED)
    with pytest.raises(LoadFailed, match="is not healthy"):
        await house.load("m")
    assert house.steps.seen.count("load m") == 1


async def test_a_failure_that_nobody_suspects_is_its_own_even_when_memory_is_low(house):
    house.others = 980 * MIB
    house.steps.fail("load m", LoadFailed("no weights"))
    with pytest.raises(LoadFailed, match="no weights"):
        await house.load("m")


async def test_a_suspected_failure_with_nothing_to_see_memory_by_is_the_models_own():
    house = await House(limits=QUICK).open()
    house.steps.fail("load m", SUSPECTED)
    with pytest.raises(LoadFailed):
        await house.load("m")
    await house.close()


# -- a model that can never fit -----------------------------------------------------------------


async def lose(house: House, error: OutOfMemory = FULL) -> str:
    house.steps.fail("load m", error)
    with pytest.raises((OutOfMemory, ModelTooLarge)) as caught:
        await house.load("m")
    house.check(*(name for name in ("n",) if name in house.listed()))
    return type(caught.value).__name__


async def test_a_model_that_runs_out_of_memory_alone_again_and_again_is_too_large(house):
    assert [await lose(house) for _ in range(5)] == ["OutOfMemory"] * 3 + ["ModelTooLarge"] * 2
    assert sample(house, "triton_adapter_oom_patterns_total", phase="load", pattern="torch") == 5


async def test_a_load_that_succeeds_clears_the_model(house):
    for _ in range(3):
        await lose(house)
    await house.load("m")
    await house.unload("m")
    assert await lose(house) == "OutOfMemory"


async def test_beside_other_models_running_out_of_memory_is_never_its_own_fault(house):
    await house.load("n")
    assert {await lose(house) for _ in range(5)} == {"OutOfMemory"}


async def test_a_model_that_asks_for_more_than_there_is_is_too_large_the_second_time(house):
    await house.load("n")
    asked = OutOfMemory("full", model_id="m", figures=MemoryFigures(2000 * MIB))
    assert await lose(house, asked) == "OutOfMemory"
    house.steps.fail("load m", asked)
    with pytest.raises(ModelTooLarge, match="'m' asked again for more memory than the device has"):
        await house.load("m")


# -- memory after an unload ---------------------------------------------------------------------


def recovery(house: House) -> float:
    return sample(house, "triton_adapter_memory_recovery_seconds_sum") or 0


async def unload_keeping(house: House, name: str, kept: int):
    """An unload that Triton has done, while so many bytes are still taken."""
    gate, unload = await held_at(house, f"remove {name}", house.unload(name))
    house.others += kept
    reading = house.steps.hold("read")
    gate.open()
    await asyncio.wait_for(reading.reached.wait(), 5)
    return reading, unload


async def test_an_unload_is_answered_when_three_quarters_are_back(house):
    await house.load("m")
    reading, unload = await unload_keeping(house, "m", 76 * MIB)
    again = house.steps.hold("read")
    reading.open()
    await asyncio.wait_for(again.reached.wait(), 5)
    assert house.state("m") is None  # another load may have the name
    assert not unload.done()
    house.others -= 2 * MIB
    again.open()  # this look was taken before
    await asyncio.wait_for(unload, 5)
    assert 0 < recovery(house) < QUICK.recovery


async def test_memory_that_does_not_come_back_is_waited_for_no_longer_than_the_limit(house):
    await house.load("m")
    reading, unload = await unload_keeping(house, "m", 300 * MIB)
    reading.open()
    await asyncio.wait_for(unload, 30)
    assert recovery(house) >= QUICK.recovery
    house.check()


async def test_memory_of_processes_that_have_ended_is_not_waited_for(house):
    house.memory.tells_apart = True
    await house.load("m")
    reading, unload = await unload_keeping(house, "m", 300 * MIB)  # others take it
    reading.open()
    await asyncio.wait_for(unload, 5)
    assert recovery(house) < QUICK.recovery / 2
    house.check()


async def test_memory_of_a_process_that_lives_on_is_waited_for(house):
    house.memory.tells_apart = True
    await house.load("m")
    house.loading["m"] = 300 * MIB  # still there when Triton has let go
    await house.unload("m")
    assert recovery(house) >= QUICK.recovery


async def test_a_small_model_is_not_waited_for(house):
    house.sizes["m"] = 15 * MIB
    await house.load("m")
    house.steps.seen.clear()
    await house.unload("m")
    assert house.steps.seen == ["read", "unload m", "wait_gone m", "remove m"]
    assert sample(house, "triton_adapter_memory_recovery_seconds_count") == 0


@pytest.mark.parametrize("ends", [True, False])
async def test_what_a_load_has_taken_meanwhile_does_not_hold_an_unload_up(house, ends):
    house.others = 0
    await house.load("m")
    house.packages.declared["/n"] = 200 * MIB
    unload_gate, unload = await held_at(house, "unload m", house.unload("m"))
    load_gate, load = await held_at(house, "load n", house.load("n"))
    house.triton.models.add("n")
    if ends:
        load_gate.open()
        await load
    unload_gate.open()
    await unload
    assert recovery(house) < 0.1
    load_gate.open()
    await load


# -- loads that never end -----------------------------------------------------------------------


async def stick(house: House, name: str) -> asyncio.Task[object]:
    """A load whose python process is killed, and that Triton never answers."""
    house.server.live[name] = True
    house.server.dies.add(name)
    house.triton.loading.add(name)
    _, task = await held_at(house, f"load {name}", house.load(name))
    return task


async def test_a_load_whose_process_is_gone_is_given_up_and_left_alone(house, caplog):
    task = await stick(house, "m")
    with pytest.raises(LoadFailed, match="process of 'm' ended while the model was being loaded"):
        await asyncio.wait_for(task, 5)
    assert "unload m" not in house.steps.seen  # it would hang as well
    assert [r.stuck for r in caplog.records if r.message == "model.load_stuck"] == [1]
    assert list(house.packages.folders) == ["m"]
    assert house.listed() == []
    assert house.state("m") is None
    assert house.control.memory.ledger.snapshot().models == 0


async def test_a_load_whose_process_is_gone_has_the_time_that_a_newer_triton_takes_to_say_so(
    house, caplog
):
    """Since 2.61 a death in `initialize` is reported after 5.1 to 6.8 s."""
    house.triton.version = "2.61.0"
    house.server.live["m"] = True
    house.server.dies.add("m")
    gate, task = await held_at(house, "load m", house.load("m"))
    await until(lambda: house.server.looks > 4)
    house.steps.fail("load", SUSPECTED)
    gate.open()
    with pytest.raises(LoadFailed, match="Stub process 'm_0_0' is not healthy"):
        await task
    assert "model.load_stuck" not in [r.message for r in caplog.records]
    assert house.server.restarts == []
    house.check()


async def test_a_load_that_is_given_up_while_memory_is_low_is_out_of_memory_and_not_tried_again(
    house,
):
    await house.load("n")
    task = await stick(house, "m")
    house.others = 780 * MIB
    await house.control.memory.readings.read()
    await house.unload("n")
    with pytest.raises(OutOfMemory):
        await asyncio.wait_for(task, 5)
    assert house.steps.seen.count("load m") == 1


async def test_the_next_load_of_the_model_goes_by_another_name(house):
    await asyncio.wait({await stick(house, "m")}, timeout=5)
    record = await house.load("m")
    assert record.name == REPLACEMENT
    assert house.listed() == ["m"]
    assert sorted(house.packages.folders) == ["m", REPLACEMENT]
    await house.unload("m")
    assert list(house.packages.folders) == ["m"]
    assert house.control.memory.ledger.snapshot().models == 0


async def test_a_load_that_does_not_end_in_time_and_cannot_be_unloaded_is_stuck_too(house, caplog):
    house.steps.fail("load m", BackendTimeout("Triton did not answer in time"))
    house.steps.fail("unload m", BackendTimeout("Triton did not answer in time"))
    with pytest.raises(BackendTimeout):
        await house.load("m")
    assert "model.load_stuck" in [r.message for r in caplog.records]
    assert (await house.load("m")).name == REPLACEMENT


async def test_an_unload_that_times_out_leaves_nothing_stuck(house, caplog):
    await house.load("m")
    house.steps.fail("unload m", BackendTimeout("Triton did not answer in time"))
    with pytest.raises(BackendTimeout):
        await house.unload("m")
    assert "model.load_stuck" not in [r.message for r in caplog.records]
    assert house.state("m") is ModelState.READY
    await house.unload("m")
    house.check()


async def test_a_process_that_is_never_seen_is_given_up_too(house):
    house.server.live["m"] = False
    gate = house.steps.hold("load m")
    with pytest.raises(LoadFailed, match="ended while the model was being loaded"):
        await asyncio.wait_for(house.load("m"), 5)
    assert gate.reached.is_set()


async def test_a_model_without_a_process_is_given_its_time(house):
    gate, load = await held_at(house, "load n", house.load("n"))
    assert not (await asyncio.wait({load}, timeout=0.6))[0]  # looked at twice
    gate.open()
    await load


@pytest.mark.parametrize("end", ["unload", "limit"])
async def test_the_processes_of_a_load_that_is_ended_are_killed(end, caplog):
    limits = TimeLimits(load=0.5 if end == "limit" else 10, unload=10, alone=5)
    house = await House(1000 * MIB, limits).open()
    house.server.endable.add("m")
    house.triton.loading.add("m")
    loading, load = await held_at(house, "load m", house.load("m"))
    gate = house.steps.hold("unload m")
    ending = house.begin(house.unload("m")) if end == "unload" else load
    for _ in range(500):
        if house.server.ended:
            break
        await asyncio.sleep(0.01)
    assert house.server.ended == ["m"]
    house.triton.loading.clear()
    loading.open()  # Triton has ended the load
    gate.open()
    kind, text = (UnloadedMeanwhile, "unloaded") if end == "unload" else (BackendTimeout, "0.5 s")
    with pytest.raises(kind, match=text):
        await load
    if end == "unload":
        await ending
    await house.quiet()
    house.check()
    lines = {r.message: r for r in caplog.records}
    assert "processes were killed" in lines["model.load_ended"].reason
    assert "model.load_stuck" not in lines
    await house.close()


async def test_a_triton_of_somebody_elses_has_no_processes_to_look_at():
    house = await House(limits=QUICK, embedded=False).open()
    house.server.live["m"] = False
    gate, load = await held_at(house, "load m", house.load("m"))
    assert not (await asyncio.wait({load}, timeout=0.6))[0]
    gate.open()
    await load
    await house.close()
