"""ModelRuntime on a control plane of fakes."""

import asyncio
import json
from pathlib import Path

from adapter._proto import model_runtime_pb2 as pb
from adapter.core.model import ModelId, ModelSource, Placement, StagedModel, TritonName
from adapter.errors import (
    BackendUnavailable,
)
from adapter.frontends.grpc.mesh_sizes import MeshSizes
from adapter.frontends.grpc.modelmesh import ModelRuntime, Options
from adapter.settings import load_settings
from tests.fakes.control import ControlOnFakes

CLOSED = BackendUnavailable("it was closed", delivered=True)
STARTING, READY = pb.RuntimeStatusResponse.STARTING, pb.RuntimeStatusResponse.READY


class FakeTriton:
    async def instances(self, name: str) -> int:
        return 3 if name == "m" else 1

    version = "9.9"


class Front:
    """What a mesh may ask, by id and path."""

    def __init__(
        self, fakes: ControlOnFakes, root: Path, unload_seconds: float = 340, **settings: object
    ) -> None:
        self.triton = FakeTriton()
        self.is_ready = True
        given = load_settings(settings, {}, None).settings
        self.runtime = ModelRuntime(
            fakes.control,
            fakes.control_state.triton,
            self.triton,
            MeshSizes(
                fakes.control,
                fakes.control_state,
                fakes.parts.mesh,
                default_bytes=given.modelmesh_default_size,
                size_factor=given.size_factor,
                capacity_bytes=given.modelmesh_capacity,
            ),
            options=Options(
                load_seconds=given.load_timeout_seconds,
                unload_seconds=unload_seconds,
                load_concurrency=given.load_concurrency or 1,
                model_concurrency=given.modelmesh_model_concurrency,
            ),
            metrics=fakes.metrics,
            is_ready=lambda: self.is_ready,
        )

    async def load(self, model_id: str, path: str | None = None, **key: object) -> int:
        return (await self.answer(model_id, path, json.dumps(key))).sizeInBytes

    async def answer(self, model_id: str, path: str | None, key: str) -> pb.LoadModelResponse:
        path = f"/{model_id}" if path is None else path
        return await self.runtime.load(
            pb.LoadModelRequest(modelId=model_id, modelPath=path, modelKey=key)
        )

    async def unload(self, model_id: str) -> None:
        await self.runtime.unload(pb.UnloadModelRequest(modelId=model_id))

    async def predict(self, path: str, key: str = "{}", model_id: str = "any") -> int:
        request = pb.PredictModelSizeRequest(modelId=model_id, modelPath=path, modelKey=key)
        return (await self.runtime.predict_size(request)).sizeInBytes

    async def size(self, model_id: str) -> int:
        return (await self.runtime.size(pb.ModelSizeRequest(modelId=model_id))).sizeInBytes

    async def status(self) -> pb.RuntimeStatusResponse:
        return await self.runtime.status(pb.RuntimeStatusRequest())


def left_over(model_id: str, *, is_loaded: bool = True) -> StagedModel:
    """Return what an earlier run has left of a model."""
    name = TritonName(model_id)
    return StagedModel(
        name,
        ModelId(model_id),
        Placement((name,)),
        is_loaded=is_loaded,
        source=ModelSource(f"/{model_id}"),
        can_load_again=True,
        content_key=f"/{model_id}",
    )


async def turns_of_the_loop():
    """Enough for the fakes to come to a standstill."""
    for _ in range(50):
        await asyncio.sleep(0)
