"""Serves inference.GRPCInferenceService: forwards bytes to Triton; loads through control."""

from collections.abc import Callable, Collection
from functools import partial

import grpc
from tritonclient.grpc import service_pb2 as pb

from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.control.presence import lost
from adapter.core.calls import RpcCall, RpcDataPlane
from adapter.core.faults import Faults
from adapter.core.registry import ModelRecord
from adapter.errors import (
    BackendError,
    BackendUnavailable,
    CapacityError,
    ModelNotFound,
    ModelNotReady,
    NotPassedThrough,
)
from adapter.frontends.grpc.limits import MessageLimits
from adapter.frontends.grpc.middleware import Context, GrpcMiddleware, Handler, Unary, metadata_of
from adapter.frontends.grpc.naming import (
    forwarded,
    id_in,
    id_of_mesh,
    named_for_caller,
    named_for_triton,
)
from adapter.frontends.grpc.stream import StreamInfer
from adapter.frontends.grpc.v2_repository import GrpcRepository, serialised
from adapter.frontends.model_repository import Repository
from adapter.protocols.protobuf import read_field
from adapter.telemetry.metrics import Metrics

SERVICE = "inference.GRPCInferenceService"

# fields that hold the model's name in the response; in each request it is field 1
_NAME_IN_ANSWER = {"ModelInfer": (1,), "ModelMetadata": (1,), "ModelConfig": (1, 1)}

# methods that an item of the setting `passthrough` allows
_ON_REQUEST = {
    "SystemSharedMemoryStatus": "shared_memory",
    "SystemSharedMemoryRegister": "shared_memory",
    "SystemSharedMemoryUnregister": "shared_memory",
    "CudaSharedMemoryStatus": "shared_memory",
    "CudaSharedMemoryRegister": "shared_memory",
    "CudaSharedMemoryUnregister": "shared_memory",
    "TraceSetting": "trace",
    "LogSettings": "log",
}
_TRACED_MODEL = 2  # field of TraceSettingRequest


class V2Service(grpc.GenericRpcHandler):
    """Without `repository` only inference is served. `load_wait_seconds`: how long a call waits for
    a load of its model that is under way.
    """

    def __init__(
        self,
        control: ModelControl,
        dataplane: RpcDataPlane,
        faults: Faults,
        metrics: Metrics,
        *,
        repository: Repository | None,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        load_wait_seconds: float,
        passthrough: Collection[str],
        limits: MessageLimits,
        frontend: str = "grpc",
    ) -> None:
        self._control = control
        self._dataplane = dataplane
        self._is_live = is_live
        self._is_ready = is_ready
        self._load_wait_seconds = load_wait_seconds
        middleware = GrpcMiddleware(metrics, frontend)
        stream = StreamInfer(control, dataplane, faults, middleware, load_wait_seconds)
        handlers = {"ModelStreamInfer": middleware.stream("ModelStreamInfer", stream.serve)}
        most = limits.unary
        handlers |= {
            name: middleware.unary(name, act, most) for name, act in self._unary_methods().items()
        }
        for name, setting in _ON_REQUEST.items():
            handlers[name] = self._on_request(middleware, name, setting, setting in passthrough)
        if repository is not None:
            calls = GrpcRepository(repository)
            handlers["RepositoryIndex"] = middleware.unary("RepositoryIndex", calls.index)
            handlers["RepositoryModelLoad"] = middleware.unary("RepositoryModelLoad", calls.load)
            handlers["RepositoryModelUnload"] = middleware.unary(
                "RepositoryModelUnload", calls.unload
            )
        self._handlers = {f"/{SERVICE}/{name}": handler for name, handler in handlers.items()}

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self,))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        return self._handlers.get(handler_call_details.method)

    def _unary_methods(self) -> dict[str, Unary]:
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": partial(self._forwarded, "ServerMetadata"),
            "ModelReady": partial(self._for_mesh, self._ready),
            "ModelStatistics": partial(self._for_mesh, self._statistics),
            **{
                name: partial(self._for_mesh, partial(self._about_model, name))
                for name in _NAME_IN_ANSWER
            },
        }

    def _on_request(
        self, middleware: GrpcMiddleware, method: str, setting: str, is_allowed: bool
    ) -> Handler:
        if not is_allowed:
            return middleware.unary(method, partial(_deny, method, setting))
        act = self._trace if method == "TraceSetting" else partial(self._forwarded, method)
        return middleware.unary(method, act)

    # -- the server -------------------------------------------------------------------------

    async def _server_live(self, _: bytes, __: Context) -> bytes:
        return serialised(pb.ServerLiveResponse(live=self._is_live()))

    async def _server_ready(self, _: bytes, __: Context) -> bytes:
        return serialised(pb.ServerReadyResponse(ready=self._is_ready()))

    async def _forwarded(self, method: str, message: bytes, context: Context) -> bytes:
        return await self._forward(method, message, context, None)

    async def _trace(self, message: bytes, context: Context) -> bytes:
        """Forward TraceSetting of one model, or of all when it names none."""
        if not read_field(message, _TRACED_MODEL):
            return await self._forwarded("TraceSetting", message, context)
        lease = self._control.lease(id_in(message, (), _TRACED_MODEL))
        with lease as record:
            message = named_for_triton(message, record, _TRACED_MODEL)
            return await self._forward("TraceSetting", message, context, lease)

    # -- one model --------------------------------------------------------------------------

    async def _for_mesh(self, act: Unary, message: bytes, context: Context) -> bytes:
        """Answer ModelMesh NOT_FOUND where Triton's process, and its models with it, are gone: it
        loads the model again, and that load waits for Triton. Of UNAVAILABLE it makes INTERNAL.
        """
        model_id, presence = id_of_mesh(metadata_of(context)), self._control.presence
        if model_id is None:
            return await act(message, context)
        presence.refuse_lost(model_id)
        try:
            return await act(message, context)
        except BackendUnavailable as error:
            if await presence.is_cause_of(error):
                raise lost(model_id) from error
            raise

    async def _about_model(self, method: str, message: bytes, context: Context) -> bytes:
        model_id = id_in(message, metadata_of(context))
        lease = await self._control.serving(model_id, self._load_wait_seconds)
        with lease as record:
            message = named_for_triton(message, record)
            try:
                answer = await self._forward(method, message, context, lease)
            except (BackendError, CapacityError) as error:
                raise await self._control.judged(error, record.id) from error
            return named_for_caller(answer, record, _NAME_IN_ANSWER[method])

    async def _ready(self, message: bytes, context: Context) -> bytes:
        """Return false for a model that is not loaded, as Triton does; NOT_FOUND to ModelMesh."""
        metadata = metadata_of(context)
        try:
            lease = self._control.lease(id_in(message, metadata))
        except (ModelNotFound, ModelNotReady) as error:
            if isinstance(error, ModelNotFound) and id_of_mesh(metadata):
                raise
            return serialised(pb.ModelReadyResponse(ready=False))
        with lease as record:
            message = named_for_triton(message, record)
            return await self._forward("ModelReady", message, context, lease)

    async def _statistics(self, message: bytes, context: Context) -> bytes:
        """Return the statistics of one model, or of all in Triton when it names none."""
        if not read_field(message, 1) and not id_of_mesh(metadata_of(context)):
            answer = await self._forwarded("ModelStatistics", message, context)
            return _with_callers_names(answer, self._control.registry.records())
        model_id = id_in(message, metadata_of(context))
        lease = await self._control.serving(model_id, self._load_wait_seconds)
        with lease as record:
            message = named_for_triton(message, record)
            answer = await self._forward("ModelStatistics", message, context, lease)
            return _with_callers_names(answer, [record])

    async def _forward(
        self, method: str, message: bytes, context: Context, lease: Lease | None
    ) -> bytes:
        metadata = forwarded(metadata_of(context))
        call = RpcCall(method, metadata, context.time_remaining())
        answer = await self._dataplane.call(call, message, lease)
        if initial := forwarded(answer.initial_metadata):
            await context.send_initial_metadata(initial)
        if trailing := forwarded(answer.trailing_metadata):
            context.set_trailing_metadata(trailing)
        return answer.message


async def _deny(method: str, setting: str, _: bytes, __: Context) -> bytes:
    raise NotPassedThrough(f"{method} is not passed on: the setting passthrough lacks {setting}")


def _with_callers_names(answer: bytes, records: Collection[ModelRecord]) -> bytes:
    """Put clients' names into the statistics; other models keep theirs."""
    names = {str(r.name): r.id for r in records if r.is_renamed}
    if not names:
        return answer
    found = pb.ModelStatisticsResponse.FromString(answer)
    for model in found.model_stats:
        model.name = names.get(model.name, model.name)
    return serialised(found)
