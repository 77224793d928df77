"""ModelStreamInfer: one stream of the caller, one stream to Triton, any models in between.

What is wrong with one request is told as Triton tells it, in a message of the stream; the stream
goes on. What is wrong with the stream ends it with a status.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.core.calls import RpcCall, RpcDataPlane, RpcMetadata, RpcStream
from adapter.core.faults import Faults
from adapter.core.model import ModelId, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AdapterError, InferenceFailed, InvalidRequest, NotTaken
from adapter.frontends.grpc.middleware import Context, GrpcMiddleware, metadata_of
from adapter.frontends.grpc.naming import id_in, named_for_caller, named_for_triton, passed_on
from adapter.frontends.status import grpc_text
from adapter.protocols.protobuf import read_field, read_repeated, with_field
from adapter.telemetry import request_ids

_METHOD = "ModelStreamInfer"

# What a caller has to take one answer: at most, and where its model or the adapter has to go; and
# how often that is looked at.
_TAKE_SECONDS, _HURRY_SECONDS, _LOOK_SECONDS = 60.0, 1.0, 0.25

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
        load_wait_seconds: float,
    ) -> None:
        self.control = control
        self.faults = faults
        self.middleware = middleware
        self.load_wait_seconds = load_wait_seconds
        self._dataplane = dataplane

    async def serve(self, requests: AsyncIterator[bytes], context: Context) -> None:
        metadata = metadata_of(context)
        call = RpcCall(_METHOD, passed_on(metadata), context.time_remaining())
        held = _Held(self.control)
        with held:
            async with self._dataplane.stream(call, held) as upstream:
                await _Conversation(self, context, metadata, upstream, held).go_on(requests)


@dataclass(slots=True)
class _Model:
    lease: Lease
    unanswered: int = 0


class _Held:
    """The models of the stream that owe it answers: no unload before those are here.

    Triton marks the last answer to a request, but for a decoupled model only when the request
    asked for that; without a mark the model is held until the stream ends.
    """

    def __init__(self, control: ModelControl) -> None:
        self._control = control
        self._models: dict[TritonName, _Model] = {}
        self._is_abandoned = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if not self._is_abandoned:
            self.end()

    @property
    def record(self) -> ModelRecord | None:
        """The model of the stream when there is but one."""
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

    async def take(self, model_id: ModelId, wait_seconds: float) -> ModelRecord:
        lease = await self._control.serving(model_id, wait_seconds)
        record = lease.record
        model = self._models.get(record.name)
        if model is None or model.lease.record is not record:  # the first, or it was loaded anew
            if model is not None:
                model.lease.end()
            model = self._models[record.name] = _Model(lease)
            lease.begin()
        model.unanswered += 1
        return record

    def named(self, name: bytes | None) -> ModelRecord | None:
        """The one that Triton's answer is about; Triton names none where it took no request."""
        if name is None:
            return self.record
        model = self._models.get(TritonName(name.decode("utf-8", "replace")))
        return model.lease.record if model else None

    def why_hurry(self) -> str | None:
        """What has to go and waits for these answers."""
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


class _Conversation:
    def __init__(
        self,
        service: StreamInfer,
        context: Context,
        metadata: RpcMetadata,
        upstream: RpcStream,
        held: _Held,
    ) -> None:
        self._service = service
        self._context = context
        self._metadata = metadata
        self._upstream = upstream
        self._held = held
        self._ids = request_ids.of_metadata(metadata)
        self._writing = asyncio.Lock()  # grpc takes one message at a time

    async def go_on(self, requests: AsyncIterator[bytes]) -> None:
        asking = asyncio.create_task(self._ask(requests))
        try:
            async for message in self._upstream.messages():
                await self._answer(message)
        finally:
            asking.cancel()
            await asyncio.wait({asking})
            failure = None if asking.cancelled() else asking.exception()
        if failure is not None:
            raise failure

    async def _ask(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for message in requests:
                await self._pass_on(message)
        finally:
            await self._upstream.done_writing()

    async def _pass_on(self, message: bytes) -> None:
        request_id = read_field(message, _ID)
        try:
            model_id = id_in(message, self._metadata)
            record = await self._held.take(model_id, self._service.load_wait_seconds)
        except AdapterError as error:
            self._service.middleware.note(_METHOD, error, self._ids)
            answer = b"" if request_id is None else with_field(b"", _ID, request_id)
            refusal = with_field(b"", _ERROR, grpc_text(error).encode())
            await self._write(with_field(refusal, _ANSWER, answer))
        else:
            await self._upstream.write(named_for_triton(message, record))

    async def _answer(self, message: bytes) -> None:
        answer = read_field(message, _ANSWER) or b""
        name, text = read_field(answer, _NAME), read_field(message, _ERROR)
        record = self._held.named(name)
        if text:
            message = with_field(message, _ERROR, (await self._failed(text, name, record)).encode())
        if name is not None and record is not None:
            message = named_for_caller(message, record, (_ANSWER, _NAME))
        await self._write(message)
        if record is not None and (_is_last(answer) or name is None):
            self._held.answered(record)

    async def _failed(self, text: bytes, name: bytes | None, record: ModelRecord | None) -> str:
        """What the caller is told. There is no code; a request that Triton did not take has no
        model in its answer either.
        """
        said = self._service.faults.of_grpc_inference(
            "NOT_FOUND" if name is None else "INTERNAL",
            text.decode("utf-8", "replace"),
            name=record.name if record else TritonName(""),
            model_id=record.id if record else ModelId(""),
        )
        if name is None and type(said) is InferenceFailed:
            said = InvalidRequest(str(said), model_id=said.model_id)
        error = said
        if record is not None:
            control = self._service.control
            error = await control.judged(said, record.id)
            # a lease that ends with an error is how control learns of it
            with suppress(AdapterError), control.lease(record.id):
                raise said
        self._service.middleware.note(_METHOD, error, self._ids)
        return grpc_text(error)

    async def _write(self, message: bytes) -> None:
        """NotTaken when the caller does not read: grpc tells of whole messages alone."""
        async with self._writing:
            taking = _Taking(self._held)
            try:
                async with asyncio.timeout(None) as limit:
                    taking.begin(limit)
                    await self._context.write(message)
            except TimeoutError as error:
                raise NotTaken(f"the answers are not read: {taking.why}") from error
            finally:
                taking.end()


class _Taking:
    """Of one answer by the caller, who is given up when it takes too long; then `why`."""

    __slots__ = ("_due", "_held", "_limit", "_loop", "_next", "why")

    def __init__(self, held: _Held) -> None:
        self.why = f"none was taken within {_TAKE_SECONDS:g} s"
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _TAKE_SECONDS

    def begin(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._next = self._loop.call_later(_LOOK_SECONDS, self._look)

    def end(self) -> None:
        self._next.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if (why := self._held.why_hurry()) is not None:
            self.why, self._due = why, min(self._due, now + _HURRY_SECONDS)
        if now >= self._due:
            self._limit.reschedule(now)
        else:
            self._next = self._loop.call_later(_LOOK_SECONDS, self._look)


def _is_last(answer: bytes) -> bool:
    return any(
        read_field(entry, _KEY) == b"triton_final_response" and read_field(entry, _VALUE) == _TRUE
        for entry in read_repeated(answer, _PARAMETERS)
    )
