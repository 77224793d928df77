"""Answers the calls of SageMaker's container contract; docs/sagemaker.md has them one by one."""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from adapter.control.door import ModelRecord, Models
from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.errors import InvalidRequest
from adapter.frontends.bodies import json_object
from adapter.frontends.http.answers import Answer, answer_json
from adapter.frontends.http.calls import CONTROL_BODY_BYTES, model_of, refuse_compressed
from adapter.frontends.http.connection import Request
from adapter.frontends.http.handled_inference import Inferences
from adapter.frontends.routes import openapi
from adapter.telemetry.metrics import own_version

if TYPE_CHECKING:
    from adapter.frontends.http.serve import Handle

_DEFAULT_PAGE = 100
_MAX_PAGE = 1000
_MAX_FIELDS = 100  # of a query
_LIMIT = re.compile(r"[0-9]{1,6}")
_DOCUMENTATION = "README.md and docs/ of this version's source; `triton-adapter --help`"


class SageMaker:
    """Answers the calls of SageMaker's multi-model container contract."""

    def __init__(
        self, models: Models, inferences: Inferences, *, is_ready: Callable[[], bool]
    ) -> None:
        self._models = models
        self._registry = models.registry
        self._is_ready = is_ready
        self.handlers: Mapping[str, Handle] = {
            "about": _about,
            "openapi": _openapi,
            "ping": self._ping,
            "list": self._list,
            "load": self._load,
            "get": self._get,
            "unload": self._unload,
            "invoke": inferences.invoke,
            "invocations": inferences.invoke,
        }

    async def _ping(self, _: Request) -> Answer:
        """Answer from memory, in milliseconds: the platform allows 2 s."""
        return Answer(status=200 if self._is_ready() else 503)

    # -- control ----------------------------------------------------------------------------

    async def _load(self, request: Request) -> Answer:
        """Answer LoadModel: load the model of the body."""
        refuse_compressed(request)
        body = json_object(await request.read_body(CONTROL_BODY_BYTES), "the body")
        name = body.get("model_name")
        url = body.get("url")
        if not isinstance(name, str):
            raise InvalidRequest("model_name must be a string")
        model_id = parse_model_id(name)
        request.model_id = model_id
        if not isinstance(url, str) or not url:
            raise InvalidRequest("url must be a string that is not empty", model_id=model_id)
        source = ModelSource(url, _hint(body, "model_type"), entry=_hint(body, "entry"))
        record = await self._models.load(model_id, source, **request.ids())
        return answer_json(_describe_model(record))

    async def _list(self, request: Request) -> Answer:
        """Answer ListModels: a page of the models."""
        query = _query(request)
        limit = _read_page_size(query)
        after = _read_page_start(query)
        records, has_more = self._registry.page(after, limit)
        body: dict[str, Any] = {"models": [_describe_model(r) for r in records]}
        if has_more:
            body["nextPageToken"] = base64.urlsafe_b64encode(records[-1].id.encode()).decode()
        return answer_json(body)

    async def _get(self, request: Request) -> Answer:
        """Answer GetModel."""
        return answer_json(_describe_model(self._registry.serving(model_of(request))))

    async def _unload(self, request: Request) -> Answer:
        """Answer UnloadModel."""
        model_id = model_of(request)
        await self._models.unload(model_id, **request.ids())
        return answer_json({"modelName": model_id})


async def _about(_: Request) -> Answer:
    """Answer the root path with the product, its version and where its documentation is."""
    product = {"product": "triton-adapter", "version": own_version()}
    return answer_json({**product, "documentation": _DOCUMENTATION, "openapi": "/openapi.json"})


async def _openapi(_: Request) -> Answer:
    """Answer with the OpenAPI description of the container contract."""
    return Answer(openapi(), {"Content-Type": "application/json"})


def _hint(body: dict[str, Any], field: str) -> str | None:
    """Return a member beyond AWS's contract, for packages that leave a choice."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string")
    return value


def _describe_model(record: ModelRecord) -> dict[str, str]:
    """Return the name and the URL of a model, as LoadModel was given them."""
    return {"modelName": record.asked_for, "modelUrl": record.source.shown_url}


def _query(request: Request) -> dict[str, str]:
    """Return the first value of each name in the query."""
    text = request.raw_path.partition("#")[0].partition("?")[2]
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        why = f"the query has more than {_MAX_FIELDS} fields"
        raise InvalidRequest(why) from None
    return dict(reversed(pairs))


def _read_page_size(query: dict[str, str]) -> int:
    """Return how many models a page has by the query."""
    text = query.get("limit", str(_DEFAULT_PAGE))
    if _LIMIT.fullmatch(text) is None or not 1 <= int(text) <= _MAX_PAGE:
        raise InvalidRequest(f"limit={text[:50]!r}; a number from 1 to {_MAX_PAGE} is accepted")
    return int(text)


def _read_page_start(query: dict[str, str]) -> ModelId | None:
    """Return the model behind which a page begins, by its token; None for the first page."""
    token = query.get("next_page_token")
    if not token:
        return None
    try:
        return ModelId(base64.b64decode(token, altchars=b"-_", validate=True).decode())
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"next_page_token {token[:200]!r} is none of ours") from error
