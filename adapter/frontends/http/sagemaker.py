"""SageMaker's multi-model container contract; docs/sagemaker.md has it call by call."""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from adapter.control.door import ModelRecord, Models
from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.errors import InvalidRequest
from adapter.frontends.bodies import json_object
from adapter.frontends.http.inference import SlowPath
from adapter.frontends.http.middleware import (
    CONTROL_BODY_BYTES,
    Serve,
    answer,
    ids_of,
    whole_body,
)
from adapter.frontends.routes import openapi
from adapter.telemetry.metrics import own_version

_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
_MAX_FIELDS = 100  # of a query
_LIMIT = re.compile(r"[0-9]{1,6}")
_DOCUMENTATION = "README.md and docs/ of this version's source; `triton-adapter --help`"


class SageMaker:
    def __init__(
        self, models: Models, slow_path: SlowPath, *, is_ready: Callable[[], bool]
    ) -> None:
        self._models = models
        self._registry = models.registry
        self._is_ready = is_ready
        self.handlers: Mapping[str, Serve] = {
            "about": _about,
            "openapi": _openapi,
            "ping": self._ping,
            "list": self._list,
            "load": self._load,
            "get": self._get,
            "unload": self._unload,
            "invoke": slow_path.invoke,
            "invocations": slow_path.invoke,
        }

    async def _ping(self, _: web.BaseRequest) -> web.Response:
        """Answer from memory, in milliseconds: the platform allows 2 s."""
        return web.Response(status=200 if self._is_ready() else 503)

    # -- control ----------------------------------------------------------------------------

    async def _load(self, request: web.BaseRequest) -> web.Response:
        body = json_object(await whole_body(request, CONTROL_BODY_BYTES), "the body")
        name, url = body.get("model_name"), body.get("url")
        if not isinstance(name, str):
            raise InvalidRequest("model_name must be a string")
        request["model_id"] = model_id = parse_model_id(name)
        if not isinstance(url, str) or not url:
            raise InvalidRequest("url must be a string that is not empty", model_id=model_id)
        source = ModelSource(url, _hint(body, "model_type"), entry=_hint(body, "entry"))
        record = await self._models.load(model_id, source, **ids_of(request))
        return answer(_described(record))

    async def _list(self, request: web.BaseRequest) -> web.Response:
        query = _query(request)
        limit, after = _page_size(query), _page_start(query)
        records, has_more = self._registry.page(after, limit)
        body: dict[str, Any] = {"models": [_described(r) for r in records]}
        if has_more:
            body["nextPageToken"] = base64.urlsafe_b64encode(records[-1].id.encode()).decode()
        return answer(body)

    async def _get(self, request: web.BaseRequest) -> web.Response:
        return answer(_described(self._registry.serving(request["model_id"])))

    async def _unload(self, request: web.BaseRequest) -> web.Response:
        model_id = request["model_id"]
        await self._models.unload(model_id, **ids_of(request))
        return answer({"modelName": model_id})


async def _about(_: web.BaseRequest) -> web.Response:
    """Say what listens here, for who opens its address."""
    product = {"product": "triton-adapter", "version": own_version()}
    return answer({**product, "documentation": _DOCUMENTATION, "openapi": "/openapi.json"})


async def _openapi(_: web.BaseRequest) -> web.Response:
    return web.Response(body=openapi(), content_type="application/json")


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
