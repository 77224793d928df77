"""Plays sequences of loads, calls, unloads and exits of Triton, each judged by an oracle."""

import asyncio
import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from adapter.control.models import Replaces, RoomMaker
from adapter.control.ports import StoreSettings
from adapter.core import times
from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.memory import HOST, Device
from adapter.core.model import (
    ModelId,
    ModelSource,
    Placement,
    ProcessId,
    StagedModel,
    TritonName,
)
from adapter.core.record import LoadedFor, ModelRecord, OnExit
from adapter.core.sizes import UNSEEN
from adapter.core.states import ModelState
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    ArtifactNotFound,
    BackendTimeout,
    BackendUnavailable,
    GivenUp,
    InsufficientMemory,
    InvalidModel,
    LoadFailed,
    MemoryFigures,
    ModelNotFound,
    ModelNotReady,
    ModelTooLarge,
    NoRoom,
    OutOfMemory,
    Overloaded,
    StubDied,
    TooManyWaiting,
    UnloadedMeanwhile,
    was_refused,
)
from tests.control.fakes import GPU, MIB, OTHER_GPU, Script
from tests.control.stage import A, B, C, Stage, fails, played

# -- loads and unloads --------------------------------------------------------------------------


@played
async def test_load_follows_one_that_was_ended():
    """A platform that changes its mind need not wait until the first load is undone."""
    async with Stage({"a": Script(load_seconds=5), "b": Script()}) as stage:
        first = asyncio.create_task(stage.load(A))
        await asyncio.sleep(1)
        unload = asyncio.create_task(stage.models.unload(A))
        await fails(first, UnloadedMeanwhile)
        assert not unload.done()
        await stage.load(A, "b")
        await unload
        assert await stage.invoke(A) == "b"


@played
async def test_failed_load_is_undone():
    scripts = {"a": Script(failure="bad weights"), "b": Script(fault="no model file")}
    async with Stage(scripts) as stage:
        await fails(stage.load(A), LoadFailed)
        await fails(stage.load(B), InvalidModel)
        await fails(stage.invoke(A), ModelNotFound)
        stage.check()


@played
async def test_unload_refuses_what_has_not_arrived():
    """Slow callers hold up no unload: their requests are refused, also those that come later."""
    async with Stage({"a": Script()}) as stage:
        record = await stage.load(A)
        slow, slower, other = (stage.models.lease(A) for _ in range(3))
        refused = []

        def refuse(lease) -> None:
            refused.append(lease)
            lease.end(ModelNotReady("unloaded"))

        for lease in (slow, slower, other):
            lease.begin()
        slow.on_unload(partial(refuse, slow))
        unload = asyncio.create_task(stage.models.unload(A))
        await asyncio.sleep(1)
        assert refused == [slow]
        slower.on_unload(partial(refuse, slower))
        assert refused == [slow, slower]
        assert record.usage.in_flight == 1
        other.end()
        async with asyncio.timeout(5):
            await unload


@played
async def test_unloads_are_bounded_though_callers_leave():
    """Each waits for the one before it; the first unload of a model is not refused."""
    async with Stage({"a": Script(), "b": Script()}) as stage:
        await stage.load(A)
        await stage.load(B)
        call = asyncio.create_task(stage.invoke(A, seconds=20))
        await asyncio.sleep(1)
        for _ in range(1000):
            unload = asyncio.create_task(stage.models.unload(A))
            await asyncio.sleep(0.001)
            unload.cancel()
        await fails(stage.models.unload(A), Overloaded)
        await stage.models.unload(B)
        await call


@played
async def test_load_follows_an_unload_in_progress():
    async with Stage({"a": Script(), "b": Script()}) as stage:
        await stage.load(A)
        call = asyncio.create_task(stage.invoke(A, seconds=5))
        await asyncio.sleep(0.1)
        unload = asyncio.create_task(stage.models.unload(A))
        await asyncio.sleep(0)
        await stage.load(A, "b")
        assert unload.done()
        assert await call == "a"
        assert await stage.invoke(A) == "b"


# -- memory -------------------------------------------------------------------------------------


@played
async def test_nothing_is_evicted_in_vain():
    scripts = {
        "a": Script(600),
        "b@1": Script(200),
        "c": Script(700, declared=700),
        "big": Script(2000, declared=2000),
    }
    async with Stage(scripts) as stage:
        await stage.load(A)
        await stage.call(B)
        error = await fails(stage.load(C), InsufficientMemory)
        assert "needs 700.0 MiB (declared)" in str(error)
        await fails(stage.load(ModelId("big")), ModelTooLarge)
        stage.check(A, B)  # to evict b would not have sufficed


@played
async def test_load_is_retried_after_oom():
    """The files say 200 MiB, and the model takes 400."""
    scripts = {
        "a@1": Script(300, declared=300),
        "b@1": Script(300, declared=300),
        "c@1": Script(500, files=200),
    }
    async with Stage(scripts) as stage:
        await stage.call(A)
        await stage.call(B)
        assert await stage.call(C) == "c@1"
        records = stage.control.registry.records()
        assert C in {record.id for record in records}
        assert len(records) == 2


@played
async def test_load_that_kernel_ends_at_once_lacks_memory():
    """Only the reading from before the load shows that the kernel has ended a process since."""
    script = Script(load_seconds=0.01, failure="its process ended", oom_kills=1)
    async with Stage({"a": script}) as stage:
        await asyncio.sleep(1)
        error = await fails(stage.load(A), ModelTooLarge)  # with nothing else loaded
        assert "memory was low" in str(error)


@played
async def test_oom_of_unseen_gpu_blames_no_host_memory():
    """Without a reading of the GPU nobody knows what else it holds, so an unload may help."""
    stage = Stage({"a": Script({HOST: 2000}, files=100, gpus=frozenset())})
    stage.triton.devices = [HOST]
    async with stage:
        for _ in range(2):
            error = await fails(stage.load(A), OutOfMemory)
            assert isinstance(error, OutOfMemory)
            assert (error.figures.device, error.figures.free_bytes) == (None, None)


@played
async def test_callers_of_failed_load_get_one_text():
    """They get the same failure, and what is added to it for one would be added for each."""
    stage = Stage({"a@1": Script({HOST: 2000}, files=100, gpus=frozenset())})
    stage.triton.devices = [HOST]
    async with stage:
        calls = [fails(stage.call(A), OutOfMemory) for _ in range(3)]
        errors = await asyncio.gather(*calls)
        assert [str(error) for error in errors] == ["a: CUDA out of memory"] * 3


@played
async def test_eviction_waits_for_requests():
    scripts = {f"{name}@1": Script(400, declared=400) for name in "abc"}
    async with Stage(scripts) as stage:
        long_call = asyncio.create_task(stage.call(A, seconds=6))
        await stage.call(B)
        other_call = asyncio.create_task(stage.call(B, seconds=9))
        await asyncio.sleep(0.1)
        assert await stage.call(C) == "c@1"  # waits until a is idle
        assert await long_call == "a@1"
        assert await other_call == "b@1"
        stage.check(B, C)
        calls = [asyncio.create_task(stage.call(one, seconds=60)) for one in (B, C)]
        await asyncio.sleep(0.1)
        await fails(stage.call(A), NoRoom)
        await asyncio.gather(*calls)


@played
async def test_callers_return_late_while_all_models_are_explicit():
    scripts = {"a": Script(600, declared=600), "b": Script(300), "c@1": Script(600, declared=600)}
    async with Stage(scripts) as stage:
        await stage.load(A)
        await stage.load(B)
        error = await fails(stage.call(C), NoRoom)
        assert isinstance(error, NoRoom)
        assert error.retry_after_ms == 60_000


@played
async def test_stampede_loads_once():
    settings = StoreSettings(max_waiting_for_one=100)
    async with Stage({"a@1": Script(), "b@1": Script(failure="bad")}, stores=settings) as stage:
        answers = await asyncio.gather(*(stage.call(A) for _ in range(50)))
        assert answers == ["a@1"] * 50
        assert stage.store.fetches == 1
        stage.check(A)
        await fails(stage.call(B), LoadFailed)
        await fails(stage.call(B), LoadFailed)
        assert stage.store.fetches == 2
        await fails(stage.call(C), ArtifactNotFound)


@played
async def test_unload_is_no_use_of_the_files():
    """The disk is cleared of what was called longest ago, and the list says when that was."""
    async with Stage({"a@1": Script()}) as stage:
        await stage.call(A)
        await asyncio.sleep(600)
        await stage.models.unload(A)
        assert 600 <= stage.store.idle_seconds["a@1"] < 610


@played
async def test_eviction_ends_an_update():
    """The update would wait for memory behind the very load that wants b to go."""
    scripts = {name: Script(600, declared=600) for name in ("b@1", "b@2", "c@1")}
    settings = StoreSettings(revalidate_seconds=3600)
    async with Stage(scripts, stores=settings) as stage:
        await stage.call(B)
        stage.store.versions["b"] += 1
        update = asyncio.create_task(stage.update(B))
        assert await stage.call(C) == "c@1"
        with suppress(UnloadedMeanwhile):
            await update
        stage.check(C)
        assert await stage.call(B) == "b@2"


@played
async def test_known_need_passes_a_load_awaiting_its_turn():
    """The second guess waits for the first load, and not for memory: it holds up nobody."""
    scripts = {
        "a": Script(load_seconds=20),
        "b": Script(),
        "c": Script(declared=100),
    }
    async with Stage(scripts) as stage:
        loads = [asyncio.create_task(stage.load(one)) for one in (A, B)]
        await asyncio.sleep(1)
        async with asyncio.timeout(2):
            await stage.load(C)
        await asyncio.gather(*loads)


@played
async def test_load_that_evicts_is_not_overtaken():
    """Anybody may pass it while it waits for its turn, but not once others are evicted for it."""
    scripts = {
        "a": Script(50, load_seconds=4),
        "b@1": Script(600, files=480),
        "c@1": Script(500, declared=500),
        "late": Script(600, declared=600),
    }
    async with Stage(scripts) as stage:
        await stage.call(C)
        await asyncio.sleep(2)
        stage.triton.unload_seconds = 3
        first = asyncio.create_task(stage.load(A))
        call = asyncio.create_task(stage.call(B))
        await first
        await asyncio.sleep(1)
        assert TritonName("c") in stage.triton.unloading
        late = asyncio.create_task(stage.load(ModelId("late")))
        await asyncio.sleep(1)
        stage.triton.growth[GPU] = 150 * MIB  # of a neighbour: the unload is answered 5 s later
        assert await call == "b@1"
        with suppress(InsufficientMemory):
            await late


@played
async def test_load_that_passed_a_limit_needs_more():
    """It is ended amid its load, and the next one is refused by what it took until then."""
    scripts = {"a": Script(50, declared=50, load_seconds=9), "b": Script(100)}
    async with Stage(scripts, limit_mib=500) as stage:
        await stage.load(B)
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(2)
        stage.triton.growth[GPU] = 450 * MIB
        await fails(load, InsufficientMemory)
        stage.triton.growth[GPU] = 0
        await asyncio.sleep(5)
        error = await fails(stage.load(A), InsufficientMemory)
        assert was_refused(error)  # Triton is not asked


@played
async def test_one_load_ends_when_two_pass_limit():
    """The other one fits once the first is taken down, which readings show late."""
    scripts = {"a": Script(450, files=10), "b": Script(100, declared=100)}
    async with Stage(scripts, limit_mib=500) as stage:
        stage.triton.lag_seconds = 3
        stage.triton.unload_seconds = 4
        first = asyncio.create_task(stage.load(A))
        await asyncio.sleep(0.02)
        second = asyncio.create_task(stage.load(B))
        await fails(first, InsufficientMemory)
        await second
        stage.check(B)


@played
async def test_slow_guesses_at_once_keep_the_limit():
    """The next guess begins after 5 s, so the loads overlap. Those that wait for a thread of
    Triton have taken nothing, and those that end while a newer one is taken down are not kept.
    """
    slow = Script(200, files=1, is_python=True, load_seconds=6.5)
    names = [ModelId(name) for name in "abcdefg"]
    async with Stage(dict.fromkeys(names, slow), limit_mib=880, device_mib=9000) as stage:
        loads = [stage.load(name) for name in names]
        results = await asyncio.gather(*loads, return_exceptions=True)
        refusals = [result for result in results if isinstance(result, Exception)]
        assert [type(refusal) for refusal in refusals] == [InsufficientMemory] * 3
        assert len(stage.triton.loaded) == 4


@played
async def test_planned_load_waits_for_the_mesh():
    scripts = {"a": Script(500, declared=500), "b": Script(600, declared=600)}
    async with Stage(scripts, mesh_default_mib=100) as stage:
        stage.control.mesh.start(900 * MIB)
        await stage.load(A)
        stage.control.mesh.count(A, 500 * MIB)
        stage.control.mesh.count(B, 600 * MIB)
        load = asyncio.create_task(stage.models.load(B, ModelSource("b"), RoomMaker.MESH))
        await asyncio.sleep(3)
        assert not load.done()
        await stage.models.unload(A)
        stage.control.mesh.drop(A)
        await load
        stage.check(B)


@played
async def test_models_are_placed_on_several_devices():
    script = Script(600, declared=600, gpus=None, leaves_gpu_open=True)
    async with Stage({"a": script, "b": script, "c": script}, devices=2, places_gpus=True) as stage:
        await stage.load(A)
        await stage.load(B)
        gpus = {record.gpu for record in stage.control.registry.records()}
        assert gpus == {0, 1}
        await fails(stage.load(C), InsufficientMemory)
        await stage.models.unload(B)
        await stage.load(C)
        used = stage.triton.used
        assert used[GPU] == used[OTHER_GPU]


@played
async def test_loads_of_different_devices_do_not_wait():
    scripts = {
        "a@1": Script(900, declared=900),
        "b@1": Script(500, declared=500),
        "c": Script({OTHER_GPU: 500}, declared=500, gpus=frozenset({1})),
    }
    async with Stage(scripts, devices=2) as stage:
        call = asyncio.create_task(stage.call(A, seconds=8))
        await asyncio.sleep(4)
        waiting = asyncio.create_task(stage.call(B))
        await asyncio.sleep(2)
        await stage.load(C)
        assert not call.done()
        await call
        assert await waiting == "b@1"


@played
async def test_load_awaiting_memory_keeps_no_thread():
    """It has run out of memory once, and has Triton's only thread for loads until then."""
    scripts = {
        "a": Script(600, files=240),
        "b": Script({OTHER_GPU: 50}, declared=50, gpus=frozenset({1})),
        "c@1": Script(500, declared=500),
    }
    async with Stage(scripts, devices=2, load_threads=1) as stage:
        call = asyncio.create_task(stage.call(C, seconds=8))
        await asyncio.sleep(3)
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(2)
        await stage.load(B)
        assert not call.done()
        assert await call == "c@1"
        await load


@played
async def test_lagging_readings_are_booked_late():
    async with Stage({"a": Script(300, files=100), "b": Script(300)}) as stage:
        stage.triton.lag_seconds = 3.0
        await stage.load(A)
        assert stage.control.ledger.loads
        await asyncio.sleep(8)
        assert stage.control.ledger.models
        await stage.models.unload(A)
        await stage.load(B)


@played
async def test_unload_of_unread_model_waits_for_readings():
    """It is answered when a reading is newer than its end, as that of any other model."""
    async with Stage({"a": Script(300)}) as stage:
        stage.triton.lag_seconds = 3.0
        await stage.load(A)
        unload = asyncio.create_task(stage.models.unload(A))
        await asyncio.sleep(3)
        assert not stage.triton.unloading
        assert not unload.done()
        await asyncio.sleep(1)
        assert unload.done()


@played
async def test_unload_waits_though_a_reading_fails():
    """A platform books the memory as free from the answer on, also while the driver is silent."""
    async with Stage({"a": Script(300)}) as stage:
        await stage.load(A)
        unload = asyncio.create_task(stage.models.unload(A))
        await asyncio.sleep(0.1)
        stage.triton.has_readings = False
        stage.triton.growth[GPU] = 300 * MIB  # the driver gives it back later than Triton
        await asyncio.sleep(2)
        assert not stage.triton.unloading
        assert not unload.done()
        stage.triton.has_readings = True
        stage.triton.growth.clear()
        await asyncio.sleep(0.5)
        assert unload.done()


@played
async def test_futile_eviction_is_not_repeated_at_once():
    """Each try of a load that does not fit would cost callers the models that they use."""
    scripts = {"a": Script(700, declared=700), "b@1": Script(100, declared=100), "c": Script(50)}
    async with Stage(scripts) as stage:
        await stage.load(C)
        await stage.call(B)
        stage.triton.growth[GPU] = 400 * MIB  # a neighbour, for all that is known growth of b
        await asyncio.sleep(5)
        await fails(stage.load(A), InsufficientMemory)
        stage.check(C)
        await stage.call(B)
        error = await fails(stage.load(A), InsufficientMemory)
        assert "what was evicted for it lately was not enough" in str(error)
        stage.check(B, C)


@played
async def test_kernel_is_not_made_to_end_more():
    """Refuse what is surely needed and not there, in host memory."""
    size = {HOST: 900}
    scripts = {"a": Script(size, declared=900, gpus=frozenset())}
    async with Stage(scripts, device_mib=1000) as stage:
        stage.triton.devices = [HOST]
        await asyncio.sleep(5)
        stage.triton.growth[HOST] = 300 * MIB  # of neighbours
        await asyncio.sleep(5)
        error = await fails(stage.load(A), InsufficientMemory)
        assert "the kernel would end more" in str(error)


@played
async def test_lost_model_returns_to_its_gpu():
    """Compiled kernels on disk, as TensorRT keeps them by GPU, are found again."""
    scripts = {
        "a": Script(400, declared=400, gpus=None, leaves_gpu_open=True),
        "b": Script(500, declared=500, gpus=None, leaves_gpu_open=True),
    }
    async with Stage(scripts, devices=2, places_gpus=True) as stage:
        await stage.load(B)
        record = await stage.load(A)
        assert record.gpu == 1
        await stage.models.unload(B)
        stage.triton.exit()
        assert await stage.wait_and_invoke(A) == "a"
        assert stage.control.registry.serving(A).gpu == 1


@played
async def test_model_of_calls_returns_by_a_call_alone():
    """Loaded again by the adapter, it would be a platform's, which is never evicted."""
    async with Stage({"a@1": Script()}) as stage:
        await stage.call(A)
        stage.triton.exit()
        await asyncio.sleep(60)
        stage.check()
        assert await stage.call(A) == "a@1"


@played
async def test_call_amid_an_exit_is_answered():
    """A lease of the lost model would fail, though the next Triton can have it."""
    async with Stage({"a@1": Script()}) as stage:
        await stage.call(A)
        stage.triton.exit()
        assert await stage.call(A) == "a@1"


@played
async def test_retry_takes_the_gpu_with_more():
    """A neighbour has come to the GPU on which the load ran out of memory."""
    scripts = {
        "a": Script(3600, files=100, load_seconds=5, gpus=None, leaves_gpu_open=True),
        "b": Script(50, declared=50),
        "c": Script({OTHER_GPU: 100}, declared=100, gpus=frozenset({1})),
    }
    async with Stage(scripts, device_mib=4000, devices=2, places_gpus=True) as stage:
        await stage.load(B)
        await stage.load(C)
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(3)
        stage.triton.growth[GPU] = 500 * MIB
        record = await load
        assert record.gpu == 1


@played
async def test_note_follows_a_late_booking():
    """The note that a later run reads has what the model took, not what was reserved for it."""
    async with Stage({"a": Script(300, files=100)}) as stage:
        stage.triton.lag_seconds = 3.0
        await stage.load(A)
        assert stage.packages.confirmed["a"] != {GPU: 300 * MIB}
        await asyncio.sleep(8)
        assert stage.packages.confirmed["a"] == {GPU: 300 * MIB}


@played
async def test_model_is_evicted_before_readings_show_it():
    scripts = {"a@1": Script(600, declared=600), "b@1": Script(600, declared=600)}
    async with Stage(scripts) as stage:
        stage.triton.lag_seconds = 3.0
        await asyncio.sleep(5)
        await stage.call(A)
        call = asyncio.create_task(stage.call(B))
        await asyncio.sleep(1.5)  # the fetch, and an unload
        assert not stage.triton.loaded
        assert await call == "b@1"


@played
async def test_model_that_is_called_meanwhile_is_not_evicted():
    async with Stage({"a@1": Script()}) as stage:
        await stage.call(A)
        record = stage.control.registry.serving(A)
        eviction = asyncio.create_task(stage.control.eviction.evict(record, {"evicted": "room"}))
        await asyncio.sleep(0)
        with stage.models.lease(A):
            assert not await eviction
        stage.check(A)


@played
async def test_deadline_makes_no_eviction_futile():
    """The eviction was too small only because a model stayed in use: the next call fits."""
    scripts = {
        "a@1": Script(300, declared=300),
        "b@1": Script(300, declared=300),
        "c@1": Script(650, declared=650),
    }
    async with Stage(scripts) as stage:
        await stage.call(A)
        long_call = asyncio.create_task(stage.call(B, seconds=60))
        await asyncio.sleep(5)
        call = asyncio.create_task(stage.call(C))
        stage.triton.unload_seconds = 3
        await asyncio.sleep(2.5)  # the fetch, and a part of the unload
        assert TritonName("a") in stage.triton.unloading
        stage.triton.growth[GPU] = 100 * MIB  # of a neighbour
        await fails(call, NoRoom)
        assert not long_call.done()
        await long_call
        assert await stage.call(C) == "c@1"


@played
async def test_caller_loses_its_own_model_first():
    """A caller who asks for more than fits takes the room of nobody else."""
    scripts = {f"{name}@1": Script(400, declared=400) for name in "abc"}
    async with Stage(scripts) as stage:
        await stage.call(A, caller="x")
        await asyncio.sleep(2)
        await stage.call(B, caller="y")
        await asyncio.sleep(2)
        await stage.call(C, caller="y")
        stage.check(A, C)


@played
async def test_forced_load_follows_an_eviction():
    """Its model was chosen before, and is gone when the turn of the update comes."""
    scripts = {
        "a@1": Script(300, declared=300),
        "a@2": Script(300, declared=300, load_seconds=9),
        "b@1": Script(600, declared=600),
    }
    async with Stage(scripts) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(3)
        call = asyncio.create_task(stage.call(B))
        await fails(update, UnloadedMeanwhile)
        assert await stage.control.on_demand.load(A, is_forced=True)
        assert await call == "b@1"
        stage.check(A, B)


@played
async def test_new_version_keeps_the_callers_of_the_old():
    """Otherwise each update would make a model nobody's, which others lose first."""
    scripts = {
        f"{name}@{version}": Script(400, declared=400) for name in "abc" for version in (1, 2)
    }
    async with Stage(scripts) as stage:
        await stage.call(A, caller="x")
        stage.store.versions["a"] += 1
        await stage.update(A)
        await asyncio.sleep(2)
        await stage.call(B, caller="y")
        await asyncio.sleep(2)
        await stage.call(C, caller="y")
        stage.check(A, C)


# -- warm-up ------------------------------------------------------------------------------------


@played
async def test_load_that_exits_in_warm_up_is_refused():
    """503 would invite the caller to end Triton once more."""
    script = Script(load_ends_triton=True, has_warm_up=True)
    async with Stage({"a": script, "b": Script(load_ends_triton=True)}) as stage:
        stage.triton.end_seconds = 2
        error = await fails(stage.load(A), LoadFailed)
        assert "Triton exited" in str(error)
        assert "model_warmup" in str(error)
        await asyncio.sleep(5)
        await fails(stage.load(B), BackendUnavailable)
        await asyncio.sleep(10)
    async with Stage({"a": script}, is_embedded=False) as stage:
        await fails(stage.load(A), BackendUnavailable)  # only the connection is seen


@played
async def test_exit_amid_two_loads_blames_no_warm_up():
    scripts = {
        "a": Script(has_warm_up=True, load_seconds=9),
        "b": Script(has_warm_up=True, load_seconds=9),
    }
    async with Stage(scripts) as stage:
        loads = [asyncio.create_task(stage.load(one)) for one in (A, B)]
        await asyncio.sleep(8)
        stage.triton.exit()
        for load in loads:
            await fails(load, BackendUnavailable)


# -- failed requests ----------------------------------------------------------------------------


async def judge_five(stage: Stage, record: ModelRecord) -> list[type[AdapterError]]:
    """Send five requests that fail; return what each failure is judged to be."""
    kinds = []
    for _ in range(5):
        lease = stage.models.lease(record.id)
        lease.begin()
        with pytest.raises(AdapterError) as caught:
            await stage.triton.infer(record)
        kinds.append(type(await lease.judge(caught.value)))
        lease.end(caught.value)
    return kinds


@played
async def test_inference_that_runs_out_is_judged():
    async with Stage({"a": Script(request_runs_out=True)}) as stage:
        record = await stage.load(A)
        kinds = await judge_five(stage, record)
        assert kinds[0] is OutOfMemory
        assert kinds[4] is ModelTooLarge


@played
async def test_judged_failure_shows_the_model_dead():
    """The next request must not meet the same dead process."""
    async with Stage({"a": Script(is_python=True)}) as stage:
        record = await stage.load(A)
        lease = stage.models.lease(A)
        lease.begin()
        stage.triton.kill_process_of(record.name)
        error = StubDied("Stub process is not healthy.")
        await lease.judge(error)
        assert record.state is ModelState.DEAD
        lease.end(error)
        await stage.models.unload(A)


@played
async def test_forget_begins_a_new_row_of_failures():
    """An operator has changed what the model computes with, and calls it anew."""
    async with Stage({"a": Script(request_runs_out=True)}) as stage:
        record = await stage.load(A)
        await judge_five(stage, record)
        stage.models.forget(A)
        kinds = await judge_five(stage, record)
        assert kinds[0] is OutOfMemory


@played
async def test_lost_requests_are_not_in_flight():
    """The metric would show them for ever."""
    async with Stage({"a": Script()}) as stage:
        await stage.load(A)
        lease = stage.models.lease(A)
        lease.begin()
        stage.control.leases.lose(lease.record)
        assert lease.is_lost()
        assert stage.control.state.requests.in_flight == 0
        lease.end()


@played
async def test_inference_beside_an_unbooked_model_is_not_final():
    """A model that readings do not show yet is there, and its unload would give room."""
    scripts = {"a": Script(100), "b": Script(100, request_runs_out=True)}
    async with Stage(scripts) as stage:
        stage.triton.lag_seconds = 3.0
        await stage.load(A)
        await asyncio.sleep(8)
        record = await stage.load(B)
        kinds = await judge_five(stage, record)
        assert list(stage.control.ledger.models) == ["a"]
        assert ModelTooLarge not in kinds


@played
async def test_process_that_dies_amid_an_unload_is_noticed():
    """Triton never ends such an unload, until the model was loaded once more."""
    for is_embedded in (True, False):
        async with Stage({"a": Script(is_python=True)}, is_embedded=is_embedded) as stage:
            await stage.load(A)
            unload = asyncio.create_task(stage.models.unload(A))
            await asyncio.sleep(0.1)
            stage.triton.kill_process_of(TritonName("a"))
            await unload
            stage.check()


@played
async def test_daemon_is_ended_when_seen_twice():
    """A load may be between two processes when it is seen for the first time."""
    async with Stage({"a": Script()}) as stage:
        await asyncio.sleep(1)
        stage.triton.daemons = frozenset({ProcessId(99, 0)})
        await asyncio.sleep(11)
        assert stage.triton.daemons
        await asyncio.sleep(10)
        assert not stage.triton.daemons


@played
async def test_load_follows_dead_model_that_hangs():
    """Triton never releases what has died, and hangs in the load that should end that."""
    scripts = {"a": Script(is_python=True), "b": Script()}
    async with Stage(scripts, load_seconds=2000) as stage:
        record = await stage.load(A)
        stage.triton.loaded[record.name].has_died = True
        await fails(stage.invoke(A), StubDied)
        await asyncio.sleep(1)
        assert record.state is ModelState.DEAD
        scripts["a"] = Script(hangs=True)
        await stage.load(A, "b")
        assert record.state is ModelState.STUCK
        assert await stage.invoke(A) == "b"


@played
async def test_model_is_dead_without_one_of_its_processes():
    """Triton gives the lost instance its share of the requests, and each of these fails."""
    async with Stage({"a": Script(is_python=True)}) as stage:
        stage.triton.more_instances = ["a_1"]
        record = await stage.load(A)
        stage.triton.more_instances = []
        lease = stage.models.lease(A)
        lease.begin()
        lease.end(StubDied("Stub process 'a_1' is not healthy."))
        await asyncio.sleep(1)
        assert record.state is ModelState.DEAD
        await stage.models.unload(A)


@played
async def test_inference_evicts_no_model_of_other_callers():
    """A text about memory costs nobody else a model that he uses."""
    scripts = {"b@1": Script(300), "c@1": Script(200, request_runs_out=True)}
    async with Stage(scripts) as stage:
        on_demand = stage.control.on_demand
        lease, _ = await on_demand.wait_for_lease(B, on_demand.key_of("b"), "bob")
        with lease:
            pass
        lease, _ = await on_demand.wait_for_lease(C, on_demand.key_of("c"), "alice")
        lease.begin()
        with pytest.raises(OutOfMemory) as caught:
            await stage.triton.infer(lease.record)
        judged = await lease.judge(caught.value)
        lease.end(judged)
        assert not await on_demand.make_room(judged)
        stage.check(B, C)


@played
async def test_inference_evicts_no_model_of_other_devices():
    """A model that runs on a CPU frees nothing of a GPU, whatever it is worth."""
    scripts = {"a": Script(300), "b@1": Script({}, gpus=frozenset()), "c@1": Script(300)}
    async with Stage(scripts) as stage:
        await stage.load(A)
        for model_id in (B, C, C):
            await stage.call(model_id)
        await asyncio.sleep(2)
        error = OutOfMemory(
            "CUDA out of memory",
            model_id=A,
            figures=MemoryFigures(500 * MIB, device=GPU),
        )
        assert await stage.control.eviction.make_room_for_inference(error)
        stage.check(A, B)


@played
async def test_inference_takes_the_reserve_before_models():
    """The memory reserve is there for inferences: what fits into it costs no model."""
    async with Stage({"a": Script(300), "b@1": Script(300)}) as stage:
        await stage.load(A)
        await stage.call(B)
        stage.control.ledger.devices[GPU].headroom_bytes = 200 * MIB
        error = OutOfMemory(
            "CUDA out of memory",
            model_id=A,
            figures=MemoryFigures(350 * MIB, device=GPU),
        )
        assert not await stage.control.eviction.make_room_for_inference(error)
        stage.check(A, B)


@played
async def test_vanished_model_stays_away_without_setting():
    """Somebody may have unloaded it on purpose, past the adapter."""
    async with Stage({"a": Script()}, on_exit=None) as stage:
        stage._unwatched = frozenset({A})
        record = await stage.load(A)
        del stage.triton.loaded[record.name]
        await fails(stage.invoke(A), ModelNotFound)
        await asyncio.sleep(5)
        await fails(stage.wait_and_invoke(A), ModelNotFound)
        assert not stage.control.registry.records()


@played
async def test_vanished_model_comes_back_by_setting():
    async with Stage({"a": Script()}) as stage:
        stage._unwatched = frozenset({A})
        record = await stage.load(A)
        del stage.triton.loaded[record.name]
        await fails(stage.invoke(A), ModelNotReady)
        await asyncio.sleep(5)
        assert await stage.wait_and_invoke(A) == "a"
        events = [str(event) for event in stage.metrics.history.latest()]
        assert any("loaded again by the adapter: a" in event for event in events), events


# -- updates ------------------------------------------------------------------------------------


async def update_under_traffic(stage: Stage, folder: str) -> list[str]:
    """Replace the model while calls come; return the errors that callers got."""
    errors: list[str] = []
    is_over = False

    async def keep_calling() -> None:
        while not is_over:
            try:
                await stage.wait_and_invoke(A)
            except AdapterError as error:
                errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.02)

    callers = [asyncio.create_task(keep_calling()) for _ in range(3)]
    try:
        await asyncio.sleep(0.5)
        await stage.replace(A, folder)
    finally:
        await asyncio.sleep(0.5)
        is_over = True
        await asyncio.gather(*callers)
    return errors


@played
async def test_failed_update_changes_nothing():
    scripts = {
        "1": Script(300),
        "fault": Script(fault="max_batch_size: -1"),
        "beside": Script(failure="bad weights"),
        "too large": Script(5000, declared=5000),
        "in place": Script(800, declared=800, failure="bad weights"),
    }
    async with Stage(scripts) as stage:
        first = await stage.load(A, "1")
        await fails(update_under_traffic(stage, "fault"), InvalidModel)
        await fails(update_under_traffic(stage, "beside"), LoadFailed)
        await fails(update_under_traffic(stage, "too large"), ModelTooLarge)
        assert stage.control.registry.serving(A) is first  # never unloaded so far
        error = await fails(update_under_traffic(stage, "in place"), LoadFailed)
        assert str(error).endswith("the model that was there was loaded again")
        assert await stage.wait_and_invoke(A) == "1"
        # whether its files have changed is asked from then on
        assert stage.control.registry.serving(A).load_started_at == first.load_started_at
        assert set(stage.served) == {"1"}
        stage.check(A)


@played
async def test_update_keeps_calls_from_being_idle():
    """The calls of the old version during the update are calls of the model."""
    settings = StoreSettings(idle_unload_seconds=30, revalidate_seconds=10)
    scripts = {"a@1": Script(), "a@2": Script(load_seconds=35)}
    async with Stage(scripts, stores=settings) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        for _ in range(8):
            await asyncio.sleep(5)
            await stage.call(A)
        await asyncio.sleep(20)
        assert await stage.invoke(A) == "a@2"


@played
async def test_idle_model_is_not_unloaded_amid_update():
    """The update would end without a new version."""
    settings = StoreSettings(idle_unload_seconds=20)
    async with Stage({"a@1": Script(), "a@2": Script()}, stores=settings) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        stage.store.fetch_seconds = 40
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(30)
        assert await stage.invoke(A) == "a@1"
        await update


@played
async def test_files_of_an_update_evict_no_model():
    """Nobody waits for the new version, and callers have theirs."""
    async with Stage({"a@1": Script(), "a@2": Script(), "b@1": Script()}) as stage:
        stage.store.disk_limit = 2
        await stage.call(A)
        await stage.call(B)
        stage.store.versions["a"] += 1
        await fails(stage.update(A), NoRoom)
        stage.check(A, B)


@played
async def test_update_succeeds_though_old_version_hangs():
    """The new version serves, and whoever asked for it need do nothing."""
    async with Stage({"1": Script(), "2": Script()}) as stage:
        await stage.load(A, "1")
        stage.triton.unload_seconds = math.inf
        await stage.replace(A, "2")
        assert await stage.invoke(A) == "2"


@played
async def test_old_version_returns_though_it_hangs():
    """Triton does not release it, and so it is loaded again under another name."""
    settings = StoreSettings(pin=("a",))  # updated in place
    async with Stage({"1": Script(300), "2": Script(300)}, stores=settings) as stage:
        await stage.load(A, "1")
        stage.triton.unload_seconds = 3000
        error = await fails(stage.replace(A, "2"), BackendTimeout)
        assert "loaded again" in str(error)
        assert await stage.invoke(A) == "1"
        stage.triton.unload_seconds = 0.2


@played
async def test_update_replaces_a_model_that_dies_meanwhile():
    """The fault that has ended its process may be the one that the new version mends."""
    async with Stage({"1": Script(is_python=True), "2": Script(load_seconds=5)}) as stage:
        record = await stage.load(A, "1")
        update = asyncio.create_task(stage.replace(A, "2"))
        await asyncio.sleep(2)
        stage.triton.kill_process_of(record.name)
        await fails(stage.invoke(A), StubDied)
        await update
        assert await stage.invoke(A) == "2"


@played
async def test_call_of_dead_model_waits_for_its_update():
    """The update is the load that the call needs, and nobody ends it."""
    async with Stage({"a@1": Script(is_python=True), "a@2": Script(load_seconds=5)}) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(2)
        stage.triton.kill_process_of(TritonName("a"))
        await fails(stage.call(A), StubDied)
        await asyncio.sleep(0.1)
        assert await stage.call(A) == "a@2"
        await update


@played
async def test_update_in_place_keeps_the_last_call():
    """The old version is called while the files of the new one are fetched."""
    settings = StoreSettings(idle_unload_seconds=30)
    async with Stage({"a@1": Script(600), "a@2": Script(600)}, stores=settings) as stage:
        await stage.call(A)
        await asyncio.sleep(10)
        stage.store.versions["a"] += 1
        stage.store.fetch_seconds = 25
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(20)
        await stage.call(A)
        await update
        await asyncio.sleep(10)
        assert await stage.invoke(A) == "a@2"


@played
async def test_update_in_place_lets_calls_wait():
    scripts = {"1": Script(600), "2": Script(600, declared=600)}
    async with Stage(scripts) as stage:
        await stage.load(A, "1")
        update = asyncio.create_task(update_under_traffic(stage, "2"))
        await asyncio.sleep(1.2)
        await fails(stage.invoke(A), ModelNotReady)  # a 404 would make platforms load it
        assert await update == []  # V2's calls wait
        assert stage.served == sorted(stage.served)
        assert stage.served[-1] == "2"


@played
async def test_call_amid_a_failed_update_is_answered():
    """The old version comes back, so the failure of the new one is no call's."""
    scripts = {
        "a@1": Script(600),
        "a@2": Script(600, declared=600, load_seconds=3, failure="bad weights"),
    }
    async with Stage(scripts) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(2)  # the old version is unloaded
        assert await stage.call(A) == "a@1"
        await fails(update, LoadFailed)


@played
async def test_load_amid_a_failed_update_succeeds():
    """It asks for what serves, and the fault is in the package of the update alone."""
    for megabytes in (100, 600):  # beside the old version, and in its place
        update_script = Script(megabytes, declared=megabytes, load_seconds=5, failure="bad weights")
        async with Stage({"1": Script(megabytes), "2": update_script}) as stage:
            await stage.load(A, "1")
            update = asyncio.create_task(stage.replace(A, "2"))
            await asyncio.sleep(2)
            assert stage.triton.loading
            load = stage.models.replace(A, ModelSource("1"), Replaces.CHANGED_FILES)
            _, record = await asyncio.gather(load, stage.models.wait_for_load(A))
            await fails(update, LoadFailed)
            assert record.source.url == "1"
            assert await stage.invoke(A) == "1"


@played
async def test_unload_amid_update_holds_for_joined_load():
    """The load was asked for before, and must not bring the model back."""
    async with Stage({"1": Script(), "2": Script(load_seconds=5)}) as stage:
        await stage.load(A, "1")
        update = asyncio.create_task(stage.replace(A, "2"))
        await asyncio.sleep(2)
        work = stage.models.replace(A, ModelSource("1"), Replaces.CHANGED_FILES)
        load = asyncio.create_task(work)
        await asyncio.sleep(1)
        await stage.models.unload(A)
        await fails(update, UnloadedMeanwhile)
        await fails(load, UnloadedMeanwhile)
        stage.check()


@played
async def test_call_waits_for_files_that_are_tried_again():
    """The failure of a moment ago is that of the files before."""
    scripts = {"a@1": Script(fault="max_batch_size: -1"), "a@2": Script(load_seconds=3)}
    async with Stage(scripts) as stage:
        await fails(stage.call(A), InvalidModel)
        stage.store.versions["a"] += 1
        assert stage.control.on_demand is not None
        load = asyncio.create_task(stage.control.on_demand.load(A))
        await asyncio.sleep(1)
        assert await stage.call(A) == "a@2"
        await load


@played
async def test_store_is_asked_once_in_an_interval():
    settings = StoreSettings(revalidate_seconds=10)
    async with Stage({"a@1": Script()}, stores=settings) as stage:
        await stage.call(A)
        await asyncio.sleep(35)
        assert stage.store.questions == 3


@played
async def test_version_that_fails_in_place_is_tried_once():
    """Each try takes the old version away from its calls. Another version is tried again."""
    settings = StoreSettings(revalidate_seconds=2)
    scripts = {
        "a@1": Script(600),
        "a@2": Script(600, declared=600, failure="bad weights"),
        "a@3": Script(600, declared=600),
    }
    async with Stage(scripts, stores=settings) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        await asyncio.sleep(10)
        record = stage.control.registry.serving(A)
        await asyncio.sleep(20)
        assert stage.control.registry.serving(A) is record
        assert await stage.call(A) == "a@1"
        stage.store.versions["a"] += 1
        await asyncio.sleep(10)
        assert await stage.call(A) == "a@3"


@played
async def test_update_that_triton_breaks_off_is_repeated():
    """The new version has not failed, and another try is worth what it costs calls."""
    settings = StoreSettings(revalidate_seconds=2)
    scripts = {"a@1": Script(600), "a@2": Script(600, declared=600, load_seconds=5)}
    async with Stage(scripts, stores=settings) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        await asyncio.sleep(5)
        assert stage.triton.loading
        stage.triton.exit()
        await asyncio.sleep(60)
        assert await stage.call(A) == "a@2"


@played
async def test_model_that_a_platform_keeps_is_not_updated():
    """Its load says that it is there; another version amid that would be a surprise."""
    settings = StoreSettings(revalidate_seconds=2)
    scripts = {"a@1": Script(100), "a@2": Script(100, load_seconds=5)}
    async with Stage(scripts, stores=settings) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        await asyncio.sleep(4)
        assert len(stage.control.registry.records_of(A)) == 2
        await fails(stage.load(A), AlreadyLoaded)
        await asyncio.sleep(10)
        assert await stage.call(A) == "a@1"


@played
async def test_model_is_kept_amid_update_in_place():
    """The platform is told that the model is there, and takes it for loaded from then on."""
    scripts = {f"a@{version}": Script(600, declared=600, load_seconds=5) for version in (1, 2)}
    async with Stage(scripts) as stage:
        await stage.call(A)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(0.5)
        await fails(stage.load(A), AlreadyLoaded)
        await update
        record = stage.control.registry.serving(A)
        assert record.source.url == "a@2"
        assert record.loaded_for is LoadedFor.PLATFORM


@played
async def test_load_after_an_eviction_in_vain_is_refused():
    """A call has kept the model. The platform takes it for loaded from then on."""
    scripts = {
        "a@1": Script(300, declared=300),
        "a@2": Script(300, declared=300, load_seconds=20),
        "b@1": Script(600, declared=600),
        "c": Script(),
    }
    async with Stage(scripts) as stage:
        await stage.call(A)
        await asyncio.sleep(3)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(5)
        call_of_b = asyncio.create_task(stage.call(B))
        await asyncio.sleep(1.5)  # the eviction waits for the undo of the update
        call = asyncio.create_task(stage.call(A, seconds=60))
        await asyncio.sleep(0.1)
        await fails(stage.load(A, "c"), AlreadyLoaded)
        assert stage.control.registry.serving(A).loaded_for is LoadedFor.PLATFORM
        await fails(update, UnloadedMeanwhile)
        assert await call_of_b == "b@1"
        await call


@played
async def test_store_that_answers_late_updates_no_platform():
    """A platform may ask for the model while the store is asked for its version."""
    settings = StoreSettings(revalidate_seconds=2)
    async with Stage({"a@1": Script(), "a@2": Script()}, stores=settings) as stage:
        stage.store.answer_seconds = 5
        await stage.call(A)
        stage.store.versions["a"] += 1
        await asyncio.sleep(5)
        await fails(stage.load(A), AlreadyLoaded)
        await asyncio.sleep(20)
        assert await stage.call(A) == "a@1"


@played
async def test_load_of_unchanged_files_keeps_the_model():
    """Whoever loads a model by its name wants it to stay, also if calls have loaded it before."""
    settings = StoreSettings(idle_unload_seconds=20)
    async with Stage({"a@1": Script()}, stores=settings) as stage:
        await stage.call(A)
        await stage.models.replace(A, ModelSource("a"), Replaces.CHANGED_FILES)
        await asyncio.sleep(40)
        stage.check(A)


@played
async def test_calls_load_a_few_models_at_a_time():
    """A caller waits for no more than the loads in progress, whatever others ask for."""
    names = [ModelId(f"m{number}") for number in range(6)]
    scripts = {f"{name}@1": Script(50, declared=50, load_seconds=5) for name in (*names, "a")}
    async with Stage(scripts, stores=StoreSettings(load_concurrency=1)) as stage:
        calls = [asyncio.create_task(stage.call(name, caller="x")) for name in names]
        await asyncio.sleep(2)
        await stage.call(A, caller="y")
        assert sum(call.done() for call in calls) == 1
        await asyncio.gather(*calls)


@played
async def test_load_keeps_its_turn_for_later_callers():
    """Its caller leaves and comes again: others who came later must not pass it each time."""
    names = [ModelId(f"m{number}") for number in range(4)]
    scripts = {f"{name}@1": Script(50, declared=50, load_seconds=10) for name in (*names, "a")}
    async with Stage(scripts, stores=StoreSettings(load_concurrency=1)) as stage:
        first = asyncio.create_task(stage.call(names[0]))
        await asyncio.sleep(1)
        impatient = asyncio.create_task(stage.call(A))
        await asyncio.sleep(2)
        others = [asyncio.create_task(stage.call(name)) for name in names[1:]]
        impatient.cancel()
        await asyncio.sleep(1)
        await stage.call(A)
        assert first.done()
        assert not any(call.done() for call in others)
        await asyncio.gather(*others)


@played
async def test_update_in_place_takes_no_other_models_name():
    """While its files are read, it is not in the table of models yet."""
    scripts = {"1": Script(600), "2": Script(600, declared=600), "other": Script(100)}
    async with Stage(scripts) as stage:
        await stage.load(A, "1")
        stage.packages.prepare_seconds = 5
        update = asyncio.create_task(stage.replace(A, "2"))
        await asyncio.sleep(1)
        other = ModelId("a#1")
        await stage.load(other, "other")
        await update
        assert await stage.invoke(A) == "2"
        assert await stage.invoke(other) == "other"


@played
async def test_triton_exits_amid_an_update_in_place():
    """The old version comes back, and V2's calls wait for it."""
    scripts = {"1": Script(600), "2": Script(600, declared=600, load_seconds=5)}
    async with Stage(scripts) as stage:
        await stage.load(A, "1")
        update = asyncio.create_task(stage.replace(A, "2"))
        await asyncio.sleep(3)
        call = asyncio.create_task(stage.wait_and_invoke(A))
        stage.triton.exit()
        await fails(update, BackendUnavailable)
        assert await call == "1"
        stage.check(A)


@played
async def test_lost_model_survives_its_failed_update():
    """The fault is in the package of the update alone."""
    async with Stage({"1": Script(), "2": Script(fault="max_batch_size: -1")}) as stage:
        await stage.load(A, "1")
        stage.packages.prepare_seconds = 5
        update = asyncio.create_task(stage.replace(A, "2"))
        await asyncio.sleep(1)
        stage.triton.exit()
        await fails(update, InvalidModel)
        assert await stage.wait_and_invoke(A) == "1"


# -- names of stores ----------------------------------------------------------------------------


@played
async def test_disk_room_waits_for_a_model_in_use():
    scripts = {"a@1": Script(), "b@1": Script()}
    async with Stage(scripts) as stage:
        stage.store.disk_limit = 1
        call = asyncio.create_task(stage.call(A, seconds=5))
        await asyncio.sleep(3)
        assert await stage.call(B) == "b@1"
        assert await call == "a@1"


@played
async def test_load_by_name_takes_no_callers_place():
    """V2 loads and `preload` wait for as long as it takes, so they must not keep calls out."""
    settings = StoreSettings(max_waiting=2, max_waiting_for_one=1)
    scripts = {f"{name}@1": Script(load_seconds=5) for name in "abc"}
    async with Stage(scripts, stores=settings) as stage:
        on_demand = stage.control.on_demand
        loads = [asyncio.create_task(on_demand.load(A)), asyncio.create_task(on_demand.load(B))]
        await asyncio.sleep(1)
        assert await stage.call(C) == "c@1"
        assert await stage.call(A) == "a@1"
        await asyncio.gather(*loads)


@played
async def test_calls_by_name_take_places_of_callers():
    """They wait for the same load, and the limit is of all who wait."""
    settings = StoreSettings(max_waiting_for_one=2)
    async with Stage({"a@1": Script(load_seconds=5)}, stores=settings) as stage:
        calls = [asyncio.create_task(stage.call(A))]
        await asyncio.sleep(2)
        calls.append(asyncio.create_task(stage.wait_and_invoke(A)))
        await asyncio.sleep(1)
        await fails(stage.call(A), TooManyWaiting)
        assert await asyncio.gather(*calls) == ["a@1", "a@1"]


@played
async def test_one_of_many_callers_had_the_files_fetched():
    """The metric of the endpoint counts each call once, and one fetch."""
    async with Stage({"a@1": Script()}) as stage:
        key = ArtifactKey("", A)
        waits = [stage.control.on_demand.wait_for_lease(A, key) for _ in range(3)]
        uses = [use for _, use in await asyncio.gather(*waits)]
        assert uses.count(CacheUse.MISS) == 1


@played
async def test_dead_model_makes_way_for_another_key():
    """It serves nobody, so the name is that of whoever calls next."""
    async with Stage({"a@1": Script(is_python=True), "a.tar.gz@1": Script()}) as stage:
        await stage.call(A)
        busy = stage.models.lease(A)
        busy.begin()
        stage.triton.kill_process_of(busy.record.name)
        failed = stage.models.lease(A)
        failed.begin()
        failed.end(StubDied("Stub process is not healthy."))
        await asyncio.sleep(1)
        key = ArtifactKey("", "a.tar.gz")
        call = asyncio.create_task(stage.control.on_demand.wait_for_lease(A, key))
        await asyncio.sleep(1)
        busy.end()
        lease, _ = await call
        with lease as record:
            assert await stage.triton.infer(record) == "a.tar.gz@1"


@played
async def test_disk_room_costs_one_large_model():
    """A small one would go in vain, though it was not called for longer."""
    async with Stage({"a@1": Script(), "b@1": Script()}) as stage:
        await stage.call(A)
        await stage.call(B)
        large = stage.control.registry.serving(B)
        assert large.files is not None
        large.files = replace(large.files, size_bytes=1000)
        assert await stage.control.eviction.unload_one(500)
        stage.check(A)


@played
async def test_disk_room_ends_no_load_that_came_later():
    """While room is made by one model, the next one may leave and be called again."""
    scripts = {
        "a@1": Script(),
        "a@2": Script(load_seconds=20),
        "b@1": Script(load_seconds=10),
    }
    async with Stage(scripts) as stage:
        await stage.call(A)
        await stage.call(B)
        stage.store.versions["a"] += 1
        update = asyncio.create_task(stage.update(A))
        await asyncio.sleep(5)
        room = asyncio.create_task(stage.control.eviction.unload_one(1))
        await asyncio.sleep(1)  # the update is undone once Triton has ended its load
        long_call = asyncio.create_task(stage.call(A, seconds=30))
        await stage.models.unload(B)
        await asyncio.sleep(8)
        call = asyncio.create_task(stage.call(B))
        assert not await room
        assert not call.done()
        assert await call == "b@1"
        await long_call
        with suppress(UnloadedMeanwhile):
            await update


@played
async def test_caller_takes_half_of_the_places_at_most():
    settings = StoreSettings(max_waiting=4, max_waiting_for_one=4)
    scripts = {f"{name}@1": Script(load_seconds=5) for name in "abc"}
    async with Stage(scripts, stores=settings) as stage:
        on_demand = stage.control.on_demand

        async def call(model_id, caller):
            key = on_demand.key_of(model_id)
            lease, _ = await on_demand.wait_for_lease(model_id, key, caller)
            with lease:
                pass

        waiting = [asyncio.create_task(call(model_id, "alice")) for model_id in (A, B)]
        await asyncio.sleep(1)
        with pytest.raises(TooManyWaiting):
            await call(C, "alice")
        await call(C, "bob")
        await asyncio.gather(*waiting)


@played
async def test_failure_of_files_is_repeated_for_seconds():
    """Callers who come one after the other have the same files inspected once."""
    scripts = {"a@1": Script(fault="no model file")}
    async with Stage(scripts) as stage:
        await fails(stage.call(A), InvalidModel)
        scripts["a@1"].fault = ""
        await fails(stage.call(A), InvalidModel)
        await asyncio.sleep(times.FAILURE_SECONDS)
        assert await stage.call(A) == "a@1"


@played
async def test_other_key_of_a_loaded_model_is_refused():
    async with Stage({"a@1": Script()}) as stage:
        await stage.call(A)
        on_demand = stage.control.on_demand
        with pytest.raises(ArtifactNotFound):
            on_demand.lease(A, ArtifactKey("", "a.tar.gz"))


# -- Triton's exits -----------------------------------------------------------------------------


@played
async def test_idle_model_is_unloaded():
    settings = StoreSettings(idle_unload_seconds=20, pin=("b",))
    async with Stage({"a@1": Script(), "b@1": Script(), "c": Script()}, stores=settings) as stage:
        await stage.call(A)
        await stage.call(B)
        await stage.load(C)
        await asyncio.sleep(30)
        stage.check(B, C)
        assert stage.models.unloader.journal.evictions["idle"] == 1


@played
async def test_triton_exits_during_a_load():
    async with Stage({"a": Script(load_seconds=5), "b@1": Script(load_seconds=5)}) as stage:
        load = asyncio.create_task(stage.load(A))
        call = asyncio.create_task(stage.call(B))
        await asyncio.sleep(3)
        stage.triton.exit()
        error = await fails(load, BackendUnavailable)  # its caller decides
        assert "Triton was killed by SIGKILL while it was loading model 'a'" in str(error)
        assert await call == "b@1"  # loaded once more by the next Triton
        stage.check(B)


@played
async def test_call_survives_one_exit():
    """A second one may be the model's doing: the caller learns of it."""
    async with Stage({"a@1": Script(load_seconds=5)}) as stage:
        call = asyncio.create_task(stage.call(A))
        await asyncio.sleep(4)
        assert stage.triton.loading
        stage.triton.exit()
        await asyncio.sleep(5)
        assert stage.triton.loading
        stage.triton.exit()
        await fails(call, BackendUnavailable)


@played
async def test_load_that_waits_for_slot_survives_exit():
    scripts = {
        "a": Script(declared=100, load_seconds=9),
        "b": Script(declared=100),
    }
    async with Stage(scripts, load_threads=1) as stage:
        loads = [asyncio.create_task(stage.load(one)) for one in (A, B)]
        await asyncio.sleep(3)
        stage.triton.exit()
        await fails(loads[0], BackendUnavailable)
        await loads[1]
        stage.check(B)


@played
async def test_exit_gives_a_refused_model_another_chance():
    scripts = {"a@1": Script(fault="no model file")}
    async with Stage(scripts) as stage:
        stage.control.desired.preload({A: ArtifactKey("", "a")})
        await asyncio.sleep(60)
        [refused] = stage.control.desired.list_refused()
        assert "no model file" in refused
        scripts["a@1"].fault = ""
        await asyncio.sleep(60)
        stage.check()
        stage.triton.exit()
        await asyncio.sleep(10)
        stage.check(A)


@played
async def test_triton_exits_between_a_load_and_its_note():
    async with Stage({"a": Script()}) as stage:
        stage.packages.confirm_seconds = 5
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(2)
        stage.triton.exit()
        await fails(load, BackendUnavailable)
        stage.check()


@played
async def test_exit_counts_that_was_silent_first():
    """Triton answers nothing any more before its process has ended. Its models come back all the
    same, the platform's and the preloaded one.
    """
    async with Stage({"a": Script(), "b@1": Script()}, on_exit=None) as stage:
        await stage.load(A)
        stage.control.desired.preload({B: ArtifactKey("", "b")})
        await asyncio.sleep(10)
        stage.check(A, B)
        stage.triton.end_seconds = 2
        stage.triton.exit()
        await asyncio.sleep(20)
        stage.check(A, B)


@played
async def test_load_amid_an_exit_keeps_its_files():
    """They are unpacked before Triton is back, where those of the lost model were."""
    async with Stage({"a": Script()}, on_exit=OnExit.FORGET) as stage:
        await stage.load(A)
        stage.packages.remove_seconds = 1
        stage.triton.exit()
        await stage.load(A)
        assert await stage.invoke(A) == "a"


@played
async def test_late_end_of_a_request_blames_no_model():
    """A connection may tell of an exit only once the next Triton is there, which may exit too."""
    async with Stage({"a": Script()}) as stage:
        await stage.load(A)
        await asyncio.sleep(60)
        lease = stage.models.lease(A)
        lease.begin()
        stage.triton.exit()
        await stage.wait_and_invoke(A)
        assert A in stage.models.blame.charges
        lease.end(BackendUnavailable("connection closed", delivered=True))
        stage.triton.exit()  # the model is idle, and so is healthy
        await stage.wait_and_invoke(A)
        assert not stage.models.blame.charges


@played
async def test_old_broken_request_blames_no_model():
    """Its connection broke a minute before the exit, which has another cause."""
    async with Stage({"a": Script()}) as stage:
        await stage.load(A)
        await asyncio.sleep(60)
        lease = stage.models.lease(A)
        lease.begin()
        lease.end(BackendUnavailable("connection closed", delivered=True))
        await asyncio.sleep(60)
        stage.triton.exit()
        await stage.wait_and_invoke(A)
        assert not stage.models.blame.charges


@played
async def test_unloaded_model_is_not_blamed():
    async with Stage({"a": Script()}) as stage:
        await stage.load(A)
        await asyncio.sleep(60)
        lease = stage.models.lease(A)
        lease.begin()
        lease.end(BackendUnavailable("connection closed", delivered=True))
        await stage.models.unload(A)
        stage.triton.exit()
        await asyncio.sleep(5)
        assert not stage.models.blame.charges


@played
async def test_refused_connection_blames_no_model():
    """Triton was away already: it has not exited over a request that never reached it."""
    async with Stage({"a": Script()}, is_embedded=False) as stage:
        await stage.load(A)
        for _ in range(3):
            await asyncio.sleep(200)
            stage.triton.exit()
            error = await fails(stage.invoke(A), BackendUnavailable)
            assert isinstance(error, BackendUnavailable)
            assert not error.delivered
            await asyncio.sleep(10)
            assert not stage.models.blame.charges


@played
async def test_refused_load_blames_no_model():
    """Triton was away before the adapter saw that, and had nothing of the load."""
    async with Stage({"a": Script(), "b": Script()}, is_embedded=False) as stage:
        await stage.load(B)
        await asyncio.sleep(100)

        async def refuse(*_: object) -> None:
            stage.triton.exit()
            raise BackendUnavailable("connection refused", delivered=False)

        load = stage.triton.load
        stage.triton.load = refuse
        await fails(stage.load(A), BackendUnavailable)
        stage.triton.load = load
        await asyncio.sleep(10)
        assert not stage.models.blame.charges


@played
async def test_wanted_model_returns_from_a_platforms_load():
    """Calls of it wait, as of any model that a setting names."""
    async with Stage({"a": Script(load_seconds=5)}) as stage:
        stage.control.desired.slots = asyncio.Semaphore(0)
        stage.control.desired.want({A: ModelSource("a")})
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(3)
        stage.triton.exit()
        await fails(load, BackendUnavailable)
        call = asyncio.create_task(stage.wait_and_invoke(A))
        await asyncio.sleep(5)
        assert not call.done()
        stage.control.desired.slots.release()
        assert await call == "a"


@played
async def test_bug_in_wanted_load_is_met_seldom():
    """It would be met, and logged, hundreds of times a second."""
    async with Stage({"a": Script()}) as stage:
        tries = 0

        async def break_down(*_: object) -> None:
            nonlocal tries
            tries += 1
            raise ValueError("a bug")

        stage.packages.prepare = break_down
        stage.control.desired.want({A: ModelSource("a")})
        await asyncio.sleep(10)
        assert tries == 3
        [reason] = stage.control.state.reasons()
        assert "a bug" in reason
        await stage.models.unload_all()


@played
async def test_lost_model_waits_for_no_others_update():
    scripts = {"1": Script(), "2": Script(), "b": Script()}
    async with Stage(scripts) as stage:
        stage.control.desired.slots = asyncio.Semaphore(1)
        await stage.load(B, "b")
        await stage.load(A, "1")
        assert await stage.invoke(A) == "1"  # called last, and so the first to come back
        stage.packages.prepare_seconds = 30
        update = asyncio.create_task(stage.replace(A, "2"))
        await asyncio.sleep(1)
        stage.packages.prepare_seconds = 0.01
        stage.triton.exit()
        await asyncio.sleep(8)
        stage.check(B)
        await fails(update, BackendUnavailable)


@played
async def test_unload_holds_for_a_queued_preload():
    """Whoever has unloaded a model of the settings does not find it loaded after an exit."""
    async with Stage({"a": Script()}) as stage:
        stage.control.desired.slots = asyncio.Semaphore(0)
        stage.control.desired.want({A: ModelSource("a")})
        await asyncio.sleep(1)
        await fails(stage.models.unload(A), ModelNotFound)
        stage.control.desired.slots.release()
        await asyncio.sleep(1)
        stage.triton.exit()
        await asyncio.sleep(10)
        stage.check()


@played
async def test_lost_models_return_by_their_last_use():
    """The model that callers have used last will be called next. Whoever has sent a call of another
    one after the exit is not asked to load it: it comes back as well.
    """
    scripts = {"a": Script(), "b": Script(), "c": Script()}
    async with Stage(scripts, on_exit=None) as stage:
        stage.control.desired.slots = asyncio.Semaphore(1)
        await stage.load(A)
        lease = stage.models.lease(A)
        lease.begin()
        await stage.load(B)
        await stage.load(C)
        stage.triton.exit()
        assert await stage.wait_and_invoke(C) == "c"
        stage.check(C)
        assert isinstance(lease.end(ModelNotFound("a is not found")), ModelNotReady)


@played
async def test_store_model_of_a_platform_returns_to_stay():
    settings = StoreSettings(idle_unload_seconds=20)
    async with Stage({"a@1": Script()}, stores=settings) as stage:
        assert await stage.control.on_demand.load(A)
        stage.triton.exit()
        await asyncio.sleep(60)
        stage.check(A)


@played
async def test_unload_ends_the_wait_for_a_slot():
    """A model that somebody unloads before its load has begun is not loaded after all."""
    async with Stage({"a@1": Script(load_seconds=5), "b@1": Script()}) as stage:
        stage.control.desired.slots = asyncio.Semaphore(1)
        stage.control.desired.preload({A: ArtifactKey("", A), B: ArtifactKey("", B)})
        await asyncio.sleep(2)
        await fails(stage.models.unload(B), ModelNotFound)
        await asyncio.sleep(20)
        stage.check(A)


@played
async def test_call_waits_ten_seconds_for_triton():
    """Its caller may ask another adapter, and this load was never begun."""
    async with Stage({"a@1": Script()}) as stage:
        stage.triton.restart_seconds = 15
        stage.triton.exit()
        await fails(stage.call(A), BackendUnavailable)


@played
async def test_lost_model_is_listed_once_given_up():
    """It stays away for ten minutes, and only a person may try it before."""
    scripts = {"a": Script()}
    async with Stage(scripts) as stage:
        await stage.load(A)
        scripts["a"].load_ends_triton = True
        stage.triton.exit()
        await asyncio.sleep(120)
        assert stage.control.state.forgotten()[A].is_given_up
        error = await fails(stage.invoke(A), ModelNotFound)
        assert "is given up until" in str(error)


@played
async def test_unbooked_model_leaves_with_its_triton():
    """Its memory is back with the exit, and no load of the next Triton waits for it."""
    async with Stage({"a": Script(), "b": Script()}) as stage:
        stage.triton.lag_seconds = 3.0
        stage.packages.confirm_seconds = 5
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(1.5)
        stage.triton.exit()
        await fails(load, BackendUnavailable)
        assert not stage.control.ledger.returning
        assert stage.control.ledger.sizes.largest() == {}


@played
async def test_triton_exits_during_a_fetch():
    async with Stage({"a@1": Script()}) as stage:
        stage.store.fetch_seconds = 4
        stage.triton.restart_seconds = 6
        call = asyncio.create_task(stage.call(A))
        await asyncio.sleep(2)
        stage.triton.exit()
        assert await call == "a@1"
        assert stage.store.fetches == 1


@played
async def test_person_may_try_a_given_up_model():
    """Calls of a model that V2 loads by its key are refused before that."""
    async with Stage({"a@1": Script(load_ends_triton=True), "a@2": Script()}) as stage:
        stage.control.desired.preload({A: ArtifactKey("", A)})
        await asyncio.sleep(120)
        error = await fails(stage.call(A), GivenUp)
        assert "is given up until" in str(error)
        assert "3 exits of Triton" in str(error)
        stage.store.versions["a"] += 1
        assert stage.control.on_demand is not None
        assert await stage.control.on_demand.load(A)
        assert await stage.call(A) == "a@2"


@played
async def test_unload_survives_a_broken_connection():
    """Triton in another container still has the model when it can be reached again."""
    async with Stage({"a": Script(), "b": Script()}, is_embedded=False) as stage:
        await stage.load(A)
        stage.triton.unload_seconds = 5
        unload = asyncio.create_task(stage.models.unload(A))
        await asyncio.sleep(1)
        await stage.triton.disconnect(3)
        await unload
        assert not stage.triton.loaded
        load = asyncio.create_task(stage.load(B))
        await asyncio.sleep(0.5)
        await stage.triton.disconnect(3)
        await fails(load, BackendUnavailable)
        stage.check()


@played
async def test_load_without_connection_is_stuck():
    """Triton goes on with it: without a record the model would stay there for good."""
    async with Stage({"a": Script(load_seconds=250)}, load_seconds=300, is_embedded=False) as stage:
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(1)
        await stage.triton.disconnect(3)
        await fails(load, BackendUnavailable)
        [record] = stage.control.registry.records()
        assert record.state is ModelState.STUCK
        await asyncio.sleep(100)
        stage.check()
        assert not stage.triton.loaded


# -- hangs --------------------------------------------------------------------------------------


@played
async def test_broken_load_shows_that_triton_lives():
    """Without another model it would count as exited, and the memory of the load as free."""
    async with Stage({"a": Script(load_seconds=250)}, load_seconds=300, is_embedded=False) as stage:
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(1)
        await stage.triton.disconnect(3)
        await fails(load, BackendUnavailable)
        assert not stage.models.blame.charges
        await stage.triton.disconnect(3)
        await asyncio.sleep(1)
        [record] = stage.control.registry.records()
        assert record.state is ModelState.STUCK
        await asyncio.sleep(200)
        stage.check()


@played
async def test_external_triton_is_away_for_a_moment():
    async with Stage({"a": Script(), "b": Script()}, is_embedded=False) as stage:
        await stage.load(A)
        await stage.triton.disconnect(2)
        await asyncio.sleep(1)
        assert await stage.invoke(A) == "a"
        stage.triton.exit()
        await asyncio.sleep(5)
        assert await stage.wait_and_invoke(A) == "a"
        await stage.load(B)


@played
async def test_load_follows_one_that_is_undone():
    """A load that is past its limit is none any more, and the next one has a try of its own."""
    scripts = {"a": Script(load_seconds=30), "b": Script()}
    async with Stage(scripts, load_seconds=20) as stage:
        await fails(stage.load(A), BackendTimeout)
        await fails(stage.invoke(A), ModelNotFound)
        await stage.load(A, "b")
        assert await stage.invoke(A) == "b"
    async with Stage(scripts, load_seconds=20) as stage:
        await fails(stage.load(A), BackendTimeout)
        await stage.replace(A, "b")
        assert await stage.invoke(A) == "b"


@played
async def test_limit_of_a_load_names_an_earlier_one():
    async with Stage({"a": Script(load_seconds=90), "b": Script()}, load_seconds=20) as stage:
        error = await fails(stage.load(A), BackendTimeout)
        assert "did not load within 20 s" in str(error)
        error = await fails(stage.load(A, "b"), BackendTimeout)
        assert "did not begin to load within 20 s" in str(error)
        await fails(stage.load(A, "b"), AlreadyLoaded)
        assert await stage.wait_and_invoke(A) == "b"


@played
async def test_hanging_loads_leave_room_for_others():
    """A load that has lasted 30 s no longer counts, and as many again may go on so."""
    scripts = {f"h{number}": Script(hangs=True, is_python=True) for number in range(4)}
    scripts |= {"a": Script(), "b": Script()}
    async with Stage(scripts, load_threads=2) as stage:
        hanging = [asyncio.create_task(stage.load(ModelId(f"h{n}"))) for n in range(2)]
        await asyncio.sleep(20)
        waiting = asyncio.create_task(stage.load(A))
        await asyncio.sleep(5)
        assert not waiting.done()
        await waiting
        more = [asyncio.create_task(stage.load(ModelId(f"h{n}"))) for n in range(2, 4)]
        await asyncio.sleep(40)
        last = asyncio.create_task(stage.load(B))
        await asyncio.sleep(5)
        assert not last.done()
        assert "'h0'" in stage.control.slots.explain()
        for number in range(4):
            await stage.models.unload(ModelId(f"h{number}"))
        await last
        results = await asyncio.gather(*hanging, *more, return_exceptions=True)
        assert {type(one) for one in results} == {UnloadedMeanwhile}
        stage.check(A, B)


@played
async def test_unload_hastens_once_requests_had_their_time():
    """Triton waits for a request that computes for ever, and its process is not given 30 s more."""
    async with Stage({"a": Script(is_python=True)}) as stage:
        await stage.load(A)
        lease = stage.models.lease(A)
        lease.begin()
        stage.triton.unload_seconds = math.inf
        unload = asyncio.create_task(stage.models.unload(A))
        await asyncio.sleep(171)  # half of the time limit is for requests
        stage.triton.unload_seconds = 0.2
        await asyncio.sleep(10)
        assert unload.done()
        lease.end()


@played
async def test_unload_ends_once_its_memory_is_back():
    """A platform books the memory as free from the answer on."""
    async with Stage({"a": Script()}) as stage:
        stage.triton.lag_seconds = 2.0
        await stage.load(A)
        await asyncio.sleep(8)
        await stage.models.unload(A)
        reading = stage.control.readings.last
        assert reading is not None
        assert reading.used[GPU] == stage.triton.base_bytes


@played
async def test_restart_by_adapter_brings_models_of_mesh_back():
    """The mesh has not seen Triton exit, and would only learn by calls that fail."""
    scripts = {"a": Script(), "b": Script(hangs=True)}
    async with Stage(scripts, on_exit=None, load_seconds=20, load_threads=1) as stage:
        stage.control.status.note_mesh()
        await stage.load(A)
        await fails(stage.load(B), BackendTimeout)
        assert await stage.wait_and_invoke(A) == "a"
        await asyncio.sleep(400)
        assert stage.triton.exits == 1
        stage.check(A)


@played
async def test_stuck_load_keeps_no_memory_without_process():
    """The memory has gone with the process, whenever Triton ends the load."""
    async with Stage({"a": Script(hangs=True, is_python=True, declared=100)}) as stage:
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(2)
        stage.triton.kill_process_of(TritonName("a"))
        await fails(load, LoadFailed)
        [record] = stage.control.registry.records()
        assert record.state is ModelState.STUCK
        assert not stage.control.ledger.stuck
        stage.triton.exit()  # or else its load is in progress for good


@played
async def test_stuck_load_ends_once_its_process_is_seen():
    """Its thread and its memory are free then, without a restart."""
    async with Stage({"a": Script(hangs=True, is_python=True)}, load_seconds=20) as stage:
        stage.triton.are_seen = False
        await fails(stage.load(A), BackendTimeout)
        await asyncio.sleep(400)
        [record] = stage.control.registry.records()
        assert record.state is ModelState.STUCK
        stage.triton.are_seen = True
        await asyncio.sleep(20)
        assert not stage.control.registry.records()


@played
async def test_callers_return_late_while_a_load_is_stuck():
    """It ends with Triton, as far as anybody knows, and no call makes it go."""
    scripts = {
        "a@1": Script(600, declared=600, hangs=True),
        "b@1": Script(600, declared=600),
    }
    async with Stage(scripts, load_seconds=20) as stage:
        await fails(stage.call(A), ModelNotReady)
        await asyncio.sleep(400)
        error = await fails(stage.call(B), NoRoom)
        assert error.retry_after_ms == 60_000
        stage.triton.exit()  # or else the load is in progress for good


@played
async def test_slow_unload_kills_no_process():
    """Triton never ends the unload of a model whose process was killed meanwhile."""
    async with Stage({"a": Script(is_python=True)}) as stage:
        record = await stage.load(A)
        model = stage.triton.loaded[record.name]
        stage.triton.answer_seconds = 5
        await stage.models.unload(A)
        assert not model.has_died


# -- start and stop -----------------------------------------------------------------------------


@played
async def test_leftover_that_triton_keeps_is_stuck():
    """Without a record its folder, and maybe the model, would stay for good."""
    stage = Stage({"a": Script()}, is_embedded=False)
    name = await stage.leave_loaded(A)
    held = {Device("GPU-0"): 100 * MIB}
    stage.packages.left_behind = [StagedModel(name, A, Placement((name,)), held=held)]
    stage.triton.unload_seconds = 300
    async with stage:
        [record] = stage.control.registry.records()
        assert record.state is ModelState.STUCK
        assert stage.control.ledger.stuck[name] == held
        stage.triton.unload_seconds = 0.2
        await stage.load(A)
        await asyncio.sleep(300)
        stage.check(A)


@played
async def test_slow_load_without_python_is_waited_for():
    """Only of models with a python process is one missed."""
    async with Stage({"a": Script(load_seconds=90)}) as stage:
        await stage.load(A)
        stage.check(A)


@played
async def test_eviction_that_never_ends_leaves_model_stuck():
    """Otherwise it would be UNLOADING for good, and each of its callers would wait in vain."""
    sizes = {"a@1": Script(600, declared=600), "b@1": Script(600, declared=600)}
    async with Stage(sizes) as stage:
        await stage.call(A)
        stage.triton.unload_seconds = math.inf
        await fails(stage.call(B), ModelNotReady)
        await asyncio.sleep(400)
        states = [record.state for record in stage.control.registry.records_of(A)]
        assert states == [ModelState.STUCK]


@played
async def test_hanging_unloads_keep_no_load_threads():
    """Triton loads other models as before, so that it needs no restart."""
    async with Stage({"a": Script(), "b": Script(), "c": Script()}, load_threads=2) as stage:
        await stage.load(A)
        await stage.load(B)
        stage.triton.unload_seconds = 3000
        for name in (A, B):
            await fails(stage.models.unload(name), BackendTimeout)
        await asyncio.sleep(10)
        assert stage.triton.exits == 0
        assert stage.control.state.reasons() == []
        await stage.load(C)
        stage.triton.unload_seconds = 0.2


@played
async def test_stuck_leftover_is_not_part_of_empty_triton():
    """Nobody has noted what a load takes that never ended. If it counted as Triton's own memory, a
    declared size would be refused for good, though it fits once Triton has let the load go.
    """
    stage = Stage({"a": Script(600), "b": Script(900, declared=900)}, is_embedded=False)
    name = await stage.leave_loaded(A)
    stage.packages.left_behind = [StagedModel(name, A, Placement((name,)))]
    stage.triton.unload_seconds = 300
    async with stage:
        await fails(stage.load(B), InsufficientMemory)
        stage.triton.unload_seconds = 0.2
        await asyncio.sleep(300)
        await stage.load(B)
        stage.check(B)


@played
async def test_model_counts_as_loaded_before_first_reading():
    """Otherwise a load beside it would be refused for good, as if it had been alone."""
    stage = Stage({"a@1": Script(900, declared=900), "b@1": Script(600), "b": Script(600)})
    stage.triton.has_readings = False
    async with stage:
        await stage.load(B)
        stage.triton.has_readings = True
        await asyncio.sleep(5)
        await fails(stage.call(A), NoRoom)
        await stage.models.unload(B)
        await stage.call(A)


@played
async def test_adopted_models_take_memory_where_nothing_is_read():
    """The limit of all memory is known only after they were adopted."""
    stage = Stage({"a": Script()}, limit_mib=300)
    stage.triton.has_readings = False
    name = await stage.leave_loaded(A)
    stage.packages.left_behind = [
        StagedModel(
            name,
            A,
            Placement((name,)),
            is_loaded=True,
            source=ModelSource("a"),
            can_load_again=True,
            content_key="a",
            held={UNSEEN: 200 * MIB},
        )
    ]
    async with stage:
        assert stage.control.memory.ledger.free(UNSEEN) == 100 * MIB


@played
async def test_adopted_model_may_be_on_each_device():
    """The run before this one read no memory. If the device counted as empty, a load that fits once
    the model has gone would be refused for good.
    """
    stage = Stage({"a": Script(600), "b": Script(900, declared=900)})
    name = await stage.leave_loaded(A)
    stage.packages.left_behind = [
        StagedModel(
            name,
            A,
            Placement((name,)),
            is_loaded=True,
            source=ModelSource("a"),
            can_load_again=True,
            content_key="a",
            held={UNSEEN: 600 * MIB},
        )
    ]
    async with stage:
        await fails(stage.load(B), InsufficientMemory)
        await stage.models.unload(A)
        await stage.load(B)


@played
async def test_drain_ends_the_wait_for_triton():
    """The load would never begin, and the drain need not last for it."""
    async with Stage({"a": Script()}) as stage:
        stage.triton.restart_seconds = 30
        stage.triton.exit()
        load = asyncio.create_task(stage.load(A))
        await asyncio.sleep(1)
        drained = asyncio.create_task(stage.control.drain(5))
        error = await fails(load, BackendUnavailable)
        assert "is draining" in str(error)
        await drained


@played
async def test_drain_ends_what_lasts():
    async with Stage({"a": Script(load_seconds=3), "b": Script(load_seconds=30)}) as stage:
        quick = asyncio.create_task(stage.load(A))
        slow = asyncio.create_task(stage.load(B))
        await asyncio.sleep(2)
        drained = asyncio.create_task(stage.control.drain(5))
        await asyncio.sleep(0)
        await fails(stage.load(C), BackendUnavailable)
        await quick
        await fails(slow, BackendUnavailable)
        await drained
        assert await stage.invoke(A) == "a"
        assert stage.control.registry.get(A) is not None
