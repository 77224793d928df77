"""A mesh in front of the adapter: over TCP and unix sockets, at one address and at two."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as v2

from tests.asking import Gate, triton_index
from tests.cases import rows
from tests.fakes.mesh import Mesh, Unimplemented
from tests.grpc_calls import infer_request, values_of
from tests.processes import triton_client
from tests.running import (
    COMPLETE,
    EXAMPLES,
    RunningAdapter,
    embedded_adapter,
    unload_all,
)
from tests.trees import CONFIG, write_python_model

pytestmark = pytest.mark.triton

INFER = "inference.GRPCInferenceService/ModelInfer"
DIGITS, IDENTITY = str(EXAMPLES / "digits"), str(EXAMPLES / "identity")
DEFAULT = 1_000_000
KEY = json.dumps({"model_type": {"name": "python", "version": "1"}, "disk_size_bytes": 21000})


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="mm-"))
    yield folder
    shutil.rmtree(folder)


LAYOUTS = {
    "tcp, one address": ("--grpc=127.0.0.1:0",),
    "one socket for both": ("--grpc=unix:{0}/mm.sock", "--grpc-data=unix:{0}/mm.sock"),
    "two sockets": ("--grpc=unix:{0}/mm.sock", "--grpc-data=unix:{0}/data.sock"),
}


# for what does not depend on the address: a journey and a crowd are played at each
once = pytest.mark.parametrize("everywhere", ["two sockets"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=LAYOUTS)
def everywhere(request, root) -> Iterator[RunningAdapter]:
    flags = [flag.format(root) for flag in LAYOUTS[request.param]]
    shared = (f"--model-roots={root}", "--load-concurrency=2", COMPLETE)
    with embedded_adapter(*shared, *flags) as adapter:
        yield adapter


@pytest.fixture
async def mesh(everywhere) -> AsyncIterator[Mesh]:
    """Started, in front of an adapter with nothing loaded."""
    async with started(everywhere) as mesh:
        yield mesh
    unload_all(everywhere)


@asynccontextmanager
async def started(adapter: RunningAdapter) -> AsyncIterator[Mesh]:
    listeners = adapter.listeners
    mesh = Mesh(listeners["grpc"], listeners.get("grpc_data", listeners["grpc"]))
    # a busy machine may not answer in 500 ms, and what is predicted is looked at here
    mesh.predict_seconds = 60
    await mesh.start()
    yield mesh
    await mesh.close()


async def ask(mesh: Mesh, model_id: str, *values: float) -> tuple[str, list[float]]:
    """Return the model's name and values in the answer to a request that names another model."""
    request = infer_request("a-vmodel", *values).SerializeToString()
    answer = v2.ModelInferResponse.FromString(await mesh.infer(INFER, model_id, request))
    return answer.model_name, values_of(answer)


@pytest.fixture
def package(root) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=root))
    yield folder
    shutil.rmtree(folder)


def left(adapter: RunningAdapter) -> tuple[list[str], set[str], list[str]]:
    """What there is in the books, in Triton, and in the repository."""
    states = triton_index(adapter)
    in_triton = {name for name, state in states.items() if state not in {"", "UNAVAILABLE"}}
    folders = [path.name for path in adapter.repository.iterdir()]
    return [model["model_id"] for model in adapter.state()["models"]], in_triton, folders


async def reached(gate: Gate) -> None:
    await asyncio.to_thread(gate.wait_reached)


async def test_a_model_is_loaded_served_and_evicted(mesh, everywhere):
    model_id = "zoë/№ 1"
    loaded = await mesh.load(model_id, DIGITS, KEY)
    assert loaded.size > 2**20  # measured: the files have 30 kB
    assert loaded.predicted == DEFAULT
    sample = json.loads((EXAMPLES / "digits" / "sample.json").read_text())
    [image] = sample["inputs"]
    request = infer_request("v", *image["data"])
    request.inputs[0].name = "IMAGE"
    request.inputs[0].shape[:] = image["shape"]
    headers = {"mm-vmodel-id": "v", "user-agent": "x", "grpc-timeout": "1n", "authorization": "k"}

    answer = v2.ModelInferResponse.FromString(
        await mesh.infer(INFER, model_id, request.SerializeToString(), headers)
    )

    at = [output.name for output in answer.outputs].index("LABEL")
    labels = np.frombuffer(answer.raw_output_contents[at], "<i8").tolist()
    assert (answer.model_name, labels) == (model_id, sample["labels"])

    await mesh.evict(model_id)
    assert left(everywhere) == ([], set(), [])
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await mesh.infer(INFER, model_id, request.SerializeToString())
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


@once
async def test_next_request_loads_removed_model_again(mesh, everywhere):
    await mesh.load("m", IDENTITY, KEY)
    with everywhere.client() as sagemaker:
        sagemaker.unload_model("m")

    assert await ask(mesh, "m", 1, 2) == ("m", [1, 2])
    assert left(everywhere)[0] == ["m"]


@once
async def test_load_past_its_time_is_cancelled_without_trace(mesh, everywhere, package, gate):
    write_python_model(package, initialize=gate.statements)
    load = asyncio.create_task(mesh.load("slow", str(package), seconds=3))
    await reached(gate)
    asyncio.get_running_loop().call_later(3.5, gate.open)  # the unload waits for the load

    with pytest.raises(TimeoutError):
        await load

    assert left(everywhere) == ([], set(), [])


@once
async def test_one_connection_carries_everything_at_once(mesh, everywhere, package, gate):
    await mesh.load("served", IDENTITY)
    # what is known of beforehand is loaded beside others
    declared = CONFIG + 'parameters { key: "memory_bytes" value { string_value: "64MiB" } }'
    write_python_model(package, initialize=gate.statements, config=declared)
    slow = asyncio.create_task(mesh.load("slow", str(package)))
    await reached(gate)

    answers = await asyncio.gather(*(ask(mesh, "served", n) for n in range(50)))
    predictions = await asyncio.gather(*(mesh.predict("p", "far/away", KEY) for _ in range(20)))
    await mesh.load("other", IDENTITY)
    await mesh.evict("other")

    assert not slow.done()
    gate.open()
    await slow
    assert answers == [("served", [n]) for n in range(50)]
    assert set(predictions) == {DEFAULT}


@once
async def test_a_mesh_that_starts_anew_finds_nothing_loaded(mesh, everywhere, package, gate):
    write_python_model(package, initialize=gate.statements)
    await mesh.load("m", IDENTITY)
    slow = asyncio.create_task(mesh.load("slow", str(package)))
    await reached(gate)
    await mesh.close()
    slow.cancel()
    asyncio.get_running_loop().call_later(1.5, gate.open)

    async with started(everywhere) as anew:
        assert anew.polls > 1  # it is STARTING while the model loads
        assert left(everywhere) == ([], set(), [])
        await anew.load("m", IDENTITY)


@once
async def test_model_loaded_past_adapter_is_unloaded_at_start(everywhere):
    """ModelMesh counts all memory as free at its start."""
    folder = everywhere.repository / "stranger"
    write_python_model(folder)
    try:
        with triton_client(everywhere) as raw:
            assert raw.post("/v2/repository/models/stranger/load", {}).status == 200
        assert triton_index(everywhere)["stranger"] == "READY"
        async with started(everywhere):
            assert triton_index(everywhere)["stranger"] != "READY"
    finally:
        shutil.rmtree(folder)


@once
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("the weights are broken", "INTERNAL"),
        # with nothing else loaded no unload can help
        ("Out of memory. Tried to allocate 2000.00 GiB", "FAILED_PRECONDITION"),
    ],
)
async def test_a_failed_load_says_why_in_tritons_words(mesh, everywhere, package, words, code):
    write_python_model(package, initialize=f"raise RuntimeError({words!r})")

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await mesh.load("bad", str(package))

    assert failed.value.code().name == code
    assert words in failed.value.details()
    assert left(everywhere) == ([], set(), [])


@once
async def test_package_with_config_loads_whatever_its_format(mesh):
    key = json.dumps({"model_type": {"name": "xgboost", "version": "1"}})
    await mesh.load("m", IDENTITY, key)

    assert await ask(mesh, "m", 3) == ("m", [3])


@once
@rows("path", ["{}/none", "/etc", "relative/path", ""])
async def test_a_load_that_is_not_tried_says_so(mesh, everywhere, root, path):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.load("none", path.format(root))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert left(everywhere) == ([], set(), [])


@once
async def test_unary_model_calls_go_through_alone(mesh):
    await mesh.load("m", IDENTITY)
    service, named = "inference.GRPCInferenceService/", v2.ModelReadyRequest(name="v")

    async def ask(method: str) -> bytes:
        return await mesh.infer(service + method, "m", named.SerializeToString())

    assert v2.ModelReadyResponse.FromString(await ask("ModelReady")).ready
    assert v2.ModelMetadataResponse.FromString(await ask("ModelMetadata")).name == "m"
    assert v2.ModelConfigResponse.FromString(await ask("ModelConfig")).config.name == "m"
    statistics = v2.ModelStatisticsResponse.FromString(await ask("ModelStatistics"))
    assert [model.name for model in statistics.model_stats] == ["m"]
    for method in ("RepositoryModelUnload", "ServerLive", "SystemSharedMemoryStatus"):
        with pytest.raises(Unimplemented):
            await ask(method)


@once
async def test_model_is_the_same_at_every_listener(mesh, everywhere):
    with everywhere.client() as sagemaker:
        sagemaker.load_model("theirs", IDENTITY)
        loaded = await mesh.load("theirs", IDENTITY)
        [model] = everywhere.state()["models"]  # before it grows under traffic
        assert sum(model["bytes"].values()) == loaded.size
        assert await ask(mesh, "theirs", 3) == ("theirs", [3])
        await mesh.load("ours", DIGITS)

        names = [m["modelName"] for m in sagemaker.get("/models").json()["models"]]
        assert names == ["ours", "theirs"]
        await mesh.evict("theirs")
        assert sagemaker.get("/models/theirs").status == 404


@once
async def test_the_second_listener_has_inference_alone(everywhere):
    empty = {"request_serializer": bytes, "response_deserializer": bytes}
    async with grpc.aio.insecure_channel(everywhere.listeners["grpc_data"]) as channel:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady", **empty)
        assert v2.ServerReadyResponse.FromString(await ready(b"")).ready
        for method in (
            "mmesh.ModelRuntime/runtimeStatus",
            "inference.GRPCInferenceService/RepositoryIndex",
        ):
            with pytest.raises(grpc.aio.AioRpcError) as none:
                await channel.unary_unary(f"/{method}", **empty)(b"")
            assert none.value.code() is grpc.StatusCode.UNIMPLEMENTED
