"""What we believe of Triton's control plane and its texts, and what TritonControl makes of both."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from adapter.core.model import ModelId, TritonName
from adapter.errors import (
    BackendTimeout,
    InferenceFailed,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    NotJson,
    OutOfMemory,
    StubDied,
)
from tests.contract.controlled import PATIENCE, ControlledTriton, made, until
from tests.fakes.calls import Calls
from tests.fakes.triton import FakeControlTriton
from tests.trees import infer_body

real = pytest.mark.triton


class FakeControlled:
    def __init__(self) -> None:
        self.control = FakeControlTriton(Calls())

    def put(self, name: str) -> None:
        pass

    def put_ensemble(self, name: str, step: str) -> None:
        self.control.along[name] = {step}

    load, unload, wait_gone = (
        ControlledTriton.load,
        ControlledTriton.unload,
        ControlledTriton.wait_gone,
    )


@pytest.fixture(params=["fake", pytest.param("real", marks=real)])
def either(request):
    return FakeControlled() if request.param == "fake" else request.getfixturevalue("controlled")


async def test_loaded_model_is_ready_until_unloaded(either):
    either.put("m")
    await either.load("m")
    assert "m" in await either.control.ready()
    assert not await either.wait_gone("m", 0.1)
    await either.unload("m")
    assert await either.wait_gone("m")
    assert "m" not in await either.control.ready()


async def test_unload_of_unknown_model_is_no_error(either):
    await either.unload("never")
    assert await either.wait_gone("never", 0)


async def test_remaining_models_are_listed(either):
    either.put("a")
    either.put("b")
    await either.load("a")
    await either.load("b")
    await either.unload("b")
    assert await either.wait_gone("b")
    assert await either.control.wait_gone({"a", "b", "never"}, 0.1) == {"a"}


async def test_ensembles_steps_come_and_go_with_it(either):
    either.put("step")
    either.put_ensemble("whole", "step")
    await either.load("whole")
    assert {"whole", "step"} <= await either.control.ready()
    await either.unload("whole")
    assert await either.control.wait_gone({"whole", "step"}, PATIENCE) == set()


async def test_a_second_load_changes_nothing(either):
    either.put("m")
    await either.load("m")
    await either.load("m")
    assert "m" in await either.control.ready()
    await either.unload("m")
    assert await either.wait_gone("m")


# -- loads ------------------------------------------------------------------------------------


@real
async def test_reload_of_unchanged_files_keeps_the_process(controlled):
    """Python's first import writes __pycache__ beside the model, which counts as a change."""
    controlled.put("m", imports="import os", answer="values = values * 0 + os.getpid()")
    await controlled.load("m")
    await controlled.load("m")
    before = (await controlled.infer("m", 1)).json()["outputs"]
    await controlled.load("m")
    assert (await controlled.infer("m", 1)).json()["outputs"] == before


@real
async def test_a_load_that_fails_tells_tritons_reason(controlled):
    controlled.put("m", initialize='raise ValueError("no weights in this folder")')
    with pytest.raises(LoadFailed, match="no weights in this folder") as caught:
        await controlled.load("m")
    assert caught.value.model_id == "m"
    assert str(caught.value).startswith("load failed for model 'm': version 1 is at UNAVAILABLE")
    assert caught.value.__cause__ is not None


@real
async def test_failed_model_is_absent_and_loads_once_mended(controlled, triton):
    controlled.put("m", initialize='raise ValueError("no weights")')
    with pytest.raises(LoadFailed):
        await controlled.load("m")
    assert "m" not in await controlled.control.present()
    raw = InferenceServerClient(triton.grpc_address)
    (entry,) = [m for m in (await raw.get_model_repository_index()).models if m.name == "m"]
    await raw.close()
    assert entry.state == "UNAVAILABLE"
    assert "no weights" in entry.reason
    controlled.put("m")
    await controlled.load("m")
    assert "m" in await controlled.control.ready()


@real
async def test_a_failure_text_of_300_kb_survives_whole(controlled):
    controlled.put("m", initialize='raise ValueError("begin" + "x" * 300_000 + "end")')
    with pytest.raises(LoadFailed) as caught:
        await controlled.load("m")
    assert "begin" + "x" * 300_000 + "end" in str(caught.value)


@real
async def test_a_load_without_memory_is_told_apart(controlled):
    controlled.put("m", initialize="raise MemoryError()")
    with pytest.raises(OutOfMemory) as caught:
        await controlled.load("m")
    assert caught.value.matched == "MemoryError"


@real
@pytest.mark.of_triton("2.51", "2.73", "its words for a failed load")
async def test_load_of_unknown_model_fails(controlled):
    with pytest.raises(LoadFailed, match="failed to load 'never', failed to poll from model"):
        await controlled.load("never")


@real
async def test_folder_gone_during_listing_is_no_failure(controlled, triton):
    """Another model's unload removes a folder at any time. Triton itself is asked as often, so that
    it is known that such lists fail.
    """
    raw, failed = InferenceServerClient(triton.grpc_address), 0
    stopped = threading.Event()

    def come_and_go(name: str) -> None:
        while not stopped.is_set():
            (triton.repository / name / "1").mkdir(parents=True)
            shutil.rmtree(triton.repository / name)

    with ThreadPoolExecutor(2) as pool:
        going = [pool.submit(come_and_go, name) for name in ("going-1", "going-2")]
        try:
            async with asyncio.timeout(100):
                while failed < 10:
                    await controlled.control.present()
                    try:
                        await raw.get_model_repository_index()
                    except InferenceServerException as error:
                        failed += "failed to stat file" in str(error)
        finally:
            stopped.set()
            await raw.close()
    for each in going:
        each.result()


@real
async def test_two_loads_go_side_by_side(controlled, tmp_path):
    """Neither ends before the other has begun."""
    body = f"""
        import os, time
        open("{tmp_path}/" + args["model_name"], "w")
        end = time.monotonic() + 60
        while not all(os.path.exists("{tmp_path}/" + name) for name in "ab"):
            assert time.monotonic() < end, "the other one does not begin"
            time.sleep(0.01)
    """
    for name in "ab":
        controlled.put(name, initialize=body)
    await asyncio.gather(controlled.load("a"), controlled.load("b"))


@real
async def test_grpc_load_holds_up_no_http_inference(controlled, gate):
    """Over Triton's HTTP port it does, for as long as the load takes: hence gRPC."""
    controlled.put("quick")
    await controlled.load("quick")
    controlled.put("slow", initialize=gate.statements)
    load = asyncio.create_task(controlled.load("slow"))
    await until(gate.reached.exists)
    for _ in range(20):
        assert (await controlled.infer("quick", 1)).status == 200
    assert not load.done()
    gate.open()
    await load


@real
async def test_load_over_its_time_goes_on_in_triton(controlled, triton, gate):
    """Its unload waits for it."""
    controlled.put("m", initialize=gate.statements)
    hasty = made(triton.grpc_address, load_seconds=1)
    await hasty.ready()  # it is connected
    with pytest.raises(BackendTimeout) as caught:
        await hasty.load(TritonName("m"), ModelId("m"))
    await hasty.close()
    assert caught.value.model_id == "m"
    await until(gate.reached.exists)
    assert "m" in await controlled.control.present()
    assert "m" not in await controlled.control.ready()
    unload = asyncio.create_task(controlled.unload("m"))
    assert (await asyncio.wait({unload}, timeout=0.2))[1] == {unload}
    gate.open()
    await unload
    assert await controlled.wait_gone("m")


# -- unloads ----------------------------------------------------------------------------------


@real
async def test_unload_waits_for_requests_in_flight(controlled, gate):
    controlled.put("m", answer=gate.statements)
    await controlled.load("m")
    answer = asyncio.create_task(controlled.infer("m", 7))
    await until(gate.reached.exists)
    await controlled.unload("m")
    assert not answer.done()
    assert "m" in await controlled.control.present()
    assert "m" not in await controlled.control.ready()
    assert type(await controlled.fault("m", 1)) is ModelNotFound
    gate.open()
    assert await controlled.wait_gone("m")
    assert (await answer).json()["outputs"][0]["data"] == [7]


@real
async def test_dead_process_needs_a_load_before_unload(controlled):
    """An inference tells of it."""
    controlled.put("m", answer="import os; os._exit(1)")
    await controlled.load("m")
    assert type(await controlled.fault("m", 1)) is StubDied
    assert "m" in await controlled.control.ready()
    await controlled.unload("m")
    assert not await controlled.wait_gone("m", 2)
    await controlled.load("m")
    await controlled.unload("m")
    assert await controlled.wait_gone("m")


# -- inferences that fail ---------------------------------------------------------------------


@real
async def test_failed_inference_becomes_the_right_error(controlled):
    controlled.put(
        "m",
        answer="""
            import triton_python_backend_utils as pb
            kind = int(values[0])
            if kind == 1:
                raise ValueError("bad label")
            if kind == 2:
                raise MemoryError()
            if kind == 3:
                error = pb.TritonError("no such user", pb.TritonError.NOT_FOUND)
                return pb.InferenceResponse(error=error)
            if kind == 4:
                raise ValueError("unknown label: Stub process 'm_0_0' is not healthy.")
        """,
    )
    await controlled.load("m")
    assert (await controlled.infer("m", 0)).status == 200
    assert type(await controlled.fault("m", 1)) is InferenceFailed
    assert type(await controlled.fault("m", 2)) is OutOfMemory
    assert type(await controlled.fault("m", 3)) is InferenceFailed
    assert type(await controlled.fault("m", 4)) is InferenceFailed
    assert type(await controlled.fault("m", body=b"{")) is NotJson
    assert type(await controlled.fault("m", body={"no": "inputs"})) is InvalidRequest
    wrong = infer_body(1)
    wrong["inputs"][0]["name"] = "CUDA out of memory"
    assert type(await controlled.fault("m", body=wrong)) is InvalidRequest
    assert type(await controlled.fault("never", 1)) is ModelNotFound
