"""Serves ModelStreamInfer: a stream of a client may name any models; each has one behind it.

An error of one request is a message of the stream, as in Triton, and the stream continues. An
error of the stream ends it with a status.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any

import grpc

from adapter.control.door import Lease, ModelState, TritonState
from adapter.core.calls import RpcCall, RpcDataPlane, RpcStream
from adapter.core.model import ModelId, TritonName
from adapter.core.triton_errors import Faults
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    NotTaken,
)
from adapter.frontends.grpc.calls import GrpcCall
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
from adapter.frontends.grpc.parameters import check_parameters
from adapter.frontends.status import grpc_text

_TAKE_SECONDS = 60.0  # in which a client must read a response
_HURRY_SECONDS = 1.0  # the same once its model is unloaded or the adapter stops
_TICK_SECONDS = 0.25
_NOT_READ = f"none was taken within {_TAKE_SECONDS:g} s"

# fields of ModelStreamInferResponse
_ERROR = 1
_ANSWER = 2
# fields of ModelInferRequest and ModelInferResponse
_NAME = 1
_ID = 3
_PARAMETERS = 4
# fields of an entry of a map
_KEY = 1
_VALUE = 2
_TRUE = b"\x08\x01"  # an InferParameter


class Streams:
    """Answers ModelStreamInfer."""

    def __init__(
        self,
        triton: TritonState,
        dataplane: RpcDataPlane,
        faults: Faults,
        lease: Callable[[ModelId], Awaitable[Lease]],
        *,
        shares_memory: bool,
    ) -> None:
        self.triton = triton
        self.dataplane = dataplane
        self.faults = faults
        self.lease = lease
        self.shares_memory = shares_memory

    async def serve(self, call: GrpcCall) -> None:
        """Answer the requests of one stream."""
        await _ClientStream(self, call).run()


class _ModelStream:
    """The stream of one model to Triton, which holds a lease of the model while answers are due.

    Triton marks the last response to a request, of a decoupled model only when the request asked
    for that; without the mark the lease ends with the stream.
    """

    upstream: RpcStream  # set when it is opened

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.record = lease.record
        self.unanswered = 0
        self.opened = asyncio.Event()
        self.is_ending = False
        self._is_abandoned = False

    def abandon(self) -> None:
        """Mark the lease as abandoned: nobody waits for the answers, on which Triton works until
        `end`.
        """
        self._is_abandoned = True
        self.lease.abandon()

    def end(self, error: BaseException | None = None) -> BaseException | None:
        """End the lease; return the error to answer in place of `error`. Called by the
        data plane.
        """
        return self.lease.end(error)

    def take(self, lease: Lease) -> None:
        """Count a request that is sent to Triton; the first of those that are unanswered begins the
        lease.
        """
        if not self.unanswered:
            self.lease = lease
            lease.begin()
        self.unanswered += 1

    def answered(self) -> None:
        """Count the last answer to a request; the last request that was unanswered ends
        the lease.
        """
        self.unanswered -= 1
        if not self.unanswered:
            self.lease.end()

    async def done_writing(self) -> None:
        """End the requests of the stream to Triton, which then ends the stream behind its
        answers.
        """
        self.is_ending = True
        await self.upstream.done_writing()

    def handle_end(self, _: object) -> None:
        """End the lease with the stream, unless the data plane does."""
        if not self._is_abandoned:
            self.lease.end()


class _ClientStream:
    """The stream of one client, and those to Triton behind it."""

    def __init__(self, service: Streams, call: GrpcCall) -> None:
        self._service = service
        self._call = call
        self._streams: dict[TritonName, _ModelStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._writing = asyncio.Lock()  # grpc accepts one write at a time
        self._has_metadata = False  # the initial metadata was sent to the client
        self._is_cut = False
        self._deadline = inf  # of the write that waits for the client
        self._limit_text = _NOT_READ  # names the limit that the deadline keeps
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Answer the requests until the client has ended the stream and all answers are sent. An
        error in forwarding answers ends the stream at once; one in forwarding requests, behind the
        last answer.
        """
        forwarding = self._start_task(self._forward_requests())
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
        forwarding.result()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task of this stream, whose end `run` handles."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended.put_nowait)
        return task

    async def _forward_requests(self) -> None:
        """Forward the client's requests one after the other, then end the requests of all streams
        to Triton.
        """
        try:
            while (message := await self._call.context.read()) is not grpc.aio.EOF:
                await self._forward_request(message)
                del message  # nothing of it stays while the client sends nothing
        finally:
            for stream in self._streams.values():
                if stream.opened.is_set():
                    await stream.done_writing()

    async def _forward_request(self, message: bytes) -> None:
        """Lease the model of a request and forward the request on the stream of that model. A
        refusal is answered in the stream, which goes on.
        """
        request_id = read_field(message, _ID)
        try:
            model_id = id_in(message, self._call.metadata)
            lease = await self._service.lease(model_id)
            check_parameters(message, lease.record, shares_memory=self._service.shares_memory)
        except AdapterError as error:
            self._call.note(error)
            answer = b"" if request_id is None else with_field(b"", _ID, request_id)
            refusal = with_field(b"", _ERROR, self._word_error(error).encode())
            await self._write(with_field(refusal, _ANSWER, answer))
        else:
            stream = self._streams.get(lease.record.name)
            if stream is None or stream.record is not lease.record:  # the model was loaded again
                stream = await self._open_stream(lease)
            else:
                stream.take(lease)
            named = named_for_triton(message, stream.record)
            await stream.upstream.write(named, request_id or b"")

    async def _open_stream(self, lease: Lease) -> _ModelStream:
        """Open a stream to Triton for a model, and end the others that owe no answers, so that at
        most one idle stream is open. Return it once it is open.
        """
        stream = _ModelStream(lease)
        stream.take(lease)
        self._start_task(self._forward_answers(stream)).add_done_callback(stream.handle_end)
        name = stream.record.name
        idle = [n for n, other in self._streams.items() if n == name or not other.unanswered]
        others = [self._streams.pop(n) for n in idle]
        self._streams[name] = stream
        for other in others:
            await other.done_writing()
        await stream.opened.wait()
        return stream

    async def _forward_answers(self, stream: _ModelStream) -> None:
        """Open the stream of a model at the data plane, and forward its answers until it ends.
        Raises BackendUnavailable if Triton ended it first.
        """
        seconds = self._call.context.time_remaining()
        call = RpcCall(self._call.method, forwarded(self._call.metadata), seconds, self._mark_cut)
        async with self._service.dataplane.stream(call, stream) as stream.upstream:
            stream.opened.set()
            async for message in stream.upstream.messages():
                await self._forward_answer(message, stream)
                del message  # nothing of it stays while Triton sends nothing
        if not stream.is_ending:
            text = "the connection to Triton broke: it ended a stream"
            raise BackendUnavailable(text, model_id=stream.record.id, delivered=True)

    def _mark_cut(self) -> None:
        """Note that the responses behind the present one are dropped."""
        self._is_cut = True

    def _find_reason_to_hurry(self) -> str | None:
        """Return what waits for these responses to be read; None where nothing does."""
        if self._is_cut:
            return "too many of them wait"
        if not self._service.triton.is_open:
            return "the adapter is draining"
        for stream in self._streams.values():
            if stream.unanswered and stream.record.state is ModelState.UNLOADING:
                return f"model {stream.record.id!r} is being unloaded"
        return None

    async def _forward_answer(self, message: bytes, stream: _ModelStream) -> None:
        """Write one answer of Triton to the client, under the client's name of the model. Triton
        names no model in the response to a request that it did not accept.
        """
        answer = read_field(message, _ANSWER) or b""
        name = read_field(answer, _NAME)
        text = read_field(message, _ERROR)
        if text:
            error_text = await self._read_failure(text, name, stream)
            message = with_field(message, _ERROR, error_text.encode())
        if name is not None:
            message = named_for_caller(message, stream.record, (_ANSWER, _NAME))
        await self._write(message)
        if _is_last(answer) or name is None:
            stream.answered()

    async def _read_failure(self, text: bytes, name: bytes | None, stream: _ModelStream) -> str:
        """Return the client's text for Triton's error; responses of a stream have no code."""
        record = stream.record
        failure: AdapterError = self._service.faults.explain_grpc_inference(
            "NOT_FOUND" if name is None else "INTERNAL",
            text.decode("utf-8", "replace"),
            name=record.name,
            model_id=record.id,
        )
        if name is None and type(failure) is InferenceFailed:
            failure = InvalidRequest(str(failure), model_id=record.id)
        noted = stream.lease.note_failure(failure)  # the lease ends with the last response
        error = await stream.lease.judge(noted if isinstance(noted, AdapterError) else failure)
        self._call.note(error)
        return self._word_error(error)

    def _word_error(self, error: AdapterError) -> str:
        """Return the text of an error for this client, which may be a mesh."""
        return grpc_text(error, is_of_mesh=names_model(self._call.metadata))

    async def _write(self, message: bytes) -> None:
        """Write one message; NotTaken when the client does not read it in time."""
        async with self._writing:
            self._deadline = self._loop.time() + _TAKE_SECONDS
            self._limit_text = _NOT_READ
            if self._timer is None:
                self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
            if not self._has_metadata:
                # With the first message, grpc would send them twice if that write is cancelled and
                # a status follows: the client would get no status.
                self._has_metadata = True
                await self._call.context.send_initial_metadata(())
            await self._call.context.write(message)
            self._deadline = inf

    def _tick(self) -> None:
        """Check whether a write takes too long; end the stream if so. The timer goes on from write
        to write: to set one for each would cost more than to look.
        """
        self._timer = None
        now = self._loop.time()
        if self._deadline == inf:
            return
        if (reason := self._find_reason_to_hurry()) is not None:
            self._limit_text = f"none was taken within {_HURRY_SECONDS:g} s, and {reason}"
            self._deadline = min(self._deadline, now + _HURRY_SECONDS)
        if now < self._deadline:
            self._timer = self._loop.call_later(_TICK_SECONDS, self._tick)
        else:
            self._start_task(
                _raise_error(NotTaken(f"the answers are not read: {self._limit_text}"))
            )


async def _raise_error(error: Exception) -> None:
    """Raise an error from a task, whose failure ends the stream."""
    raise error


def _is_last(answer: bytes) -> bool:
    """Return whether Triton marks an answer as the last one to its request."""
    return any(
        read_field(entry, _KEY) == b"triton_final_response" and read_field(entry, _VALUE) == _TRUE
        for entry in read_repeated(answer, _PARAMETERS)
    )
