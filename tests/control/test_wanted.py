"""Models of load_at_start, loaded by a loop on a control plane of fakes."""

import asyncio

import pytest
import pytest_asyncio

from adapter.control.wanted import WantedModels
from adapter.core.model import ModelId, ModelSource
from adapter.core.residency.wanted import Want
from adapter.errors import ModelNotFound
from tests.fakes.house import House

M = ModelId("m")


@pytest_asyncio.fixture
async def house():
    house = await House().open()
    yield house
    await house.close()


async def test_one_that_is_unloaded_amid_its_load_is_gone_and_wanted_no_more(house: House):
    wanted = WantedModels(house.control, ready_when="models")
    wanted.want({M: ModelSource("/m")})
    gate = house.steps.hold("load m")
    house.begin(wanted.run())
    await gate.reached.wait()
    unloading = house.begin(house.unload("m"))
    await house.turns()
    assert wanted.why_missing() is None
    gate.open()
    await unloading

    house.check()
    assert [each.state for each in wanted.models] == [Want.UNLOADED]


async def test_one_whose_load_hangs_before_its_turn_is_not_begun_once_unloaded(house: House):
    names = [ModelId(f"m{n}") for n in range(5)]  # four are loaded at once
    wanted = WantedModels(house.control, ready_when="models")
    wanted.want({each: ModelSource(f"/{each}") for each in names})
    gates = [house.steps.hold(f"prepare /{each}") for each in names[:4]]
    house.begin(wanted.run())
    await asyncio.gather(*(gate.reached.wait() for gate in gates))
    with pytest.raises(ModelNotFound, match="it is wanted no more"):
        await house.unload("m4")
    for gate in gates:
        gate.open()
    for each in names[:4]:
        await house.control.loaded(each)
    await house.turns()

    house.check(*names[:4])
