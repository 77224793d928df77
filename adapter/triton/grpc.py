"""Forwards calls to Triton over gRPC, as bytes, on one channel."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc
from tritonclient.grpc import service_pb2 as pb

from adapter.core.calls import (
    ChannelOptions,
    Hold,
    RpcAnswer,
    RpcCall,
    RpcMetadata,
    ServedModel,
    keepalive,
)
from adapter.core.model import ModelId
from adapter.core.triton_errors import Faults
from adapter.core.triton_input import HeaderTable
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable, InferenceFailed
from adapter.relay.protobuf import encoded_field
from adapter.runtime import clock
from adapter.runtime.unread import Answers, Unread
from adapter.telemetry.traffic import add_waited

SERVICE = "/inference.GRPCInferenceService"
_INFER = f"{SERVICE}/ModelInfer"

_EXTERNAL = HeaderTable("--grpc-header-forward-pattern", None)
_MAX_METADATA_BYTES = 4 * 2**20
_CHANNEL = (
    # A longer failure text would arrive as RESOURCE_EXHAUSTED, its words lost.
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    # the listener has a limit of its own, and replacing the name may lengthen a message
    ("grpc.max_send_message_length", -1),
    # reconnect to a restarted Triton within a second, not grpc's two minutes
    ("grpc.initial_reconnect_backoff_ms", 100),
    # the time of one attempt to connect, which a busy Triton may need
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# Triton closes an idle connection that is pinged too often ("Too many pings", seen on 2.51 with a
# ping each second); gRPC's documented default is every 300 s.
_KEEPALIVE = keepalive(seconds=310, answer_seconds=30)

# texts of grpcio for a message, or metadata, over a limit of the channel
_ANSWER_TOO_LARGE = re.compile(
    rf"(?<!SERVER: )Received message larger|metadata .*vs\. {_MAX_METADATA_BYTES}\b"
)

# grpcio's error for a write to a stream that has ended; the reason for the end is lost
_ENDED_EARLIER = (grpc.StatusCode.INTERNAL, "Internal error from Core")

# the field infer_response of ModelStreamInferResponse, and the parameter that marks the last one
_ANSWER = 2
_LAST = pb.InferParameter(bool_param=True)
_IS_LAST = pb.ModelInferResponse(parameters={"triton_final_response": _LAST}).SerializeToString()
# Calls of one stream that may wait for Triton at once: each takes the adapter some KiB.
MOST_UNANSWERED = 256
# A call keeps a message of at most this size until it is answered. A larger one is written like a
# stream: that takes twice the CPU, and keeps no message that Triton has.
_KEPT_BYTES = 2**16
# a parameter of requests whose order matters
_SEQUENCE = b"sequence_id"
_NOT_ACCEPTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}

T = TypeVar("T")
_UnaryMethod: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_StreamMethod: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
_LargeMethod: TypeAlias = "grpc.aio.StreamUnaryMultiCallable[bytes, bytes]"
_InferCall: TypeAlias = (
    "grpc.aio.UnaryUnaryCall[bytes, bytes] | grpc.aio.StreamUnaryCall[bytes, bytes]"
)
_Fault: TypeAlias = Callable[[grpc.aio.AioRpcError], AdapterError]


class GrpcDataPlane:
    """Forwards calls and streams to one Triton.

    A call waits for its answer until the time limit, or until the client's deadline where that is
    earlier; a stream has that deadline alone. Calls are cancelled only where `takes_cancels` says
    so, streams never: when the client leaves, their answers are read and dropped. Triton 2.51
    crashes on cancels, and keeps the answers that a model sends to a cancelled stream.
    """

    def __init__(
        self,
        faults: Faults,
        *,
        timeout_seconds: float,  # for the answer to a call
        max_message_bytes: int,  # of an answer
        unread: Unread,  # bounds the answers of streams that their clients have not read
        keepalive: ChannelOptions = _KEEPALIVE,
        takes_cancels: Callable[[], bool] = bool,
        metadata: HeaderTable = _EXTERNAL,  # decides which metadata Triton gets
    ) -> None:
        self._metadata = metadata
        self._faults = faults
        self._unread = unread
        self._takes_cancels = takes_cancels
        self._timeout = timeout_seconds
        self._max_message_bytes = max_message_bytes
        self._options = (*_CHANNEL, *keepalive)
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, _UnaryMethod] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    def connect(self, address: str) -> None:
        """Use `host:port` or `unix:/path`; grpc connects at the first call."""
        limit = ("grpc.max_receive_message_length", self._max_message_bytes)
        self._channel = grpc.aio.insecure_channel(address, options=(*self._options, limit))

    async def close(self) -> None:
        """Close the connection, and wait until its calls have ended."""
        channel, self._channel = self._channel, None
        self._methods.clear()
        if channel is not None:
            await channel.close()
        if self._calls:
            await asyncio.wait(self._calls)

    async def call(self, call: RpcCall, message: bytes, hold: Hold | None) -> RpcAnswer:
        """Return Triton's answer to a call. The hold is abandoned where nobody waits for the answer
        any more; it ends as the answer comes.
        """
        record = hold.record if hold else None
        seconds = self._timeout if call.seconds is None else min(call.seconds, self._timeout)
        started_at = clock.monotonic()
        rpc = self._method(call.method)(message, metadata=self._sent(call.metadata))
        answering = self._task(self._answer(rpc, record))
        has_left = True
        is_answered = False
        try:
            await asyncio.wait({answering}, timeout=seconds)
            has_left = False
            is_answered = answering.done()
        finally:
            add_waited(clock.monotonic() - started_at)
            if not is_answered:  # also where the caller left as the answer came
                self._abandon(answering, hold)
                if has_left and self._takes_cancels():
                    rpc.cancel()
        if is_answered:
            return answering.result()
        text = f"no answer from Triton within {seconds:g} s"
        if seconds < self._timeout:
            text = "the caller's deadline has passed"
        raise BackendTimeout(text, model_id=record.asked_for if record else None)

    async def _answer(
        self, rpc: "grpc.aio.UnaryUnaryCall[bytes, bytes]", record: ServedModel | None
    ) -> RpcAnswer:
        try:
            answer = await rpc
            return RpcAnswer(
                answer,
                _metadata(await rpc.initial_metadata()),
                _metadata(await rpc.trailing_metadata()),
            )
        except grpc.aio.AioRpcError as error:
            raise self._fault(record, error) from error

    def _task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task that is not cancelled with whoever waits for it."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    @staticmethod
    def _abandon(answering: "asyncio.Task[RpcAnswer]", hold: Hold | None) -> None:
        """Mark the hold as abandoned, and end it when Triton's answer comes, which is dropped."""

        def ended(answering: "asyncio.Task[RpcAnswer]") -> None:
            error = None if answering.cancelled() else answering.exception()
            if hold is not None:
                hold.end(error)

        if hold is not None:
            hold.abandon()
        answering.add_done_callback(ended)

    @asynccontextmanager
    async def stream(self, call: RpcCall, hold: Hold) -> AsyncIterator["GrpcStream"]:
        """Open a stream to Triton while the context lasts. Afterwards its answers are read and
        dropped until Triton ends it. The hold of a stream that breaks ends with the reason, which
        may be an exit of Triton.
        """
        record = hold.record
        metadata = self._sent(call.metadata)
        fault = partial(self._fault, record)
        answers = self._unread.stream(call.on_cut)
        if record is not None and not await self._is_decoupled(record):
            calls = _Inferences(self._open(), metadata, record, fault)
            stream = GrpcStream(calls, calls.write, answers, fault)
        else:
            method: _StreamMethod = self._open().stream_stream(f"{SERVICE}/{call.method}")
            opened = method(metadata=metadata)
            stream = GrpcStream(opened, lambda message, _: opened.write(message), answers, fault)
        reading = self._task(stream.read())
        try:
            yield stream
        finally:
            answers.drop()
            if not reading.done():
                hold.abandon()
                await stream.done_writing()
                reading.add_done_callback(lambda _: hold.end(stream.explain_failure()))
            elif (error := stream.explain_failure()) is not None:
                hold.end(error)

    async def _is_decoupled(self, record: ServedModel) -> bool:
        """Ask Triton, once for each load, whether a request may have any number of answers."""
        if record.is_decoupled is None:
            message = pb.ModelConfigRequest(name=record.name).SerializeToString()
            asking = self._task(self._answer(self._method("ModelConfig")(message), record))
            try:
                answer = await asyncio.shield(asking)
            except BackendUnavailable:
                raise
            except AdapterError:
                return False  # an inference will say why
            config = pb.ModelConfigResponse.FromString(answer.message).config
            record.is_decoupled = config.model_transaction_policy.decoupled
        return record.is_decoupled

    def _sent(self, metadata: RpcMetadata) -> Any:
        return tuple((key, value) for key, value in metadata if self._metadata.should_pass(key))

    def _method(self, name: str) -> _UnaryMethod:
        if (method := self._methods.get(name)) is None:
            method = self._methods[name] = self._open().unary_unary(f"{SERVICE}/{name}")
        return method

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise BackendUnavailable("Triton is not up yet", delivered=False)
        return self._channel

    def _fault(self, record: ServedModel | None, error: grpc.aio.AioRpcError) -> AdapterError:
        text = error.details() or ""
        model_id = record.asked_for if record else ModelId("")
        is_exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        if is_exhausted and _ANSWER_TOO_LARGE.search(text):
            return InferenceFailed(f"Triton's answer is too large: {text}", model_id=model_id)
        if (error.code(), text) == _ENDED_EARLIER:
            # Triton ends no stream that is written to, unless it stops itself
            reason = f"the connection to Triton broke: {text}"
            return BackendUnavailable(reason, model_id=model_id, delivered=True)
        code = error.code().name
        if record is None:
            return self._faults.explain_server_call(code, text)
        return self._faults.explain_grpc_inference(
            code, text, name=record.name, model_id=record.asked_for
        )


class GrpcStream:
    """One stream of a caller: `call` is grpc's own, or has the same methods. Its answers are read
    as they come. Writes are shielded: grpc cancels a call when a read or write of it is cancelled.
    """

    def __init__(
        self,
        call: "_StreamCall | _Inferences",
        write: Callable[[bytes, bytes], Coroutine[Any, Any, None]],
        answers: Answers,
        fault: _Fault,
    ) -> None:
        self._call = call
        self._write = write
        self._answers = answers
        self._fault = fault
        self._news = asyncio.Event()
        self._is_over = False
        self._failure: BaseException | None = None
        self._writing: asyncio.Task[None] | None = None

    async def write(self, message: bytes, request_id: bytes = b"") -> None:
        """Write a message, or nothing when the stream has ended; `messages` raises the reason."""
        await asyncio.shield(self._begin_write(self._write(message, request_id)))

    async def done_writing(self) -> None:
        """Half-close the stream after the current write, without waiting for it."""
        self._begin_write(self._call.done_writing())

    def _begin_write(self, act: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that writes after the writes before it; return the task."""
        self._writing = asyncio.create_task(_write_in_turn(self._writing, act))
        return self._writing

    async def read(self) -> None:
        """Read to the end, whether somebody takes the answers or not."""
        try:
            async for message in self._call:
                self._answers.put(message)
                self._news.set()
                del message  # whoever takes it is to be the last to keep it
        except grpc.aio.AioRpcError as error:
            self._failure = error.with_traceback(None)
        except BaseException as error:  # the channel was closed
            self._failure = error
            raise
        finally:
            self._is_over = True
            self._news.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the answers. Raises NotTaken where they were dropped."""
        while True:
            self._news.clear()
            while (message := self._answers.take()) is not None:
                yield message
            if (error := self._answers.error) is not None:
                raise error
            if self._is_over:
                break
            await self._news.wait()
        failure = self.explain_failure()
        if failure is not None:
            raise failure from self._failure

    def explain_failure(self) -> AdapterError | None:
        """Return why the answers have broken off; None if they have not."""
        if isinstance(self._failure, grpc.aio.AioRpcError):
            return self._fault(self._failure)
        if self._failure is not None:
            return BackendUnavailable("the connection to Triton was closed", delivered=True)
        return None


async def _write_in_turn(
    before: "asyncio.Task[None] | None", act: Coroutine[Any, Any, None]
) -> None:
    """Write to a stream, which may have ended meanwhile, behind what is being written."""
    if before is not None and not before.done():
        await asyncio.wait({before})
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError):
        await act


class _Inferences:
    """Inferences of a model that answers each once, with the methods of a stream: Triton 2.51 ends
    by SIGSEGV or SIGABRT where streams of decoupled models and of others are open at once
    (docs/design/triton.md). Answers come in the order of the requests. Those of sequences, which
    have an order in Triton too, go one by one. A write waits while too many are unanswered.
    """

    def __init__(
        self, channel: grpc.aio.Channel, metadata: Any, record: ServedModel, fault: _Fault
    ) -> None:
        self._record = record
        self._fault = fault
        small: _UnaryMethod = channel.unary_unary(_INFER)
        large: _LargeMethod = channel.stream_unary(_INFER)
        self._begin = partial(small, metadata=metadata)
        self._begin_large = partial(large, metadata=metadata)
        self._last: _InferCall | None = None
        # the queue lacks the call whose answer is awaited
        self._calls: asyncio.Queue[tuple[_InferCall, bytes] | None]
        self._calls = asyncio.Queue(MOST_UNANSWERED - 1)
        self._is_over = False

    async def write(self, message: bytes, request_id: bytes) -> None:
        """Begin a call; one of a sequence waits for the answer before it."""
        if self._last is not None and _SEQUENCE in message:
            await self._last.code()
        if self._is_over:
            return
        large = self._begin_large() if len(message) > _KEPT_BYTES else None
        self._last = large or self._begin(message)
        await self._calls.put((self._last, request_id))
        if large is not None:
            await large.write(message)
            await large.done_writing()

    async def done_writing(self) -> None:
        """End the answers behind those of the present calls."""
        if not self._is_over:  # nobody makes room any more
            await self._calls.put(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (found := await self._calls.get()) is not None:
                call, request_id = found
                try:
                    yield _streamed(await call)
                except grpc.aio.AioRpcError as error:
                    yield self._refusal(error, request_id)
                if self._last is call:
                    self._last = None
                del found, call  # a call keeps its answer
        finally:
            self._is_over = True
            if self._calls.full():
                self._calls.get_nowait()  # a write waits for room

    def _refusal(self, error: grpc.aio.AioRpcError, request_id: bytes) -> bytes:
        """Return the failure as Triton's stream has it, which names no model of a request that it
        did not accept. Raise that of a Triton which cannot be reached, the end of the stream.
        """
        if type(self._fault(error)) is BackendUnavailable:
            raise error
        answer = pb.ModelInferResponse(id=request_id.decode("utf-8", "replace"))
        if error.code() not in _NOT_ACCEPTED:
            answer.model_name = self._record.name
        text = pb.ModelStreamInferResponse(error_message=error.details() or "")
        return bytes(text.SerializeToString() + _streamed(answer.SerializeToString()))


def _streamed(answer: bytes) -> bytes:
    """Return a ModelInferResponse, the only one to its request, as Triton's stream has it."""
    return encoded_field(_ANSWER, answer + _IS_LAST)


def _metadata(metadata: Any) -> RpcMetadata:
    return tuple((key, value) for key, value in metadata or ())
