"""What the real ModelMesh was seen to send, played to the real command."""

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as pb
from tests.fakes import mesh
from tests.grpc_calls import infer_request
from tests.journeys.modelmesh.frames import Caller, calling
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, unload_all
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

SCRIPT = json.loads((Path(__file__).parent / "recorded" / "mesh-0.12.json").read_text())
MODEL = "identity__isvc-0123456789"
SECONDS = 60


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="mm-"))
    write_python_model(made / MODEL / "identity")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Iterator[RunningAdapter]:
    """The mesh has one socket; the other is for inference alone."""
    sockets = (f"--grpc=unix:{folder}/rt.sock", f"--grpc-data=unix:{folder}/data.sock")
    with embedded_adapter(f"--model-roots={folder}", COMPLETE, *sockets) as adapter:
        yield adapter


class Played:
    """The script's calls in their order, each on the next stream of the connection."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._streams = itertools.count(1, 2)

    async def call(self, step: dict[str, Any], request: Any) -> Any:
        stream, deadline = next(self._streams), step.get("deadline_seconds")
        self.caller.headers(stream, step["method"], deadline_seconds=deadline)
        self.caller.data(stream, request.SerializeToString())
        answer = getattr(pb, type(request).__name__.replace("Request", "Response"))
        return answer.FromString(await self.caller.answer(stream, deadline or SECONDS))

    async def start(self) -> None:
        step = SCRIPT["start"]
        while True:
            answer = await self.call(step, pb.RuntimeStatusRequest())
            if pb.RuntimeStatusResponse.Status.Name(answer.status) == step["until"]:
                return
            await asyncio.sleep(mesh.POLL_SECONDS)  # the mesh: every_seconds

    async def load(self, local: Path) -> tuple[int, int]:
        """The sizes that it was told: before, and of what it loaded."""
        predict, load, size = SCRIPT["load"]
        key = json.dumps({"model_type": {"name": "python"}, "disk_size_bytes": 600})
        asked = {"modelId": MODEL, "modelKey": key}
        request = pb.PredictModelSizeRequest(modelPath="models/identity", **asked)
        for _ in range(20):  # a busy machine may not answer in 500 ms
            with suppress(TimeoutError):
                predicted = await self.call(predict, request)
                break
        loaded = await self.call(load, pb.LoadModelRequest(modelPath=str(local), **asked))
        told = loaded.sizeInBytes
        if told == size["only_if_size_is"]:
            told = (await self.call(size, pb.ModelSizeRequest(modelId=MODEL))).sizeInBytes
        return predicted.sizeInBytes, told

    async def infer(self, frames: list[str]) -> dict[int, list[float]]:
        """What each stream of the record was answered; each asks for its own number."""
        step = SCRIPT["inferences"]
        numbers = sorted({int(line.split()[1]) for line in frames})
        streams = {number: next(self._streams) for number in numbers}
        binary = base64.b64encode(MODEL.encode()).decode().rstrip("=")
        values = dict(zip(step["metadata"], (binary, MODEL), strict=True))
        for line in frames:
            kind, number = line.split()
            stream = streams[int(number)]
            if kind == "HEADERS":
                limit = step["deadline_seconds"]
                self.caller.headers(stream, step["method"], *values.items(), deadline_seconds=limit)
            else:
                request = infer_request(MODEL, float(number))
                self.caller.data(stream, request.SerializeToString())
        return {
            number: numbers_in(await self.caller.answer(stream, SECONDS))
            for number, stream in streams.items()
        }

    async def unload(self) -> None:
        await self.call(SCRIPT["unload"], pb.UnloadModelRequest(modelId=MODEL))


def numbers_in(message: bytes) -> list[float]:
    [raw] = v2.ModelInferResponse.FromString(message).raw_output_contents
    return memoryview(raw).cast("f").tolist()


async def test_the_mesh_as_it_was_recorded_has_every_call_answered(adapter, folder):
    async with calling(f"{folder}/rt.sock") as caller:
        played = Played(caller)
        await played.start()
        first = await played.load(folder / MODEL / "identity")
        [model] = adapter.state()["models"]  # before inferences, which a model may grow by
        answers = await played.infer(SCRIPT["inferences"]["frames"])
        await played.unload()
        again = await played.load(folder / MODEL / "identity")
        await played.unload()

    assert answers == {5: [5.0], 7: [7.0], 9: [9.0]}
    default = 1_000_000  # what is learned is larger, and never predicted
    assert first == (default, sum(model["bytes"].values()))
    assert again[0] == default
    assert again[1] > default
    assert adapter.state()["models"] == []


@pytest.mark.parametrize("socket", ["rt.sock", "data.sock"])
async def test_requests_may_end_in_any_order_whatever_began_first(adapter, folder, socket):
    heads = [line for line in SCRIPT["inferences"]["frames"] if line.startswith("HEADERS")]
    bodies = [line for line in SCRIPT["inferences"]["frames"] if line.startswith("DATA")]
    async with calling(f"{folder}/rt.sock") as managing:
        await Played(managing).load(folder / MODEL / "identity")
    async with calling(f"{folder}/{socket}") as caller:
        played = Played(caller)
        for order in itertools.permutations(bodies):
            answers = await played.infer([*heads, *order])
            assert answers == {5: [5.0], 7: [7.0], 9: [9.0]}, order
    unload_all(adapter)


def test_the_mesh_that_the_tests_play_is_the_one_that_was_recorded():
    predict, _, size = SCRIPT["load"]
    assert predict["deadline_seconds"] == mesh.PREDICT_SECONDS
    assert size["deadline_seconds"] == mesh.SIZE_SECONDS
    assert SCRIPT["unavailable"]["tries"] == mesh.TRIES
