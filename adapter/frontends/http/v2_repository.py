"""Triton's model repository extension over REST: frontends/model_repository.py in JSON."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from adapter.control.models import ModelControl
from adapter.core.model import parse_model_id
from adapter.errors import InvalidRequest
from adapter.frontends.callers_json import json_object
from adapter.frontends.http.middleware import Route, answer, ids_of, whole_body
from adapter.frontends.model_repository import Repository


class V2Repository:
    def __init__(
        self,
        control: ModelControl,
        versions: Callable[[], Awaitable[Mapping[str, Sequence[str]]]],
        model_roots: Sequence[Path],
        *,
        max_body_bytes: int,
        max_control_body_bytes: int,
    ) -> None:
        self._repository = Repository(control, versions, model_roots)
        self._max_body = max_body_bytes
        self._max_control_body = max_control_body_bytes

    def route(self, request: web.BaseRequest, path: Sequence[str]) -> Route | None:
        """`path` is what stands behind /v2/repository; None when that is nothing of ours."""
        match path:
            case ["index"]:
                return Route("repository_index", {"POST": self._index})
            case ["models", name, "load"]:
                request["model_id"] = parse_model_id(name)
                return Route("repository_load", {"POST": self._load})
            case ["models", name, "unload"]:
                request["model_id"] = parse_model_id(name)
                return Route("repository_unload", {"POST": self._unload})
        return None

    async def _index(self, request: web.BaseRequest) -> web.Response:
        only_ready = (await _body(request, self._max_control_body)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("ready must be true or false")
        entries = await self._repository.index(only_ready=only_ready)
        return answer([asdict(entry) for entry in entries])

    async def _load(self, request: web.BaseRequest) -> web.Response:
        given = _parameters(await _body(request, self._max_body))
        await self._repository.load(request["model_id"], given, **ids_of(request))
        return answer({})

    async def _unload(self, request: web.BaseRequest) -> web.Response:
        given = _parameters(await _body(request, self._max_control_body))
        await self._repository.unload(request["model_id"], given, **ids_of(request))
        return answer({})


async def _body(request: web.BaseRequest, limit: int) -> dict[str, Any]:
    """An empty body means what an empty object does."""
    raw = await whole_body(request, limit)
    return json_object(raw, "the body") if raw else {}


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters", {})
    if not isinstance(found, dict):
        raise InvalidRequest("parameters must be a JSON object")
    return found
