"""A loaded model is replaced by another package under its name, and is there if that fails."""

import asyncio

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import (
    AlreadyLoaded,
    BackendError,
    BackendTimeout,
    InvalidModel,
    LoadFailed,
    ModelNotReady,
    ModelTooLarge,
    OutOfMemory,
    UnloadedMeanwhile,
)
from tests.control.models.steps import LOST, MIB
from tests.fakes.house import House

NEW = ModelSource("/new")


@pytest_asyncio.fixture
async def loaded(house: House) -> tuple[House, ModelRecord]:
    record = await house.load("m")
    house.steps.seen.clear()
    return house, record


def served(house: House, name: str) -> tuple[str, str]:
    """Return where the model that is served comes from, and its name in Triton."""
    record = house.control.registry.serving(ModelId(name))
    return record.source.url, record.name


def forbid_beside(record: ModelRecord) -> None:
    """Have the model updated in place."""
    record.can_be_doubled = False


async def test_update_is_loaded_beside_the_old_version(loaded):
    house, old = loaded
    gate = house.steps.hold("load")
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    assert served(house, "m") == ("/m", "m")
    gate.open()
    assert await update
    url, name = served(house, "m")
    assert (url, name != "m") == ("/new", True)
    assert list(house.packages.folders) == [name]
    assert house.packages.folders[TritonName(name)].model_id == "m", "as the next run adopts it"
    assert house.triton.models == {name}
    assert await house.control.updates.update(house.control.registry.get(ModelId("m")), NEW)
    assert served(house, "m") == ("/new", "m")
    house.check("m")


async def test_failed_load_beside_leaves_the_old_version(loaded):
    house, old = loaded
    house.steps.fail("load", LoadFailed("model 'm#1' is broken", model_id="m#1"))
    with pytest.raises(LoadFailed, match="model 'm' is broken") as raised:
        await house.control.updates.update(old, NEW)
    assert raised.value.model_id == "m"
    assert house.control.registry.serving(ModelId("m")) is old
    house.check("m")


async def test_update_of_an_unloaded_model_is_declined(loaded):
    house, old = loaded
    await house.unload("m")
    assert not await house.control.updates.update(old, NEW)
    house.check()


async def test_second_update_waits_for_the_first(loaded):
    house, old = loaded
    gate = house.steps.hold("load")
    first = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    second = house.begin(house.control.updates.update(old, ModelSource("/newer")))
    await house.turns()
    gate.open()
    assert (await first, await second) == (True, False)
    assert served(house, "m")[0] == "/new"


async def test_unload_ends_an_update_beside(loaded):
    house, old = loaded
    gate = house.steps.hold("load")
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    gate.open()
    await unload
    with pytest.raises(UnloadedMeanwhile, match="model 'm' was unloaded"):
        await update
    house.check()


@pytest.mark.parametrize("error", [LoadFailed("broken"), OutOfMemory("no room")])
async def test_old_version_is_loaded_again_when_the_new_one_fails(loaded, error):
    house, old = loaded
    forbid_beside(old)
    old.can_load_again = False
    house.steps.fail("load m", error)
    with pytest.raises(type(error), match="the model that was there was loaded again"):
        await house.control.updates.update(old, NEW)
    assert served(house, "m") == ("/m", "m")
    record = house.control.registry.get(ModelId("m"))
    assert (record.can_load_again, record.begun_at) == (False, old.begun_at)
    house.check("m")
    assert "discard kept m" in house.steps.seen


async def test_refused_package_unloads_nothing(loaded):
    house, old = loaded
    forbid_beside(old)
    house.steps.fail("prepare /new", InvalidModel("no config"))
    with pytest.raises(InvalidModel, match=r"no config$"):
        await house.control.updates.update(old, NEW)
    assert house.control.registry.serving(ModelId("m")) is old
    house.check("m")


async def test_full_disk_unloads_nothing(loaded):
    house, old = loaded
    forbid_beside(old)
    house.steps.fail("keep m", BackendError("cannot stage"))
    with pytest.raises(BackendError, match=r"cannot stage$"):
        await house.control.updates.update(old, NEW)
    assert house.control.registry.serving(ModelId("m")) is old
    house.check("m")


async def test_failure_says_that_the_old_version_is_gone(loaded):
    house, old = loaded
    forbid_beside(old)
    house.steps.fail("load m", LoadFailed("broken"))
    house.steps.fail("prepare /m", InvalidModel("no such file"))
    text = "broken; the model that was there could not be loaded again: no such file"
    with pytest.raises(LoadFailed, match=text):
        await house.control.updates.update(old, NEW)
    house.check()


async def test_unload_ends_an_update_in_place_for_good(loaded):
    house, old = loaded
    forbid_beside(old)
    gate = house.steps.hold("load m")
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    gate.open()
    await unload
    with pytest.raises(UnloadedMeanwhile):
        await update
    house.check()


async def test_unload_ends_update_that_unloads_the_old(loaded):
    """It was answered as done, and the update loaded the new version afterwards."""
    house, old = loaded
    forbid_beside(old)
    gate = house.steps.hold("unload m")
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await house.turns()
    gate.open()
    await unload
    with pytest.raises(UnloadedMeanwhile):
        await update
    house.check()


@pytest.mark.parametrize("step", ["unload m", "load m"])
async def test_calls_wait_for_an_update_in_place(loaded, step):
    house, old = loaded
    forbid_beside(old)
    gate = house.steps.hold(step)
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    assert house.control.is_being_loaded(ModelId("m"))
    with pytest.raises(ModelNotReady):
        house.control.lease(ModelId("m"))
    call = house.begin(house.control.wait_for_lease(ModelId("m"), 60))
    await house.turns()
    gate.open()
    assert (await call).record.source == NEW
    assert await update


async def test_calls_wait_until_the_old_version_is_back(loaded):
    house, old = loaded
    forbid_beside(old)
    gate = house.steps.hold("load m")
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    call = house.begin(house.control.wait_for_lease(ModelId("m"), 60))
    await house.turns()
    house.steps.fail("confirm m", LoadFailed("broken"))
    gate.open()
    assert (await call).record.source.url == "/m"
    with pytest.raises(LoadFailed, match="the model that was there was loaded again"):
        await update


async def test_second_update_in_place_waits_for_the_first(loaded):
    """The second was loaded first, and the first then replaced it by the older files."""
    house, old = loaded
    forbid_beside(old)
    gate = house.steps.hold("unload m")
    first = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    with pytest.raises(AlreadyLoaded):
        await house.control.load(ModelId("m"), ModelSource("/newer"))
    gate.open()
    assert await first
    assert served(house, "m")[0] == "/new"


async def test_old_version_is_loaded_by_the_next_triton(loaded):
    house, old = loaded
    forbid_beside(old)
    house.steps.fail("load m", LOST)
    with pytest.raises(type(LOST), match="the model that was there was loaded again"):
        await house.control.updates.update(old, NEW)
    house.check("m")


async def test_old_version_comes_back_after_the_time_limit():
    house = await House(limits=TimeLimits(load=0.6, unload=60.0)).open()
    old = await house.load("m")
    forbid_beside(old)
    gate = house.steps.hold("load m")
    update = house.begin(house.control.updates.update(old, NEW))
    await gate.reached.wait()
    await asyncio.sleep(5)
    gate.open()
    with pytest.raises(BackendTimeout, match="the model that was there was loaded again"):
        await update
    assert served(house, "m") == ("/m", "m")
    house.check("m")
    await house.close()


async def test_update_without_room_for_both_is_in_place(measured):
    old = await measured.load("m")
    measured.others = 500 * MIB
    await measured.control.memory.readings.read()
    assert await measured.control.updates.update(old, NEW)
    assert served(measured, "m") == ("/new", "m")
    measured.check("m")


async def test_too_large_update_leaves_the_old_version(measured):
    """Nothing is unloaded for a model that can never fit."""
    old = await measured.load("m")
    measured.packages.declared["/new"] = 2000 * MIB
    held = measured.control.memory.ledger.snapshot().held_bytes
    with pytest.raises(ModelTooLarge):
        await measured.control.updates.update(old, NEW)
    assert measured.control.registry.serving(ModelId("m")) is old
    book = measured.control.memory.ledger.snapshot()
    assert (book.held_bytes, book.reserved_bytes, book.models) == (held, 0, 1)


async def test_pinned_model_keeps_its_name_in_triton(loaded):
    """Other models may call it by that name."""

    class Pinning:
        can_evict = False

        def is_pinned(self, model_id: ModelId) -> bool:
            return model_id == "m"

        async def evict_for(self, _: object) -> bool:
            return False

    house, old = loaded
    house.control.evictor = Pinning()
    assert await house.control.updates.update(old, NEW)
    assert served(house, "m") == ("/new", "m")
    assert house.state("m") is ModelState.READY
