"""What the real ModelMesh was seen to send, played to the real command."""

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import hpack
import pytest
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as pb
from adapter.relay import frames
from tests.fakes import mesh
from tests.frontends.grpc.proxy_listener import Wire, frame, head_of, prefixed
from tests.grpc_calls import infer_request
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, unload_all
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

SCRIPT = json.loads((Path(__file__).parent / "recorded" / "mesh-0.12.json").read_text())
MODEL = "identity__isvc-0123456789"
_DEADLINE_EXCEEDED = "4"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="mm-"))
    write_python_model(made / MODEL / "identity")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def adapter(folder) -> Iterator[RunningAdapter]:
    """The mesh has one socket; the other is for inference alone."""
    sockets = (f"--grpc=unix:{folder}/rt.sock", f"--grpc-data=unix:{folder}/data.sock")
    with embedded_adapter(f"--model-roots={folder}", COMPLETE, *sockets) as adapter:
        yield adapter


@asynccontextmanager
async def playing(path: str) -> AsyncIterator["Played"]:
    reader, writer = await asyncio.open_unix_connection(path)
    played = Played(Wire(reader, writer))
    played.wire.greet()
    yield played
    writer.close()


class Played:
    """The script's calls in their order, each on the next stream of the connection."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._streams = itertools.count(1, 2)

    def send_head(self, stream: int, step: dict[str, Any], *metadata: tuple[bytes, bytes]) -> None:
        if (seconds := step.get("deadline_seconds")) is not None:
            metadata = ((b"grpc-timeout", b"%dm" % (seconds * 1000)), *metadata)
        head = head_of(f"/{step['method']}", *metadata)
        self.wire.send(frames.header_block(stream, head, end=False))

    def send_message(self, stream: int, request: Any) -> None:
        message = prefixed(request.SerializeToString())
        self.wire.send(frame(frames.DATA, frames.END_STREAM, stream, message))

    async def call(self, step: dict[str, Any], request: Any) -> Any:
        stream = next(self._streams)
        self.send_head(stream, step)
        self.send_message(stream, request)
        message, trailers = await self.wire.answer(stream)
        status = dict(hpack.Decoder().decode(trailers))["grpc-status"]
        if status == _DEADLINE_EXCEEDED:
            raise TimeoutError
        assert status == "0"
        answer = getattr(pb, type(request).__name__.replace("Request", "Response"))
        return answer.FromString(message[5:])

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

    async def infer(self, lines: list[str]) -> dict[int, list[float]]:
        """What each stream of the record was answered; each asks for its own number."""
        step = SCRIPT["inferences"]
        numbers = sorted({int(line.split()[1]) for line in lines})
        streams = {number: next(self._streams) for number in numbers}
        binary = base64.b64encode(MODEL.encode()).rstrip(b"=")
        names = [name.encode() for name in step["metadata"]]
        metadata = tuple(zip(names, (binary, MODEL.encode()), strict=True))
        for line in lines:
            kind, number = line.split()
            if kind == "HEADERS":
                self.send_head(streams[int(number)], step, *metadata)
            else:
                request = infer_request(MODEL, float(number))
                self.send_message(streams[int(number)], request)
        return {number: await self._answer(stream) for number, stream in streams.items()}

    async def _answer(self, stream: int) -> list[float]:
        """The answers come in any order."""
        end = (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream)
        while not any(got[:3] == end for got in self.wire.got):
            assert await self.wire.next() is not None
        data = [got[3] for got in self.wire.got if got[0] == frames.DATA and got[2] == stream]
        return numbers_in(b"".join(data)[5:])

    async def unload(self) -> None:
        await self.call(SCRIPT["unload"], pb.UnloadModelRequest(modelId=MODEL))


def numbers_in(message: bytes) -> list[float]:
    [raw] = v2.ModelInferResponse.FromString(message).raw_output_contents
    return memoryview(raw).cast("f").tolist()


async def test_recorded_mesh_has_every_call_answered(adapter, folder):
    async with playing(f"{folder}/rt.sock") as played:
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
async def test_requests_end_in_any_order(adapter, folder, socket):
    heads = [line for line in SCRIPT["inferences"]["frames"] if line.startswith("HEADERS")]
    bodies = [line for line in SCRIPT["inferences"]["frames"] if line.startswith("DATA")]
    async with playing(f"{folder}/rt.sock") as managing:
        await managing.load(folder / MODEL / "identity")
    async with playing(f"{folder}/{socket}") as played:
        for order in itertools.permutations(bodies):
            answers = await played.infer([*heads, *order])
            assert answers == {5: [5.0], 7: [7.0], 9: [9.0]}, order
    unload_all(adapter)


def test_played_mesh_matches_the_recorded_one():
    predict, _, size = SCRIPT["load"]
    assert predict["deadline_seconds"] == mesh.PREDICT_SECONDS
    assert size["deadline_seconds"] == mesh.SIZE_SECONDS
    assert SCRIPT["unavailable"]["tries"] == mesh.TRIES
