"""Serves the OpenAPI document of the HTTP listeners, whose source is docs/openapi.yaml."""

import json
from functools import cache
from pathlib import Path

import yaml
from aiohttp import web

from adapter.errors import InvalidRequest
from adapter.frontends.access import Access
from adapter.frontends.http.middleware import Route
from adapter.frontends.http.observer import path_segments

NAME = "openapi.json"
_OPERATION = "openapi"
_BUILT = Path(__file__).with_name(NAME)  # in a wheel, by scripts/build_hook.py
_SOURCE = Path(__file__).parents[2] / "docs" / "openapi.yaml"  # of a checkout


@cache
def document() -> bytes:
    """Return the document as JSON."""
    if _BUILT.exists():
        return _BUILT.read_bytes()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = yaml.load(_SOURCE.read_bytes(), loader)  # noqa: S506 - both are safe
    return json.dumps(found).encode()


async def _document(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=document(), content_type="application/json")


class OpenApi:
    """At a listener for callers; `access` is that listener's."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if path_segments(request.raw_path) not in ([NAME], [NAME, ""]):
            raise InvalidRequest(f"there is nothing at {request.raw_path[:200]!r}")
        request["operation"] = _OPERATION
        self._access.check(_OPERATION, request.headers.getall("Authorization", ()))
        return await Route(_OPERATION, {"GET": _document}).serve(request)


class OpenApiPage:
    """At a listener for operators."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get(f"/{NAME}", _document)
