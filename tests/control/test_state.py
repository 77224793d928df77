"""Shows what control tells probes, pages and contracts."""

import asyncio
from contextlib import suppress

from adapter.core.model import ModelSource
from adapter.core.record import OnExit, Step
from adapter.core.states import ModelState
from adapter.errors import AdapterError, StubDied
from tests.control.fakes import GPU, MIB, Script
from tests.control.stage import A, B, C, Stage, played


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
        await load


@played
async def test_size_of_model_says_how_it_is_known():
    """ModelMesh gets a size once it is measured, and the page says what a size stands on."""
    async with Stage({"a": Script(), "b": Script(load_seconds=5, declared=100)}) as stage:
        await stage.load(A)
        load = asyncio.create_task(stage.load(B))
        await asyncio.sleep(3)
        state = stage.control.state
        registry = stage.control.registry
        size = state.size_of(registry.serving(A))
        assert (size.is_learned, size.is_measured, size.is_reported) == (True, True, False)
        assert size.held == {GPU: 100 * MIB}
        loading = registry.get(B)
        assert loading is not None
        size = state.size_of(loading)
        assert (size.is_learned, size.is_measured, size.basis) == (False, False, "declared")
        assert size.declared_bytes == 100 * MIB
        assert state.measured_bytes("a", B) == 100 * MIB
        assert state.measured_bytes("elsewhere", B) is None
        assert state.mean_bytes() == 100 * MIB
        assert state.largest() == {GPU: 100 * MIB}
        await load


@played
async def test_size_is_unknown_where_nobody_measures():
    """Without a reading and a limit there is no device, and 0 bytes would be a claim."""
    stage = Stage({"a": Script()})
    stage.triton.has_readings = False
    async with stage:
        await stage.load(A)
        state = stage.control.state
        size = state.size_of(stage.control.registry.serving(A))
        assert (size.held, size.is_learned) == ({}, False)
        assert state.measured_bytes("a", A) is None
        assert [note for note in state.notes() if "memory is not measured" in note]


@played
async def test_wanted_models_are_listed_with_their_failures():
    """A model that a caller has unloaded is wanted no more, until somebody loads it."""
    scripts = {"a": Script(), "b": Script(failure="bad weights")}
    async with Stage(scripts) as stage:
        stage.control.desired.want({A: ModelSource("a"), B: ModelSource("b")})
        await asyncio.sleep(10)
        state = stage.control.state
        [loaded, missing] = state.wanted()
        assert (loaded.model_id, loaded.url, loaded.state) == ("a", "a", "loaded")
        assert loaded.is_loaded
        assert (missing.model_id, missing.state, missing.is_loaded) == ("b", "failed", False)
        assert "bad weights" in missing.reason
        assert state.count_wanted() == {"loaded": 1, "missing": 1, "unloaded": 0}
        await stage.models.unload(A)
        [missing, unloaded] = state.wanted()
        assert (unloaded.model_id, unloaded.state) == ("a", "unloaded")
        assert state.count_wanted() == {"loaded": 0, "missing": 1, "unloaded": 1}
        await stage.load(A)
        assert state.count_wanted() == {"loaded": 1, "missing": 1, "unloaded": 0}


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
        assert (stores.waiting, stores.waiting_for(A)) == (1, 1)
        assert stores.files_of(stage.control.registry.serving(B)) is None
        await call
        assert stores.waiting == 0
