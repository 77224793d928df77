"""runtimeStatus."""

import pytest

from adapter.core.record import OnExit
from adapter.core.states import ModelState
from adapter.errors import (
    BackendError,
    BackendTimeout,
    ModelNotFound,
    UnloadedMeanwhile,
)
from tests.frontends.grpc.modelmesh.front import READY, STARTING, Front, turns_of_the_loop


class TestStatus:
    async def test_what_a_mesh_is_told(self, open_fakes, tmp_path):
        fakes = await open_fakes(limit=10**9, others=50)
        front = Front(fakes, tmp_path, load_concurrency=3, modelmesh_default_size="2MiB")
        status = await front.status()
        assert status.status == READY
        assert status.capacityInBytes == 8 * 10**8 - 50
        assert status.maxLoadingConcurrency == 3
        assert status.modelLoadingTimeoutMs == 350_000
        assert status.defaultModelSizeInBytes == 2 * 2**20
        assert status.runtimeVersion == "9.9"
        assert not status.limitModelConcurrency
        assert not status.allowAnyMethod
        paths = {name: list(info.idInjectionPath) for name, info in status.methodInfos.items()}
        service = "inference.GRPCInferenceService/"
        assert paths == {
            f"{service}{method}": [1]
            for method in (
                "ModelReady",
                "ModelMetadata",
                "ModelInfer",
                "ModelConfig",
                "ModelStatistics",
            )
        }

    async def test_a_mesh_that_asks_loads_again_itself_what_triton_loses(
        self, open_fakes, tmp_path
    ):
        fakes = await open_fakes(limit=10**9, on_exit=None)
        front = Front(fakes, tmp_path)
        assert fakes.parts.status.on_exit is OnExit.RELOAD
        await front.status()
        assert fakes.parts.status.on_exit is OnExit.FORGET
        assert fakes.parts.status.on_restart[0] == "forget"

    async def test_a_triton_without_a_version_is_v1(self, fakes, tmp_path):
        front = Front(fakes, tmp_path)
        front.triton.version = ""
        assert (await front.status()).runtimeVersion == "v1"

    async def test_no_longer_load_is_promised_than_is_allowed(self, fakes, tmp_path):
        front = Front(fakes, tmp_path, load_timeout_seconds="12.5")
        assert (await front.status()).modelLoadingTimeoutMs == 12_500

    async def test_it_is_starting_while_the_adapter_is(self, front):
        front.is_ready = False
        assert (await front.status()).status == STARTING

    async def test_whatever_is_loaded_is_gone_before_it_is_ready(self, fakes, front):
        await front.load("ours")
        await fakes.load("another-listeners")
        assert (await front.status()).status == READY
        fakes.check()

    async def test_status_unloads_models_that_others_loaded_into_triton(self, fakes, front):
        """ModelMesh counts all memory as free then."""
        fakes.sizes["stranger"] = 300
        fakes.triton.models.add("stranger")
        status = await front.status()
        assert status.status == READY
        assert fakes.triton.models == set()
        assert status.capacityInBytes == (await front.status()).capacityInBytes

    async def test_status_is_starting_while_a_stranger_is_not_unloaded(self, fakes, front):
        fakes.triton.models.add("stranger")
        fakes.calls.fail("unload stranger", BackendError("not now"))
        assert (await front.status()).status == STARTING
        assert (await front.status()).status == READY
        assert fakes.triton.models == set()

    async def test_a_load_under_way_is_ended_and_undone_before_it_is_ready(self, fakes, front):
        gate = fakes.calls.hold("load m")
        load = fakes.begin(front.load("m"))
        await gate.reached.wait()
        load.cancel()
        status = fakes.begin(front.status())
        await turns_of_the_loop()
        gate.open()  # a load goes on in Triton
        assert (await status).status == READY
        fakes.check()

    async def test_a_load_that_waits_for_its_turn_is_never_begun(self, fakes, front):
        load = fakes.begin(front.load("m"))
        assert (await front.status()).status == READY
        with pytest.raises(ModelNotFound, match="waited to begin"):
            await load
        fakes.check()

    async def test_another_listeners_load_is_ended_and_undone_before_it_is_ready(
        self, fakes, front
    ):
        gate = fakes.calls.hold("load m")
        load = fakes.begin(fakes.load("m"))
        await gate.reached.wait()
        status = fakes.begin(front.status())
        await turns_of_the_loop()
        gate.open()  # a load goes on in Triton
        assert (await status).status == READY
        with pytest.raises(UnloadedMeanwhile):
            await load
        fakes.check()

    async def test_an_unload_that_fails_is_tried_again_the_next_time(self, fakes, front, caplog):
        await front.load("m")
        fakes.calls.fail("unload m", BackendTimeout("not now"))
        assert (await front.status()).status == STARTING
        reasons = [r.reason for r in caplog.records if r.msg == "modelmesh.purge_failed"]
        assert len(reasons) == 1
        assert reasons[0].startswith("Triton does not release model 'm'")
        await fakes.until_free("m")  # the watcher unloads what is stuck
        assert (await front.status()).status == READY
        fakes.check()

    async def test_a_model_that_is_unloading_is_waited_for(self, fakes, front):
        await front.load("m")
        gate = fakes.calls.hold("wait_gone m")
        unload = fakes.begin(front.unload("m"))
        await gate.reached.wait()
        status = fakes.begin(front.status())
        await turns_of_the_loop()
        assert not status.done()
        assert fakes.state("m") is ModelState.UNLOADING
        gate.open()
        await unload
        assert (await status).status == READY

    async def test_the_container_bounds_the_capacity(self, fakes, tmp_path):
        front = Front(fakes, tmp_path, modelmesh_capacity="500MiB")
        assert (await front.status()).capacityInBytes == 500 * 2**20

    async def test_the_container_alone_will_do(self, open_fakes, tmp_path):
        fakes = await open_fakes()
        front = Front(fakes, tmp_path, modelmesh_capacity="6GiB")
        assert (await front.status()).capacityInBytes == 6 * 2**30

    async def test_memory_that_nobody_knows_is_told_by_name(self, open_fakes, tmp_path):
        front = Front(await open_fakes(), tmp_path)
        with pytest.raises(BackendError, match="CONTAINER_MEM_REQ_BYTES"):
            await front.status()

    async def test_memory_with_which_no_mesh_starts_is_told_with_the_reason(
        self, open_fakes, tmp_path
    ):
        front = Front(await open_fakes(limit=10**6), tmp_path)
        with pytest.raises(BackendError, match="ModelMesh does not start below"):
            await front.status()
