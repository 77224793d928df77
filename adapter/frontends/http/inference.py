"""Inferences over HTTP, SageMaker's and V2's, as aiohttp serves them: names, leases, bodies on
their way to Triton. Those that are plain never come here (http/fast_path.py).
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import lru_cache

from aiohttp import HttpVersion11, web

from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.inflight import InflightBytes
from adapter.core.model import ModelId, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.errors import AdapterError, BackendError, CapacityError, InvalidRequest
from adapter.frontends.http import binary
from adapter.frontends.http.application import application_of
from adapter.frontends.http.middleware import chunks_of, whole_body
from adapter.frontends.http.observer import (
    FORWARDED,
    call_headers,
    echoed_headers,
    passed_on,
    path_segments,
)

_HEADER_LENGTH = "Inference-Header-Content-Length"
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})
_EVENT_END = b"\n\n"
# Bodies up to this size are taken whole: one write each way instead of a stream.
_WHOLE_BYTES = 2**20
# What a body may become whose length nobody has said, or that is compressed.
_UNKNOWN_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Route:
    """`model_id` is None for the one model of single-model mode. `path` is what stands behind the
    model's name in V2.
    """

    frontend: str
    operation: str
    model_id: ModelId | None
    path: str = ""


@lru_cache(512)
def route_of(raw_target: bytes) -> Route | None:
    """None for what is no inference, or is one of no model that there can be."""
    try:
        return _route(path_segments(raw_target.decode()))
    except (AdapterError, UnicodeDecodeError):
        return None


def _route(segments: list[str]) -> Route | None:
    if len(segments) > 1 and segments[-1] == "":
        segments.pop()  # one trailing slash means nothing
    match segments:
        case ["invocations"]:
            return Route("sagemaker", "invocations", None)
        case ["models", name, "invoke"]:
            return Route("sagemaker", "invoke", parse_model_id(name))
        case ["v2", "models", name, *versions, "infer" | "generate" | "generate_stream" as call]:
            match versions:
                case []:
                    return Route("v2", call, parse_model_id(name), f"/{call}")
                case ["versions", number] if number.isascii() and number.isdigit():
                    path = f"/versions/{number}/{call}"
                    return Route("v2", call, parse_model_id(name), path)
    return None


class Inferences:
    """`default_model` is what /invocations serves in single-model mode.

    `load_wait_seconds`: how long a call of V2 waits for the end of its model's load.
    """

    def __init__(
        self,
        control: ModelControl,
        dataplane: V2DataPlane,
        *,
        load_wait_seconds: float,
        max_body_bytes: int,
        default_model: ModelId | None,
        inflight: InflightBytes,
    ) -> None:
        self._control = control
        self._dataplane = dataplane
        self._load_wait = load_wait_seconds
        self._max_body = max_body_bytes
        self._default_model = default_model
        self._inflight = inflight

    async def serve(self, route: Route, request: web.BaseRequest) -> web.StreamResponse:
        """Whatever is no good answer of Triton's is raised as one of our errors."""
        request["frontend"], request["operation"] = route.frontend, route.operation
        model_id = request["model_id"] = route.model_id or self._default_model
        if model_id is None:
            raise InvalidRequest(
                "many models are served here: POST /models/{model_name}/invoke, "
                "or start with --single-model"
            )
        try:
            if route.frontend == "v2":
                lease = await self._control.serving(model_id, self._load_wait)
                with lease:
                    return await self._infer(route.path, lease, request)
            lease = self._control.lease(model_id)
            with lease:
                return await self._invoke(lease, request)
        except (BackendError, CapacityError) as error:
            raise await self._control.judged(error, model_id) from error

    async def _body_of(
        self, request: web.BaseRequest, lease: Lease
    ) -> bytes | AsyncIterator[bytes]:
        """Whole when small, else a stream."""
        if not request.content.is_eof():
            front = application_of(request).front
            lease.arrives(lambda: front.refuse("the model is being unloaded"))
        length = request.content_length if request.can_read_body else 0
        is_packed = "Content-Encoding" in request.headers
        if length is None or length > _WHOLE_BYTES or (length and is_packed):
            size = _UNKNOWN_BYTES if length is None or is_packed else length
            turn = application_of(request).turn = asyncio.Event()
            return self._in_turn(chunks_of(request, self._max_body), size, turn)
        return await whole_body(request, self._max_body)

    async def _in_turn(
        self, body: AsyncIterator[bytes], size: int, turn: asyncio.Event
    ) -> AsyncIterator[bytes]:
        """Once so much more may be on its way to Triton."""
        claim = self._inflight.claim(size, turn.set)
        try:
            await turn.wait()
            async for piece in body:
                yield piece
        finally:
            claim.end()

    # -- SageMaker's ------------------------------------------------------------------------

    async def _invoke(self, lease: Lease, request: web.BaseRequest) -> web.StreamResponse:
        record = lease.record
        headers = _told(record, request)
        body = await self._body_of(request, lease)
        if isinstance(body, bytes):
            _check_is_there(body)
        else:
            body = _not_empty(body)
        call = V2Call("POST", f"/models/{record.name}/infer", headers, body)
        async with self._dataplane.forward(call, lease) as found:
            size, length = found.json_header_bytes, found.content_length
            if record.is_renamed:
                body, size = binary.put_name_back(await found.read(), size, record.name, record.id)
            elif length is not None and length <= _WHOLE_BYTES:
                body = await found.read()
            else:
                headers = _invoke_headers(found, size)
                return await _streamed(request, 200, headers, length, found.chunks())
            return web.Response(body=body, headers=_invoke_headers(found, size))

    # -- V2 ---------------------------------------------------------------------------------

    async def _infer(self, path: str, lease: Lease, request: web.BaseRequest) -> web.StreamResponse:
        record = lease.record
        headers = call_headers(request.headers, is_rewritten=record.is_renamed)
        if request.content_length is not None:
            headers["Content-Length"] = str(request.content_length)
        body = await self._body_of(request, lease)
        is_stream = path.endswith("/generate_stream")
        call = V2Call("POST", f"/models/{record.name}{path}", headers, body, is_stream=is_stream)
        async with self._dataplane.forward(call, lease) as found:
            return await _relay(request, record, found, is_stream=is_stream)


def _check_is_there(body: bytes) -> None:
    """Triton takes none for a tensor without values."""
    if not body:
        raise InvalidRequest("a body is needed")


async def _not_empty(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    some = b""
    async for some in body:
        yield some
    _check_is_there(some)


def _told(record: ModelRecord, request: web.BaseRequest) -> dict[str, str]:
    """The headers of an invocation on its way to Triton."""
    given, length = request.headers, request.content_length
    headers = {name: value for name in FORWARDED if (value := given.get(name)) is not None}
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise InvalidRequest(f"Content-Encoding {encoding!r}; gzip and deflate are understood")
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
            await found.read(), found.json_header_bytes, record.name, record.id
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
    response.headers.update(echoed_headers(request.headers))
    if length is not None:
        response.content_length = length
    elif request.version != HttpVersion11:
        response.force_close()
    if not application_of(request).may_be_kept(request):
        response.force_close()
    await response.prepare(request)
    async for piece in chunks:
        await response.write(piece)
    return response


async def _renamed(chunks: AsyncIterator[bytes], record: ModelRecord) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(_EVENT_END)
        for event in events:
            yield binary.put_name_back(event, None, record.name, record.id)[0] + _EVENT_END
    if rest:
        yield rest
