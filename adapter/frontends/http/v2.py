"""V2 REST under /v2: Triton's own calls, under the callers' names; docs/v2.md has the differences.

What loads and unloads goes through control, so that the ledger never loses sight of a model.
Everything else is passed on to Triton as it is.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from adapter.control.models import ModelControl
from adapter.core.calls import V2Call, V2DataPlane
from adapter.errors import BackendUnavailable, InvalidRequest, NotPassedThrough
from adapter.frontends.http.inference import Inferences
from adapter.frontends.http.middleware import Route, Serve, whole_body
from adapter.frontends.http.observer import call_headers, path_segments
from adapter.frontends.http.v2_models import V2Models, relay
from adapter.frontends.http.v2_repository import V2Repository


class V2:
    """`versions` tells which versions of each model Triton's index has ready, by Triton's names.

    `passthrough` opens calls that reach beyond one model: `shared_memory`, `trace` and `log`.
    `load_wait_seconds`: how long a call waits for the end of its model's load.
    """

    def __init__(
        self,
        control: ModelControl,
        dataplane: V2DataPlane,
        inferences: Inferences,
        versions: Callable[[], Awaitable[Mapping[str, Sequence[str]]]],
        model_roots: Sequence[Path],
        *,
        load_wait_seconds: float,
        max_body_bytes: int,
        max_control_body_bytes: int,
        passthrough: frozenset[str] = frozenset(),
    ) -> None:
        self._control = control
        self._dataplane = dataplane
        self._passthrough = passthrough
        self._max_control_body = max_control_body_bytes
        self._models = V2Models(
            control,
            dataplane,
            inferences,
            load_wait_seconds=load_wait_seconds,
            max_control_body_bytes=max_control_body_bytes,
        )
        self._repository = V2Repository(
            control,
            versions,
            model_roots,
            max_body_bytes=max_body_bytes,
            max_control_body_bytes=max_control_body_bytes,
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        _, *path = path_segments(request.raw_path)
        if path and path[-1] == "":
            path.pop()  # one trailing slash means nothing
        route = self._route(request, path)
        if route is None:
            raise InvalidRequest(f"there is nothing at {request.raw_path[:200]!r}")
        if route.needs is not None and route.needs not in self._passthrough:
            raise _closed(route.needs)
        return await route.serve(request)

    def _route(self, request: web.BaseRequest, path: Sequence[str]) -> Route | None:
        call = "".join(f"/{quote(part, safe='')}" for part in path)
        pass_on = partial(self._pass, call)
        match path:
            case []:
                return Route("server_metadata", {"GET": pass_on})
            case ["health", "live"]:
                return Route("live", {"GET": partial(self._pass, call, is_probe=True)})
            case ["health", "ready"]:
                return Route("server_ready", {"GET": partial(self._ready, call)})
            case ["models", *rest]:
                return self._models.route(request, rest)
            case ["repository", *rest]:
                return self._repository.route(request, rest)
        return _beyond_models(path, pass_on)

    async def _ready(self, call: str, request: web.BaseRequest) -> web.StreamResponse:
        if not self._control.is_open:
            raise BackendUnavailable("the adapter is starting or stopping", delivered=False)
        return await self._pass(call, request, is_probe=True)

    async def _pass(
        self, path: str, request: web.BaseRequest, *, is_probe: bool = False
    ) -> web.StreamResponse:
        headers = call_headers(request.headers, is_rewritten=False)
        is_post = request.method == "POST"
        body = await whole_body(request, self._max_control_body) if is_post else None
        method = "POST" if is_post else "GET"
        call = V2Call(method, path, headers, body, is_probe=is_probe)
        async with self._dataplane.forward(call, None) as found:
            return await relay(found)


def _closed(needs: str) -> NotPassedThrough:
    text = f"this is not passed on to Triton unless the setting passthrough has {needs!r}"
    return NotPassedThrough(text)


def _beyond_models(path: Sequence[str], pass_on: Serve) -> Route | None:
    both = {"GET": pass_on, "POST": pass_on}
    match path:
        case ["trace", "setting"]:
            return Route("trace", both, needs="trace")
        case ["logging"]:
            return Route("logging", both, needs="log")
        case ["systemsharedmemory" | "cudasharedmemory", *rest]:
            return _shared_memory(rest, pass_on)
    return None


def _shared_memory(path: Sequence[str], pass_on: Serve) -> Route | None:
    match path:
        case ["status"] | ["region", _, "status"]:
            method = "GET"
        case ["unregister"] | ["region", _, "register" | "unregister"]:
            method = "POST"
        case _:
            return None
    return Route("shared_memory", {method: pass_on}, needs="shared_memory")
