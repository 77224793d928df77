"""What is kept, forgotten, loaded again and cleared away when the adapter or Triton starts anew."""

import asyncio

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ModelSource, Placement, StagedModel, TritonName
from adapter.core.state import ModelState
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    StubDied,
)
from tests.fakes.house import House

MIB = 2**20
QUICK = TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=5, stub_gone=0)
LOST = BackendUnavailable("the connection to Triton broke", delivered=True)


@pytest_asyncio.fixture
async def house():
    house = await House(1000 * MIB, QUICK).open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def reloading():
    """What Triton has lost is loaded again."""
    house = await House(1000 * MIB, QUICK, loads_again=True).open()
    yield house
    await house.close()


def left_over(model_id: str, *, mib: int = 0, is_loaded: bool = True) -> StagedModel:
    name = TritonName(model_id)
    return StagedModel(
        name,
        ModelId(model_id),
        Placement((name,)),
        is_loaded=is_loaded,
        source=ModelSource(f"/{model_id}"),
        can_load_again=True,
        content_key=f"/{model_id}",
        held={HOST: mib * MIB},
    )


async def started(*models: StagedModel, ready: set[str], others: int = 0) -> House:
    """An adapter that starts beside a Triton that is up."""
    house = House(1000 * MIB, QUICK)
    house.packages.folders = {model.name: model for model in models}
    house.triton.models = set(ready)
    house.others = others
    return await house.open()


# -- the adapter starts anew --------------------------------------------------------------------


async def test_what_was_loaded_and_is_still_served_is_taken_over(caplog):
    caplog.set_level("INFO")
    kept = left_over("m", mib=300)
    house = await started(kept, ready={"m", "foreign"}, others=350 * MIB)
    house.check_registry("m")
    assert house.held("m") == 300 * MIB
    assert house.control.memory.ledger.snapshot().baseline_bytes == 50 * MIB
    record = house.control.registry.serving(ModelId("m"))
    assert (record.source.url, record.package_key) == ("/m", "/m")
    assert [r.model_id for r in caplog.records if r.message == "model.adopted"] == ["m"]
    with house.control.lease(ModelId("m")):
        pass
    await house.unload("m")
    assert house.triton.models == {"foreign"}
    assert house.packages.folders == {}
    await house.close()


@pytest.mark.parametrize(("is_loaded", "ready"), [(True, set()), (False, {"m"}), (False, set())])
async def test_what_was_half_done_or_is_no_longer_served_is_taken_down(is_loaded, ready):
    house = await started(left_over("m", is_loaded=is_loaded), ready=ready)
    house.check()
    await house.load("m")
    house.check("m")
    await house.close()


async def test_before_stock_is_taken_no_model_is_called_not_found():
    """To a platform that would say that it has to load it."""
    house = House(1000 * MIB, QUICK)
    with pytest.raises(BackendUnavailable, match="starting or stopping"):
        house.control.lease(ModelId("m"))
    await house.open()
    with pytest.raises(ModelNotFound):
        house.control.lease(ModelId("m"))
    await house.close()


async def test_what_triton_is_stuck_with_does_not_keep_the_adapter_from_starting():
    house = House(limits=TimeLimits(load=10, unload=0, stall=0, recovery=1, alone=5))
    house.packages.folders[TritonName("m")] = left_over("m", is_loaded=False)
    house.steps.fail("unload m", BackendTimeout("Triton did not answer in time"))
    await house.control.open()
    await house.load("n")
    record = await house.load("m")
    assert record.name.startswith("ta.r.1.")
    assert set(house.packages.folders) == {"m", "n", record.name}
    await house.close()


async def test_of_a_package_all_models_must_be_served_to_take_it_over():
    names = tuple(map(TritonName, ("h", "m")))
    whole = StagedModel(names[1], ModelId("m"), Placement(names), is_loaded=True)
    house = await started(whole, ready={"m"})
    house.check()
    await house.close()


async def test_what_was_taken_over_is_held_to_what_was_noted_as_nobody_measured_it_here():
    house = await started(left_over("m", mib=300), ready={"m"})
    house.sizes["m"] = 300 * MIB
    await house.control.memory.tick({ModelId("m")})
    house.sizes["m"] = 340 * MIB
    await house.control.memory.tick({ModelId("m")})
    assert house.held("m") == 300 * MIB
    await house.close()


# -- Triton starts anew -------------------------------------------------------------------------


async def test_models_that_vanished_give_their_bytes_back(house):
    house.sizes["m"] = 300 * MIB
    await house.load("m")
    house.triton.models.clear()
    await house.control.triton_restarted()
    house.check()
    with pytest.raises(ModelNotFound):
        house.control.lease(ModelId("m"))


async def test_what_triton_has_lost_is_loaded_again_where_that_is_wanted(reloading):
    await reloading.load("m")
    await reloading.load("n")
    reloading.triton.models.clear()
    await reloading.control.triton_restarted()
    await reloading.quiet()
    reloading.check("m", "n")


async def test_the_request_that_finds_the_loss_is_told_to_try_again(reloading):
    await reloading.load("m")
    reloading.triton.models.clear()
    with pytest.raises(ModelNotReady), reloading.control.lease(ModelId("m")):
        raise ModelNotFound("Triton does not have the model")
    await reloading.until_state("m", None)
    await reloading.until_state("m", ModelState.READY)
    await reloading.quiet()
    reloading.check("m")


async def test_until_the_load_begins_again_requests_are_told_to_try_again(reloading):
    await reloading.load("m")
    reloading.triton.models.clear()
    removal = reloading.steps.hold("remove m")
    coming = asyncio.create_task(reloading.control.triton_restarted())
    await removal.reached.wait()
    with pytest.raises(ModelNotReady):
        reloading.control.lease(ModelId("m"))
    removal.open()
    await coming
    await reloading.quiet()
    reloading.check("m")


async def test_what_nobody_loads_again_is_not_found(house, reloading):
    for one, can_load_again in ((house, True), (reloading, False)):
        record = await one.load("m")
        record.can_load_again = can_load_again
        one.triton.models.clear()
        with pytest.raises(ModelNotFound), one.control.lease(ModelId("m")):
            raise ModelNotFound("Triton does not have the model")
        await one.quiet()
        one.check()


async def test_a_dead_model_is_loaded_again_too(reloading):
    await reloading.load("m")
    reloading.server.live["m"] = False
    with pytest.raises(StubDied), reloading.control.lease(ModelId("m")):
        raise StubDied("Stub process 'm_0_0' is not healthy.")
    await reloading.until_state("m", ModelState.DEAD)
    reloading.triton.models.clear()
    await reloading.control.triton_restarted()
    await reloading.quiet()
    reloading.check("m")


async def test_a_model_whose_load_request_brought_files_cannot_be_loaded_again(reloading):
    record = await reloading.load("m")
    record.can_load_again = False
    reloading.triton.models.clear()
    await reloading.control.triton_restarted()
    await reloading.quiet()
    reloading.check()


async def test_a_model_that_does_not_come_back_is_gone_and_the_others_are_not(reloading):
    await reloading.load("m")
    await reloading.load("n")
    reloading.triton.models.clear()
    reloading.steps.fail("load m", LoadFailed("no weights"))
    await reloading.control.triton_restarted()
    await reloading.quiet()
    reloading.check("n")


# -- which Triton was looked at -----------------------------------------------------------------


async def test_a_look_at_a_triton_that_has_ended_since_says_nothing_of_the_next_one(house):
    """It would be taken for lost, with all models, until somebody looks again."""
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    house.server.pid = 2
    await house.control.triton_restarted()
    gate.open()
    await looking
    assert house.control.presence.is_up
    assert not house.control.presence.has_lost_all


@pytest.mark.parametrize("next_process", [None, 2])
async def test_a_load_whose_triton_ends_before_all_is_noted_has_failed(house, next_process):
    gate = house.steps.hold("confirm m")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    house.triton.models.clear()
    house.server.pid = next_process
    await house.control.triton_restarted()
    gate.open()
    with pytest.raises(BackendUnavailable) as caught:
        await load
    assert caught.value.delivered
    house.check()


# -- loads that are stuck -----------------------------------------------------------------------


async def stick(house: House, *names: str) -> None:
    """These loads never end: their processes were killed, and Triton does not answer."""
    for name in names:
        house.server.live[name] = True
        house.server.dies.add(name)
        house.triton.loading.add(name)
        house.steps.hold(f"load {name}")
        with pytest.raises(LoadFailed):
            await asyncio.wait_for(house.load(name), 5)


def come_back(house: House) -> None:
    """Triton is there again, with nothing in it."""
    house.triton.models.clear()
    house.triton.loading.clear()
    house.server.live.clear()


async def test_triton_is_not_stuck_while_a_thread_is_left(house):
    await stick(house, "a")
    assert house.control.why_stuck() is None


@pytest.mark.slow
async def test_triton_is_restarted_when_stuck_loads_keep_all_its_threads(house):
    await house.load("m")
    await stick(house, "a", "b")
    reason = "2 loads are stuck in Triton and keep all of its 2 threads"
    assert house.control.why_stuck() == reason
    watching = house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    assert house.server.restarts == [reason]
    come_back(house)
    await house.control.triton_restarted()
    watching.cancel()
    await house.quiet()
    assert house.control.why_stuck() is None
    house.check("m")  # loaded again, and the folders of the stuck ones are cleared
    await house.load("a")
    house.check("a", "m")


@pytest.mark.slow
async def test_a_restart_is_asked_for_once(house):
    await stick(house, "a", "b")
    house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    house.server.restarted.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(house.server.restarted.wait(), 1.2)


@pytest.mark.slow
async def test_a_restart_that_fails_on_the_way_still_loads_everything_again(house):
    await house.load("m")
    await stick(house, "a", "b")
    watching = house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    watching.cancel()
    come_back(house)
    house.steps.fail("ready", LOST)
    with pytest.raises(BackendUnavailable):
        await house.control.triton_restarted()
    await house.control.triton_restarted()
    await house.quiet()
    house.check("m")


@pytest.mark.slow
async def test_a_later_restart_of_tritons_own_loads_nothing_again(house):
    await house.load("m")
    await stick(house, "a", "b")
    watching = house.begin(house.control.run_housekeeping())
    await asyncio.wait_for(house.server.restarted.wait(), 5)
    watching.cancel()
    come_back(house)
    await house.control.triton_restarted()
    await house.quiet()
    come_back(house)
    await house.control.triton_restarted()
    await house.quiet()
    house.check()


@pytest.mark.slow
async def test_a_triton_of_somebody_elses_is_only_said_to_be_stuck():
    house = await House(limits=QUICK, embedded=False).open()
    for name in "ab":
        for call in ("load", "unload"):
            house.steps.fail(f"{call} {name}", BackendTimeout("Triton did not answer in time"))
        with pytest.raises(BackendTimeout):
            await house.load(name)
        house.triton.loading.add(name)
    assert house.control.why_stuck() is not None
    watching = house.begin(house.control.run_housekeeping())
    looked = house.steps.hold("ready")
    await asyncio.wait_for(looked.reached.wait(), 5)
    assert not watching.done()
    watching.cancel()
    come_back(house)
    await house.control.triton_restarted()
    assert house.control.why_stuck() is None
    house.check()
    await house.close()


@pytest.mark.slow
async def test_what_ends_loading_after_all_is_unloaded_and_its_name_is_free_again(house):
    await stick(house, "m")
    second = await house.load("m")
    house.begin(house.control.run_housekeeping())
    look = house.steps.hold("present")
    await asyncio.wait_for(look.reached.wait(), 5)
    look.open()
    await house.turns()
    assert "m" in house.packages.folders
    house.triton.loading.discard("m")
    house.triton.models.add("m")
    gate = house.steps.hold("remove m")
    await asyncio.wait_for(gate.reached.wait(), 5)
    gate.open()
    await house.turns()
    assert house.triton.models == {second.name}
    assert list(house.packages.folders) == [second.name]
    house.server.live.clear()
    await house.unload("m")
    assert (await house.load("m")).name == "m"
    house.check("m")


@pytest.mark.slow
async def test_clearing_away_does_not_wait_for_a_load_under_another_name(house):
    await stick(house, "m")
    house.triton.loading.discard("m")
    house.server.live.clear()
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    house.begin(house.control.run_housekeeping())
    for step in ("present", "read"):  # after the look at Triton comes one at memory again
        look = house.steps.hold(step)
        await asyncio.wait_for(look.reached.wait(), 5)
        look.open()
        await house.turns()
    gate.open()
    await load


@pytest.mark.slow
async def test_two_looks_at_once_clear_each_stuck_load_away_once(house):
    await stick(house, "a", "b")
    come_back(house)
    gate = house.steps.hold("remove a")
    first = house.begin(house.control.triton_restarted())
    await asyncio.wait_for(gate.reached.wait(), 5)
    await house.control.triton_restarted()
    gate.open()
    await first
    assert house.control.why_stuck() is None
    house.check()


async def test_no_load_takes_the_name_of_a_stuck_one_before_its_folder_is_cleared(house):
    await stick(house, "m")
    house.triton.loading.discard("m")
    house.server.live.clear()
    house.begin(house.control.run_housekeeping())
    gate = house.steps.hold("remove m")
    await asyncio.wait_for(gate.reached.wait(), 5)
    load = house.begin(house.load("m"))
    await house.turns()
    gate.open()
    await asyncio.wait_for(load, 5)
    house.check("m")
    assert house.state("m") is ModelState.READY
