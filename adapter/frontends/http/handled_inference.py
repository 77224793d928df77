"""Inferences that a task answers: a model converts the body, generates, or the head has no plan.

All others are answered by hand (inference.py).
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing
from functools import partial
from http import HTTPStatus

from adapter.codecs.base import Source
from adapter.control.door import Lease, ModelRecord
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.model import ModelId
from adapter.core.tensors import ContentTypes
from adapter.core.triton_errors import Faults
from adapter.errors import (
    AdapterError,
    BackendError,
    BackendTimeout,
    CapacityError,
    InvalidRequest,
    NotJson,
    NotTaken,
)
from adapter.frontends.http import binary
from adapter.frontends.http.answers import Answer, Writer
from adapter.frontends.http.connection import Request
from adapter.frontends.http.content_types import (
    JSON,
    answer_type,
    as_answer,
    as_request,
    codec_for,
    explained,
    is_typed,
    refuse_unlisted,
)
from adapter.frontends.http.contracts import ContainerContracts, Contract
from adapter.frontends.http.instrumentation import forwarded, list_call_headers, passed_on
from adapter.telemetry.traffic import waiting_for_caller

_HEADER_LENGTH = "Inference-Header-Content-Length"
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
_EVENT_END = b"\n\n"
_EVENT_NAME = b"data:"
_ERROR_EVENT = b'data: {"error":'
_INFER = "infer"
_GENERATE_STREAM = "generate_stream"
# Triton 2.51 says so with 200, of a decoupled model that did not answer exactly once.
_SEVERAL_ANSWERS = b'{"error":"generate expects'
# Errors of a stream on whose request Triton works on.
_UNFINISHED = (BackendTimeout, NotTaken)
# Bodies up to this size are taken whole: one write each way instead of a stream.
_WHOLE_BYTES = 2**20

Send = Callable[["HandledInference"], Awaitable[Answer | None]]


class Inferences:
    """Answers the inferences of a listener that are not answered by hand."""

    def __init__(
        self,
        dataplane: V2DataPlane,
        contracts: ContainerContracts,
        *,
        max_body_bytes: int,
        default_model: ModelId | None,  # served at /invocations
        operation: str = _INFER,  # Triton's extension that answers an invocation
        shares_memory: bool = False,  # inferences may name regions of shared memory
    ) -> None:
        self.dataplane = dataplane
        self.contracts = contracts
        self.max_body_bytes = max_body_bytes
        self.operation = operation
        self.shares_memory = shares_memory
        self._default_model = default_model

    async def invoke(self, request: Request) -> Answer | None:
        """Answer an inference of SageMaker's container contract."""
        model_id = request.model_id or self._default_model
        request.model_id = model_id
        if model_id is None:
            raise InvalidRequest(
                "many models are served here: POST /models/{model_name}/invoke, "
                "or start with --single-model"
            )
        contract = self.contracts.sagemaker
        return await self.attempt(contract, model_id, request, HandledInference.invoke)

    async def infer(self, request: Request, below_model: str) -> Answer | None:
        """Answer an inference of V2, whose path goes on with `below_model`."""
        assert request.model_id is not None  # noqa: S101 - the path has it
        send = partial(HandledInference.infer, below_model=below_model)
        return await self.attempt(self.contracts.v2, request.model_id, request, send)

    async def attempt(
        self, contract: Contract, model_id: ModelId, request: Request, send: Send
    ) -> Answer | None:
        """Lease the model as its contract says, and have `send` answer with it."""
        lease = await contract.wait_for_lease(model_id, request)
        request.has_lease = True
        try:
            with lease, ExitStack() as held:
                return await send(HandledInference(self, request, lease, held))
        except (BackendError, CapacityError) as error:
            raise await lease.judge(error) from error


class HandledInference:
    """One inference of a task."""

    def __init__(
        self,
        inferences: Inferences,
        request: Request,
        lease: Lease,
        held: ExitStack,  # closed when the inference is over
    ) -> None:
        self.request = request
        self.lease = lease
        self.held = held
        self._inferences = inferences
        self._is_stream = False
        self._record = lease.record
        self._type = request.headers.get("Content-Type", "")
        self._accept = ", ".join(request.headers.getall("Accept", []))
        self._encoding = request.headers.get("Content-Encoding", "").strip().lower()
        self._is_packed = self._encoding not in {"", "identity"}
        if self._encoding not in _ENCODINGS:
            reason = f"Content-Encoding {self._encoding!r}; gzip and deflate are understood"
            raise InvalidRequest(reason)

    # -- SageMaker's ------------------------------------------------------------------------

    async def invoke(self) -> Answer | None:
        """Answer an invocation: infer, generate, or a conversion by the model's content types."""
        types = self._record.content_types
        if self._inferences.operation != _INFER:
            return await self._generate(self._inferences.operation)
        try:
            if types is not None and is_typed(self._type, self._accept):
                return await self._convert(types)
            headers = self._list_invocation_headers()
            sent = _refuse_empty(await self._read_body())
            async with self.forward("/infer", headers, sent) as answer:
                return await self._respond(answer)
        except NotJson as error:
            raise explained(error, self.request.headers, types) from error

    async def _convert(self, types: ContentTypes) -> Answer | None:
        """Convert by the model's own content types (docs/content-types.md)."""
        codec = codec_for(self._type, types, is_packed=self._is_packed)
        is_choosing = codec is None or codec.may_be_json
        wanted = answer_type(self._accept, types, is_choosing=is_choosing)
        headers = self._list_invocation_headers() | {"Accept-Encoding": "identity"}
        # such a body becomes whole before Triton is sent the first byte of it
        holds_whole = codec is not None and codec.holds_whole_body
        length = self.request.content_length
        sent = await self._read_body(is_kept=holds_whole or length is None)
        async with aclosing(Source(sent)) as source:
            if codec is not None and codec.may_be_json:
                if await source.begins_with_brace():
                    codec = None
                else:
                    refuse_unlisted(codec, types)
            if codec is None:
                sent = source.pieces(0)
                sent = b"".join([p async for p in sent]) if source.is_whole else sent
            else:
                length = len(sent) if isinstance(sent, bytes) else length
                asked = await as_request(codec, source, length, types, wanted)
                headers = headers | asked.headers
                sent = asked.body
            async with self.forward("/infer", headers, _refuse_empty(sent)) as upstream_answer:
                if wanted in {JSON, binary.MEDIA_TYPE}:
                    is_binary = wanted == binary.MEDIA_TYPE
                    return await self._respond(upstream_answer, is_binary=is_binary)
                converted = await as_answer(upstream_answer, wanted)
                if isinstance(converted.body, bytes):
                    return Answer(converted.body, _drop_length(converted.headers))
                size = int(converted.headers["Content-Length"])
                await self._write_pieces(_drop_length(converted.headers), size, converted.body)
                return None

    async def _generate(self, operation: str) -> Answer | None:
        """Answer an invocation by Triton's generate extension, which takes JSON alone."""
        headers = self._list_invocation_headers()
        if headers.pop(_HEADER_LENGTH, None) is not None:
            raise InvalidRequest(f"inference_type is {operation}, which takes JSON alone")
        async with self.forward(f"/{operation}", headers, await self._read_body()) as answer:
            return await self._respond(answer, is_v2=True, is_one=not self._is_stream)

    # -- V2 ---------------------------------------------------------------------------------

    async def infer(self, below_model: str) -> Answer | None:
        """Answer an inference of V2."""
        sent_headers = self.request.headers
        if len(sent_headers.getall(_HEADER_LENGTH, ())) > 1:
            raise InvalidRequest(f"more than one {_HEADER_LENGTH}")
        headers = list_call_headers(sent_headers, is_rewritten=self._record.is_renamed)
        self._add_length(headers)
        async with self.forward(below_model, headers, await self._read_body()) as answer:
            is_one = below_model.endswith("/generate")
            return await self._respond(answer, is_v2=True, is_one=is_one)

    # -- the request ------------------------------------------------------------------------

    def _list_invocation_headers(self) -> dict[str, str]:
        """Return the headers for Triton of an inference in SageMaker's contract: those that are
        forwarded, and the lengths of the body and of its JSON part. Without Accept-Encoding for a
        renamed model, as the name in the answer is replaced.
        """
        headers = forwarded(self.request.headers)
        if self._record.is_renamed:
            headers.pop("Accept-Encoding", None)
        length = None if self._is_packed else self.request.content_length
        size = binary.json_header_bytes(self._type, length)
        if size is not None:
            headers[_HEADER_LENGTH] = str(size)
        self._add_length(headers)
        return headers

    def _add_length(self, headers: dict[str, str]) -> None:
        """Add the length of the caller's body, if it was announced."""
        length = self.request.content_length
        if length is not None and "Content-Length" in self.request.headers:
            headers["Content-Length"] = str(length)

    async def _read_body(self, *, is_kept: bool = False) -> bytes | AsyncIterator[bytes]:
        """Return the whole body if it was read before or is small, else a stream.

        A body that does not come at once counts in the budget until `held` is closed; a stream
        only until it has been read, unless it `is_kept`.
        """
        request = self.request
        connection = request.connection
        limit = self._inferences.max_body_bytes
        if request.body is not None:
            return request.body
        if not connection.is_whole:
            self.lease.on_unload(lambda: connection.refuse_body("the model is being unloaded"))
        length = request.content_length
        is_large = length is None or length > _WHOLE_BYTES
        is_encoded = "Content-Encoding" in request.headers and length != 0
        if is_large or is_encoded:
            return self._iterate_held(limit, is_kept=is_kept)
        if not connection.is_whole:
            self.held.enter_context(request.hold_body())
        with waiting_for_caller():
            return await request.read_body(limit)

    async def _iterate_held(self, limit: int, *, is_kept: bool) -> AsyncIterator[bytes]:
        """Yield the body; Triton holds what it has of it until it is complete."""
        pieces = self.request.iterate_body(limit)
        self.held.enter_context(self.request.hold_body())
        async for piece in pieces:
            yield piece
        if not is_kept:
            self.request.connection.end_holding()

    def forward(
        self, below_model: str, headers: dict[str, str], body: bytes | AsyncIterator[bytes]
    ) -> AbstractAsyncContextManager[V2Answer]:
        """Forward the request to Triton; the context is its answer."""
        self._is_stream = below_model.endswith(_GENERATE_STREAM)
        if self._is_stream:
            self.held.enter_context(self.request.count_stream())
        call = V2Call(
            "POST",
            f"/models/{self._record.name}{below_model}",
            headers,
            body,
            is_stream=self._is_stream,
            on_cut=self.request.connection.abort,  # a client that does not read gets no error
            shares_memory=self._inferences.shares_memory,
        )
        return self._inferences.dataplane.forward(call, self.lease)

    # -- the answer -------------------------------------------------------------------------

    async def _respond(
        self,
        answer: V2Answer,
        *,
        is_v2: bool = False,  # the answer keeps all headers
        is_binary: bool = False,  # SageMaker's binary media type, even if the whole body is JSON
        is_one: bool = False,  # InvalidRequest if the model gave several answers, or none
    ) -> Answer | None:
        """Return Triton's answer under the caller's name of the model."""
        record = self._record
        size = answer.json_header_bytes
        length = answer.content_length
        pieces = answer.chunks()
        body: bytes | None = None
        if record.is_renamed and self._is_stream:
            events = iterate_events(pieces, record)
            await self._write_pieces(passed_on(answer.headers), None, events)
            return None
        if record.is_renamed:
            pieces, size, length = await _rename(pieces, size, length, record)
        if is_one:
            pieces = await _refuse_several(pieces)
        if length is not None and length <= _WHOLE_BYTES:
            body = b"".join([piece async for piece in pieces])
        if is_binary and size is None:
            size = length if body is None else len(body)
        headers = passed_on(answer.headers) if is_v2 else _list_invoke_headers(answer, size)
        if is_v2 and record.is_renamed and size is not None:
            headers[_HEADER_LENGTH] = str(size)
        if body is None:
            await self._write_pieces(headers, length, pieces)
            return None
        return Answer(body, headers)

    async def _write_pieces(
        self, headers: dict[str, str], length: int | None, pieces: AsyncIterator[bytes]
    ) -> None:
        """Write an answer with these headers, in pieces, as the client takes them."""
        writer = self.begin_answer(headers, length)
        with waiting_for_caller():
            async for piece in pieces:
                await writer.write(piece)
        writer.end()

    async def fail_stream(self, error: AdapterError, logged: Mapping[str, object]) -> AdapterError:
        """End the lease of a stream that has failed behind its first answer, unless Triton works
        on: then the lease lasts until that is done. Log and count the failure. Return the error to
        tell the client.
        """
        ended = error if isinstance(error, _UNFINISHED) else self.lease.end(error)
        judged = await self.lease.judge(ended if isinstance(ended, AdapterError) else error)
        request = self.request
        request.connection.parts.instrumentation.record_refusal(
            judged,
            request.describe_for_log,
            request.operation,
            self._record.id,
            more={"status": HTTPStatus.OK.value, **logged},
        )
        return judged

    def begin_answer(self, headers: dict[str, str], length: int | None = None) -> Writer:
        """Write the head of an answer whose body comes in pieces."""
        return Writer(self.request, headers, length)


def _refuse_empty(body: bytes | AsyncIterator[bytes]) -> bytes | AsyncIterator[bytes]:
    """Refuse an empty body, which Triton takes for a tensor without values."""
    if not body:
        raise InvalidRequest("a body is needed")
    return body if isinstance(body, bytes) else _refuse_no_pieces(body)


async def _refuse_no_pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a body; raise InvalidRequest if there were none."""
    piece = b""
    async for piece in body:
        yield piece
    _refuse_empty(piece)


def _drop_length(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers without Content-Length."""
    return {name: value for name, value in headers.items() if name != "Content-Length"}


def _list_invoke_headers(answer: V2Answer, json_header_size: int | None) -> dict[str, str]:
    """Return the headers of an answer in SageMaker's contract."""
    headers = {"Content-Type": binary.content_type(json_header_size)}
    if "Content-Encoding" in answer.headers:
        headers["Content-Encoding"] = answer.headers["Content-Encoding"]
    return headers


async def _rename(
    pieces: AsyncIterator[bytes],
    size: int | None,  # of the JSON in front of raw tensors
    length: int | None,
    record: ModelRecord,
) -> tuple[AsyncIterator[bytes], int | None, int | None]:
    """Put the client's name of the model into an answer; return the pieces, the size and the length
    that the answer has then.
    """
    gathered = binary.Begin(record.name)
    async for piece in pieces:
        gathered.add(piece)
        if gathered.has_name:
            break
    begin = gathered.join()
    named, size = binary.put_name_back(begin, size, record.name, record.asked_for)
    if length is not None:
        length += len(named) - len(begin)
    return _prepend(named, pieces), size, length


async def _refuse_several(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Return the pieces of an answer of generate. Raise InvalidRequest if they say that the model
    gave several answers, or none.
    """
    begin = b""
    async for piece in pieces:
        begin += piece
        if len(begin) >= len(_SEVERAL_ANSWERS):
            break
    if begin.startswith(_SEVERAL_ANSWERS):
        rest = b"".join([piece async for piece in pieces])
        raise InvalidRequest(str(json.loads(begin + rest)["error"]))
    return _prepend(begin, pieces)


async def _prepend(begin: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the begin of an answer, and then the rest of its pieces."""
    yield begin
    async for piece in pieces:
        yield piece


async def iterate_events(chunks: AsyncIterator[bytes], record: ModelRecord) -> AsyncIterator[bytes]:
    """Yield each event of generate_stream's answer, with the client's name of the model in it."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(_EVENT_END)
        for event in events:
            names = record.name, record.asked_for
            named = binary.put_name_back(event, None, *names)[0] if record.is_renamed else event
            yield named + _EVENT_END
    if rest:
        yield rest


async def iterate_generated(
    answer: V2Answer,  # of generate_stream
    record: ModelRecord,
    faults: Faults,
) -> AsyncIterator[bytes]:
    """Yield each event, with the client's name of the model in it. Raises the error that an event
    reports.
    """
    async for event in iterate_events(answer.chunks(), record):
        if event.startswith(_ERROR_EVENT):
            # a model's error may have bytes of any encoding
            payload = event.removeprefix(_EVENT_NAME).decode(errors="replace")
            text = str(json.loads(payload)["error"])
            raise faults.explain_grpc_inference(
                "INTERNAL", text, name=record.name, model_id=record.id
            )
        yield event
