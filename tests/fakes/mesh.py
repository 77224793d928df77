"""Plays the mesh: what ModelMesh's Java side does with a runtime, one instance of it.

As docs/modelmesh.md has it: it polls, predicts with 500 ms, loads without a deadline but
with a timer that cancels, unloads after a pause, rewrites headers, puts the id into the request,
and has one connection for each address. Its pauses are shorter here. recorded/ has what the real
one was seen to send.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as pb

POLL_SECONDS = 0.2  # 2 s
PREDICT_SECONDS = 0.5
SIZE_SECONDS = 30
UNLOAD_PAUSE_SECONDS = 0.2
START_SECONDS = 60  # 180 s
UNIT = 8192
TRIES = 8
STRIPPED = ("mm-", "grpc-")
STRIPPED_ALONE = ("content-type", "user-agent")
MAX_MESSAGE = 16 * 2**20

Metadata = list[tuple[str, str | bytes]]


def identity(raw: bytes) -> bytes:
    return raw


def with_id(method: str, message: bytes, path: list[int], model_id: str) -> bytes:
    """Put the id into the field of the request. Paths have one number."""
    [number] = path
    request = getattr(v2, f"{method.rpartition('/')[2]}Request").FromString(message)
    setattr(request, request.DESCRIPTOR.fields_by_number[number].name, model_id)
    return bytes(request.SerializeToString())


def is_connection_lost(error: BaseException) -> bool:
    """Return whether a call has failed by its connection, and not by an answer of the runtime."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    is_answer = "BackendUnavailable" in (error.details() or "")
    return error.code() is grpc.StatusCode.UNAVAILABLE and not is_answer


class RefusesToStart(Exception):
    pass


class Unimplemented(Exception):
    """The mesh's own answer to a method that the runtime did not name."""


@dataclass
class Loaded:
    path: str
    key: str
    size: int
    predicted: int


@dataclass
class Mesh:
    """`models` is what it believes to be loaded here."""

    management: str
    data: str
    models: dict[str, Loaded] = field(default_factory=dict)
    polls: int = 0
    predict_seconds: float = PREDICT_SECONDS
    _returning: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _failed: dict[str, Exception] = field(default_factory=dict)
    _loses: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        limits = [(f"grpc.max_{way}_message_length", MAX_MESSAGE) for way in ("send", "receive")]
        self._channels = {
            address: grpc.aio.insecure_channel(address, options=limits)
            for address in {self.management, self.data}
        }

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def connected(self) -> None:
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels.values()))

    # -- management -------------------------------------------------------------------------

    def manage(self, method: str, request: Any, timeout: float | None = None) -> Any:
        answer = getattr(pb, type(request).__name__.replace("Request", "Response"))
        return self._channels[self.management].unary_unary(
            f"/mmesh.ModelRuntime/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )(request, timeout=timeout)

    async def start(self) -> pb.RuntimeStatusResponse:
        """Poll until the runtime is ready, then look at what it tells."""
        end = asyncio.get_running_loop().time() + START_SECONDS
        while True:
            self.polls += 1
            left = end - asyncio.get_running_loop().time()
            try:
                status: pb.RuntimeStatusResponse = await self.manage(
                    "runtimeStatus", pb.RuntimeStatusRequest(), left
                )
                if status.status == pb.RuntimeStatusResponse.READY:
                    break
                if status.status != pb.RuntimeStatusResponse.STARTING:
                    raise RefusesToStart(status)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED or left < POLL_SECONDS:
                    raise RefusesToStart(error.details()) from error
            await asyncio.sleep(POLL_SECONDS)
        default = status.defaultModelSizeInBytes
        if (
            status.maxLoadingConcurrency < 1
            or status.modelLoadingTimeoutMs < 100
            or default < 1
            or status.capacityInBytes < max(2 * default, min(512 * 2**20, 10 * default))
            or status.capacityInBytes // UNIT >= 2**31
        ):
            raise RefusesToStart(status)
        self.status = status
        self._loaders = asyncio.Semaphore(status.maxLoadingConcurrency)
        return status

    async def predict(self, model_id: str, path: str, key: str = "") -> int:
        request = pb.PredictModelSizeRequest(modelId=model_id, modelPath=path, modelKey=key)
        try:
            answer = await self.manage("predictModelSize", request, self.predict_seconds)
        except grpc.aio.AioRpcError:
            return int(self.status.defaultModelSizeInBytes)
        return int(answer.sizeInBytes)

    async def load(
        self, model_id: str, path: str, key: str = "", *, seconds: float | None = None
    ) -> Loaded:
        """`seconds` in the place of the timeout that the runtime told. What failed once is not
        asked for again: a mesh remembers that for minutes.
        """
        if model_id in self._failed:
            raise self._failed[model_id]
        async with self._loaders:
            predicted = await self.predict(model_id, path, key)
            request = pb.LoadModelRequest(modelId=model_id, modelPath=path, modelKey=key)
            call = self.manage("loadModel", request)
            limit = self.status.modelLoadingTimeoutMs / 1000 if seconds is None else seconds
            try:
                async with asyncio.timeout(limit):
                    answer = await call
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if is_connection_lost(error):
                    raise  # nobody has refused the model
                self._failed[model_id] = error
                call.cancel()
                await asyncio.sleep(UNLOAD_PAUSE_SECONDS)
                await self.send_unload(model_id)
                raise
        size = answer.sizeInBytes
        if size == 0:
            asked = pb.ModelSizeRequest(modelId=model_id)
            size = (await self.manage("modelSize", asked, SIZE_SECONDS)).sizeInBytes or predicted
        found = Loaded(path, key, size, predicted)
        self.models[model_id] = found
        return found

    async def evict(self, model_id: str) -> None:
        self.models.pop(model_id)
        await asyncio.sleep(UNLOAD_PAUSE_SECONDS)
        await self.send_unload(model_id)

    async def send_unload(self, model_id: str) -> None:
        await self.manage("unloadModel", pb.UnloadModelRequest(modelId=model_id))

    # -- inference --------------------------------------------------------------------------

    async def infer(
        self,
        method: str,
        model_id: str,
        message: bytes,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = 30,
    ) -> bytes:
        """A client's call for this model, as it reaches the client again. What is UNAVAILABLE is
        tried again at once; a model that is on its way back is waited for before each try.
        """
        for tries_left in reversed(range(TRIES)):
            if (returning := self._returning.get(model_id)) is not None:
                await returning
            believed = self.models.get(model_id)
            try:
                return await self._forward(method, model_id, message, headers or {}, seconds)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and tries_left:
                    continue
                if error.code() is not grpc.StatusCode.NOT_FOUND or believed is None:
                    raise
            await self._load_again(model_id, believed)
        return await self._forward(method, model_id, message, headers or {}, seconds)

    async def _load_again(self, model_id: str, gone: Loaded) -> None:
        """Once for all whose requests found that it is gone."""
        if self.models.get(model_id) is gone:
            del self.models[model_id]
            self._returning[model_id] = asyncio.create_task(self._bring_back(model_id, gone))
            async with self._loses:
                self._loses.notify_all()
        await self._returning[model_id]

    async def wait_until_lost(self, model_id: str) -> None:
        """Wait until a call has found that the model is gone, so that it is loaded again."""
        async with self._loses:
            await self._loses.wait_for(lambda: model_id in self._returning)

    async def _bring_back(self, model_id: str, gone: Loaded) -> None:
        """Load the model again, also after the runtime has died amid the load."""
        if self.management != self.data:
            await self.send_unload(model_id)
        while True:
            try:
                await self.load(model_id, gone.path, gone.key)
            except grpc.aio.AioRpcError as error:
                if not is_connection_lost(error):
                    raise
                await asyncio.sleep(POLL_SECONDS)
                await self.connected()
            else:
                return

    async def _forward(
        self,
        method: str,
        model_id: str,
        message: bytes,
        headers: Mapping[str, str],
        seconds: float | None,
    ) -> bytes:
        infos = self.status.methodInfos
        if infos and not self.status.allowAnyMethod and method not in infos:
            raise Unimplemented(method)
        metadata: Metadata = [
            (name, value)
            for name, value in headers.items()
            if not name.startswith(STRIPPED) and name not in STRIPPED_ALONE
        ]
        metadata.append(("mm-model-id-bin", model_id.encode()))
        if model_id.isascii() and model_id.isprintable():
            metadata.append(("mm-model-id", model_id))
        if path := list(infos[method].idInjectionPath):
            message = with_id(method, message, path, model_id)
        call = self._channels[self.data].unary_unary(
            f"/{method}", request_serializer=identity, response_deserializer=identity
        )
        return await call(message, metadata=metadata, timeout=seconds)
