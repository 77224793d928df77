"""SageMaker's multi-model container contract; docs/sagemaker.md has it call by call."""

import base64
import binascii
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from adapter.control.models import ModelControl
from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.errors import InvalidRequest
from adapter.frontends import openapi
from adapter.frontends.access import Access
from adapter.frontends.bodies import json_object
from adapter.frontends.http.inference import Inferences, Route
from adapter.frontends.http.middleware import (
    CONTROL_BODY_BYTES,
    Serve,
    answer,
    ids_of,
    method_not_allowed,
    whole_body,
)
from adapter.frontends.http.observer import path_segments
from adapter.telemetry.metrics import own_version

_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
_MAX_FIELDS = 100  # of a query
_LIMIT = re.compile(r"[0-9]{1,6}")
_DOCUMENTATION = "README.md and docs/ of this version's source; `triton-adapter --help`"


class SageMaker:
    def __init__(
        self,
        control: ModelControl,
        inferences: Inferences,
        *,
        access: Access,
        is_ready: Callable[[], bool],
    ) -> None:
        self._control = control
        self._inferences = inferences
        self._access = access
        self._is_ready = is_ready

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        segments = path_segments(request.raw_path)
        if len(segments) > 1 and segments[-1] == "":
            segments.pop()  # one trailing slash means nothing
        match segments:
            case [""]:
                methods: dict[str, tuple[str, Serve]] = {"GET": ("about", _about)}
            case ["ping"]:
                methods = {"GET": ("ping", self._ping)}
            case ["models"]:
                methods = {"GET": ("list", self._list), "POST": ("load", self._load)}
            case ["invocations"]:
                methods = {"POST": self._inference("invocations", None)}
            case ["models", name]:
                request["model_id"] = parse_model_id(name)
                methods = {"GET": ("get", self._get), "DELETE": ("unload", self._unload)}
            case ["models", name, "invoke"]:
                request["model_id"] = model_id = parse_model_id(name)
                methods = {"POST": self._inference("invoke", model_id)}
            case _:
                raise InvalidRequest(f"there is nothing at {request.raw_path[:200]!r}")
        return await self._dispatch(request, methods)

    async def _dispatch(
        self, request: web.BaseRequest, methods: dict[str, tuple[str, Serve]]
    ) -> web.StreamResponse:
        """HEAD is GET without the body."""
        found = methods.get("GET" if request.method == "HEAD" else request.method)
        if found is None:
            raise method_not_allowed(request, methods)
        request["operation"], serve = found
        self._access.check(request["operation"], request.headers.getall("Authorization", ()))
        return await serve(request)

    def _inference(self, operation: str, model_id: ModelId | None) -> tuple[str, Serve]:
        route = Route("sagemaker", operation, model_id)
        return operation, partial(self._inferences.serve, route)

    async def _ping(self, _: web.BaseRequest) -> web.Response:
        """From memory, in milliseconds: the platform gives it 2 s, whatever else goes on."""
        return web.Response(status=200 if self._is_ready() else 503)

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
        query = _query(request)
        limit, after = _page_size(query), _page_start(query)
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
        raw = await whole_body(request, CONTROL_BODY_BYTES)
        return json_object(raw, "the body")


async def _about(_: web.BaseRequest) -> web.Response:
    """Say what listens here, for who opens its address."""
    product = {"product": "triton-adapter", "version": own_version()}
    return answer({**product, "documentation": _DOCUMENTATION, "openapi": f"/{openapi.NAME}"})


def _hint(body: dict[str, Any], field: str) -> str | None:
    """A member beyond AWS's contract, for packages that leave a choice."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string")
    return value


def _described(record: ModelRecord) -> dict[str, str]:
    return {"modelName": record.asked_for, "modelUrl": record.source.told_url}


def _query(request: web.BaseRequest) -> dict[str, str]:
    """Return the first value of each name. `request.query` stays in a cache of aiohttp's."""
    text = request.rel_url.raw_query_string
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        why = f"the query has more than {_MAX_FIELDS} fields"
        raise InvalidRequest(why) from None
    return dict(reversed(pairs))


def _page_size(query: dict[str, str]) -> int:
    text = query.get("limit", str(_DEFAULT_PAGE))
    if _LIMIT.fullmatch(text) is None or not 1 <= int(text) <= _MAX_PAGE:
        raise InvalidRequest(f"limit={text[:50]!r}; a number from 1 to {_MAX_PAGE} is accepted")
    return int(text)


def _page_start(query: dict[str, str]) -> ModelId | None:
    token = query.get("next_page_token")
    if not token:
        return None
    try:
        return ModelId(base64.b64decode(token, altchars=b"-_", validate=True).decode())
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"next_page_token {token[:200]!r} is none of ours") from error
