"""Known callers have turns: one who asks for many models neither holds up those of another nor
takes their place.
"""

import asyncio

import pytest

from adapter.control.residency import Options
from adapter.core.residency import victims
from adapter.core.residency.waiting import WaitLimits
from adapter.errors import OutOfMemory, TooManyWaiting
from tests.fakes.residence import Residence


async def begun(residence: Residence, name: str, caller: str) -> asyncio.Task:
    """A call that waits for its model."""
    call = residence.house.begin(residence.call(name, caller))
    for _ in range(20):
        await asyncio.sleep(0)
    return call


@pytest.fixture
async def roomy():
    """One load at a time, and memory for all models."""
    names = [f"a{number}" for number in range(6)] + ["b"]
    options = Options(load_concurrency=1)
    residence = await Residence(10, options).open(*names)
    yield residence
    await residence.close()


async def test_a_cold_start_waits_for_one_load_of_another_caller_and_not_for_all(roomy):
    gate = roomy.steps.hold("load a0")
    calls = [await begun(roomy, f"a{number}", "a") for number in range(6)]
    await gate.reached.wait()
    calls.append(await begun(roomy, "b", "b"))
    gate.open()
    async with asyncio.timeout(30):
        await asyncio.gather(*calls)
    loads = [step for step in roomy.steps.seen if step.startswith("load ")]
    assert (loads[0], loads.index("load b")) == ("load a0", 1)


async def test_a_caller_with_many_models_takes_the_place_of_its_own(residence):
    for name in "ab":
        await residence.call(name, "one")
    await residence.call("a", "another")
    await residence.call("b", "one")  # used later than the other's
    await residence.call("c", "one")
    residence.check("a", "c")


async def test_what_another_has_not_used_lately_goes_first(residence, monkeypatch):
    monkeypatch.setattr(victims, "_RECENT_SECONDS", 0.0)
    await residence.call("a", "another")
    await residence.call("b", "one")
    await residence.call("c", "one")
    residence.check("b", "c")


async def test_for_a_caller_without_a_model_of_its_own_one_of_another_goes(residence):
    for name in "ab":
        await residence.call(name, "another")
    await residence.call("c", "one")
    residence.check("b", "c")


async def test_for_a_model_s_own_words_nothing_goes_that_another_uses():
    residence = await Residence(9).open("a", "c")
    await residence.call("a", "another")
    residence.steps.fail("load c", OutOfMemory("CUDA out of memory", model_id="c"))
    await residence.call("c", "one")  # it is tried again
    residence.check("a", "c")
    await residence.close()


async def test_of_the_waiting_calls_a_known_caller_may_have_half():
    limits = WaitLimits(in_all=4, for_one=4)
    residence = await Residence(2, Options(limits=limits)).open("a", "b", "c")
    gate = residence.steps.hold("fetch a")
    calls = [await begun(residence, "a", "one") for _ in range(2)]
    await gate.reached.wait()
    with pytest.raises(TooManyWaiting, match="2 calls of this caller wait"):
        await residence.call("b", "one")
    calls.append(await begun(residence, "b", "another"))
    gate.open()
    await asyncio.gather(*calls)
    await residence.close()
