"""Serves ModelStreamInfer: each stream of a client is one stream to Triton, for any models.

An error of one request is a message of the stream, as in Triton, and the stream continues. An
error of the stream ends it with a status.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.core.calls import RpcCall, RpcDataPlane, RpcMetadata, RpcStream
from adapter.core.faults import Faults
from adapter.core.model import ModelId, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AdapterError, InferenceFailed, InvalidRequest, NotTaken
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
from adapter.frontends.status import grpc_text
from adapter.telemetry.log import ids_of_metadata

_METHOD = "ModelStreamInfer"

# A client must read a response within _TAKE_SECONDS, and within _HURRY_SECONDS when its model is
# unloaded or the adapter stops.
_TAKE_SECONDS, _HURRY_SECONDS, _TICK_SECONDS = 60.0, 1.0, 0.25
_ENDING_SECONDS = 1.0  # for the last of the requests, when the stream of responses has ended

# fields of ModelStreamInferResponse
_ERROR, _ANSWER = 1, 2
# fields of ModelInferRequest and ModelInferResponse
_NAME, _ID, _PARAMETERS = 1, 3, 4
# an entry of a map: key and value; and an InferParameter that is true
_KEY, _VALUE, _TRUE = 1, 2, b"\x08\x01"


class StreamInfer:
    def __init__(
        self,
        control: ModelControl,
        dataplane: RpcDataPlane,
        faults: Faults,
        middleware: GrpcMiddleware,
        lease: Callable[[ModelId], Awaitable[Lease]],
    ) -> None:
        self.control = control
        self.lease = lease
        self.faults = faults
        self.middleware = middleware
        self._dataplane = dataplane

    async def serve(self, requests: AsyncIterator[bytes], context: Context) -> None:
        metadata = metadata_of(context)
        leases = _StreamLeases(self.control)
        call = RpcCall(_METHOD, forwarded(metadata), context.time_remaining(), leases.cut)
        with leases:
            async with self._dataplane.stream(call, leases) as upstream:
                await _StreamProxy(self, context, metadata, upstream, leases).run(requests)


@dataclass(slots=True)
class _Model:
    lease: Lease
    unanswered: int = 0


class _StreamLeases:
    """Holds a lease of each model with unanswered requests in the stream.

    Triton marks the last response to a request, of a decoupled model only when the request asked
    for that; without the mark the lease ends with the stream.
    """

    def __init__(self, control: ModelControl) -> None:
        self._control = control
        self._models: dict[TritonName, _Model] = {}
        self._is_abandoned = self._is_cut = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if not self._is_abandoned:
            self.end()

    @property
    def record(self) -> ModelRecord | None:
        """The only model of the stream; None when it has several."""
        models = list(self._models.values())
        return models[0].lease.record if len(models) == 1 else None

    def abandon(self) -> None:
        self._is_abandoned = True
        for model in self._models.values():
            model.lease.abandon()

    def end(self, error: BaseException | None = None) -> BaseException | None:
        for model in self._models.values():
            model.lease.end(error)
        return error

    def take(self, lease: Lease) -> ModelRecord:
        record = lease.record
        model = self._models.get(record.name)
        if model is None or model.lease.record is not record:  # its first request, or reloaded
            if model is not None:
                model.lease.end()
            model = self._models[record.name] = _Model(lease)
            lease.begin()
        model.unanswered += 1
        return record

    def named(self, name: bytes | None) -> ModelRecord | None:
        """Return the model of Triton's response, which has no name for a request not accepted."""
        if name is None:
            return self.record
        model = self._models.get(TritonName(name.decode("utf-8", "replace")))
        return model.lease.record if model else None

    def cut(self) -> None:
        """Note that the responses behind the one in hand are dropped."""
        self._is_cut = True

    def reason_to_hurry(self) -> str | None:
        """Return what waits for these responses to be read; None where nothing does."""
        if self._is_cut:
            return "too many wait"
        if not self._control.is_open:
            return "the adapter is stopping"
        records = [model.lease.record for model in self._models.values()]
        leaving = [record.id for record in records if record.state is ModelState.UNLOADING]
        return f"model {leaving[0]!r} is being unloaded" if leaving else None

    def answered(self, record: ModelRecord) -> None:
        model = self._models[record.name]
        model.unanswered -= 1
        if model.unanswered == 0:
            del self._models[record.name]
            model.lease.end()


class _StreamProxy:
    def __init__(
        self,
        service: StreamInfer,
        context: Context,
        metadata: RpcMetadata,
        upstream: RpcStream,
        leases: _StreamLeases,
    ) -> None:
        self._service = service
        self._context = context
        self._metadata = metadata
        self._upstream = upstream
        self._leases = leases
        self._ids = partial(ids_of_metadata, metadata)
        self._writing = asyncio.Lock()  # grpc accepts one write at a time
        self._has_read_all = False

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        forwarding = asyncio.create_task(self._forward_requests(requests))
        try:
            async for message in self._upstream.messages():
                await self._forward_answer(message)
            if self._has_read_all:  # a malformed request may have ended the stream
                await asyncio.wait({forwarding}, timeout=_ENDING_SECONDS)
        finally:
            forwarding.cancel()
            await asyncio.wait({forwarding})
        if not forwarding.cancelled():
            forwarding.result()

    async def _forward_requests(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for message in requests:
                await self._forward_request(message)
        finally:
            self._has_read_all = True
            await self._upstream.done_writing()

    async def _forward_request(self, message: bytes) -> None:
        request_id = read_field(message, _ID)
        try:
            model_id = id_in(message, self._metadata)
            record = self._leases.take(await self._service.lease(model_id))
        except AdapterError as error:
            self._service.middleware.note(_METHOD, error, self._ids)
            answer = b"" if request_id is None else with_field(b"", _ID, request_id)
            refusal = with_field(b"", _ERROR, self._text(error).encode())
            await self._write(with_field(refusal, _ANSWER, answer))
        else:
            await self._upstream.write(named_for_triton(message, record))

    async def _forward_answer(self, message: bytes) -> None:
        answer = read_field(message, _ANSWER) or b""
        name, text = read_field(answer, _NAME), read_field(message, _ERROR)
        record = self._leases.named(name)
        if text:
            message = with_field(message, _ERROR, (await self._failed(text, name, record)).encode())
        if name is not None and record is not None:
            message = named_for_caller(message, record, (_ANSWER, _NAME))
        await self._write(message)
        if record is not None and (_is_last(answer) or name is None):
            self._leases.answered(record)

    async def _failed(self, text: bytes, name: bytes | None, record: ModelRecord | None) -> str:
        """Return the text for the client; responses of a stream have no code. Triton names no model
        in the response to a request that it did not accept.
        """
        error = self._service.faults.of_grpc_inference(
            "NOT_FOUND" if name is None else "INTERNAL",
            text.decode("utf-8", "replace"),
            name=record.name if record else TritonName(""),
            model_id=record.id if record else ModelId(""),
        )
        if name is None and type(error) is InferenceFailed:
            error = InvalidRequest(str(error), model_id=error.model_id)
        if record is not None:
            control, failure = self._service.control, error
            error = await control.judged(failure, record.id)
            control.call_failed(record, failure)  # the lease ends with the last response
        self._service.middleware.note(_METHOD, error, self._ids)
        return self._text(error)

    def _text(self, error: AdapterError) -> str:
        return grpc_text(error, is_of_mesh=names_model(self._metadata))

    async def _write(self, message: bytes) -> None:
        """Write one message; NotTaken when the client does not read it in time."""
        async with self._writing:
            timeout = _WriteTimeout(self._leases)
            try:
                async with asyncio.timeout(None) as limit:
                    timeout.begin(limit)
                    await self._context.write(message)
            except TimeoutError as error:
                raise NotTaken(f"the answers are not read: {timeout.why}") from error
            finally:
                timeout.end()


class _WriteTimeout:
    """Ends a write that takes too long; `why` says which limit that was."""

    __slots__ = ("_deadline", "_leases", "_limit", "_loop", "_next", "why")

    def __init__(self, leases: _StreamLeases) -> None:
        self.why = f"none was taken within {_TAKE_SECONDS:g} s"
        self._leases = leases
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + _TAKE_SECONDS

    def begin(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._next = self._loop.call_later(_TICK_SECONDS, self._tick)

    def end(self) -> None:
        self._next.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        if (why := self._leases.reason_to_hurry()) is not None:
            self.why, self._deadline = why, min(self._deadline, now + _HURRY_SECONDS)
        if now >= self._deadline:
            self._limit.reschedule(now)
        else:
            self._next = self._loop.call_later(_TICK_SECONDS, self._tick)


def _is_last(answer: bytes) -> bool:
    return any(
        read_field(entry, _KEY) == b"triton_final_response" and read_field(entry, _VALUE) == _TRUE
        for entry in read_repeated(answer, _PARAMETERS)
    )
