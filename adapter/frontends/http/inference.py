"""Inferences over HTTP, SageMaker's and V2's, as aiohttp serves them: names, leases, bodies on
their way to Triton. Those that are plain never come here (http/fast_path.py).
"""

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from adapter.control.lease import Lease, Serving
from adapter.control.models import ModelControl
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.model import ModelId, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.errors import AdapterError, BackendError, CapacityError, InvalidRequest, NotJson
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
from adapter.frontends.http.instrumentation import FORWARDED, call_headers, passed_on, path_segments
from adapter.frontends.http.middleware import chunks_of, error_format_of, held_body, whole_body
from adapter.frontends.routes import INFERENCE, Match, Route, bare, find
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


@dataclass(frozen=True, slots=True)
class Target:
    """The target of an inference. `model_id` is None for the one model of single-model mode. `path`
    is what stands behind the model's name in V2. `media_type`: of the platform that a call of V2
    came through, in which it says where raw tensors begin.
    """

    frontend: str
    operation: str
    model_id: ModelId | None
    path: str = ""
    media_type: str = ""


def target_of(raw: bytes) -> Target | None:
    """Return the inference that a POST of this path is, but for those of the endpoint; None for
    what is none, or is one of no model that there can be.
    """
    try:
        match = find(bare(path_segments(raw.decode())))
        route = None if match is None else match.methods.get("POST")
        if match is None or route is None or route.scope is not INFERENCE:
            return None
        return None if route.contract == "endpoint" else of_match(match, route)
    except (AdapterError, UnicodeDecodeError):
        return None


def of_match(match: Match, route: Route) -> Target:
    """Raise InvalidRequest for a name that no model can have."""
    name = match.names.get("model_name")
    path = match.below_model() if route.contract == "v2" else ""
    model_id = None if name is None else parse_model_id(name)
    return Target(route.contract, route.operation, model_id, path)


class Inferences:
    """`default_model` is what /invocations serves in single-model mode. `operation`: what Triton is
    asked for an invocation: infer, generate or generate_stream.

    `load_wait_seconds`: how long a call of V2 waits for the end of its model's load. `serving`: how
    V2 comes to its models, by default those that are loaded.
    """

    def __init__(
        self,
        control: ModelControl,
        dataplane: V2DataPlane,
        *,
        load_wait_seconds: float,
        max_body_bytes: int,
        default_model: ModelId | None,
        budget: ByteBudget,
        serving: Serving | None = None,
        operation: str = _INFER,
    ) -> None:
        self._control = control
        self._serving = serving or control.serving
        self._dataplane = dataplane
        self._load_wait = load_wait_seconds
        self._max_body = max_body_bytes
        self._default_model = default_model
        self._budget = budget
        self._operation = operation

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match: Match = request["match"]
        return await self.serve(of_match(match, match.methods["POST"]), request)

    async def serve(self, target: Target, request: web.BaseRequest) -> web.StreamResponse:
        """Whatever is no good answer of Triton's is raised as one of our errors."""
        request["frontend"], request["operation"] = target.frontend, target.operation
        model_id = request["model_id"] = target.model_id or self._default_model
        if model_id is None:
            raise InvalidRequest(
                "many models are served here: POST /models/{model_name}/invoke, "
                "or start with --single-model"
            )
        try:
            if target.frontend == "v2":
                lease = await self._serving(model_id, self._load_wait)
                with lease, ExitStack() as held:
                    return await self._infer(target, lease, request, held)
            lease = await self._control.serving(model_id, 0)
            with lease:
                return await self.invoke(lease, request)
        except (BackendError, CapacityError) as error:
            raise await self._control.judged(error, model_id) from error

    async def _body_of(
        self,
        request: web.BaseRequest,
        lease: Lease,
        held: ExitStack,
        body: bytes | None,
        *,
        is_kept: bool = False,
    ) -> bytes | AsyncIterator[bytes]:
        """Return `body` if it was read before, the whole body if it is small, else a stream. A
        stream counts until it has been read, or until `held` is closed if it `is_kept`; never for
        longer than `held` is open.
        """
        if body is not None:
            return body
        if not request.content.is_eof():
            front = application_of(request).client
            lease.arrives(lambda: front.refuse("the model is being unloaded"))
        length = request.content_length if request.can_read_body else 0
        is_packed = "Content-Encoding" in request.headers
        if length is None or length > _WHOLE_BYTES or (length and is_packed):
            chunks = chunks_of(request, self._max_body)
            return self._counted(chunks, request, held, is_kept=is_kept)
        if request.content.is_eof():
            return await whole_body(request, self._max_body)
        with waiting_for_caller(), held_body(request, self._budget) as counted:
            return await whole_body(request, self._max_body, counted)

    async def _counted(
        self,
        chunks: AsyncIterator[bytes],
        request: web.BaseRequest,
        held: ExitStack,
        *,
        is_kept: bool,
    ) -> AsyncIterator[bytes]:
        """Triton holds what it has of a body until the body is complete."""
        counted = held.enter_context(held_body(request, self._budget))
        async for piece in chunks:
            await counted.take(len(piece))
            yield piece
        counted.arrived()
        if not is_kept:
            counted.end()

    # -- SageMaker's ------------------------------------------------------------------------

    async def invoke(
        self, lease: Lease, request: web.BaseRequest, body: bytes | None = None
    ) -> web.StreamResponse:
        """`body`: where it was read before."""
        types = lease.record.content_types
        with ExitStack() as held:
            if self._operation != _INFER:
                return await self._generate(lease, request, body, held)
            try:
                if types is not None and is_typed(_content_type(request), _accept(request)):
                    return await self._invoke_typed(types, lease, request, body, held)
                return await self._invoke_v2(lease, request, body, held)
            except NotJson as error:
                raise explained(error, request.headers, types) from error

    async def _invoke_v2(
        self, lease: Lease, request: web.BaseRequest, body: bytes | None, held: ExitStack
    ) -> web.StreamResponse:
        record = lease.record
        headers = _model_headers(record, request)
        sent = await self._body_of(request, lease, held, body)
        if isinstance(sent, bytes):
            _check_is_there(sent)
        else:
            sent = _not_empty(sent)
        call = V2Call("POST", f"/models/{record.name}/infer", headers, sent)
        async with self._dataplane.forward(call, lease) as found:
            return await _invoked(request, record, found)

    async def _invoke_typed(
        self,
        types: ContentTypes,
        lease: Lease,
        request: web.BaseRequest,
        body: bytes | None,
        held: ExitStack,
    ) -> web.StreamResponse:
        """Convert by the model's own content types (docs/content-types.md)."""
        record = lease.record
        is_packed = _encoding_of(request) not in {"", "identity"}
        codec = codec_for(_content_type(request), types, is_packed=is_packed)
        is_choosing = codec is None or codec.may_be_json
        wanted = answer_type(_accept(request), types, is_choosing=is_choosing)
        headers = _model_headers(record, request) | {"Accept-Encoding": "identity"}
        # these become whole before Triton is sent the first byte of them
        holds_whole = codec is not None and codec.holds_whole_body
        is_kept = holds_whole or request.content_length is None
        sent = await self._body_of(request, lease, held, body, is_kept=is_kept)
        async with aclosing(Source(sent)) as source:
            if codec is not None and codec.may_be_json:
                if await source.begins_with_brace():
                    codec = None
                else:
                    refuse_unlisted(codec, types)
            if codec is None:
                sent = source.pieces(0)
                sent = b"".join([p async for p in sent]) if source.is_whole else _not_empty(sent)
            else:
                length = len(sent) if isinstance(sent, bytes) else request.content_length
                asked = await as_request(codec, source, length, types, wanted)
                headers, sent = headers | asked.headers, asked.body
            if isinstance(sent, bytes):
                _check_is_there(sent)
            call = V2Call("POST", f"/models/{record.name}/infer", headers, sent)
            async with self._dataplane.forward(call, lease) as found:
                return await _invoked_typed(request, record, found, wanted)

    async def _generate(
        self, lease: Lease, request: web.BaseRequest, body: bytes | None, held: ExitStack
    ) -> web.StreamResponse:
        """An invocation as a call of Triton's generate extension, which takes JSON alone."""
        record = lease.record
        headers = _model_headers(record, request)
        if headers.pop(_HEADER_LENGTH, None) is not None:
            raise InvalidRequest(f"inference_type is {self._operation}, which takes JSON alone")
        sent = await self._body_of(request, lease, held, body)
        is_stream = self._operation == _GENERATE_STREAM
        path = f"/models/{record.name}/{self._operation}"
        end = application_of(request).client.abort
        call = V2Call("POST", path, headers, sent, is_stream=is_stream, on_cut=end)
        if is_stream:
            held.enter_context(self._budget.open_stream())
        async with self._dataplane.forward(call, lease) as found:
            if is_stream:
                return await _relay(request, record, found, is_stream=True)
            back = await found.read()
            if back.startswith(_SEVERAL_ANSWERS):
                raise InvalidRequest(str(json.loads(back)["error"]))
            if record.is_renamed:
                back, _ = binary.put_name_back(back, None, record.name, record.asked_for)
            return web.Response(body=back, headers=passed_on(found.headers))

    # -- V2 ---------------------------------------------------------------------------------

    async def _infer(
        self, target: Target, lease: Lease, request: web.BaseRequest, held: ExitStack
    ) -> web.StreamResponse:
        record, path = lease.record, target.path
        is_packed = _encoding_of(request) not in {"", "identity"}
        if len(request.headers.getall(_HEADER_LENGTH, ())) > 1:
            raise InvalidRequest(f"more than one {_HEADER_LENGTH}")
        headers = call_headers(request.headers, is_rewritten=record.is_renamed)
        if target.media_type:
            length = None if is_packed else request.content_length
            kind = request.headers.get("Content-Type", "")
            size = binary.json_header_bytes(kind, length, target.media_type)
            if size is not None:
                headers[_HEADER_LENGTH] = str(size)
        if request.content_length is not None:
            headers["Content-Length"] = str(request.content_length)
        body = await self._body_of(request, lease, held, None)
        is_stream = path.endswith("/generate_stream")
        path = f"/models/{record.name}{path}"
        end = application_of(request).client.abort  # a caller who does not read gets no error
        call = V2Call("POST", path, headers, body, is_stream=is_stream, on_cut=end)
        if is_stream:
            held.enter_context(self._budget.open_stream())
        async with self._dataplane.forward(call, lease) as found:
            return await _relay(request, record, found, is_stream=is_stream)


def _content_type(request: web.BaseRequest) -> str:
    return request.headers.get("Content-Type", "")


def _accept(request: web.BaseRequest) -> str:
    return ", ".join(request.headers.getall("Accept", []))


async def _invoked(
    request: web.BaseRequest, record: ModelRecord, found: V2Answer, *, is_binary: bool = False
) -> web.StreamResponse:
    """Triton's answer to an invocation. `is_binary`: it is told as SageMaker's media type, even
    where all of it is JSON.
    """
    size, length = found.json_header_bytes, found.content_length
    if record.is_renamed:
        back, size = binary.put_name_back(await found.read(), size, record.name, record.asked_for)
    elif length is not None and length <= _WHOLE_BYTES:
        back = await found.read()
    else:
        size = length if is_binary and size is None else size
        headers = _invoke_headers(found, size)
        return await _streamed(request, 200, headers, length, found.chunks())
    size = len(back) if is_binary and size is None else size
    return web.Response(body=back, headers=_invoke_headers(found, size))


async def _invoked_typed(
    request: web.BaseRequest, record: ModelRecord, found: V2Answer, wanted: str
) -> web.StreamResponse:
    """Return Triton's answer as the media type that the caller wants."""
    if wanted in {JSON, binary.MEDIA_TYPE}:
        return await _invoked(request, record, found, is_binary=wanted == binary.MEDIA_TYPE)
    answer = await as_answer(found, wanted)
    if isinstance(answer.body, bytes):
        return web.Response(body=answer.body, headers=answer.headers)
    size = int(answer.headers["Content-Length"])
    return await _streamed(request, 200, answer.headers, size, answer.body)


def _check_is_there(body: bytes) -> None:
    """Triton takes none for a tensor without values."""
    if not body:
        raise InvalidRequest("a body is needed")


async def _not_empty(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    some = b""
    async for some in body:
        yield some
    _check_is_there(some)


def _model_headers(record: ModelRecord, request: web.BaseRequest) -> dict[str, str]:
    """The headers of an invocation on its way to Triton."""
    given, length = request.headers, request.content_length
    headers = {name: value for name in FORWARDED if (value := given.get(name)) is not None}
    encoding = _encoding_of(request)
    if encoding:
        headers["Content-Encoding"] = encoding  # Triton knows no GZIP
    is_packed = encoding not in {"", "identity"}
    size = binary.json_header_bytes(given.get("Content-Type", ""), None if is_packed else length)
    if size is not None:
        headers[_HEADER_LENGTH] = str(size)
    if length is not None:
        headers["Content-Length"] = str(length)
    if record.is_renamed:
        # the answer names the model, and its name will have to be put back
        headers.pop("Accept-Encoding", None)
    return headers


def _encoding_of(request: web.BaseRequest) -> str:
    """InvalidRequest for one that Triton does not know."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise InvalidRequest(f"Content-Encoding {encoding!r}; gzip and deflate are understood")
    return encoding


def _invoke_headers(found: V2Answer, json_header_size: int | None) -> dict[str, str]:
    headers = {"Content-Type": binary.content_type(json_header_size)}
    if "Content-Encoding" in found.headers:
        headers["Content-Encoding"] = found.headers["Content-Encoding"]
    return headers


async def _relay(
    request: web.BaseRequest, record: ModelRecord, found: V2Answer, *, is_stream: bool
) -> web.StreamResponse:
    """Triton's answer as it came, each piece as soon as it is there; the caller's name in it."""
    status, headers, length = found.status, passed_on(found.headers), found.content_length
    if record.is_renamed and is_stream:
        return await _streamed(request, status, headers, None, _renamed(found.chunks(), record))
    if record.is_renamed:
        body, size = binary.put_name_back(
            await found.read(), found.json_header_bytes, record.name, record.asked_for
        )
        if size is not None:
            headers[_HEADER_LENGTH] = str(size)
        return web.Response(status=status, headers=headers, body=body)
    if length is not None and length <= _WHOLE_BYTES:
        return web.Response(status=status, headers=headers, body=await found.read())
    return await _streamed(request, status, headers, length, found.chunks())


async def _streamed(
    request: web.BaseRequest,
    status: int,
    headers: dict[str, str],
    length: int | None,
    chunks: AsyncIterator[bytes],
) -> web.StreamResponse:
    """`length` None: in chunks, which HTTP/1.0 does not know: its connection ends the body."""
    response = web.StreamResponse(status=status, headers=headers)
    response.headers.update(error_format_of(request).headers(request))
    if length is not None:
        response.content_length = length
    elif request.version != HttpVersion11:
        response.force_close()
    if not application_of(request).may_be_kept(request):
        response.force_close()
    await response.prepare(request)
    with waiting_for_caller():
        async for piece in chunks:
            await response.write(piece)
    return response


async def _renamed(chunks: AsyncIterator[bytes], record: ModelRecord) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(_EVENT_END)
        for event in events:
            yield binary.put_name_back(event, None, record.name, record.asked_for)[0] + _EVENT_END
    if rest:
        yield rest
