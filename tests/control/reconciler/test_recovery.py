"""Triton starts anew: what is forgotten, what is loaded again, and in which turn."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from adapter.control import suspects
from adapter.control.triton_status import TritonStatus
from adapter.core.admission import MeshBooks
from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import (
    AlreadyLoaded,
    BackendUnavailable,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    StubDied,
)
from tests.control.reconciler.steps import LOST, MIB
from tests.fakes.house import House


async def test_models_that_vanished_give_their_bytes_back(house):
    house.sizes["m"] = 300 * MIB
    await house.load("m")
    house.triton.models.clear()
    await house.control.triton_restarted()
    await house.quiet()
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
    await reloading.until_state("m", ModelState.LOADING)
    await reloading.until_state("m", ModelState.READY)
    await reloading.quiet()
    reloading.check("m")


@pytest.mark.parametrize(
    ("state", "held"),
    [
        (ModelState.LOST, "remove m"),
        (ModelState.LOADING, "load m"),
        (ModelState.READY, None),
    ],
)
async def test_a_request_that_triton_lost_is_told_to_try_again_once_the_loss_is_known(state, held):
    house = await House(embedded=False, loads_again=None).open()
    await house.load("m")
    lease = house.control.lease(ModelId("m"))
    lease.__enter__()
    gate = house.steps.hold(held) if held else None
    house.triton.models.clear()
    house.triton.lives += 1
    coming = house.begin(house.control.triton_restarted())
    await house.until_state("m", state)
    with pytest.raises(ModelNotReady), lease:
        raise ModelNotFound("Triton does not have the model")
    if gate is not None:
        gate.open()
    await coming
    await house.until_state("m", ModelState.READY)
    await house.close()


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


async def test_a_model_that_cannot_be_cleared_away_is_not_said_to_come_back_for_ever(reloading):
    await reloading.load("m")
    await reloading.load("n")
    reloading.triton.models.clear()
    reloading.steps.fail("remove m", OSError("the disk is gone"))
    with suppress(OSError):
        await reloading.control.triton_restarted()
    await reloading.quiet()
    with pytest.raises(ModelNotFound):
        reloading.control.lease(ModelId("m"))
    assert reloading.state("n") is ModelState.READY


async def test_a_load_of_a_model_that_is_coming_back_is_a_conflict(reloading):
    await reloading.load("m")
    reloading.triton.models.clear()
    async with reloading.control.operations.lock(ModelId("m")):
        coming = reloading.begin(reloading.control.triton_restarted())
        await reloading.until_state("m", ModelState.LOST)
        with pytest.raises(AlreadyLoaded):
            await reloading.load("m")
        with pytest.raises(ModelNotReady, match="being loaded again"):
            reloading.control.lease(ModelId("m"))
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


async def restart_triton(house: House) -> None:
    """Triton is another one, with nothing in it."""
    house.triton.models.clear()
    house.triton.ended.clear()
    house.triton.lives += 1
    house.server.pid = house.triton.lives
    await house.control.triton_restarted()


async def end_while_loading(house: House, *names: str) -> None:
    """Triton is restarted, and ends while these are being loaded again."""
    gates = [house.steps.hold(f"load {name}") for name in names]
    await restart_triton(house)
    for name, gate in zip(names, gates, strict=True):
        await asyncio.wait_for(gate.reached.wait(), 5)
        house.steps.fail(f"load {name}", LOST)
    house.triton.end()
    for gate in gates:
        gate.open()
    for name in names:
        await house.until_state(name, ModelState.LOST)
    await house.quiet()


async def test_as_many_models_come_back_at_a_time_as_triton_loads(reloading):
    names = "abc"
    await load_all(reloading, names[::-1])  # the most recently used comes back first
    gates = [reloading.steps.hold(f"load {name}") for name in names]
    await restart_triton(reloading)
    for gate in gates[:2]:
        await asyncio.wait_for(gate.reached.wait(), 5)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert reloading.state("c") is ModelState.LOST
    gates[0].open()
    await asyncio.wait_for(gates[2].reached.wait(), 5)
    for gate in gates:
        gate.open()
    for name in names:
        await reloading.until_state(name, ModelState.READY)


async def load_all(house: House, names: str) -> None:
    for name in names:
        await house.load(name)


async def test_suspects_come_back_after_the_others_one_at_a_time_the_latest_first(reloading):
    await load_all(reloading, "abc")
    await end_while_loading(reloading, *"cb")

    gates = {name: reloading.steps.hold(f"load {name}") for name in "abc"}
    await restart_triton(reloading)
    for name in "abc":
        await asyncio.wait_for(gates[name].reached.wait(), 5)
        assert reloading.control.registry.counts()[ModelState.LOADING] == 1
        gates[name].open()
        await reloading.until_state(name, ModelState.READY)

    await reloading.quiet()
    reloading.check(*"abc")


async def test_a_model_comes_back_whose_load_is_undone_only_after_triton_is_back(reloading):
    await reloading.load("m")
    load = reloading.steps.hold("load m")
    await restart_triton(reloading)
    await asyncio.wait_for(load.reached.wait(), 5)
    reloading.steps.fail("load m", LOST)
    undo = reloading.steps.hold("remove m")
    reloading.triton.end()
    load.open()
    await asyncio.wait_for(undo.reached.wait(), 5)
    await restart_triton(reloading)
    undo.open()
    await reloading.until_state("m", ModelState.READY)


async def test_a_model_whose_return_was_broken_off_is_still_coming_back_for_its_callers(reloading):
    await reloading.load("m")
    await end_while_loading(reloading, "m")

    with pytest.raises(ModelNotReady):
        reloading.control.lease(ModelId("m"))
    with pytest.raises(AlreadyLoaded, match="is being loaded again"):
        await reloading.load("m")
    await restart_triton(reloading)
    await reloading.until_state("m", ModelState.READY)


async def test_a_model_whose_return_was_broken_off_can_be_unloaded_and_stays_unloaded(reloading):
    await load_all(reloading, "mn")
    await end_while_loading(reloading, *"mn")

    await reloading.unload("m")
    await restart_triton(reloading)
    await reloading.until_state("n", ModelState.READY)

    await reloading.quiet()
    reloading.check("n")


async def test_an_unload_that_came_before_the_next_try_of_a_return_wins(reloading):
    await load_all(reloading, "mn")
    await end_while_loading(reloading, *"mn")
    async with reloading.control.operations.lock(ModelId("m")):
        unloading = reloading.begin(reloading.unload("m"))
        await reloading.turns()
        await restart_triton(reloading)
    await unloading
    await reloading.until_state("n", ModelState.READY)

    await reloading.quiet()
    reloading.check("n")


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.model_id for r in caplog.records if r.message == "model.return_given_up"]


@pytest.mark.parametrize("culprit", "abc")
async def test_a_model_that_ends_triton_at_each_load_is_given_up_and_the_others_return(
    reloading, caplog, culprit
):
    await load_all(reloading, "abc")
    others = sorted({*"abc"} - {culprit})
    reloading.triton.deadly = {culprit}
    for _ in range(3):  # with the others, and twice alone
        assert given_up(caplog) == []
        await restart_triton(reloading)
        await asyncio.wait_for(reloading.triton.ended.wait(), 5)
        await reloading.quiet()

    await restart_triton(reloading)
    for name in others:
        await reloading.until_state(name, ModelState.READY)
    await reloading.quiet()

    assert given_up(caplog) == [culprit]
    reloading.check(*others)
    with pytest.raises(ModelNotFound):
        reloading.control.lease(ModelId(culprit))


async def test_an_answer_about_an_earlier_connection_is_no_end_of_triton(caplog):
    """A Triton that hung is asked twice; the first answer comes when the second question is out."""
    house = await House(embedded=False, loads_again=True).open()
    gate = house.steps.hold("load m")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    for _ in range(2):
        late = house.steps.hold("ready")
        asked = house.begin(house.control.reconcile())
        await late.reached.wait()
        house.triton.lives += 1
        await house.control.reconcile()
        late.open()
        await asked

    assert given_up(caplog) == []
    gate.open()
    await load
    await house.close()


async def test_the_only_model_is_tried_again_once_when_triton_ends_during_its_return(
    reloading, caplog
):
    await reloading.load("m")
    await end_while_loading(reloading, "m")
    reloading.triton.deadly = {"m"}
    await restart_triton(reloading)
    await asyncio.wait_for(reloading.triton.ended.wait(), 5)
    await reloading.quiet()
    await restart_triton(reloading)
    await reloading.quiet()

    assert given_up(caplog) == ["m"]
    reloading.check()


async def test_a_model_that_ends_triton_after_its_load_is_given_up_and_the_others_stay(
    reloading, caplog, monkeypatch
):
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.2)  # it ends Triton before it is cleared
    await load_all(reloading, "abc")
    await restart_triton(reloading)
    for ends in range(3):
        await reloading.until_state("b", ModelState.READY)
        assert (ends, given_up(caplog)) == (ends, [])
        with pytest.raises(BackendUnavailable), reloading.control.lease(ModelId("b")):
            raise BackendUnavailable("the connection to Triton broke", delivered=True)
        reloading.triton.end()
        await restart_triton(reloading)
    for name in "ac":
        await reloading.until_state(name, ModelState.READY)
    await reloading.quiet()
    reloading.check(*"ac")
    assert given_up(caplog) == ["b"]
    assert reloading.control.registry.lost[ModelId("b")].is_given_up


async def test_the_last_suspect_is_cleared_too_once_it_has_served_for_its_trial(
    reloading, caplog, monkeypatch
):
    """No load of another follows it, before which it would be looked at."""
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.02)
    await load_all(reloading, "ab")
    for _ in range(4):
        reloading.triton.end()
        await restart_triton(reloading)
        for name in "ab":
            await reloading.until_state(name, ModelState.READY)
        await asyncio.sleep(0.3)  # the longest trial has 0.16 s
        await reloading.control.reconcile()
    assert given_up(caplog) == []
    reloading.check(*"ab")


async def test_a_model_that_was_given_up_is_cleared_once_it_was_loaded_and_has_served_for_its_trial(
    reloading, caplog, monkeypatch
):
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 0.02)
    await reloading.load("m")
    for _ in range(3):
        reloading.triton.end()
        await restart_triton(reloading)
        await reloading.quiet()
    assert given_up(caplog) == ["m"]
    await reloading.load("m")
    await asyncio.sleep(0.3)
    await reloading.control.reconcile()
    reloading.triton.end()
    await restart_triton(reloading)
    await reloading.until_state("m", ModelState.READY)
    assert given_up(caplog) == ["m"]


async def test_the_first_suspect_does_not_wait_for_what_triton_had_before_its_end(
    reloading, monkeypatch
):
    monkeypatch.setattr(suspects, "TRIAL_SECONDS", 60.0)
    await reloading.load("m")
    for _ in range(2):
        await restart_triton(reloading)
        await reloading.until_state("m", ModelState.READY)
        with pytest.raises(BackendUnavailable), reloading.control.lease(ModelId("m")):
            raise BackendUnavailable("the connection to Triton broke", delivered=True)
        reloading.triton.end()


async def test_a_model_that_was_given_up_is_loaded_when_a_caller_asks_for_it(reloading):
    await reloading.load("m")
    reloading.triton.deadly = {"m"}
    while not reloading.control.registry.lost:
        await restart_triton(reloading)
        await reloading.quiet()
    reloading.triton.deadly.clear()
    await reloading.load("m")
    reloading.check("m")
    assert not reloading.control.registry.lost


async def test_models_that_are_not_coming_back_are_known_until_their_unload_is_asked_for(house):
    await load_all(house, "mn")
    await restart_triton(house)
    assert {*house.control.registry.lost} == {"m", "n"}
    with pytest.raises(ModelNotFound):
        await house.unload("m")
    await house.load("n")
    assert not house.control.registry.lost


async def test_a_load_of_a_callers_own_that_triton_ended_is_not_sent_again(reloading):
    reloading.triton.deadly = {"m"}
    with pytest.raises(BackendUnavailable):
        await reloading.load("m")
    reloading.triton.deadly.clear()

    await restart_triton(reloading)

    await reloading.quiet()
    reloading.check()


async def test_a_look_at_a_triton_that_has_ended_since_says_nothing_of_the_next_one(house):
    """It would be taken for lost, with all models, until somebody looks again."""
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    house.server.pid = 2
    await house.control.triton_restarted()
    gate.open()
    await looking
    assert house.control.triton_status.is_up
    assert not house.control.triton_status.has_lost_all


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


def test_a_late_answer_about_an_earlier_life_of_triton_is_no_end():
    """Else one hang of an external Triton counts as several ends, and a model is given up."""
    triton = SimpleNamespace(live=True, lives=1)
    status = TritonStatus(
        SimpleNamespace(triton=triton, server=None), MeshBooks(), loads_again=True
    )
    first = status.now()
    assert not status.follows_an_end(first)
    triton.lives = 2
    second = status.now()
    assert status.follows_an_end(second)
    assert not status.follows_an_end(first)
    assert not status.follows_an_end(second)
