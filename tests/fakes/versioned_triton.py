"""A gRPC server in Triton's place that behaves as the version that it reports, by the list of
adapter/core/versions.py. It runs no model.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format, text_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core import versions

_NO_SHARED_MEMORY = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
_UNKNOWN = "Request for unknown model: '{}' is not found"


class Refused(Exception):
    """Triton's answer with this code and text."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class VersionedTriton(grpc.GenericRpcHandler):
    """Models in `not_ready` have an `is_ready` that says False, those in `dead` a process that has
    died. An inference waits for `answers`; `ended` is set when this Triton dies of a cancelled one.
    """

    def __init__(self, version: str, repository: Path) -> None:
        self.version = version
        self.models: dict[str, ModelConfig] = {}
        self.uploads: set[str] = set()
        self.not_ready: set[str] = set()
        self.dead: set[str] = set()
        self.statistics: dict[str, list[pb.ModelStatistics] | None] = {}
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()
        self.answers, self.ended = asyncio.Event(), asyncio.Event()
        self._repository = repository
        self._acts: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "ServerLive": (pb.ServerLiveRequest, self._live),
            "ServerMetadata": (pb.ServerMetadataRequest, self._metadata),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._index),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self._load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._unload),
            "ModelReady": (pb.ModelReadyRequest, self._ready),
            "ModelConfig": (pb.ModelConfigRequest, self._config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._statistics),
            "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, self._regions),
        }

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "ModelInfer":
            return grpc.unary_unary_rpc_method_handler(self._infer)
        known = self._acts.get(method)
        if known is None:
            return None
        request, act = known

        async def answer(message: bytes, context: Any) -> bytes:
            try:
                return bytes(act(request.FromString(message)).SerializeToString())
            except Refused as refused:
                await context.abort(refused.code, str(refused))
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    def _has(self, change: versions.Change) -> bool:
        return versions.has(change, self.version)

    def _live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def _metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="triton", version=self.version)

    def _index(self, _: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """An upload is in no folder, so in no index."""
        index = pb.RepositoryIndexResponse()
        for name in self.models.keys() - self.uploads:
            index.models.add(name=name, version="1", state="READY")
        return index

    def _load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        name = request.model_name
        if name in self.models and request.parameters:
            return pb.RepositoryModelLoadResponse()  # OK, with the files of before
        config = ModelConfig()
        if request.parameters:
            json_format.Parse(request.parameters["config"].string_param, config)
            self.uploads.add(name)
        else:
            text_format.Parse((self._repository / name / "config.pbtxt").read_text(), config)
            self._check_labels(self._repository / name, config)
        self.models[name] = config
        self.dead.discard(name)
        return pb.RepositoryModelLoadResponse()

    def _check_labels(self, folder: Path, config: ModelConfig) -> None:
        for output in config.output:
            path = folder / output.label_filename
            leads_out = not path.resolve().is_relative_to(folder.resolve())
            if leads_out and self._has(versions.LINKS):
                where = f"for output '{output.name}' in model '{folder.name}'"
                text = f"label file path '{path}' {where} is outside model directory"
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, text)

    def _unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        self.models.pop(request.model_name, None)
        self.uploads.discard(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    def _ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        if request.name not in self.models:
            if self._has(versions.UNKNOWN_READY):
                raise Refused(grpc.StatusCode.NOT_FOUND, _UNKNOWN.format(request.name))
            return pb.ModelReadyResponse(ready=False)
        says_no = request.name in self.not_ready and self._has(versions.IS_READY)
        is_dead = request.name in self.dead and self._has(versions.DEAD_READY)
        return pb.ModelReadyResponse(ready=not says_no and not is_dead)

    def _config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        if request.name not in self.models:
            raise Refused(grpc.StatusCode.NOT_FOUND, _UNKNOWN.format(request.name))
        return pb.ModelConfigResponse(config=self.models[request.name])

    def _statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        if (known := self.statistics.get(request.name)) is None:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "no statistics extension")
        return pb.ModelStatisticsResponse(model_stats=known)

    def _regions(
        self, _: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        if self._has(versions.CLIENT_SHM):
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, _NO_SHARED_MEMORY)
        return pb.SystemSharedMemoryStatusResponse()

    async def _infer(self, _message: bytes, _context: Any) -> bytes:
        self.asked.set()
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            if not self._has(versions.CANCELS):
                self.ended.set()
            raise
        return b""


@asynccontextmanager
async def serving(triton: VersionedTriton, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve it; yield its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((triton,))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address.replace(":0", f":{port}")
    finally:
        await server.stop(None)
