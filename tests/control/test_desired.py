"""Models of load_at_start: what happens to one, and who is missing then."""

import asyncio
import itertools

import pytest
import pytest_asyncio

from adapter.control.desired import DesiredModel, DesiredModels
from adapter.core.desired import START, Want, WantEvent
from adapter.core.model import ModelId, ModelSource
from adapter.errors import ModelNotFound
from tests.fakes.house import House

M = ModelId("m")
HOME = ModelSource("/models/m")


@pytest_asyncio.fixture
async def house():
    house = await House().open()
    yield house
    await house.close()


async def test_one_that_is_unloaded_amid_its_load_is_gone_and_wanted_no_more(house: House):
    desired = house.control.desired
    gate = house.steps.hold("load m")
    desired.want({M: ModelSource("/m")})
    await gate.reached.wait()
    unloading = house.begin(house.unload("m"))
    await house.turns()
    assert desired.why_missing() is None
    gate.open()
    await unloading

    house.check()
    assert [each.state for each in desired.wanted()] == [Want.UNLOADED]


async def test_one_whose_load_hangs_before_its_turn_is_not_begun_once_unloaded(house: House):
    names = [ModelId(f"m{n}") for n in range(5)]  # four are loaded at once
    gates = [house.steps.hold(f"prepare /{each}") for each in names[:4]]
    house.control.desired.want({each: ModelSource(f"/{each}") for each in names})
    await asyncio.gather(*(gate.reached.wait() for gate in gates))
    with pytest.raises(ModelNotFound, match="ends the adapter"):
        await house.unload("m4")
    for gate in gates:
        gate.open()
    for each in names[:4]:
        await house.control.wait_for_load(each)
    await house.turns()

    house.check(*names[:4])


@pytest.fixture
def desired() -> DesiredModels:
    """Of a control plane that is not open: nothing is loaded."""
    desired = House().control.desired
    desired.want({M: HOME})
    return desired


def state(desired: DesiredModels) -> Want:
    return desired.wanted()[0].state


def unload_asked(desired: DesiredModels) -> None:
    with desired.no_more(M):
        pass


def test_one_that_a_caller_unloads_is_wanted_no_more_whatever_it_was():
    for before in set(Want) - {Want.UNLOADED}:
        model = DesiredModel(M, START, state=before, why="broken")
        assert model.apply(WantEvent.UNLOAD_ASKED)
        assert (model.state, model.why) == (Want.UNLOADED, "")


def test_only_a_load_has_one_that_was_unloaded_be_wanted_again():
    others = set(WantEvent) - {WantEvent.LOADED}
    for events in itertools.permutations(others, 3):
        model = DesiredModel(M, START, state=Want.UNLOADED)
        assert [model.apply(event) for event in events] == [False] * 3
    assert model.apply(WantEvent.LOADED)
    assert model.state is Want.LOADED


@pytest.mark.parametrize("url", ["/models/m", "/models/m/", "file:///models/m"])
def test_one_that_is_loaded_again_from_its_place_is_wanted_again(desired, url):
    unload_asked(desired)
    desired.loaded(M, ModelSource(url))
    assert state(desired) is Want.LOADED


def test_one_that_is_loaded_from_elsewhere_is_no_wanted_one(desired):
    unload_asked(desired)
    desired.loaded(M, ModelSource("/models/other"))
    assert state(desired) is Want.UNLOADED


def test_a_restart_of_triton_loses_the_loaded_and_gives_the_refused_another_try(desired):
    for event in (WantEvent.LOADED, WantEvent.REFUSED):
        desired.wanted()[0].apply(event)
        desired.doubt()
        assert state(desired) is Want.WAITING


def test_what_is_wanted_no_more_is_counted_apart_and_not_as_missing(desired):
    assert desired.count() == {"loaded": 0, "missing": 1, "unloaded": 0}
    unload_asked(desired)
    assert desired.count() == {"loaded": 0, "missing": 0, "unloaded": 1}
    assert desired.why_missing() is None
