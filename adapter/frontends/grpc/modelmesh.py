"""Serves ModelMesh's runtime contract, mmesh.ModelRuntime; see docs/modelmesh.md."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from adapter._proto import model_runtime_pb2 as pb
from adapter.control.door import (
    BEING_LOADED,
    ModelRecord,
    Models,
    ModelState,
    RoomMaker,
    TritonState,
)
from adapter.core.model import (
    ModelId,
    ModelSource,
    TritonName,
    parse_model_id,
    strip_last_slash,
)
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    BackendUnavailable,
    InvalidRequest,
    ModelNotFound,
)
from adapter.frontends.grpc.calls import GrpcCall, GrpcCalls
from adapter.frontends.grpc.mesh_sizes import MeshSizes, ModelKey, parse_key
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")

SERVICE = "mmesh.ModelRuntime"

_Act: TypeAlias = Callable[..., Awaitable[Any]]
_OPERATIONS = (pb.LoadModelRequest, pb.UnloadModelRequest)

# ModelMesh asks every 2 s; it gets the result of a longer purge the next time.
_PURGE_SECONDS = 1.0
_VERSION = "v1"  # until Triton reports its own
_PRESENT = BEING_LOADED | {ModelState.READY}
_RETRY_SECONDS = 0.25
# Calls that name a model, in field 1. ModelMesh refuses all others, and cannot proxy streams.
_METHODS = ("ModelReady", "ModelMetadata", "ModelInfer", "ModelConfig", "ModelStatistics")


class Triton(Protocol):
    """Tells ModelMesh about Triton."""

    @property
    def version(self) -> str:
        """Return what Triton reports; "" if nothing."""

    async def instances(self, name: TritonName) -> int:
        """Return how many instances a model has."""


@dataclass(frozen=True, slots=True)
class Options:
    """Holds the limits that ModelMesh is told, and goes by."""

    load_seconds: float
    unload_seconds: float
    load_concurrency: int
    # requests of one model at a time; 0 for no limit, a text for as many as it has instances
    model_concurrency: int | str


class ModelRuntime:
    """Loads, unloads and sizes models for ModelMesh."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        server: Triton,
        sizes: MeshSizes,
        *,
        options: Options,
        metrics: Metrics,
        is_ready: Callable[[], bool],
    ) -> None:
        self._models = models
        self._registry = models.registry
        self._triton = triton
        self._server = server
        self._sizes = sizes
        self._options = options
        self._metrics = metrics
        self._is_ready = is_ready
        self._load_slots = asyncio.Semaphore(options.load_concurrency)
        # one at a time: a load that crashed Triton must not fail the other repeated loads again
        self._broken_off = asyncio.Lock()
        self._loads: set[asyncio.Task[ModelRecord]] = set()
        self._waiting: dict[ModelId, set[asyncio.Task[None]]] = defaultdict(set)  # to begin a load
        self._purging: asyncio.Task[None] | None = None

    # -- loading ----------------------------------------------------------------------------

    async def load(self, request: pb.LoadModelRequest, **log_fields: str) -> pb.LoadModelResponse:
        """Load the model unless the same files are loaded already: after NOT_FOUND ModelMesh loads
        again, at times without an unload.
        """
        model_id = parse_model_id(request.modelId)
        key = parse_key(request.modelKey)
        source = _read_source(request, key)
        seconds = self._options.load_seconds
        size = self._sizes.begin_load(model_id, source.url, key)
        try:
            record = await self._with_triton(
                lambda: self._ensure_loaded(model_id, source, size, log_fields),
                seconds,
                self._broken_off,
            )
        except BaseException:
            self._sizes.drop(model_id)
            raise
        limit = self._options.model_concurrency
        if isinstance(limit, str):
            limit = await self._server.instances(record.name)
        size = self._sizes.after_load(model_id)
        return pb.LoadModelResponse(sizeInBytes=size, maxConcurrency=limit)

    async def _ensure_loaded(
        self, model_id: ModelId, source: ModelSource, size: int, log_fields: Mapping[str, str]
    ) -> ModelRecord:
        """Return the record of the loaded model. Wait for a load of the same files that is in
        progress; replace a model that was loaded from other files.
        """
        while True:
            known = self._registry.get(model_id)
            if known is not None and known.state in _PRESENT:
                if strip_last_slash(known.source.url) == strip_last_slash(source.url):
                    return await self._models.wait_for_load(model_id)
                await self._unload(model_id, **log_fields)
            try:
                return await self._load_in_slot(model_id, source, size, log_fields)
            except AlreadyLoaded:  # by another frontend, meanwhile, or Triton has lost it
                with suppress(AdapterError):
                    await self._models.wait_for_load(model_id)
                    continue
                await asyncio.sleep(_RETRY_SECONDS)

    async def _load_in_slot(
        self, model_id: ModelId, source: ModelSource, size: int, log_fields: Mapping[str, str]
    ) -> ModelRecord:
        """Load the model once ModelMesh has made room and a slot is free; return its record. The
        slot is released when the load ends, also if the caller has disconnected before.
        """
        await self._wait_to_begin(model_id, size)
        log_fields = {"frontend": "modelmesh", **log_fields}
        work = self._models.load(model_id, source, RoomMaker.MESH, **log_fields)
        task = asyncio.create_task(work)
        self._loads.add(task)
        task.add_done_callback(self._release_load_slot)
        return await asyncio.shield(task)

    async def _wait_to_begin(self, model_id: ModelId, size: int) -> None:
        """Wait for room that ModelMesh is making, and then for a slot. An unload of the model ends
        the wait.
        """
        wait = asyncio.create_task(self._wait_for_slot(model_id, size))
        self._waiting[model_id].add(wait)
        try:
            await asyncio.shield(wait)
        except asyncio.CancelledError:
            if wait.cancelled():  # by an unload
                text = f"model {model_id!r} was unloaded while its load waited to begin"
                raise ModelNotFound(text, model_id=model_id) from None
            wait.cancel()  # the caller has left
            if wait.done():
                self._load_slots.release()
            raise
        finally:
            self._waiting[model_id].discard(wait)
            if not self._waiting[model_id]:
                del self._waiting[model_id]

    async def _wait_for_slot(self, model_id: ModelId, size: int) -> None:
        """Wait for evictions of ModelMesh, for a while, and then for a slot, which is held on
        return. `size` is counted for the load in between; a lack of room is no error here.
        """
        with self._metrics.waiting_load("memory"):
            await self._sizes.wait_for_evictions(self._options.load_seconds / 2)
        # counted before the slot: the next load waits for what ModelMesh evicts for this size
        self._sizes.count(model_id, size)
        with self._metrics.waiting_load("turn"):
            await self._load_slots.acquire()

    def _release_load_slot(self, task: asyncio.Task[ModelRecord]) -> None:
        """Release the slot of a load whose task has ended, and read its error, which asyncio would
        log if nobody did: the caller of the load may have left.
        """
        self._load_slots.release()
        self._loads.remove(task)
        if not task.cancelled():
            task.exception()

    async def _with_triton(
        self,
        act: Callable[[], Awaitable[T]],
        seconds: float,
        again: AbstractAsyncContextManager[object],
    ) -> T:
        """Run `act` when the adapter is open and Triton is up, waiting at most `seconds`: ModelMesh
        takes a failed load for the model's own fault, and remembers it for minutes. When the end
        of Triton interrupts `act`, it is repeated once, within `again`: it may be what ended
        Triton.
        """
        deadline = clock.monotonic() + seconds
        was_broken_off = False
        while True:
            try:
                async with again if was_broken_off else nullcontext():
                    await self._triton.wait_until_up(deadline)
                    return await act()
            except BackendUnavailable as error:
                is_over = not self._triton.is_open or clock.monotonic() > deadline
                if is_over or (error.delivered and was_broken_off):
                    raise
                if error.delivered:
                    was_broken_off = True
                    log.info("modelmesh.broken_off", extra={"reason": str(error)})

    # -- unloading --------------------------------------------------------------------------

    async def unload(
        self, request: pb.UnloadModelRequest, **log_fields: str
    ) -> pb.UnloadModelResponse:
        """Unload a model, also one whose id no load accepts: ModelMesh repeats failed unloads for
        15 minutes.
        """
        model_id = ModelId(request.modelId)
        seconds = self._options.unload_seconds
        for wait in self._waiting.get(model_id, ()):
            wait.cancel()
        is_known = self._registry.get(model_id) is not None
        if self._triton.is_open and not is_known:  # nothing that Triton would have to do
            await self._unload(model_id, **log_fields)
        else:
            act = partial(self._unload, model_id, **log_fields)
            await self._with_triton(act, seconds, nullcontext())
        self._sizes.drop(model_id)
        return pb.UnloadModelResponse()

    async def _unload(self, model_id: ModelId, **log_fields: str) -> None:
        """Unload a model; succeed if it is not loaded."""
        # "If the specified model is not found/loaded, ... return immediately (without error)"
        with suppress(ModelNotFound):
            await self._models.unload(model_id, frontend="modelmesh", **log_fields)

    # -- sizes ------------------------------------------------------------------------------

    async def predict_size(
        self, request: pb.PredictModelSizeRequest
    ) -> pb.PredictModelSizeResponse:
        """Return the size of a model before its load."""
        size = self._sizes.predict(ModelId(request.modelId), request.modelPath)
        return pb.PredictModelSizeResponse(sizeInBytes=size)

    async def size(self, request: pb.ModelSizeRequest) -> pb.ModelSizeResponse:
        """Return the size of a loaded model."""
        size = await self._sizes.measure_loaded(ModelId(request.modelId))
        return pb.ModelSizeResponse(sizeInBytes=size)

    # -- the start of ModelMesh -------------------------------------------------------------

    async def status(self, _: pb.RuntimeStatusRequest) -> pb.RuntimeStatusResponse:
        """Return READY, with what ModelMesh has to know, once nothing is loaded."""
        self._triton.note_mesh()
        starting = pb.RuntimeStatusResponse(status=pb.RuntimeStatusResponse.STARTING)
        if not self._is_ready() or not await self._has_purged():
            return starting
        options = self._options
        return pb.RuntimeStatusResponse(
            status=pb.RuntimeStatusResponse.READY,
            capacityInBytes=self._sizes.report_capacity(),
            maxLoadingConcurrency=options.load_concurrency,
            modelLoadingTimeoutMs=int(options.load_seconds * 1000),
            defaultModelSizeInBytes=self._sizes.default_bytes,
            runtimeVersion=self._server.version or _VERSION,
            methodInfos={
                f"inference.GRPCInferenceService/{method}": pb.RuntimeStatusResponse.MethodInfo(
                    idInjectionPath=[1]
                )
                for method in _METHODS
            },
            limitModelConcurrency=options.model_concurrency != 0,
        )

    async def _has_purged(self) -> bool:
        """Start to unload all models, or go on with it, and return whether nothing is loaded: at
        its start ModelMesh counts all memory as free.
        """
        task = self._purging = self._purging or asyncio.create_task(self._purge())
        await asyncio.wait({task}, timeout=_PURGE_SECONDS)
        if not task.done():
            return False
        if self._purging is task:
            self._purging = None
        if (error := task.exception()) is not None:
            log.warning("modelmesh.purge_failed", extra={"reason": str(error)})
        return error is None

    async def _purge(self) -> None:
        """End all loads, and unload every model, also those loaded past the adapter."""
        while True:
            for wait in [wait for waits in self._waiting.values() for wait in waits]:
                wait.cancel()
            await asyncio.sleep(0)  # for loads whose wait has just ended
            await self._models.unload_all(frontend="modelmesh")
            if not self._waiting and not self._loads:
                return

    # -- the service ------------------------------------------------------------------------

    def service(self, calls: GrpcCalls) -> grpc.GenericRpcHandler:
        """Return what answers the methods."""
        acts: dict[str, tuple[_Act, Any]] = {
            "loadModel": (self.load, pb.LoadModelRequest),
            "unloadModel": (self.unload, pb.UnloadModelRequest),
            "predictModelSize": (self.predict_size, pb.PredictModelSizeRequest),
            "modelSize": (self.size, pb.ModelSizeRequest),
            "runtimeStatus": (self.status, pb.RuntimeStatusRequest),
        }
        unary = {method: partial(_parse_and_answer, *act) for method, act in acts.items()}
        return calls.service(SERVICE, unary)


async def _parse_and_answer(act: _Act, kind: Any, call: GrpcCall) -> bytes:
    """Parse the request of a method, run the method, and serialize its response."""
    try:
        request = kind.FromString(call.message)
    except DecodeError as error:
        raise InvalidRequest(f"this is no {kind.DESCRIPTOR.name}: {error}") from error
    log_fields = call.read_ids() if kind in _OPERATIONS else {}
    return bytes((await act(request, **log_fields)).SerializeToString())


def _read_source(request: pb.LoadModelRequest, key: ModelKey) -> ModelSource:
    """Return where a LoadModel request says that the model is, and its type. Raises InvalidRequest
    for an empty path and a schema path that is no string.
    """
    if not request.modelPath:
        raise InvalidRequest("modelPath is empty")
    schema = key.schema_path or None
    if not isinstance(schema, str | None):
        raise InvalidRequest("schema_path of modelKey must be a string")
    return ModelSource(request.modelPath, key.model_type or request.modelType or None, schema)
