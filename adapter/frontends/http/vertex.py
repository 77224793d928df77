"""Vertex AI's contract for containers: a route for predictions and one for health.

A prediction is an inference of the default model, or what its header says of V2; docs/vertex.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from aiohttp import web

from adapter.core.model import ModelId
from adapter.errors import InvalidRequest, NotPassedThrough
from adapter.frontends.access import Access
from adapter.frontends.http import binary
from adapter.frontends.http.inference import Inferences, Route, route_of
from adapter.frontends.http.middleware import method_not_allowed
from adapter.frontends.http.observer import path_segments
from adapter.frontends.http.v2 import V2
from adapter.settings.vertex import VertexRoutes

REDIRECT = "X-Vertex-Ai-Triton-Redirect"
# What may be reached by a header: inferences, and what changes nothing.
_REDIRECTED = frozenset(
    {
        *("infer", "generate", "generate_stream", "ready", "live", "server_ready"),
        *("server_metadata", "metadata", "config", "statistics", "all_statistics"),
        "repository_index",
    }
)
# They stay what they are, whatever the platform chooses.
_OWN = frozenset({"", "ping", "models", "invocations", "v2", "endpoints", "openapi.json"})


class Vertex:
    """`model_id`: the model of predictions that name none."""

    def __init__(
        self,
        v2: V2,
        inferences: Inferences,
        *,
        access: Access,
        routes: VertexRoutes,
        model_id: ModelId | None,
        is_ready: Callable[[], bool],
    ) -> None:
        self._v2 = v2
        self._inferences = inferences
        self._access = access
        self._predict = _bare(path_segments(routes.predict))
        self._health = _bare(path_segments(routes.health))
        self._model_id = model_id
        self._is_ready = is_ready

    def has(self, segments: Sequence[str]) -> bool:
        return segments[0] not in _OWN and _bare(segments) in (self._predict, self._health)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if _bare(path_segments(request.raw_path)) == self._health:
            request["operation"] = "ping"
            if request.method not in {"GET", "HEAD"}:
                raise method_not_allowed(request, ["GET"])
            return web.Response(status=200 if self._is_ready() else 503)
        request["operation"] = "infer"
        if request.method != "POST":
            raise method_not_allowed(request, ["POST"])
        redirect = request.headers.get(REDIRECT)
        if redirect is None:
            return await self._infer(request, self._default())
        return await self._redirected(request, f"/{redirect.strip().lstrip('/')}")

    def _default(self) -> Route:
        if self._model_id is None:
            raise InvalidRequest(
                f"no model is named: send {REDIRECT}: v2/models/NAME/infer, or start with "
                "--vertex-model or --single-model"
            )
        return Route("v2", "infer", self._model_id, "/infer")

    async def _infer(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        self._access.check(route.operation, request.headers.getall("Authorization", ()))
        return await self._inferences.serve(replace(route, media_type=binary.VERTEX), request)

    async def _redirected(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        """As if this had been asked for, by the method that it has."""
        inference = route_of(target.encode("utf-8", "surrogateescape"))
        if inference is not None and inference.frontend == "v2":
            return await self._infer(request, inference)
        first, *path = path_segments(target)
        route = self._v2.route(request, path) if first == "v2" else None
        if route is None:
            raise InvalidRequest(f"{REDIRECT}: there is nothing at {target[:200]!r}")
        request["frontend"], request["operation"] = "v2", route.operation
        self._access.check(route.operation, request.headers.getall("Authorization", ()))
        if route.operation not in _REDIRECTED:
            raise NotPassedThrough(f"{REDIRECT} does not lead to {target[:200]!r}")
        serve = route.methods.get("GET") or route.methods["POST"]
        return await serve(request)


def _bare(segments: Sequence[str]) -> list[str]:
    """Return those of the path without a slash at its end, which means nothing."""
    return list(segments[:-1] if len(segments) > 1 and not segments[-1] else segments)
