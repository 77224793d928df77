"""Serves ModelStreamInfer: a stream of a client may name any models; each has one behind it.

An error of one request is a message of the stream, as in Triton, and the stream continues. An
error of the stream ends it with a status.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from math import inf
from typing import Any

from adapter.control.door import Lease, ModelState, TritonState
from adapter.core.calls import RpcCall, RpcDataPlane, RpcStream
from adapter.core.faults import Faults
from adapter.core.model import ModelId, TritonName
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    NotTaken,
)
from adapter.frontends.grpc.messages import (
    forwarded,
    id_in,
    named_for_caller,
    named_for_triton,
    names_model,
    read_field,
    read_repeated,
    with_field,
)
from adapter.frontends.grpc.middleware import Context, GrpcMiddleware, metadata_of
from adapter.frontends.grpc.parameters import check_parameters
from adapter.frontends.status import grpc_text
from adapter.telemetry.log import ids_of_metadata

_METHOD = "ModelStreamInfer"

# A client must read a response within _TAKE_SECONDS, and within _HURRY_SECONDS when its model is
# unloaded or the adapter stops.
_TAKE_SECONDS, _HURRY_SECONDS, _TICK_SECONDS = 60.0, 1.0, 0.25
_NONE_TAKEN = f"none was taken within {_TAKE_SECONDS:g} s"

# fields of ModelStreamInferResponse
_ERROR, _ANSWER = 1, 2
# fields of ModelInferRequest and ModelInferResponse
_NAME, _ID, _PARAMETERS = 1, 3, 4
# an entry of a map: key and value; and an InferParameter that is true
_KEY, _VALUE, _TRUE = 1, 2, b"\x08\x01"


class StreamInfer:
    def __init__(
        self,
        triton: TritonState,
        dataplane: RpcDataPlane,
        faults: Faults,
        middleware: GrpcMiddleware,
        lease: Callable[[ModelId], Awaitable[Lease]],
        *,
        shares_memory: bool,
    ) -> None:
        self.shares_memory = shares_memory
        self.triton = triton
        self.lease = lease
        self.faults = faults
        self.middleware = middleware
        self.dataplane = dataplane

    async def serve(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await _StreamProxy(self, context).run(requests)


class _ModelStream:
    """The stream of one model to Triton, which holds a lease of the model while answers are due.

    Triton marks the last response to a request, of a decoupled model only when the request asked
    for that; without the mark the lease ends with the stream.
    """

    upstream: RpcStream

    def __init__(self, lease: Lease) -> None:
        self.record = lease.record
        self.unanswered = 0
        self.opened = asyncio.Event()
        self.is_ending = self._is_abandoned = False
        self.lease = lease

    def abandon(self) -> None:
        self._is_abandoned = True
        self.lease.abandon()

    def end(self, error: BaseException | None = None) -> BaseException | None:
        return self.lease.end(error)

    def take(self, lease: Lease) -> None:
        if not self.unanswered:
            self.lease = lease
            lease.begin()
        self.unanswered += 1

    def answered(self) -> None:
        self.unanswered -= 1
        if not self.unanswered:
            self.lease.end()

    async def done_writing(self) -> None:
        self.is_ending = True
        await self.upstream.done_writing()

    def has_ended(self, _: object) -> None:
        if not self._is_abandoned:
            self.lease.end()


class _StreamProxy:
    def __init__(self, service: StreamInfer, context: Context) -> None:
        self._service = service
        self._context = context
        self._metadata = metadata_of(context)
        self._streams: dict[TritonName, _ModelStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._ids = partial(ids_of_metadata, self._metadata)
        self._writing = asyncio.Lock()  # grpc accepts one write at a time
        self._is_cut = False
        # of the write that waits for the client: when it is too late, and which limit that is
        self._due, self._why = inf, ""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        forwarding = self._begin(self._forward_requests(requests))
        try:
            while self._tasks:
                ended = await self._ended.get()
                self._tasks.discard(ended)
                if ended is not forwarding:
                    ended.result()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        forwarding.result()  # raised behind the last answer

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)
        return task

    async def _forward_requests(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for message in requests:
                await self._forward_request(message)
        finally:
            for stream in self._streams.values():
                if stream.opened.is_set():
                    await stream.done_writing()

    async def _forward_request(self, message: bytes) -> None:
        request_id = read_field(message, _ID)
        try:
            model_id = id_in(message, self._metadata)
            lease = await self._service.lease(model_id)
            check_parameters(message, lease.record, shares_memory=self._service.shares_memory)
        except AdapterError as error:
            self._service.middleware.note(_METHOD, error, self._ids)
            answer = b"" if request_id is None else with_field(b"", _ID, request_id)
            refusal = with_field(b"", _ERROR, self._text(error).encode())
            await self._write(with_field(refusal, _ANSWER, answer))
        else:
            stream = self._streams.get(lease.record.name)
            if (
                stream is None or stream.record is not lease.record
            ):  # its first request, or reloaded
                stream = await self._opened(lease)
            else:
                stream.take(lease)
            named = named_for_triton(message, stream.record)
            await stream.upstream.write(named, request_id or b"")

    async def _opened(self, lease: Lease) -> _ModelStream:
        """Open a stream to Triton, and end the idle ones: at most one owes no answers."""
        stream = _ModelStream(lease)
        stream.take(lease)
        self._begin(self._forward_answers(stream)).add_done_callback(stream.has_ended)
        name = stream.record.name
        idle = [n for n, other in self._streams.items() if n == name or not other.unanswered]
        ended = [self._streams.pop(each) for each in idle]
        self._streams[name] = stream
        for other in ended:
            await other.done_writing()
        await stream.opened.wait()
        return stream

    async def _forward_answers(self, stream: _ModelStream) -> None:
        seconds = self._context.time_remaining()
        call = RpcCall(_METHOD, forwarded(self._metadata), seconds, self._cut)
        async with self._service.dataplane.stream(call, stream) as stream.upstream:
            stream.opened.set()
            async for message in stream.upstream.messages():
                await self._forward_answer(message, stream)
        if not stream.is_ending:
            why = "the connection to Triton broke: it ended a stream"
            raise BackendUnavailable(why, model_id=stream.record.id, delivered=True)

    def _cut(self) -> None:
        """Note that the responses behind the one in hand are dropped."""
        self._is_cut = True

    def reason_to_hurry(self) -> str | None:
        """Return what waits for these responses to be read; None where nothing does."""
        if self._is_cut:
            return "too many of them wait"
        if not self._service.triton.is_open:
            return "the adapter is stopping"
        for stream in self._streams.values():
            if stream.unanswered and stream.record.state is ModelState.UNLOADING:
                return f"model {stream.record.id!r} is being unloaded"
        return None

    async def _forward_answer(self, message: bytes, stream: _ModelStream) -> None:
        """Triton names no model in the response to a request that it did not accept."""
        answer, record = read_field(message, _ANSWER) or b"", stream.record
        name, text = read_field(answer, _NAME), read_field(message, _ERROR)
        if text:
            message = with_field(message, _ERROR, (await self._failed(text, name, stream)).encode())
        if name is not None:
            message = named_for_caller(message, record, (_ANSWER, _NAME))
        await self._write(message)
        if _is_last(answer) or name is None:
            stream.answered()

    async def _failed(self, text: bytes, name: bytes | None, stream: _ModelStream) -> str:
        """Return the text for the client; responses of a stream have no code."""
        record = stream.record
        failure: AdapterError = self._service.faults.of_grpc_inference(
            "NOT_FOUND" if name is None else "INTERNAL",
            text.decode("utf-8", "replace"),
            name=record.name,
            model_id=record.id,
        )
        if name is None and type(failure) is InferenceFailed:
            failure = InvalidRequest(str(failure), model_id=record.id)
        error = await stream.lease.judge(failure)
        stream.lease.note_failure(failure)  # the lease ends with the last response
        self._service.middleware.note(_METHOD, error, self._ids)
        return self._text(error)

    def _text(self, error: AdapterError) -> str:
        return grpc_text(error, is_of_mesh=names_model(self._metadata))

    async def _write(self, message: bytes) -> None:
        """Write one message; NotTaken when the client does not read it in time."""
        async with self._writing:
            self._due, self._why = self._loop.time() + _TAKE_SECONDS, _NONE_TAKEN
            if self._timer is None:
                self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
            await self._context.write(message)
            self._due = inf

    def _tick(self) -> None:
        """End the stream if a write takes too long. The timer goes on from write to write: to set
        one for each would cost more than to look.
        """
        self._timer, now = None, self._loop.time()
        if self._due == inf:
            return
        if (why := self.reason_to_hurry()) is not None:
            self._why = f"none was taken within {_HURRY_SECONDS:g} s, and {why}"
            self._due = min(self._due, now + _HURRY_SECONDS)
        if now < self._due:
            self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        else:
            self._begin(_not_taken(self._why))


async def _not_taken(why: str) -> None:
    raise NotTaken(f"the answers are not read: {why}")


def _is_last(answer: bytes) -> bool:
    return any(
        read_field(entry, _KEY) == b"triton_final_response" and read_field(entry, _VALUE) == _TRUE
        for entry in read_repeated(answer, _PARAMETERS)
    )
