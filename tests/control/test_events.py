"""Shows that control writes the events of today, with their fields."""

import asyncio
import logging

from adapter.control.ports import StoreSettings
from adapter.core.record import Step
from tests.control.fakes import MIB, Script
from tests.control.stage import A, B, C, Stage, played


def find(caplog, event):
    """Return the lines of one event."""
    return [record for record in caplog.records if record.msg == event]


def test_eviction_tells_for_whom(caplog):
    """An operator sees why a model went, and what it was worth."""
    caplog.set_level(logging.INFO)

    @played
    async def sequence():
        scripts = {"a@1": Script(600, declared=600), "b@1": Script(600, declared=600)}
        async with Stage(scripts) as stage:
            await stage.call(A)
            await stage.call(B)
            evictions = stage.metrics.endpoint_evictions.labels("memory", "room")
            assert evictions._value.get() == 1

    sequence()
    [unloading] = find(caplog, "model.unloading")
    assert (unloading.evicted, unloading.evicted_for) == ("room", "b")
    assert "1 call x" in unloading.worth


def test_wait_names_the_models_before_it(caplog):
    """/debug/state and `ps` show whom a load waits for, and so does its line."""
    caplog.set_level(logging.INFO)

    @played
    async def sequence():
        async with Stage({"a": Script(load_seconds=9), "b": Script()}) as stage:
            first = asyncio.create_task(stage.load(A))
            await asyncio.sleep(2)
            second = asyncio.create_task(stage.load(B))
            await asyncio.sleep(2)
            [waiting] = stage.control.registry.records_of(B)
            assert (waiting.step, waiting.blockers) == (Step.TURN, ("a",))
            await asyncio.gather(first, second)

    sequence()
    [line] = find(caplog, "model.load_waits")
    assert (line.model_id, line.waits_for, line.awaits) == ("b", "turn", ["a"])


def test_replaced_version_counts_as_evicted(caplog):
    """The metric and the page count what calls have loaded and the store has anew."""
    caplog.set_level(logging.INFO)

    @played
    async def sequence():
        settings = StoreSettings(revalidate_seconds=30)
        scripts = {
            "a@1": Script(),
            "a@2": Script(),
            "b@1": Script(600, declared=600),
            "b@2": Script(600, declared=600),
        }
        async with Stage(scripts, stores=settings) as stage:
            await stage.call(A)
            await stage.call(B)  # has to go before its new version comes
            stage.store.versions["a"] += 1
            stage.store.versions["b"] += 1
            await asyncio.sleep(40)
            evictions = stage.metrics.endpoint_evictions.labels("memory", "changed")
            assert evictions._value.get() == 2
            assert stage.models.unloader.journal.evictions == {"changed": 2}
            page, _ = stage.metrics.page("")
            assert b"triton_adapter_endpoint_model_unloading_seconds_count 2.0" in page

    sequence()
    lines = [line for line in find(caplog, "model.unloading") if line.evicted == "changed"]
    assert [line.replaced_by for line in lines] == ["a", "b"]


def test_failed_check_is_logged_once_per_reason(caplog):
    """A key that is gone stays gone: a line at each check would hide all others."""

    @played
    async def sequence():
        async with Stage({"a@1": Script()}, stores=StoreSettings(revalidate_seconds=10)) as stage:
            await stage.call(A)
            for _ in range(2):
                stage.store.keys.remove("a")
                await asyncio.sleep(60)
                stage.store.keys.add("a")
                await asyncio.sleep(60)

    sequence()
    lines = find(caplog, "model.not_revalidated")
    assert [(line.model_id, line.reason) for line in lines] == [("a", "there is no a")] * 2


def test_report_of_triton_that_differs_is_logged(caplog):
    """Triton's tracker does not see all that some backends take; once per package suffices."""
    caplog.set_level(logging.INFO)

    @played
    async def sequence():
        scripts = {
            "a": Script(300, reported=200),
            "b": Script(300, reported=290),
            "c": Script(300, reported=100),
        }
        async with Stage(scripts) as stage:
            await stage.load(C)  # the first load makes a CUDA context as well
            for model_id in (A, B, A):
                record = await stage.load(model_id)
                assert stage.control.state.size_of(record).is_reported
                await stage.models.unload(model_id)

    sequence()
    [line] = find(caplog, "memory.report_differs")
    assert (line.model_id, line.levelname) == ("a", "WARNING")
    assert (line.reported_bytes, line.read_bytes) == (200 * MIB, 300 * MIB)


def test_return_that_an_exit_breaks_off_is_logged(caplog):
    """Triton exits again while it loads a model that it had lost."""
    caplog.set_level(logging.INFO)

    @played
    async def sequence():
        async with Stage({"a": Script(load_seconds=5)}) as stage:
            await stage.load(A)
            stage.triton.exit()
            await asyncio.sleep(5)
            assert stage.triton.loading
            stage.triton.exit()
            await asyncio.sleep(60)
            stage.check(A)

    sequence()
    [line] = find(caplog, "model.return_broken_off")
    assert (line.model_id, line.levelname) == ("a", "WARNING")
