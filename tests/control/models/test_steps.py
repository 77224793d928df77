"""Load and unload: the order of steps, and what is undone when one fails."""

import logging

import pytest

from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import (
    BackendError,
    BackendUnavailable,
    InvalidModel,
    LoadFailed,
)
from tests.control.models.steps import LOAD, LOST, MIB, UNDO, UNLOAD, operations


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


async def test_each_operation_leaves_a_line_when_it_begins_and_one_with_its_figures(
    measured, caplog
):
    caplog.set_level(logging.INFO)
    await measured.control.load(ModelId("m"), (await measured.load("n")).source, request_id="r7")
    await measured.unload("m")
    lines = [(r.message, r.model_id) for r in caplog.records]
    assert lines == [
        ("model.loading", "n"),
        ("model.loaded", "n"),
        ("model.loading", "m"),
        ("model.loaded", "m"),
        ("model.unloading", "m"),
        ("model.unloaded", "m"),
    ]
    beginning, loaded, unloading, unloaded = caplog.records[2:]
    assert (beginning.request_id, beginning.url) == ("r7", "/n")
    assert (loaded.request_id, loaded.bytes) == ("r7", 300 * MIB)
    assert loaded.seconds >= 0
    assert unloading.in_flight == 0
    assert unloaded.bytes == 300 * MIB  # what it held, and is free now
    assert operations(measured, "load", "ok") == 2
    assert operations(measured, "unload", "ok") == 1


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
@pytest.mark.parametrize("error", [InvalidModel("no config.pbtxt"), KeyError("a bug")], ids=type)
async def test_a_failure_at_any_step_is_undone_newest_first(house, step, undone, error):
    house.steps.fail(step, error)
    with pytest.raises(type(error)):
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
