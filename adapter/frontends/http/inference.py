"""Inferences that a coroutine awaits, as something of them is not plain: the model, the body or the
answer. Plain ones never come here (http/fast_path.py).
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing
from functools import partial

from aiohttp import HttpVersion11, web

from adapter.control.door import Lease, ModelRecord
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.model import ModelId
from adapter.errors import BackendError, CapacityError, InvalidRequest, NotJson
from adapter.frontends.http import binary
from adapter.frontends.http.application import application_of
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
from adapter.frontends.http.instrumentation import FORWARDED, call_headers, passed_on
from adapter.frontends.http.middleware import chunks_of, error_format_of, held_body, whole_body
from adapter.protocols.codecs.base import Source
from adapter.protocols.tensors import ContentTypes
from adapter.runtime.byte_budget import ByteBudget
from adapter.telemetry.traffic import waiting_for_caller

_HEADER_LENGTH = "Inference-Header-Content-Length"
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
_EVENT_END = b"\n\n"
_INFER, _GENERATE_STREAM = "infer", "generate_stream"
# Triton 2.51 says so with 200, of a decoupled model that did not answer exactly once.
_SEVERAL_ANSWERS = b'{"error":"generate expects'
# Bodies up to this size are taken whole: one write each way instead of a stream.
_WHOLE_BYTES = 2**20


class SlowPath:
    """Holds what all inferences that aiohttp serves share. `default_model` is what /invocations
    serves in single-model mode. `operation`: what Triton is asked for an invocation: infer,
    generate or generate_stream.
    """

    def __init__(
        self,
        dataplane: V2DataPlane,
        contracts: ContainerContracts,
        *,
        max_body_bytes: int,
        default_model: ModelId | None,
        budget: ByteBudget,
        operation: str = _INFER,
        shares_memory: bool = False,  # as in V2Call
    ) -> None:
        self.shares_memory = shares_memory
        self.dataplane, self.contracts, self.budget = dataplane, contracts, budget
        self.max_body, self.operation = max_body_bytes, operation
        self._default_model = default_model

    async def invoke(self, request: web.BaseRequest) -> web.StreamResponse:
        """An inference of SageMaker's container contract."""
        model_id = request["model_id"] = request.get("model_id", self._default_model)
        if model_id is None:
            raise InvalidRequest(
                "many models are served here: POST /models/{model_name}/invoke, "
                "or start with --single-model"
            )
        contract = self.contracts.sagemaker
        return await self.attempt(contract, model_id, request, AwaitedInference.invoke)

    async def infer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer an inference of V2; `path` stands behind the model's name."""
        send = partial(AwaitedInference.infer, path=path)
        return await self.attempt(self.contracts.v2, request["model_id"], request, send)

    async def attempt(
        self,
        contract: Contract,
        model_id: ModelId,
        request: web.BaseRequest,
        send: "Callable[[AwaitedInference], Awaitable[web.StreamResponse]]",
        body: bytes | None = None,
    ) -> web.StreamResponse:
        """Lease the model as its contract says, and have `send` answer with it. Whatever is no good
        answer of Triton's is raised as one of our errors.
        """
        lease = await contract.wait(model_id, request)
        try:
            with lease, ExitStack() as held:
                return await send(AwaitedInference(self, request, lease, held, body))
        except (BackendError, CapacityError) as error:
            raise await lease.judge(error) from error


class AwaitedInference:
    """One inference of a coroutine. `body`: where it was read before; `held` is closed when the
    inference is over.
    """

    def __init__(
        self,
        path: SlowPath,
        request: web.BaseRequest,
        lease: Lease,
        held: ExitStack,
        body: bytes | None,
    ) -> None:
        self.request, self.lease, self.held, self.body = request, lease, held, body
        self.path = path
        self._is_stream = False
        self._record = lease.record
        self._type = request.headers.get("Content-Type", "")
        self._accept = ", ".join(request.headers.getall("Accept", []))
        self._encoding = request.headers.get("Content-Encoding", "").strip().lower()
        self._is_packed = self._encoding not in {"", "identity"}
        if self._encoding not in _ENCODINGS:
            why = f"Content-Encoding {self._encoding!r}; gzip and deflate are understood"
            raise InvalidRequest(why)

    # -- SageMaker's ------------------------------------------------------------------------

    async def invoke(self) -> web.StreamResponse:
        types = self._record.content_types
        if self.path.operation != _INFER:
            return await self._generate(self.path.operation)
        try:
            if types is not None and is_typed(self._type, self._accept):
                return await self._convert(types)
            headers = self._invocation_headers()
            sent = _not_empty(await self._read_body())
            async with self.forward("/infer", headers, sent) as found:
                return await self._respond(found)
        except NotJson as error:
            raise explained(error, self.request.headers, types) from error

    async def _convert(self, types: ContentTypes) -> web.StreamResponse:
        """Convert by the model's own content types (docs/content-types.md)."""
        codec = codec_for(self._type, types, is_packed=self._is_packed)
        is_choosing = codec is None or codec.may_be_json
        wanted = answer_type(self._accept, types, is_choosing=is_choosing)
        headers = self._invocation_headers() | {"Accept-Encoding": "identity"}
        # these become whole before Triton is sent the first byte of them
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
                headers, sent = headers | asked.headers, asked.body
            async with self.forward("/infer", headers, _not_empty(sent)) as found:
                if wanted in {JSON, binary.MEDIA_TYPE}:
                    return await self._respond(found, is_binary=wanted == binary.MEDIA_TYPE)
                answer = await as_answer(found, wanted)
                if isinstance(answer.body, bytes):
                    return web.Response(body=answer.body, headers=answer.headers)
                size = int(answer.headers["Content-Length"])
                return await self._stream(answer.headers, size, answer.body)

    async def _generate(self, operation: str) -> web.StreamResponse:
        """An invocation as a call of Triton's generate extension, which takes JSON alone."""
        headers = self._invocation_headers()
        if headers.pop(_HEADER_LENGTH, None) is not None:
            raise InvalidRequest(f"inference_type is {operation}, which takes JSON alone")
        async with self.forward(f"/{operation}", headers, await self._read_body()) as found:
            return await self._respond(found, is_v2=True, is_one=not self._is_stream)

    # -- V2 ---------------------------------------------------------------------------------

    async def infer(self, path: str) -> web.StreamResponse:
        given = self.request.headers
        if len(given.getall(_HEADER_LENGTH, ())) > 1:
            raise InvalidRequest(f"more than one {_HEADER_LENGTH}")
        headers = call_headers(given, is_rewritten=self._record.is_renamed)
        self._put_length(headers)
        async with self.forward(path, headers, await self._read_body()) as found:
            return await self._respond(found, is_v2=True)

    # -- the request ------------------------------------------------------------------------

    def _invocation_headers(self) -> dict[str, str]:
        given = self.request.headers
        headers = {name: value for name in FORWARDED if (value := given.get(name)) is not None}
        if self._record.is_renamed:
            # the answer names the model, and its name will have to be put back
            headers.pop("Accept-Encoding", None)
        length = None if self._is_packed else self.request.content_length
        if (size := binary.json_header_bytes(self._type, length)) is not None:
            headers[_HEADER_LENGTH] = str(size)
        self._put_length(headers)
        return headers

    def _put_length(self, headers: dict[str, str]) -> None:
        """Add the length of the caller's body, if it was announced."""
        length = self.request.content_length
        if length is not None:
            headers["Content-Length"] = str(length)

    async def _read_body(self, *, is_kept: bool = False) -> bytes | AsyncIterator[bytes]:
        """Return the whole body if it was read before or is small, else a stream. A stream counts
        until it has been read, or until `held` is closed if it `is_kept`; never for longer than
        `held` is open.
        """
        request, most = self.request, self.path.max_body
        if self.body is not None:
            return self.body
        if not request.content.is_eof():
            front = application_of(request).client
            self.lease.arrives(lambda: front.refuse("the model is being unloaded"))
        length = request.content_length if request.can_read_body else 0
        is_encoded = "Content-Encoding" in request.headers
        if length is None or length > _WHOLE_BYTES or (length and is_encoded):
            return self._counted(chunks_of(request, most), is_kept=is_kept)
        if request.content.is_eof():
            return await whole_body(request, most)
        with waiting_for_caller(), held_body(request, self.path.budget) as counted:
            return await whole_body(request, most, counted)

    async def _counted(
        self, chunks: AsyncIterator[bytes], *, is_kept: bool
    ) -> AsyncIterator[bytes]:
        """Triton holds what it has of a body until the body is complete."""
        counted = self.held.enter_context(held_body(self.request, self.path.budget))
        async for piece in chunks:
            await counted.take(len(piece))
            yield piece
        counted.arrived()
        if not is_kept:
            counted.end()

    def forward(
        self, path: str, headers: dict[str, str], body: bytes | AsyncIterator[bytes]
    ) -> AbstractAsyncContextManager[V2Answer]:
        self._is_stream = path.endswith(_GENERATE_STREAM)
        if self._is_stream:
            self.held.enter_context(self.path.budget.open_stream())
        path = f"/models/{self._record.name}{path}"
        end = application_of(self.request).client.abort  # who does not read gets no error
        call = V2Call(
            "POST",
            path,
            headers,
            body,
            is_stream=self._is_stream,
            on_cut=end,
            shares_memory=self.path.shares_memory,
        )
        return self.path.dataplane.forward(call, self.lease)

    # -- the answer -------------------------------------------------------------------------

    async def _respond(
        self,
        found: V2Answer,
        *,
        is_v2: bool = False,
        is_binary: bool = False,
        is_one: bool = False,
    ) -> web.StreamResponse:
        """Return Triton's answer under the caller's name of the model. `is_v2`: keep all headers.
        `is_binary`: use SageMaker's binary media type, even if the whole body is JSON. `is_one`:
        raise InvalidRequest if the model gave several answers, or none.
        """
        record, size, length = self._record, found.json_header_bytes, found.content_length
        back: bytes | None = None
        if record.is_renamed and self._is_stream:
            events = events_of(found.chunks(), record)
            return await self._stream(passed_on(found.headers), None, events)
        if record.is_renamed:
            back, size = binary.put_name_back(
                await found.read(), size, record.name, record.asked_for
            )
        elif is_one or (length is not None and length <= _WHOLE_BYTES):
            back = await found.read()
        if is_one and back is not None and back.startswith(_SEVERAL_ANSWERS):
            raise InvalidRequest(str(json.loads(back)["error"]))
        if is_binary and size is None:
            size = length if back is None else len(back)
        headers = passed_on(found.headers) if is_v2 else _invoke_headers(found, size)
        if is_v2 and record.is_renamed and size is not None:
            headers[_HEADER_LENGTH] = str(size)
        if back is None:
            return await self._stream(headers, length, found.chunks())
        return web.Response(body=back, headers=headers)

    async def _stream(
        self, headers: dict[str, str], length: int | None, chunks: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        response = await self.begin_answer(headers, length)
        with waiting_for_caller():
            async for piece in chunks:
                await response.write(piece)
        return response

    async def begin_answer(
        self, headers: dict[str, str], length: int | None = None
    ) -> web.StreamResponse:
        """`length` None: in chunks, which HTTP/1.0 does not know: its connection ends the body."""
        request, response = self.request, web.StreamResponse(headers=headers)
        response.headers.update(error_format_of(request).headers(request))
        if length is not None:
            response.content_length = length
        elif request.version != HttpVersion11:
            response.force_close()
        if not application_of(request).may_be_kept(request):
            response.force_close()
        await response.prepare(request)
        return response


def _not_empty(body: bytes | AsyncIterator[bytes]) -> bytes | AsyncIterator[bytes]:
    """Refuse an empty body, which Triton takes for a tensor without values."""
    if not body:
        raise InvalidRequest("a body is needed")
    return body if isinstance(body, bytes) else _not_without_pieces(body)


async def _not_without_pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    piece = b""
    async for piece in body:
        yield piece
    _not_empty(piece)


def _invoke_headers(found: V2Answer, json_header_size: int | None) -> dict[str, str]:
    headers = {"Content-Type": binary.content_type(json_header_size)}
    if "Content-Encoding" in found.headers:
        headers["Content-Encoding"] = found.headers["Content-Encoding"]
    return headers


async def events_of(chunks: AsyncIterator[bytes], record: ModelRecord) -> AsyncIterator[bytes]:
    """Yield each event of generate_stream, under the caller's name of the model."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(_EVENT_END)
        for event in events:
            names = record.name, record.asked_for
            named = binary.put_name_back(event, None, *names)[0] if record.is_renamed else event
            yield named + _EVENT_END
    if rest:
        yield rest
