"""Shows what control tells probes, pages and contracts."""

import asyncio
import math
from contextlib import suppress

from adapter.core.model import ModelSource
from adapter.core.record import OnExit, Step
from adapter.core.states import ModelState
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    StubDied,
    UnloadedMeanwhile,
)
from tests.control.fakes import GPU, MIB, Script
from tests.control.stage import A, B, C, Stage, fails, played


@played
async def test_figures_of_a_device_add_up():
    """A page shows the limit as what is free, held, reserved, and in use with nothing loaded."""
    async with Stage({"a": Script(), "b": Script(load_seconds=5, declared=100)}) as stage:
        await stage.load(A)
        load = asyncio.create_task(stage.load(B))
        await asyncio.sleep(3)
        state = stage.control.state
        figures = state.devices(await state.read_memory())[GPU]
        assert figures.used_by_models_bytes == 100 * MIB
        assert figures.reserved_bytes == 100 * MIB
        assert figures.limit_bytes == 1000 * MIB
        assert figures.free_bytes == 800 * MIB - figures.empty_bytes - figures.memory_reserve_bytes
        assert figures.not_attributed_bytes == 0
        assert state.pending_operations == 1
        loading = stage.control.registry.get(B)
        assert loading is not None
        size = state.size_of(loading)
        assert (size.basis, size.declared_bytes) == ("declared", 100 * MIB)
        await load


@played
async def test_lost_models_are_listed_until_loaded_or_unloaded():
    """Somebody has to load them again, and `ps` says which they are."""
    scripts = {"a": Script(), "b": Script(), "c@1": Script()}
    async with Stage(scripts, on_exit=OnExit.FORGET) as stage:
        await stage.load(A)
        await stage.load(B)
        await stage.call(C)
        stage.triton.exit()
        await asyncio.sleep(5)
        state = stage.control.state
        assert list(state.forgotten()) == [A, B]  # the next call loads c
        assert not state.forgotten()[A].is_given_up
        await stage.load(A)
        with suppress(AdapterError):
            await stage.models.unload(B)
        assert not state.forgotten()


@played
async def test_stuck_unload_shows_since_when():
    """Loads are timed by their threads in Triton, and an unload keeps none of them."""
    async with Stage({"a": Script()}) as stage:
        record = await stage.load(A)
        stage.triton.unload_seconds = math.inf
        await fails(stage.models.unload(A), BackendTimeout)
        assert stage.control.state.hangs_since(record) == record.state_since


@played
async def test_dead_model_is_not_listed_with_tritons_exit():
    """Triton may drop a model whose process has died, and nothing of that is an exit."""
    async with Stage({"a": Script(is_python=True)}, on_exit=None) as stage:
        record = await stage.load(A)
        stage.triton.kill_process_of(record.name)
        lease = stage.models.lease(A)
        lease.begin()
        try:
            await stage.triton.infer(record)
        except StubDied as error:
            await lease.judge(error)
            lease.end(error)
        assert record.state is ModelState.DEAD
        del stage.triton.loaded[record.name]
        await asyncio.sleep(20)
        assert (
            stage.control.state.forgotten()[A].reason == "their processes had died; load them again"
        )


@played
async def test_model_that_a_caller_unloads_is_not_missing():
    async with Stage({"a": Script()}) as stage:
        stage.control.desired.want({A: ModelSource("a")})
        await asyncio.sleep(10)
        await stage.models.unload(A)
        count_wanted = stage.control.state.count_wanted
        assert count_wanted() == {"loaded": 0, "missing": 0, "unloaded": 1}
        await stage.load(A)
        assert count_wanted() == {"loaded": 1, "missing": 0, "unloaded": 0}


@played
async def test_store_models_are_shown_from_their_fetch_on():
    """A fetch is a step of a load, so its model is listed before any file is there."""
    async with Stage({"a@1": Script(), "b": Script()}) as stage:
        await stage.load(B)
        stage.store.fetch_seconds = 4
        call = asyncio.create_task(stage.call(A))
        await asyncio.sleep(2)
        stores = stage.control.state.stores
        assert stores is not None
        [record] = stores.models()
        assert (record.state, record.step) == (ModelState.PREPARING, Step.FETCH)
        files = stores.files_of(record)
        assert files is not None
        assert (str(files.key), files.is_outdated) == ("a", False)
        assert (stores.waiting, stores.count_waiting(A)) == (1, 1)
        assert stores.files_of(stage.control.registry.serving(B)) is None
        await call
        assert stores.waiting == 0


@played
async def test_model_is_listed_once_amid_its_update():
    """The next version is being loaded beside the one that callers get."""
    async with Stage({"a@1": Script(), "a@2": Script(load_seconds=5)}) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(3)
        assert len(stage.control.registry.records_of(A)) == 2
        stores = stage.control.state.stores
        assert stores is not None
        assert stores.models() == [stage.control.registry.serving(A)]
        await update


@played
async def test_load_that_exit_breaks_off_is_not_forgotten():
    """It was never loaded, and its caller has heard why."""
    async with Stage({"a": Script(load_seconds=5)}, on_exit=OnExit.FORGET) as stage:
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(3)
        stage.triton.exit()
        await fails(load, BackendUnavailable)
        assert not stage.control.state.forgotten()


@played
async def test_load_that_an_unload_ends_has_failed():
    """Operators see that it was begun, and so how it ended."""
    async with Stage({"a": Script(load_seconds=5)}) as stage:
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(3)
        await stage.models.unload(A)
        await fails(load, UnloadedMeanwhile)
        [failure] = stage.metrics.history.failures(["load"])
        assert failure.kind is UnloadedMeanwhile


@played
async def test_reserve_is_a_share_of_the_limit():
    """An operator who gives models half of a device keeps free a tenth of that half."""
    stage = Stage({"a": Script()}, limit_mib=500, headroom_of=lambda limit: limit // 10)
    async with stage:
        figures = stage.control.state.devices(await stage.control.state.read_memory())[GPU]
        assert figures.memory_reserve_bytes == 50 * MIB
