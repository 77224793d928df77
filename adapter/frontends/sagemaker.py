"""SageMaker's multi-model container contract; docs/sagemaker.md has it call by call."""

import base64
import binascii
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from adapter.control import ModelControl
from adapter.core.infer import DataPlane, InferAnswer, InferRequest
from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.errors import BackendError, CapacityError, InvalidRequest
from adapter.frontends import binary
from adapter.frontends.body import body_chunks, whole_body
from adapter.frontends.http import (
    Handler,
    answer,
    echo,
    ids_of,
    method_not_allowed,
    path_segments,
)

_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
_LIMIT = re.compile(r"[0-9]{1,6}")

# Bodies up to this size are taken whole: one write each way instead of a stream.
_WHOLE_BYTES = 2**20

_ENCODINGS = frozenset({"", "identity", "gzip", "deflate"})


class SageMaker:
    """`default_model` is what /invocations serves in single-model mode."""

    def __init__(
        self,
        control: ModelControl,
        dataplane: DataPlane,
        *,
        is_well: Callable[[], bool],
        max_body_bytes: int,
        max_control_body_bytes: int,
        default_model: ModelId | None,
    ) -> None:
        self._control = control
        self._dataplane = dataplane
        self._is_well = is_well
        self._max_body = max_body_bytes
        self._max_control_body = max_control_body_bytes
        self._default_model = default_model

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        segments = path_segments(request)
        if len(segments) > 1 and segments[-1] == "":
            segments.pop()  # one trailing slash means nothing
        match segments:
            case ["ping"]:
                methods: dict[str, Handler] = {"GET": self._pong}
            case ["models"]:
                methods = {"GET": self._list, "POST": self._load}
            case ["invocations"]:
                methods = {"POST": self._invocations}
            case ["models", name]:
                request["model_id"] = parse_model_id(name)
                methods = {"GET": self._get, "DELETE": self._unload}
            case ["models", name, "invoke"]:
                request["model_id"] = parse_model_id(name)
                methods = {"POST": self._invoke}
            case _:
                raise InvalidRequest(f"there is nothing at {request.raw_path[:200]!r}")
        return await self._dispatch(request, methods)

    async def _dispatch(
        self, request: web.BaseRequest, methods: dict[str, Handler]
    ) -> web.StreamResponse:
        method = "GET" if request.method == "HEAD" else request.method
        handler = methods.get(method)
        if handler is None:
            return method_not_allowed(request, ", ".join(methods))
        request["operation"] = handler.__name__.removeprefix("_")
        return await handler(request)

    async def _pong(self, _: web.BaseRequest) -> web.Response:
        """From memory, in milliseconds: the platform gives it 2 s, whatever else goes on."""
        return web.Response(status=200 if self._is_well() else 503)

    # -- control ----------------------------------------------------------------------------

    async def _load(self, request: web.BaseRequest) -> web.Response:
        body = await self._control_body(request)
        name, url = body.get("model_name"), body.get("url")
        if not isinstance(name, str):
            raise InvalidRequest("model_name must be a string")
        request["model_id"] = model_id = parse_model_id(name)
        if not isinstance(url, str) or not url:
            raise InvalidRequest("url must be a string that is not empty", model_id=model_id)
        source = ModelSource(url, _hint(body, "model_type"), entry=_hint(body, "entry"))
        record = await self._control.load(model_id, source, **ids_of(request))
        return answer(_described(record))

    async def _list(self, request: web.BaseRequest) -> web.Response:
        limit, after = _page_size(request), _page_start(request)
        records, has_more = self._control.registry.page(after, limit)
        body: dict[str, Any] = {"models": [_described(r) for r in records]}
        if has_more:
            body["nextPageToken"] = base64.urlsafe_b64encode(records[-1].id.encode()).decode()
        return answer(body)

    async def _get(self, request: web.BaseRequest) -> web.Response:
        return answer(_described(self._control.registry.serving(request["model_id"])))

    async def _unload(self, request: web.BaseRequest) -> web.Response:
        model_id = request["model_id"]
        await self._control.unload(model_id, **ids_of(request))
        return answer({"modelName": model_id})

    async def _control_body(self, request: web.BaseRequest) -> dict[str, Any]:
        raw = await whole_body(request, self._max_control_body)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object with model_name and url")
        return body

    # -- inference --------------------------------------------------------------------------

    async def _invocations(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._default_model is None:
            raise InvalidRequest(
                "many models are served here: POST /models/{model_name}/invoke, "
                "or start with --single-model"
            )
        request["model_id"] = self._default_model
        return await self._invoke(request)

    async def _invoke(self, request: web.BaseRequest) -> web.StreamResponse:
        model_id: ModelId = request["model_id"]
        with self._control.lease(model_id) as record:
            try:
                infer = await self._infer_request(request)
                async with self._dataplane.infer(record, infer) as result:
                    return await self._relay(request, record, result)
            except (BackendError, CapacityError) as error:
                raise await self._control.recovery.judged(error, model_id) from error

    async def _infer_request(self, request: web.BaseRequest) -> InferRequest:
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise InvalidRequest(f"Content-Encoding {encoding!r}; gzip and deflate are understood")
        length = request.content_length
        header = binary.json_header_bytes(
            request.headers.get("Content-Type", ""),
            length if encoding in {"", "identity"} else None,
        )
        chunks = body_chunks(request, self._max_body)
        body: bytes | AsyncIterator[bytes] = chunks
        if length is not None and length <= _WHOLE_BYTES:
            body = b"".join([chunk async for chunk in chunks])
        return InferRequest(request.headers, body, length, header)

    async def _relay(
        self, request: web.BaseRequest, record: ModelRecord, result: InferAnswer
    ) -> web.StreamResponse:
        size, length = result.json_header_bytes, result.content_length
        if record.is_renamed:
            body, size = binary.put_name_back(await result.read(), size, record.name, record.id)
        elif length is not None and length <= _WHOLE_BYTES:
            body = await result.read()
        else:
            return await _stream(request, result, size)
        return web.Response(body=body, headers=_answer_headers(result, size))


async def _stream(
    request: web.BaseRequest, result: InferAnswer, json_header_size: int | None
) -> web.StreamResponse:
    response = web.StreamResponse(headers=_answer_headers(result, json_header_size))
    response.content_length = result.content_length
    echo(request, response)
    await response.prepare(request)
    async for chunk in result.chunks():
        await response.write(chunk)
    await response.write_eof()
    return response


def _answer_headers(result: InferAnswer, json_header_size: int | None) -> dict[str, str]:
    headers = {"Content-Type": binary.content_type(json_header_size)}
    if "Content-Encoding" in result.headers:
        headers["Content-Encoding"] = result.headers["Content-Encoding"]
    return headers


def _hint(body: dict[str, Any], field: str) -> str | None:
    """A member beyond AWS's contract, for packages that leave a choice."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string")
    return value


def _described(record: ModelRecord) -> dict[str, str]:
    return {"modelName": record.id, "modelUrl": record.source.url}


def _page_size(request: web.BaseRequest) -> int:
    text = request.query.get("limit", str(_DEFAULT_PAGE))
    if _LIMIT.fullmatch(text) is None or not 1 <= int(text) <= _MAX_PAGE:
        raise InvalidRequest(f"limit={text[:50]!r}; a number from 1 to {_MAX_PAGE} is accepted")
    return int(text)


def _page_start(request: web.BaseRequest) -> ModelId | None:
    token = request.query.get("next_page_token")
    if not token:
        return None
    try:
        return ModelId(base64.b64decode(token, altchars=b"-_", validate=True).decode())
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"next_page_token {token[:200]!r} is none of ours") from error
