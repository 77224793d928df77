"""A V2 load joins a load of the same model that is in progress."""

import asyncio

import pytest

from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId, ModelSource
from adapter.errors import BackendTimeout, LoadFailed
from adapter.frontends.model_repository import Repository
from tests.fakes.house import House


async def no_versions():
    return {}


async def test_the_failure_of_a_load_that_began_later_is_answered_to_all_that_wait(tmp_path):
    house = await House().open()
    (tmp_path / "m").mkdir()
    repository = Repository(house.control, no_versions, [tmp_path])
    gate = house.steps.hold("load m")
    house.steps.fail("load m", LoadFailed("no weights"))
    first = house.begin(repository.load("m", {}))
    await gate.reached.wait()
    later = house.steps.hold("load m")
    others = [house.begin(repository.load("m", {})) for _ in range(5)]
    await asyncio.sleep(1)
    gate.open()
    with pytest.raises(LoadFailed, match="no weights"):
        await first
    await later.reached.wait()
    house.steps.fail("load m", LoadFailed("still none"))
    await asyncio.sleep(1)
    later.open()
    found = await asyncio.gather(*others, return_exceptions=True)
    assert {str(each) for each in found} == {"still none"}
    assert house.steps.seen.count("load m") == 2
    await house.close()


async def test_a_failure_that_is_not_the_callers_is_waited_for_until_it_is_undone():
    """A load that is asked for amid the undo would be refused, and asked for again at once."""
    house = await House(limits=TimeLimits(load=0.6, unload=60.0)).open()
    load = house.steps.hold("load m")
    first = house.begin(house.load("m"))
    await load.reached.wait()
    joined = house.begin(house.control.join_load(ModelId("m"), ModelSource("/others"), 0.0))
    with pytest.raises(BackendTimeout):
        await first
    await asyncio.sleep(5)
    assert not joined.done()
    load.open()  # and Triton unloads the model
    assert await joined is None
    assert ModelId("m") not in house.control.loads.in_progress
    await house.close()
