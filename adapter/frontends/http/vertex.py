"""Vertex AI's contract for containers: a route for predictions and one for health.

A prediction is an inference of the default model, or what its header says of V2; docs/vertex.md.
"""

from collections.abc import Callable, Sequence

from aiohttp import web

from adapter.core.model import ModelId
from adapter.errors import InvalidRequest, NotPassedThrough
from adapter.frontends.access import Access
from adapter.frontends.http import binary
from adapter.frontends.http.inference import SlowPath
from adapter.frontends.http.instrumentation import path_segments
from adapter.frontends.http.middleware import Calls, method_not_allowed, note_model
from adapter.frontends.routes import CONTRACTS, CONTROL, INFERENCE, bare, find
from adapter.settings.vertex import VertexRoutes

REDIRECT = "X-Vertex-Ai-Triton-Redirect"


class Vertex:
    """`model_id`: the model of predictions that name none."""

    def __init__(
        self,
        calls: Calls,
        slow_path: SlowPath,
        *,
        access: Access,
        routes: VertexRoutes,
        model_id: ModelId | None,
        is_ready: Callable[[], bool],
    ) -> None:
        self._calls = calls
        self._slow_path = slow_path
        self._access = access
        self._predict = bare(path_segments(routes.predict))
        self._health = bare(path_segments(routes.health))
        self._model_id = model_id
        self._is_ready = is_ready

    def has(self, segments: Sequence[str]) -> bool:
        return segments[0] not in CONTRACTS and bare(segments) in (self._predict, self._health)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if bare(path_segments(request.raw_path)) == self._health:
            request["route"], request["operation"] = f"/{'/'.join(self._health)}", "ping"
            if request.method not in {"GET", "HEAD"}:
                raise method_not_allowed(request, ["GET"])
            return web.Response(status=200 if self._is_ready() else 503)
        request["route"], request["operation"] = f"/{'/'.join(self._predict)}", "infer"
        if request.method != "POST":
            raise method_not_allowed(request, ["POST"])
        redirect = request.headers.get(REDIRECT)
        if redirect is not None:
            return await self._redirected(request, f"/{redirect.strip().lstrip('/')}")
        if self._model_id is None:
            raise InvalidRequest(
                f"no model is named: send {REDIRECT}: v2/models/NAME/infer, or start with "
                "--vertex-model or --single-model"
            )
        return await self._infer(request, self._model_id, "infer", "/infer")

    async def _infer(
        self, request: web.BaseRequest, model_id: ModelId, operation: str, path: str
    ) -> web.StreamResponse:
        self._access.check(INFERENCE, request.headers.getall("Authorization", ()))
        request["frontend"], request["operation"], request["model_id"] = "v2", operation, model_id
        return await self._slow_path.infer(request, path, binary.VERTEX)

    async def _redirected(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """As if this had been asked for, by the method that it has: an inference, or what changes
        nothing.
        """
        match = find(bare(path_segments(path)))
        route = None if match is None else next(iter(match.methods.values()))
        if match is None or route is None or route.contract != "v2":
            raise InvalidRequest(f"{REDIRECT}: unknown path {path[:200]!r}")
        note_model(request, match)
        if route.scope is INFERENCE:
            where = (route.operation, match.below_model())
            return await self._infer(request, request["model_id"], *where)
        if route.scope is CONTROL or route.passthrough is not None:
            why = "it is for inferences and reads only: call that path itself"
            raise NotPassedThrough(f"{REDIRECT} does not lead to {path[:200]!r}; {why}")
        return await self._calls.answer(request, match, route)
