"""Calls of Triton's gRPC port: bytes in, Triton, bytes out, on one channel."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, TypeAlias

import grpc

from adapter.core.faults import Faults
from adapter.core.model import ModelId, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.rpc import RpcAnswer, RpcCall, RpcMetadata
from adapter.core.waiting import add_waited
from adapter.errors import AdapterError, BackendUnavailable, InferenceFailed

SERVICE = "/inference.GRPCInferenceService"

_CHANNEL = (
    # A longer failure text would arrive as RESOURCE_EXHAUSTED, its words lost (memory.md 0.2).
    ("grpc.max_metadata_size", 4 * 2**20),
    ("grpc.absolute_max_metadata_size", 4 * 2**20),
    # the door has its own limit, and a name put in may lengthen a message
    ("grpc.max_send_message_length", -1),
    # Notice a restarted Triton within a second, not after grpc's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# grpcio's, where a stream had ended when a message was written: why it ended, nobody learns then.
_ENDED_EARLIER = (grpc.StatusCode.INTERNAL, "Internal error from Core")

_UnaryMethod: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_StreamMethod: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class GrpcDataPlane:
    """`max_message_bytes` bounds Triton's answers. `timeout_seconds` bounds each call but streams;
    the caller's deadline bounds those as well.
    """

    def __init__(self, faults: Faults, *, timeout_seconds: float, max_message_bytes: int) -> None:
        self._faults = faults
        self._timeout = timeout_seconds
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, _UnaryMethod] = {}

    def connect(self, address: str) -> None:
        """`host:port` or `unix:/path`. Opens nothing yet: grpc connects at the first call."""
        limit = ("grpc.max_receive_message_length", self._max_message_bytes)
        self._channel = grpc.aio.insecure_channel(address, options=(*_CHANNEL, limit))

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        self._methods.clear()
        if channel is not None:
            await channel.close()

    async def call(self, call: RpcCall, message: bytes, record: ModelRecord | None) -> RpcAnswer:
        """A caller who goes away cancels this, and that cancels the call at Triton."""
        seconds = self._timeout if call.seconds is None else min(call.seconds, self._timeout)
        begun = monotonic()
        rpc = self._method(call.method)(message, timeout=seconds, metadata=_sent(call.metadata))
        try:
            answer = await rpc
            return RpcAnswer(
                answer, _seen(await rpc.initial_metadata()), _seen(await rpc.trailing_metadata())
            )
        except grpc.aio.AioRpcError as error:
            raise self._fault(error, record) from error
        finally:
            add_waited(monotonic() - begun)

    @asynccontextmanager
    async def stream(
        self, call: RpcCall, about: Callable[[], ModelRecord | None]
    ) -> AsyncIterator["GrpcStream"]:
        method: _StreamMethod = self._open().stream_stream(f"{SERVICE}/{call.method}")
        opened = method(timeout=call.seconds, metadata=_sent(call.metadata))
        try:
            yield GrpcStream(opened, lambda error: self._fault(error, about()))
        finally:
            opened.cancel()

    def _method(self, name: str) -> _UnaryMethod:
        if (method := self._methods.get(name)) is None:
            method = self._methods[name] = self._open().unary_unary(f"{SERVICE}/{name}")
        return method

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise BackendUnavailable("Triton is not up yet", delivered=False)
        return self._channel

    def _fault(self, error: grpc.aio.AioRpcError, record: ModelRecord | None) -> AdapterError:
        text, model_id = error.details() or "", record.id if record else ModelId("")
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # grpcio's own word on what it got: Triton takes all that we send, and never says so
            return InferenceFailed(f"Triton's answer is too large: {text}", model_id=model_id)
        if (error.code(), text) == _ENDED_EARLIER:
            # Triton ends no stream while its caller still writes, unless it goes itself
            why = f"the connection to Triton broke: {text}"
            return BackendUnavailable(why, model_id=model_id, delivered=True)
        name = record.name if record else TritonName("")
        return self._faults.of_grpc_inference(error.code().name, text, name=name, model_id=model_id)


class GrpcStream:
    def __init__(
        self, call: _StreamCall, fault: Callable[[grpc.aio.AioRpcError], AdapterError]
    ) -> None:
        self._call = call
        self._fault = fault

    async def write(self, message: bytes) -> None:
        """When the stream has ended, `messages` says why."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    async def done_writing(self) -> None:
        with suppress(grpc.aio.InternalError):  # it has ended meanwhile
            await self._call.done_writing()

    async def messages(self) -> AsyncIterator[bytes]:
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._fault(error) from error


def _sent(metadata: RpcMetadata) -> Any:
    return tuple(metadata)


def _seen(metadata: Any) -> RpcMetadata:
    return tuple((key, value) for key, value in metadata or ())
