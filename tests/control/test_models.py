"""Load, unload and what lies between, on fakes: the order of steps, and what is undone."""

import asyncio
import logging
import time

import pytest
import pytest_asyncio

from adapter.control import operations as control_operations
from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId, Placement, StagedModel, TritonName
from adapter.core.state import ModelState
from adapter.errors import (
    AlreadyLoaded,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidModel,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    StubDied,
)
from adapter.telemetry.log import EVENTS
from tests.fakes.house import House

MIB = 2**20

LOAD = ["prepare /m", "read", "place m", "read", "load m", "read", "confirm m"]
UNDO = ["unload m", "wait_gone m", "remove m"]
UNLOAD = ["read", *UNDO]
LOST = BackendUnavailable("the connection to Triton broke", delivered=True)


@pytest_asyncio.fixture
async def house():
    house = await House().open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def measured():
    """1000 MiB, and a reader that sees who takes them."""
    house = await House(limit=1000 * MIB).open()
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    yield house
    await house.close()


@pytest_asyncio.fixture
async def hasty():
    """Time limits that are over at once; callers wait one second more."""
    house = await House(limits=TimeLimits(load=0, unload=0, stall=0)).open()
    yield house
    await house.close()


def operations(house: House, operation: str, outcome: str) -> float:
    labels = {"operation": operation, "outcome": outcome}
    return house.metrics.registry.get_sample_value("adapter_operations_total", labels) or 0


# -- the straight way ---------------------------------------------------------------------------


async def test_a_load_looks_then_stages_then_loads_then_measures(house):
    record = await house.load("m")
    assert house.steps.seen == LOAD
    assert record.state is ModelState.READY
    assert record.source.url == "/m"
    house.check("m")


async def test_an_unload_removes_the_folder_only_when_triton_has_let_go(house):
    await house.load("m")
    house.steps.seen.clear()
    await house.unload("m")
    assert house.steps.seen == UNLOAD
    house.check()


async def test_a_model_with_an_unsafe_name_gets_a_safe_one_in_triton(house):
    record = await house.load("team/a b")
    assert record.name == "ta.u.team_2fa_20b"
    assert house.triton.models == {"ta.u.team_2fa_20b"}
    assert house.listed() == ["team/a b"]


async def test_each_operation_leaves_one_line_with_its_figures(measured, caplog):
    caplog.set_level(logging.INFO)
    await measured.control.load(ModelId("m"), (await measured.load("n")).source, request_id="r7")
    await measured.unload("m")
    lines = [(r.message, r.model_id, r.bytes) for r in caplog.records]
    assert lines == [
        ("model.loaded", "n", 200 * MIB),
        ("model.loaded", "m", 300 * MIB),
        ("model.unloaded", "m", 0),
    ]
    assert caplog.records[1].request_id == "r7"
    assert caplog.records[1].seconds >= 0
    assert operations(measured, "load", "ok") == 2
    assert operations(measured, "unload", "ok") == 1


# -- undo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "undone"),
    [
        ("prepare", ["remove m"]),
        ("read", ["remove m"]),
        ("place", ["remove m"]),
        ("load", UNDO),
        ("confirm", UNDO),
    ],
)
async def test_a_failure_at_any_step_is_undone_newest_first(house, step, undone):
    house.steps.fail(step, InvalidModel("no config.pbtxt"))
    with pytest.raises(InvalidModel, match=r"no config\.pbtxt"):
        await house.load("m")
    seen = house.steps.seen
    assert seen[[s.split()[0] for s in seen].index(step) + 1 :] == undone
    house.check()
    await house.load("m")
    house.check("m")


async def test_a_failure_after_the_load_unloads_again(house):
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    house.steps.fail("read", LOST)
    gate.open()
    with pytest.raises(BackendUnavailable):
        await load
    house.check()


async def test_a_bug_is_undone_too_and_logged_with_its_traceback(house, caplog):
    house.steps.fail("place", RuntimeError("bug"))
    with pytest.raises(RuntimeError, match="bug"):
        await house.load("m")
    await house.quiet()
    house.check()
    (line,) = [r for r in caplog.records if r.message == "operation.failed"]
    assert line.exc_info is not None
    assert (line.operation, line.model_id) == ("load", "m")
    assert operations(house, "load", "bug") == 1


async def test_an_undo_that_fails_does_not_hide_why_the_load_failed(house, caplog):
    house.steps.fail("load", LoadFailed("no weights"))
    house.steps.fail("unload", LOST)
    with pytest.raises(LoadFailed, match="no weights"):
        await house.load("m")
    assert "model.undo_failed" in [r.message for r in caplog.records]
    house.check()


async def test_a_folder_that_cannot_be_removed_does_not_hide_why_the_load_failed(house):
    house.steps.fail("load", LoadFailed("no weights"))
    house.steps.fail("remove", BackendError("cannot remove m"))
    with pytest.raises(LoadFailed, match="no weights"):
        await house.load("m")
    assert house.control.registry.records() == []


async def test_an_unload_that_fails_leaves_the_model_serving(house):
    await house.load("m")
    house.steps.fail("unload", LOST)
    with pytest.raises(BackendUnavailable):
        await house.unload("m")
    house.check("m")
    await house.unload("m")
    house.check()


async def test_a_folder_that_cannot_be_removed_does_not_hold_the_model(house):
    """Triton has let go, so its memory is free and the name is too."""
    await house.load("m")
    house.steps.fail("remove", BackendError("cannot remove m"))
    with pytest.raises(BackendError):
        await house.unload("m")
    assert house.control.registry.records() == []
    assert house.control.memory.ledger.snapshot().models == 0
    await house.load("m")
    house.check("m")


# -- one model, many callers --------------------------------------------------------------------


async def test_a_second_load_of_a_loaded_model_is_a_conflict(house):
    await house.load("m")
    with pytest.raises(AlreadyLoaded, match="'m' is loaded already") as caught:
        await house.load("m")
    assert caught.value.model_id == "m"
    house.check("m")


async def test_a_second_load_is_refused_at_once_while_the_first_goes_on(house):
    gate = house.steps.hold("load")
    first = house.begin(house.load("m"))
    await gate.reached.wait()
    with pytest.raises(AlreadyLoaded, match="'m' is being loaded"):
        await house.load("m")
    assert not first.done()
    gate.open()
    await first
    house.check("m")


async def test_a_second_load_is_refused_before_the_first_has_taken_a_step(house):
    first = house.begin(house.load("m"))
    second = house.begin(house.load("m"))
    done = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(d).__name__ for d in done] == ["ModelRecord", "AlreadyLoaded"]


async def test_a_model_being_loaded_cannot_be_invoked_yet(house):
    gate = house.steps.hold("load")
    first = house.begin(house.load("m"))
    await gate.reached.wait()
    with pytest.raises(ModelNotReady):
        house.control.lease(ModelId("m"))
    gate.open()
    await first


async def test_an_unload_during_a_load_waits_and_then_unloads(house):
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await asyncio.sleep(0)
    gate.open()
    await load
    await unload
    assert house.steps.seen == LOAD + UNLOAD
    house.check()


async def test_an_unload_during_a_load_that_fails_finds_nothing(house):
    gate = house.steps.hold("load")
    house.steps.fail("load", LoadFailed("no weights"))
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    unload = house.begin(house.unload("m"))
    await asyncio.sleep(0)
    gate.open()
    done = await asyncio.gather(load, unload, return_exceptions=True)
    assert [type(d) for d in done] == [LoadFailed, ModelNotFound]
    house.check()


async def test_of_two_unloads_at_once_the_second_finds_nothing(house):
    await house.load("m")
    both = (house.begin(house.unload("m")), house.begin(house.unload("m")))
    done = await asyncio.gather(*both, return_exceptions=True)
    assert [type(d) for d in done] == [type(None), ModelNotFound]
    house.check()


async def test_a_load_during_an_unload_waits_and_then_loads(house):
    await house.load("m")
    house.steps.seen.clear()
    gate = house.steps.hold("unload")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    load = house.begin(house.load("m"))
    await asyncio.sleep(0)
    assert house.steps.seen == ["read", "unload m"]
    gate.open()
    await unload
    await load
    assert house.steps.seen == UNLOAD + LOAD
    house.check("m")


async def test_unload_of_an_unknown_model_is_not_found_and_starts_nothing(house):
    with pytest.raises(ModelNotFound):
        await house.unload("m")
    assert house.steps.seen == []


async def test_models_do_not_wait_for_each_other(house):
    await house.load("c")
    gates = [house.steps.hold("load a"), house.steps.hold("unload c")]
    slow = [house.begin(house.load("a")), house.begin(house.unload("c"))]
    for gate in gates:
        await gate.reached.wait()
    await house.load("b")
    await house.unload("b")
    assert not any(task.done() for task in slow)
    for gate in gates:
        gate.open()
    await asyncio.gather(*slow)
    house.check("a")


# -- inferences ---------------------------------------------------------------------------------


async def test_an_unload_waits_for_the_inferences_under_way_and_new_ones_are_refused(house):
    await house.load("m")
    house.steps.seen.clear()
    with house.control.lease(ModelId("m")) as record, house.control.lease(ModelId("m")):
        assert record.in_flight == 2
        unload = house.begin(house.unload("m"))
        await house.until_state("m", ModelState.UNLOADING)
        with pytest.raises(ModelNotFound):
            house.control.lease(ModelId("m"))
        assert house.steps.seen == []
    await unload
    assert house.steps.seen == UNLOAD
    house.check()


async def test_the_last_of_several_inferences_lets_the_unload_go_on(house):
    await house.load("m")
    house.steps.seen.clear()
    first, second = (house.control.lease(ModelId("m")) for _ in range(2))
    first.__enter__()
    second.__enter__()
    unload = house.begin(house.unload("m"))
    await house.until_state("m", ModelState.UNLOADING)
    first.__exit__(None, None, None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert house.steps.seen == []
    second.__exit__(None, None, None)
    await unload


async def test_an_unload_does_not_wait_for_ever(hasty, caplog):
    await hasty.load("m")
    with hasty.control.lease(ModelId("m")):
        await hasty.unload("m")
    hasty.check()
    assert "model.drain_timed_out" in [r.message for r in caplog.records]


async def test_an_inference_that_failed_says_nothing_about_the_model(house):
    await house.load("m")
    with pytest.raises(InferenceFailed), house.control.lease(ModelId("m")) as record:
        raise InferenceFailed("bad label")
    assert record.in_flight == 0
    house.check("m")


# -- the process of a model dies ----------------------------------------------------------------


async def kill(house: House, name: str) -> None:
    house.triton.stuck.add(name)
    house.server.live[name] = False
    with pytest.raises(StubDied), house.control.lease(ModelId(name)):
        raise StubDied(f"Stub process '{name}_0_0' is not healthy.")
    await house.until_state(name, ModelState.DEAD)


async def test_a_dead_model_is_neither_listed_nor_served(house):
    await house.load("m")
    await kill(house, "m")
    assert house.listed() == []
    with pytest.raises(ModelNotFound, match="load it again"):
        house.control.lease(ModelId("m"))


async def say_dead(house: House, name: str) -> None:
    with pytest.raises(StubDied), house.control.lease(ModelId(name)):
        raise StubDied(f"Stub process '{name}_0_0' is not healthy.")
    await house.control.drain(5)
    house.control.is_open = True


@pytest.mark.parametrize("alive", [True, None])
async def test_a_model_whose_process_lives_is_not_dead_by_a_text(house, alive):
    """A model may answer with whatever its caller wrote."""
    if alive is not None:
        house.server.live["m"] = alive
    await house.load("m")
    await say_dead(house, "m")
    house.check("m")


async def test_a_model_that_has_lost_one_of_its_processes_is_dead(house):
    house.server.live["m"] = True
    house.server.instances["m"] = {"m_0_0", "m_0_1"}
    await house.load("m")
    await say_dead(house, "m")
    house.check("m")
    house.server.instances["m"] = {"m_0_0"}
    await say_dead(house, "m")
    assert house.state("m") is ModelState.DEAD


async def test_with_a_triton_of_others_its_words_are_all_there_is():
    house = await House(embedded=False).open()
    await house.load("m")
    await say_dead(house, "m")
    assert house.state("m") is ModelState.DEAD
    await house.close()


async def test_a_refused_load_says_what_was_odd_in_the_package(house):
    house.packages.warnings = ("config.pbtxt:3:1: field 'colour' is not known",)
    house.steps.fail("load m", LoadFailed("failed to poll from model repository"))
    with pytest.raises(LoadFailed) as caught:
        await house.load("m")
    assert str(caught.value) == (
        "failed to poll from model repository; config.pbtxt:3:1: field 'colour' is not known"
    )


async def test_a_load_brings_a_dead_model_back(house):
    await house.load("m")
    await kill(house, "m")
    await house.load("m")
    house.check("m")


async def test_a_dead_model_can_be_unloaded_by_way_of_a_live_process(house):
    await house.load("m")
    await kill(house, "m")
    house.steps.seen.clear()
    await house.unload("m")
    assert house.steps.seen == [
        *("read", "unload m", "wait_gone m", "wait_gone m"),
        *("load m", "unload m", "wait_gone m"),
        "remove m",
    ]
    assert house.triton.waited[:2] == [1.0, 1.0]
    house.check()


async def test_a_process_known_to_be_gone_is_not_waited_for(house, caplog):
    """Nobody has called the model since; only the process table knows."""
    await house.load("m")
    house.triton.stuck.add("m")
    house.server.live["m"] = False
    await house.unload("m")
    assert house.triton.waited == [1.0, 1.0, 5.0]  # two short looks, and one after the live process
    assert "model.unload_stalled" in [r.message for r in caplog.records]
    house.check()


async def test_a_live_process_is_given_its_time(house):
    await house.load("m")
    house.triton.stuck.add("m")
    house.server.live["m"] = True
    await house.unload("m")
    assert house.triton.waited == [1.0, 5.0, 5.0]
    house.check()


async def test_a_slow_end_within_the_stall_time_is_no_stall(house):
    await house.load("m")
    house.triton.stuck.add("m")
    gate = house.steps.hold("wait_gone")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    house.steps.seen.clear()
    second = house.steps.hold("wait_gone")
    gate.open()
    await second.reached.wait()
    house.triton.models.discard("m")
    second.open()
    await unload
    assert house.steps.seen == ["wait_gone m", "remove m"]
    house.check()


async def test_a_model_that_triton_never_lets_go_of_is_still_there(house):
    await house.load("m")
    house.triton.stuck.add("m")
    gate = house.steps.hold("load m")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    again = house.steps.hold("unload m")
    gate.open()
    await again.reached.wait()
    house.triton.stuck.add("m")
    again.open()
    with pytest.raises(BackendTimeout, match="does not let go of model 'm'"):
        await unload
    assert house.state("m") is ModelState.READY


# -- Triton restarts ----------------------------------------------------------------------------


async def test_models_that_triton_no_longer_has_are_forgotten(measured, caplog):
    await measured.load("m")
    await measured.load("n")
    measured.triton.models.discard("m")
    await measured.control.reconcile()
    measured.check("n")
    (line,) = [r for r in caplog.records if r.message == "triton.models_vanished"]
    assert line.models == ["m"]


async def test_where_nothing_vanished_nothing_is_said(house, caplog):
    await house.load("m")
    await house.control.reconcile()
    house.check("m")
    assert caplog.records == []


async def test_a_model_that_became_ready_while_triton_was_asked_is_kept(house):
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    await house.load("m")
    gate.open()
    await looking
    house.check("m")


async def test_a_model_that_was_loaded_anew_while_triton_was_asked_is_kept(house):
    await house.load("m")
    house.triton.models.clear()
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    await house.unload("m")
    await house.load("m")
    gate.open()
    await looking
    house.check("m")


async def test_a_dead_model_that_vanished_is_forgotten(house):
    await house.load("m")
    await kill(house, "m")
    house.triton.models.clear()
    await house.control.reconcile()
    house.check()


async def test_two_looks_at_once_forget_a_model_once(house):
    """The supervisor and the watch both notice a restart."""
    for name in "abc":
        await house.load(name)
    house.triton.models.discard("a")
    first = house.steps.hold("ready")
    one = house.begin(house.control.reconcile())
    await first.reached.wait()
    second = house.steps.hold("ready")
    two = house.begin(house.control.reconcile())
    await second.reached.wait()
    first.open()
    second.open()
    await asyncio.gather(one, two)
    house.check("b", "c")


async def test_an_inference_of_before_a_restart_that_ends_after_it_hurts_no_other_model(house):
    await house.load("a")
    await house.load("b")
    lease = house.control.lease(ModelId("a"))
    lease.__enter__()
    house.triton.models.discard("a")
    await house.control.reconcile()
    died = StubDied("Stub process 'a_0_0' is not healthy.")
    lease.__exit__(type(died), died, None)
    house.check("b")


async def test_a_load_right_after_a_restart_keeps_its_folder(house):
    """What is lost is removed from the disk in the model's own turn."""
    await house.load("m")
    house.triton.models.clear()
    gate = house.steps.hold("ready")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    gate.open()
    await house.until_state("m", None)
    await house.load("m")
    await looking
    house.check("m")


async def test_a_load_that_comes_first_keeps_what_it_staged(house):
    for name in ("m", "n"):
        await house.load(name)
    house.triton.models.clear()
    gate = house.steps.hold("remove m")
    looking = house.begin(house.control.reconcile())
    await gate.reached.wait()
    load = house.begin(house.load("n"))  # has its turn before the clearing of `n`
    await load
    gate.open()
    await looking
    house.check("n")


async def test_a_not_found_of_triton_makes_it_look_once(house):
    await house.load("m")
    house.triton.models.clear()
    gate = house.steps.hold("ready")
    for _ in range(3):
        with pytest.raises(ModelNotFound), house.control.lease(ModelId("m")):
            raise ModelNotFound("Request for unknown model: 'm' is not found")
    await gate.reached.wait()
    gate.open()
    await house.quiet()
    assert house.steps.seen.count("ready") == 1
    house.check()
    await house.load("m")
    with pytest.raises(ModelNotFound), house.control.lease(ModelId("m")):
        raise ModelNotFound("Request for unknown model: 'm' is not found")
    await house.quiet()
    assert house.steps.seen.count("ready") == 2
    house.check("m")


async def test_a_look_that_finds_no_triton_forgets_nothing(house):
    await house.load("m")
    house.steps.fail("ready", LOST)
    with pytest.raises(BackendUnavailable):
        await house.control.reconcile()
    house.check("m")


# -- start and stop -----------------------------------------------------------------------------


def left_over(name: str, model_id: str) -> StagedModel:
    alone = Placement((TritonName(name),))
    return StagedModel(TritonName(name), ModelId(model_id), alone)


async def test_before_the_first_load_what_an_earlier_run_left_is_taken_down():
    house = House(limit=1000)
    house.others = 70
    for name, model_id in (("m", "m"), ("ta.u._20", " ")):
        house.packages.folders[TritonName(name)] = left_over(name, model_id)
    house.triton.models = {"m", "ta.u._20", "foreign"}
    await house.control.open()
    assert house.steps.seen == [
        *("staged", "ready"),
        *UNDO,
        *(f"{verb} ta.u._20" for verb in ("unload", "wait_gone", "remove")),
        "read",
    ]
    assert house.triton.models == {"foreign"}
    assert house.packages.folders == {}
    assert house.control.memory.ledger.snapshot().baseline_bytes == 70
    assert house.control.is_open


async def test_what_memory_holds_at_the_start_is_unknown_without_a_reader(house):
    assert house.control.memory.ledger.snapshot().baseline_bytes == 0


@pytest.mark.parametrize("operation", ["load", "unload"])
async def test_nothing_begins_before_the_start_and_after_the_stop(operation):
    house = House()
    call = getattr(house, operation)
    with pytest.raises(BackendUnavailable, match="starting or stopping"):
        await call("m")
    await house.open()
    await house.load("m")
    await house.control.drain(1)
    with pytest.raises(BackendUnavailable, match="starting or stopping"):
        await call("m")


async def test_a_stop_waits_for_the_operations_under_way(house):
    gate = house.steps.hold("load")
    load = house.begin(house.load("m"))
    await gate.reached.wait()
    stop = house.begin(house.control.drain(30))
    await asyncio.sleep(0)
    assert not stop.done()
    gate.open()
    await stop
    await load
    house.check("m")


async def test_a_stop_waits_no_longer_than_it_was_told(house):
    gate = house.steps.hold("load")
    house.begin(house.load("m"))
    await gate.reached.wait()
    await house.control.drain(0.01)
    assert house.state("m") is ModelState.LOADING
    gate.open()


# -- callers that go away, and time limits ------------------------------------------------------


async def test_a_load_outlives_its_caller(house):
    gate = house.steps.hold("load")
    caller = house.begin(house.load("m"))
    await gate.reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(AlreadyLoaded):
        await house.load("m")
    gate.open()
    await house.quiet()
    house.check("m")


async def test_a_load_that_fails_after_its_caller_has_gone_is_undone_and_logged(house, caplog):
    gate = house.steps.hold("load")
    house.steps.fail("load", LoadFailed("no weights"))
    caller = house.begin(house.load("m"))
    await gate.reached.wait()
    caller.cancel()
    gate.open()
    await house.quiet()
    house.check()
    assert "model.load_failed" in [r.message for r in caplog.records]


async def test_an_unload_outlives_its_caller(house):
    await house.load("m")
    gate = house.steps.hold("unload")
    caller = house.begin(house.unload("m"))
    await gate.reached.wait()
    caller.cancel()
    gate.open()
    await house.quiet()
    house.check()


@pytest.mark.slow
async def test_a_caller_gets_a_timeout_while_the_undo_goes_on(hasty):
    """As when Triton still loads after the time limit: its unload waits for that."""
    hasty.steps.fail("load", BackendTimeout("Triton did not answer in time"))
    gate = hasty.steps.hold("unload")
    begun = time.monotonic()
    with pytest.raises(BackendTimeout, match="did not load within 0 s") as caught:
        await hasty.load("m")
    assert time.monotonic() - begun < 5
    assert caught.value.model_id == "m"
    assert hasty.state("m") is ModelState.LOADING
    with pytest.raises(AlreadyLoaded):
        await hasty.load("m")
    gate.open()
    await hasty.quiet()
    hasty.check()
    await hasty.load("m")
    hasty.check("m")


@pytest.mark.slow
async def test_a_caller_gets_a_timeout_while_the_unload_goes_on(hasty):
    await hasty.load("m")
    gate = hasty.steps.hold("unload")
    with pytest.raises(BackendTimeout, match="was not gone within 0 s") as caught:
        await hasty.unload("m")
    assert caught.value.model_id == "m"
    assert hasty.state("m") is ModelState.UNLOADING
    gate.open()
    await hasty.quiet()
    hasty.check()


# -- what is said about it ----------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["load", "unload"])
@pytest.mark.parametrize("kind", [LoadFailed, InvalidModel, RuntimeError])
async def test_an_operation_that_fails_leaves_a_line_with_a_documented_event(
    house, caplog, operation, kind
):
    caplog.set_level(logging.INFO)
    await house.load("m")
    caplog.clear()
    house.steps.fail("prepare" if operation == "load" else "unload", kind("x"))
    with pytest.raises(kind):
        await (house.load("n") if operation == "load" else house.unload("m"))
    lines = [r for r in caplog.records if r.message.startswith("model.")]
    assert [r.message for r in lines if r.message not in EVENTS] == []
    assert len(lines) == 1
    (line,) = lines
    refused = kind is InvalidModel
    assert line.message == f"model.{operation}_{'refused' if refused else 'failed'}"
    assert operations(house, operation, "bug" if kind is RuntimeError else kind.__name__) == 1


async def test_loads_beyond_a_bound_are_refused_at_once(house, monkeypatch):
    """They outlive their callers, who may come again and again."""
    monkeypatch.setattr(control_operations, "_MAX_OPERATIONS", 3)
    gate = house.steps.hold("prepare")
    loads = [house.begin(house.load(name)) for name in ("a", "b", "c")]
    await asyncio.wait_for(gate.reached.wait(), 5)
    with pytest.raises(Overloaded, match="3 loads and unloads"):
        await house.load("d")
    gate.open()
    await asyncio.gather(*loads)
    await house.load("d")
    house.check("a", "b", "c", "d")
