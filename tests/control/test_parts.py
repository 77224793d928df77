"""Packages of several models: helpers are loaded first, steps come along, all of it goes again."""

import logging

import pytest
import pytest_asyncio

from adapter.core.model import Placement, TritonName
from adapter.core.state import ModelState
from adapter.errors import BackendUnavailable, LoadFailed, OutOfMemory
from tests.fakes.house import House

LOST = BackendUnavailable("the connection to Triton broke", delivered=True)
WHOLE = "wait_gone h1 h2 m s1 s2"


def names(*texts):
    return tuple(map(TritonName, texts))


@pytest_asyncio.fixture
async def house():
    """The package `m` has two helpers, and an ensemble for an entry with two steps."""
    house = House(limit=1000)
    house.sizes |= {"h1": 100, "h2": 100, "m": 10, "s1": 50, "s2": 50}
    house.packages.placements["/m"] = Placement(names("h1", "h2", "m"), names("s1", "s2"))
    house.triton.along["m"] = {"s1", "s2"}
    await house.open()
    yield house
    await house.close()


async def test_helpers_are_loaded_before_the_entry_and_steps_by_triton(house):
    await house.load("m")
    assert house.steps.seen == [
        *("prepare /m", "read", "place m", "read"),
        *("load h1", "load h2", "load m"),
        *("read", "confirm m"),
    ]
    house.check("m")


async def test_an_unload_takes_the_entry_down_first_and_waits_for_all(house):
    await house.load("m")
    house.steps.seen.clear()
    await house.unload("m")
    assert house.steps.seen == ["read", "unload m", "unload h2", "unload h1", WHOLE, "remove m"]
    house.check()


async def test_all_models_of_a_package_are_measured_as_one(house):
    await house.load("m")
    assert house.held("m") == 310


async def test_only_the_entry_is_listed(house):
    await house.load("m")
    assert house.listed() == ["m"]
    assert len(house.control.registry.records()) == 1


@pytest.mark.parametrize("failing", ["h1", "h2", "m"])
async def test_a_model_that_fails_to_load_takes_down_those_before_it(house, failing):
    house.steps.fail(f"load {failing}", LoadFailed("no weights"))
    with pytest.raises(LoadFailed, match="no weights"):
        await house.load("m")
    house.check()
    assert house.steps.seen[-5:] == ["unload m", "unload h2", "unload h1", WHOLE, "remove m"]
    await house.load("m")
    house.check("m")


async def test_out_of_memory_at_a_helper_is_completed_and_undone(house):
    house.steps.fail("load h2", OutOfMemory("full", model_id="m"))
    with pytest.raises(OutOfMemory) as caught:
        await house.load("m")
    assert caught.value.figures.limit_bytes == 1000
    house.check()


async def test_a_failure_to_unload_a_helper_leaves_the_model_to_be_unloaded_again(house):
    await house.load("m")
    house.steps.fail("unload h1", LOST)
    with pytest.raises(BackendUnavailable):
        await house.unload("m")
    assert house.state("m") is ModelState.READY
    await house.unload("m")
    house.check()


@pytest.mark.parametrize("stuck", ["h1", "m", "s1"])
async def test_of_all_its_models_only_the_stuck_one_is_helped_along(house, stuck, caplog):
    caplog.set_level(logging.WARNING)
    await house.load("m")
    house.triton.stuck.add(stuck)
    house.server.live[stuck] = False
    house.steps.seen.clear()
    await house.unload("m")
    assert house.steps.seen == [
        *("read", "unload m", "unload h2", "unload h1", WHOLE, f"wait_gone {stuck}"),
        *(f"load {stuck}", f"unload {stuck}", f"wait_gone {stuck}"),
        "remove m",
    ]
    assert house.triton.waited[:2] == [1.0, 1.0]
    assert "model.unload_stalled" in [r.message for r in caplog.records]
    house.check()


async def test_two_stuck_models_are_both_helped_along(house):
    await house.load("m")
    house.triton.stuck |= {"h2", "s2"}
    await house.unload("m")
    assert house.triton.waited == [1.0, 5.0, 5.0]  # alive as far as is known: given its time
    house.check()


async def test_a_stuck_model_whose_files_are_gone_is_given_up_and_the_others_are_not(house, caplog):
    await house.load("m")
    house.triton.stuck |= {"h1", "s1"}
    house.server.live |= {"h1": False, "s1": False}
    house.steps.fail("load h1", LoadFailed("no files"))
    await house.unload("m")
    assert "model.abandoned" in [r.message for r in caplog.records]
    assert house.triton.models == {"h1"}
    assert house.listed() == []


async def test_what_an_earlier_run_left_half_done_of_a_package_is_taken_down_whole():
    house = House()
    placement = Placement(names("h1", "m"), names("s1"))
    house.packages.placements["/m"] = placement
    house.triton.along["m"] = {"s1"}
    await house.open()
    await house.load("m")
    after = House()
    after.triton.models, after.triton.along = house.triton.models, house.triton.along
    after.packages.folders = house.packages.folders
    house.triton.models.discard("h1")  # not all of it is served
    await after.control.open()
    assert after.triton.models == set()
    assert after.packages.folders == {}
    await house.close()
    await after.close()


async def test_what_is_left_of_a_package_whose_entry_vanished_is_taken_down(house):
    """Somebody unloaded the entry behind the adapter's back; its helpers hold memory."""
    await house.load("m")
    house.triton.models -= {"m"}
    await house.control.reconcile()
    await house.quiet()
    house.check()


async def test_what_is_odd_about_a_package_is_logged_and_no_fault(house, caplog):
    house.packages.warnings = ("config.pbtxt:3: field 'x' is not known",)
    await house.load("m")
    (line,) = [r for r in caplog.records if r.message == "model.package_odd"]
    assert (line.model_id, line.warnings) == ("m", house.packages.warnings)
    house.check("m")
