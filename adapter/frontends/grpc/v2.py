"""Serves inference.GRPCInferenceService: forwards bytes to Triton; loads through control."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.control.door import Lease, ModelRecord, Models, TritonState, WaitForLease
from adapter.core.calls import RpcCall, RpcDataPlane
from adapter.core.faults import Faults
from adapter.core.model import ModelId, parse_model_id
from adapter.errors import (
    BackendError,
    BackendUnavailable,
    CapacityError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NotPassedThrough,
    PayloadTooLarge,
)
from adapter.frontends.access import Access, Extensions
from adapter.frontends.bodies import HeldBody
from adapter.frontends.grpc.messages import (
    forwarded,
    id_in,
    id_of_mesh,
    named_for_caller,
    named_for_triton,
    read_field,
)
from adapter.frontends.grpc.middleware import (
    Context,
    GrpcMiddleware,
    Handler,
    MessageLimits,
    Unary,
    ids_of,
    metadata_of,
)
from adapter.frontends.grpc.parameters import check_parameters
from adapter.frontends.grpc.stream import StreamInfer
from adapter.frontends.model_repository import Repository, find_ensemble
from adapter.http2.protobuf import SHORT_BYTES, has_no_outputs
from adapter.runtime.byte_budget import ByteBudget
from adapter.telemetry.metrics import Metrics

SERVICE = "inference.GRPCInferenceService"
_MAX_PARAMETERS = 10_000
_NAME = 1  # field of each request about one model

# fields that hold the model's name in the response
_INFER = "ModelInfer"
_NAME_IN_ANSWER = {_INFER: (1,), "ModelMetadata": (1,), "ModelConfig": (1, 1)}

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
    """Serves the methods of the service at one listener."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        dataplane: RpcDataPlane,
        faults: Faults,
        metrics: Metrics,
        *,
        access: Access,
        repository: Repository | None,  # None serves inference alone
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        load_wait_seconds: float,  # for a load of the model by somebody else
        passthrough: Collection[str],
        limits: MessageLimits,
        budget: ByteBudget,
        on_demand: WaitForLease | None = None,  # has models loaded for calls
    ) -> None:
        self._models = models
        self._registry = models.registry
        self._triton = triton
        self._wait_for_lease = on_demand or models.wait_for_lease
        self._loads_on_demand = on_demand is not None
        self._dataplane = dataplane
        self._is_live, self._is_ready = is_live, is_ready
        self._load_wait_seconds = load_wait_seconds
        self._extensions = Extensions(passthrough, has_repository=repository is not None)
        middleware = GrpcMiddleware(metrics, access.name, access=access)
        self._shares_memory = "shared_memory" in passthrough
        stream = StreamInfer(
            triton,
            dataplane,
            faults,
            middleware,
            self._lease_of,
            shares_memory=self._shares_memory,
        )
        handlers = {"ModelStreamInfer": middleware.stream("ModelStreamInfer", stream.serve)}
        for name, act in self._unary_methods().items():
            handlers[name] = middleware.unary(name, act, limits.unary)
        for name, setting in _ON_REQUEST.items():
            handlers[name] = self._on_request(middleware, name, setting, setting in passthrough)
        if repository is not None:
            calls = GrpcRepository(repository, budget)
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
            "ServerMetadata": self._server_metadata,
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

    async def _server_metadata(self, message: bytes, context: Context) -> bytes:
        """Leave out the extensions that are not open at this listener."""
        answer = await self._forwarded("ServerMetadata", message, context)
        found = pb.ServerMetadataResponse.FromString(answer)
        found.extensions[:] = self._extensions.served(found.extensions)
        return serialised(found)

    async def _forwarded(self, method: str, message: bytes, context: Context) -> bytes:
        return await self._forward(method, message, context, None)

    async def _trace(self, message: bytes, context: Context) -> bytes:
        """Forward TraceSetting of one model, or of all when it names none."""
        if not read_field(message, _TRACED_MODEL):
            return await self._forwarded("TraceSetting", message, context)
        lease = self._models.lease(id_in(message, (), _TRACED_MODEL))
        lease.is_inference = False
        with lease as record:
            message = named_for_triton(message, record, _TRACED_MODEL)
            return await self._forward("TraceSetting", message, context, lease)

    # -- one model --------------------------------------------------------------------------

    async def _for_mesh(self, act: Unary, message: bytes, context: Context) -> bytes:
        """Answer ModelMesh NOT_FOUND where Triton's process, and its models with it, are gone: it
        loads the model again, and that load waits for Triton. Of UNAVAILABLE it makes INTERNAL.
        """
        model_id = self._id_of_mesh(message, context)
        if model_id is None:
            return await act(message, context)
        self._triton.refuse_lost(model_id)
        try:
            return await act(message, context)
        except BackendUnavailable as error:
            if await self._triton.is_exit_behind(error):
                raise self._triton.explain_lost(model_id) from error
            raise

    async def _lease(self, message: bytes, context: Context) -> Lease:
        """Return a lease of the model that the message is about. What a mesh asks for is loaded by
        the mesh alone.
        """
        if (model_id := self._id_of_mesh(message, context)) is not None:
            return await self._models.wait_for_lease(model_id, self._load_wait_seconds)
        return await self._lease_of(id_in(message, metadata_of(context)))

    def _id_of_mesh(self, message: bytes, context: Context) -> ModelId | None:
        """Return the model that a mesh asks for. Where calls load models, metadata with the name
        that the message has is for a proxy, which routes by it, and no mesh's.
        """
        model_id = id_of_mesh(metadata_of(context))
        if model_id is None or not self._loads_on_demand:
            return model_id
        return None if read_field(message, _NAME) == model_id.encode() else model_id

    async def _lease_of(self, model_id: ModelId) -> Lease:
        return await self._wait_for_lease(model_id, self._load_wait_seconds)

    def _lease_of_step(self, message: bytes, context: Context) -> Lease | None:
        """Return a lease of the ensemble if the message is about one of its steps, which the config
        of the ensemble names as Triton does; None otherwise.
        """
        step = id_in(message, metadata_of(context))
        ensemble = find_ensemble(self._registry, step)
        if ensemble is None:
            return None
        lease = self._models.lease(ensemble.id)
        lease.is_inference = False
        return lease

    async def _about_model(self, method: str, message: bytes, context: Context) -> bytes:
        of_step = None if method == _INFER else self._lease_of_step(message, context)
        if of_step is not None:
            with of_step:
                return await self._forward(method, message, context, of_step)
        lease = await self._lease(message, context)
        lease.is_inference = method == _INFER
        with lease as record:
            message = named_for_triton(message, record)
            if method == _INFER:
                check_parameters(message, record, shares_memory=self._shares_memory)
            try:
                answer = await self._forward(method, message, context, lease)
            except (BackendError, CapacityError) as error:
                raise await lease.judge(error) from error
            if method == _INFER and len(answer) < SHORT_BYTES and has_no_outputs(answer):
                lease.note_missing_outputs()
            return named_for_caller(answer, record, _NAME_IN_ANSWER[method])

    async def _ready(self, message: bytes, context: Context) -> bytes:
        """Return false for a model that is not loaded, as Triton does; NOT_FOUND to ModelMesh."""
        if (lease := self._lease_of_step(message, context)) is not None:
            with lease:
                return await self._forward("ModelReady", message, context, lease)
        metadata = metadata_of(context)
        try:
            lease = self._models.lease(id_in(message, metadata))
        except (ModelNotFound, ModelNotReady) as error:
            if isinstance(error, ModelNotFound) and self._id_of_mesh(message, context):
                raise
            return serialised(pb.ModelReadyResponse(ready=False))
        lease.is_inference = False
        with lease as record:
            message = named_for_triton(message, record)
            return await self._forward("ModelReady", message, context, lease)

    async def _statistics(self, message: bytes, context: Context) -> bytes:
        """Return the statistics of one model, or of all in Triton when it names none."""
        if not read_field(message, 1) and not id_of_mesh(metadata_of(context)):
            answer = await self._forwarded("ModelStatistics", message, context)
            return _with_callers_names(answer, self._registry.records())
        if (lease := self._lease_of_step(message, context)) is not None:
            with lease:
                return await self._forward("ModelStatistics", message, context, lease)
        lease = await self._lease(message, context)
        lease.is_inference = False
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
    text = f"{method} is not forwarded to Triton: the setting passthrough lacks {setting!r}"
    raise NotPassedThrough(f"{text}; see docs/v2.md#calls-about-the-whole-server")


def _with_callers_names(answer: bytes, records: Collection[ModelRecord]) -> bytes:
    """Put clients' names into the statistics; other models keep theirs."""
    names = {str(r.name): r.asked_for for r in records if r.is_renamed}
    if not names:
        return answer
    found = pb.ModelStatisticsResponse.FromString(answer)
    for model in found.model_stats:
        model.name = names.get(model.name, model.name)
    return serialised(found)


class GrpcRepository:
    """Triton's model repository extension: frontends/model_repository.py in protobuf. `budget`
    bounds the messages of loads, which may bring files.
    """

    def __init__(self, repository: Repository, budget: ByteBudget) -> None:
        self._repository = repository
        self._budget = budget

    async def index(self, message: bytes, _: Context) -> bytes:
        request = _parsed(pb.RepositoryIndexRequest, message)
        entries = await self._repository.index(only_ready=request.ready)
        models = [pb.RepositoryIndexResponse.ModelIndex(**asdict(entry)) for entry in entries]
        return serialised(pb.RepositoryIndexResponse(models=models))

    async def load(self, message: bytes, context: Context) -> bytes:
        with HeldBody(self._budget, None) as held:
            await held.take(len(message))
            held.arrived()
            request = _parsed(pb.RepositoryModelLoadRequest, message)
            model_id, parameters = _about(request)
            await self._repository.load(model_id, parameters, **ids_of(context))
        return serialised(pb.RepositoryModelLoadResponse())

    async def unload(self, message: bytes, context: Context) -> bytes:
        request = _parsed(pb.RepositoryModelUnloadRequest, message)
        model_id, parameters = _about(request)
        await self._repository.unload(model_id, parameters, **ids_of(context))
        return serialised(pb.RepositoryModelUnloadResponse())


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        request = kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.name}") from error
    if request.repository_name:  # nor does Triton
        raise InvalidRequest("repository_name is not supported: there is one repository")
    return request


def _about(request: Any) -> tuple[ModelId, Mapping[str, Any]]:
    if len(request.parameters) > _MAX_PARAMETERS:
        raise PayloadTooLarge(
            f"{len(request.parameters)} parameters; at most {_MAX_PARAMETERS} are accepted"
        )
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in request.parameters.items()
    }
    return parse_model_id(request.model_name), parameters


def serialised(message: Any) -> bytes:
    return bytes(message.SerializeToString())
