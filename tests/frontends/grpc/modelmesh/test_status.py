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
        front = Front(
            fakes,
            tmp_path,
            load_concurrency=3,
            load_timeout_seconds="12.5",
            modelmesh_default_size="2MiB",
        )
        status = await front.status()
        assert status.status == READY
        assert status.capacityInBytes == 8 * 10**8 - 50
        assert status.maxLoadingConcurrency == 3
        assert status.modelLoadingTimeoutMs == 12_500
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

    async def test_reload_after_exit_is_left_to_mesh(self, open_fakes, tmp_path):
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

    async def test_it_is_starting_while_the_adapter_is(self, front):
        front.is_ready = False
        assert (await front.status()).status == STARTING

    async def test_load_awaiting_its_turn_never_begins(self, fakes, front):
        load = fakes.begin(front.load("m"))
        assert (await front.status()).status == READY
        with pytest.raises(ModelNotFound, match="waited to begin"):
            await load
        fakes.check()

    async def test_other_listeners_load_is_undone_before_readiness(self, fakes, front):
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

    async def test_failed_unload_is_tried_again(self, fakes, front, caplog):
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

    async def test_memory_that_nobody_knows_is_told_by_name(self, open_fakes, tmp_path):
        front = Front(await open_fakes(), tmp_path)
        with pytest.raises(BackendError, match="CONTAINER_MEM_REQ_BYTES"):
            await front.status()

    async def test_memory_too_small_for_a_mesh_is_explained(self, open_fakes, tmp_path):
        front = Front(await open_fakes(limit=10**6), tmp_path)
        with pytest.raises(BackendError, match="ModelMesh does not start below"):
            await front.status()
