"""Serves inference.GRPCInferenceService: forwards bytes to Triton; loads through control."""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.control.door import Lease, ModelRecord, Models, TritonState, WaitForLease
from adapter.core.calls import RpcCall, RpcDataPlane
from adapter.core.model import ModelId, parse_model_id
from adapter.core.triton_errors import Faults
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
from adapter.frontends.access import Extensions
from adapter.frontends.bodies import HeldBody
from adapter.frontends.grpc.calls import LOAD, GrpcCall, GrpcCalls, Unary
from adapter.frontends.grpc.messages import (
    forwarded,
    id_in,
    id_of_mesh,
    named_for_caller,
    named_for_triton,
    read_field,
)
from adapter.frontends.grpc.parameters import check_parameters
from adapter.frontends.grpc.streams import Streams
from adapter.frontends.repository import Repository, find_ensemble
from adapter.relay.protobuf import SHORT_BYTES, has_no_outputs
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.open_streams import STREAM_BYTES

SERVICE = "inference.GRPCInferenceService"
_MAX_PARAMETERS = 10_000
_NAME = 1  # field of each request about one model
_TRACED_MODEL = 2  # field of TraceSettingRequest
# the fields around the model's name in an answer, and its own
_NAME_IN_ANSWER = {"ModelInfer": (1,), "ModelMetadata": (1,), "ModelConfig": (1, 1)}

# methods that an item of the setting `passthrough` allows
_PASSED_THROUGH = {
    "SystemSharedMemoryStatus": "shared_memory",
    "SystemSharedMemoryRegister": "shared_memory",
    "SystemSharedMemoryUnregister": "shared_memory",
    "CudaSharedMemoryStatus": "shared_memory",
    "CudaSharedMemoryRegister": "shared_memory",
    "CudaSharedMemoryUnregister": "shared_memory",
    "TraceSetting": "trace",
    "LogSettings": "log",
}


class V2Service:
    """Answers the methods of the service at one listener."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        dataplane: RpcDataPlane,
        faults: Faults,
        *,
        repository: Repository | None,  # None serves inference alone
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        load_wait_seconds: float,  # for a load of the model by somebody else
        passthrough: Collection[str],
        budget: ByteBudget,
        on_demand: WaitForLease | None = None,  # has models loaded for calls
    ) -> None:
        self._models = models
        self._triton = triton
        self._wait_for_lease = on_demand or models.wait_for_lease
        self._loads_on_demand = on_demand is not None
        self._dataplane = dataplane
        self._budget = budget
        self._is_live = is_live
        self._is_ready = is_ready
        self._load_wait_seconds = load_wait_seconds
        self._passthrough = passthrough
        self._extensions = Extensions(passthrough, has_repository=repository is not None)
        self._shares_memory = "shared_memory" in passthrough
        self._repository = None if repository is None else GrpcRepository(repository, budget)
        self._streams = Streams(
            triton, dataplane, faults, self._lease_by_id, shares_memory=self._shares_memory
        )

    def service(self, calls: GrpcCalls) -> grpc.GenericRpcHandler:
        """Return what answers the methods."""
        unary: dict[str, Unary] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelInfer": partial(self._call_about_model, self._infer),
            "ModelReady": partial(self._call_about_model, self._ready),
            "ModelMetadata": partial(self._call_about_model, self._describe),
            "ModelConfig": partial(self._call_about_model, self._describe),
            "ModelStatistics": partial(self._call_about_model, self._statistics),
        }
        for method, item in _PASSED_THROUGH.items():
            unary[method] = (
                self._forward if item in self._passthrough else partial(_refuse_passthrough, item)
            )
        if "trace" in self._passthrough:
            unary["TraceSetting"] = self._trace
        if self._repository is not None:
            unary["RepositoryIndex"] = self._repository.index
            unary[LOAD] = self._repository.load
            unary["RepositoryModelUnload"] = self._repository.unload
        return calls.service(SERVICE, unary, {"ModelStreamInfer": self._streams.serve})

    # -- the server -------------------------------------------------------------------------

    async def _server_live(self, _: GrpcCall) -> bytes:
        """Answer ServerLive with whether the adapter is live."""
        return _serialize(pb.ServerLiveResponse(live=self._is_live()))

    async def _server_ready(self, _: GrpcCall) -> bytes:
        """Answer ServerReady with whether the adapter is ready."""
        return _serialize(pb.ServerReadyResponse(ready=self._is_ready()))

    async def _server_metadata(self, call: GrpcCall) -> bytes:
        """Answer ServerMetadata as Triton does, without the extensions that are not open at this
        listener.
        """
        answer = pb.ServerMetadataResponse.FromString(await self._forward(call))
        answer.extensions[:] = self._extensions.served(answer.extensions)
        return _serialize(answer)

    async def _trace(self, call: GrpcCall) -> bytes:
        """Forward TraceSetting of one model, or of all when it names none."""
        if not read_field(call.message, _TRACED_MODEL):
            return await self._forward(call)
        lease = self._models.lease(id_in(call.message, (), _TRACED_MODEL))
        return await self._forward_about(call, lease, _TRACED_MODEL)

    # -- one model --------------------------------------------------------------------------

    async def _call_about_model(self, act: Unary, call: GrpcCall) -> bytes:
        """Run a call about one model. Answer ModelMesh NOT_FOUND where Triton's process, and its
        models with it, are gone: it loads the model again, and that load waits for Triton. Of
        UNAVAILABLE it makes INTERNAL.
        """
        model_id = self._read_mesh_id(call)
        if model_id is None:
            return await act(call)
        self._triton.refuse_lost(model_id)
        try:
            return await act(call)
        except BackendUnavailable as error:
            if await self._triton.was_caused_by_exit(error):
                raise self._triton.explain_lost(model_id) from error
            raise

    async def _lease(self, call: GrpcCall) -> Lease:
        """Wait for a lease of the model that the message is about. What a mesh asks for is loaded
        by the mesh alone.
        """
        if (model_id := self._read_mesh_id(call)) is not None:
            return await self._models.wait_for_lease(model_id, self._load_wait_seconds)
        return await self._lease_by_id(id_in(call.message, call.metadata))

    def _read_mesh_id(self, call: GrpcCall) -> ModelId | None:
        """Return the model that a mesh asks for in metadata; None if no mesh does. Where calls load
        models, metadata with the name that the message has is for a proxy, which routes by it, and
        no mesh's.
        """
        model_id = id_of_mesh(call.metadata)
        if model_id is None or not self._loads_on_demand:
            return model_id
        return None if read_field(call.message, _NAME) == model_id.encode() else model_id

    async def _lease_by_id(self, model_id: ModelId) -> Lease:
        """Wait for a lease of a model, which is loaded for that if the listener loads on demand."""
        return await self._wait_for_lease(model_id, self._load_wait_seconds)

    def _lease_of_ensemble(self, call: GrpcCall) -> Lease | None:
        """Return a lease of the ensemble if the call is about one of its steps, which the config of
        the ensemble names as Triton does; None otherwise.
        """
        step = id_in(call.message, call.metadata)
        ensemble = find_ensemble(self._models.registry, step)
        return None if ensemble is None else self._models.lease(ensemble.id)

    async def _infer(self, call: GrpcCall) -> bytes:
        """Answer an inference that was not relayed directly: forward it under Triton's name of the
        model.
        """
        lease = await self._lease(call)
        with lease as record:
            message = named_for_triton(call.message, record)
            check_parameters(message, record, shares_memory=self._shares_memory)
            answer = await self._forward_judged(call, lease, message)
            if len(answer) < SHORT_BYTES and has_no_outputs(answer):
                lease.note_missing_outputs()
            self._hold_answer(call, len(answer))
            return named_for_caller(answer, record, _NAME_IN_ANSWER[call.method])

    def _hold_answer(self, call: GrpcCall, size: int) -> None:
        """Count a large answer in the budget until its client has taken it: gRPC has all of it in
        memory. Raises TooManyWaiting without room for it.
        """
        if size > STREAM_BYTES:
            held = ExitStack()
            held.enter_context(self._budget.hold_answer(size))
            release: Any = partial(_release, held)  # grpc's stubs have a class for it
            call.context.add_done_callback(release)

    async def _describe(self, call: GrpcCall) -> bytes:
        """Return what Triton says of a model, or of a step of an ensemble."""
        if (lease := self._lease_of_ensemble(call)) is not None:
            return await self._forward_about(call, lease, None)
        lease = await self._lease(call)
        lease.is_inference = False
        with lease as record:
            message = named_for_triton(call.message, record)
            answer = await self._forward_judged(call, lease, message)
            return named_for_caller(answer, record, _NAME_IN_ANSWER[call.method])

    async def _ready(self, call: GrpcCall) -> bytes:
        """Return false for a model that is not loaded, as Triton does; NOT_FOUND to ModelMesh."""
        if (lease := self._lease_of_ensemble(call)) is not None:
            return await self._forward_about(call, lease, None)
        try:
            lease = self._models.lease(id_in(call.message, call.metadata))
        except (ModelNotFound, ModelNotReady) as error:
            if isinstance(error, ModelNotFound) and self._read_mesh_id(call):
                raise
            return _serialize(pb.ModelReadyResponse(ready=False))
        return await self._forward_about(call, lease)

    async def _statistics(self, call: GrpcCall) -> bytes:
        """Return the statistics of one model, or of all in Triton when it names none."""
        if not read_field(call.message, _NAME) and not id_of_mesh(call.metadata):
            return _with_callers_names(await self._forward(call), self._models.registry.records())
        if (lease := self._lease_of_ensemble(call)) is not None:
            return await self._forward_about(call, lease, None)
        lease = await self._lease(call)
        return _with_callers_names(await self._forward_about(call, lease), [lease.record])

    async def _forward_about(self, call: GrpcCall, lease: Lease, name: int | None = _NAME) -> bytes:
        """Forward a call that is no inference while its model is leased. `name` is the field with
        the model's name; None where that is Triton's already.
        """
        lease.is_inference = False
        with lease as record:
            message = call.message if name is None else named_for_triton(call.message, record, name)
            return await self._forward(call, message, lease)

    async def _forward_judged(self, call: GrpcCall, lease: Lease, message: bytes) -> bytes:
        """Forward a call with its lease. Raise the error that the lease finds behind Triton's, such
        as the end of its process.
        """
        try:
            return await self._forward(call, message, lease)
        except (BackendError, CapacityError) as error:
            raise await lease.judge(error) from error

    async def _forward(
        self, call: GrpcCall, message: bytes | None = None, lease: Lease | None = None
    ) -> bytes:
        """Return Triton's answer to the call's message, or to `message` in its place."""
        seconds = call.context.time_remaining()
        answer = await self._dataplane.call(
            RpcCall(call.method, forwarded(call.metadata), seconds),
            call.message if message is None else message,
            lease,
        )
        if initial := forwarded(answer.initial_metadata):
            await call.context.send_initial_metadata(initial)
        if trailing := forwarded(answer.trailing_metadata):
            call.context.set_trailing_metadata(trailing)
        return answer.message


def _release(held: ExitStack, _: object) -> None:
    """Stop counting an answer, as its call has ended."""
    held.close()


async def _refuse_passthrough(item: str, call: GrpcCall) -> bytes:
    """Raise NotPassedThrough for a method whose group the setting passthrough lacks."""
    text = f"{call.method} is not forwarded to Triton: the setting passthrough lacks {item!r}"
    raise NotPassedThrough(f"{text}; see docs/v2.md#calls-about-the-whole-server")


def _with_callers_names(answer: bytes, records: Collection[ModelRecord]) -> bytes:
    """Put clients' names into the statistics; other models keep theirs."""
    names = {str(r.name): r.asked_for for r in records if r.is_renamed}
    if not names:
        return answer
    statistics = pb.ModelStatisticsResponse.FromString(answer)
    for model in statistics.model_stats:
        model.name = names.get(model.name, model.name)
    return _serialize(statistics)


class GrpcRepository:
    """Answers the calls of Triton's model repository extension (frontends/repository.py)."""

    def __init__(
        self,
        repository: Repository,
        budget: ByteBudget,  # bounds the messages of loads, which may bring files
    ) -> None:
        self._repository = repository
        self._budget = budget

    async def index(self, call: GrpcCall) -> bytes:
        """Answer RepositoryIndex."""
        request = _parse(pb.RepositoryIndexRequest, call)
        entries = await self._repository.index(
            only_ready=request.ready, repository=request.repository_name
        )
        models = [pb.RepositoryIndexResponse.ModelIndex(**asdict(entry)) for entry in entries]
        return _serialize(pb.RepositoryIndexResponse(models=models))

    async def load(self, call: GrpcCall) -> bytes:
        """Answer RepositoryModelLoad."""
        with HeldBody(self._budget, None) as held:
            await held.take(len(call.message))
            held.arrived()
            request = _parse(pb.RepositoryModelLoadRequest, call)
            _refuse_repository(request)
            model_id = parse_model_id(request.model_name)
            await self._repository.load(model_id, _read_parameters(request), **call.read_ids())
        return _serialize(pb.RepositoryModelLoadResponse())

    async def unload(self, call: GrpcCall) -> bytes:
        """Answer RepositoryModelUnload."""
        request = _parse(pb.RepositoryModelUnloadRequest, call)
        _refuse_repository(request)
        model_id = parse_model_id(request.model_name)
        await self._repository.unload(model_id, _read_parameters(request), **call.read_ids())
        return _serialize(pb.RepositoryModelUnloadResponse())


def _serialize(message: Any) -> bytes:
    """Return a message of protobuf as bytes; tritonclient has no types."""
    return bytes(message.SerializeToString())


def _parse(kind: Any, call: GrpcCall) -> Any:
    """Parse a request about the model repository; raise InvalidRequest if it is malformed."""
    try:
        return kind.FromString(call.message)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no {kind.DESCRIPTOR.name}") from error


def _refuse_repository(request: Any) -> None:
    """Refuse a load or an unload that names a repository, as Triton does."""
    if request.repository_name:
        raise InvalidRequest("repository_name is not supported: there is one repository")


def _read_parameters(request: Any) -> Mapping[str, Any]:
    """Return the parameters of a request by their names; None stands for one without a value.
    Raises PayloadTooLarge for too many.
    """
    if len(request.parameters) > _MAX_PARAMETERS:
        raise PayloadTooLarge(
            f"{len(request.parameters)} parameters; at most {_MAX_PARAMETERS} are accepted"
        )
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None)
        for name, value in request.parameters.items()
    }
