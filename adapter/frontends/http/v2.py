"""V2 REST under /v2: Triton's own calls, under the callers' names; docs/v2.md has the differences.

What loads and unloads goes through control, so that the ledger never loses sight of a model.
Everything else is passed on to Triton as it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from aiohttp import web

from adapter.control.lease import Lease, Serving
from adapter.control.models import ModelControl
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.model import ModelId, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.errors import BackendUnavailable, InvalidRequest, NotPassedThrough
from adapter.frontends.access import Access, Extensions
from adapter.frontends.bodies import HeldBody, json_object
from adapter.frontends.http.inference import Inferences
from adapter.frontends.http.inference import Route as Inference
from adapter.frontends.http.middleware import (
    CONTROL_BODY_BYTES,
    Route,
    Serve,
    answer,
    held_body,
    ids_of,
    whole_body,
)
from adapter.frontends.http.observer import call_headers, passed_on, path_segments
from adapter.frontends.model_repository import Repository
from adapter.runtime.byte_budget import ByteBudget

Rename = Callable[[dict[str, Any], ModelRecord], dict[str, Any]]


class V2:
    """`passthrough` opens calls that reach beyond one model: `shared_memory`, `trace` and `log`.
    `load_wait_seconds`: how long a call waits for the end of its model's load. `budget` bounds
    the bodies of loads, which may bring files.
    """

    def __init__(
        self,
        control: ModelControl,
        dataplane: V2DataPlane,
        inferences: Inferences,
        repository: Repository,
        *,
        access: Access,
        load_wait_seconds: float,
        budget: ByteBudget,
        max_body_bytes: int,
        passthrough: frozenset[str] = frozenset(),
        serving: Serving | None = None,
    ) -> None:
        self._control = control
        self._dataplane = dataplane
        self._passthrough = passthrough
        self._access = access
        self._extensions = Extensions(passthrough, has_repository=not access.infers_only)
        self._models = V2Models(
            control,
            dataplane,
            inferences,
            load_wait_seconds=load_wait_seconds,
            serving=serving,
        )
        self._repository = repository
        self._max_body = max_body_bytes
        self._budget = budget

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        _, *path = path_segments(request.raw_path)
        route = self.route(request, path)
        if route is None:
            raise InvalidRequest(f"there is nothing at {request.raw_path[:200]!r}")
        request["frontend"], request["operation"] = "v2", route.operation
        self._access.check(route.operation, request.headers.getall("Authorization", ()))
        if route.needs is not None and route.needs not in self._passthrough:
            raise _closed(route.needs)
        return await route.serve(request)

    def route(self, request: web.BaseRequest, path: Sequence[str]) -> Route | None:
        """`path` is what stands behind /v2; None when that is nothing of ours."""
        # one trailing slash means nothing
        return self._route(request, path[:-1] if path and path[-1] == "" else path)

    def _route(self, request: web.BaseRequest, path: Sequence[str]) -> Route | None:
        call = "".join(f"/{quote(part, safe='')}" for part in path)
        pass_on = partial(self._pass, call)
        match path:
            case []:
                return Route("server_metadata", {"GET": self._metadata})
            case ["health", "live"]:
                return Route("live", {"GET": partial(self._probe, call, "live")})
            case ["health", "ready"]:
                return Route("server_ready", {"GET": partial(self._ready, call)})
            case ["models", *rest]:
                return self._models.of_path(request, rest)
            case ["repository", "index"]:
                return Route("repository_index", {"POST": self._index})
            case ["repository", "models", name, "load" | "unload" as act]:
                request["model_id"] = parse_model_id(name)
                serve = self._load if act == "load" else self._unload
                return Route(f"repository_{act}", {"POST": serve})
        return _beyond_models(path, pass_on)

    async def _ready(self, call: str, request: web.BaseRequest) -> web.StreamResponse:
        if not self._control.is_open:
            raise BackendUnavailable("the adapter is starting or stopping", delivered=False)
        return await self._probe(call, "ready", request)

    async def _probe(self, path: str, what: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer Triton's empty 200 with the body that the protocol gives it."""
        headers = call_headers(request.headers, is_rewritten=False)
        async with self._dataplane.forward(
            V2Call("GET", path, headers, is_probe=True), None
        ) as found:
            return answer({what: True}) if found.status == HTTPStatus.OK else await relay(found)

    async def _metadata(self, request: web.BaseRequest) -> web.StreamResponse:
        """Without the extensions that are not open here."""
        headers = call_headers(request.headers, is_rewritten=True)
        async with self._dataplane.forward(V2Call("GET", "", headers), None) as found:
            told = json.loads(await found.read())
        return answer(told | {"extensions": self._extensions.served(told["extensions"])})

    async def _pass(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        headers = call_headers(request.headers, is_rewritten=False)
        is_post = request.method == "POST"
        body = await whole_body(request, CONTROL_BODY_BYTES) if is_post else None
        method = "POST" if is_post else "GET"
        call = V2Call(method, path, headers, body)
        async with self._dataplane.forward(call, None) as found:
            return await relay(found)

    # -- Triton's model repository extension: frontends/model_repository.py in JSON -----------

    async def _index(self, request: web.BaseRequest) -> web.Response:
        only_ready = (await _body(request, CONTROL_BODY_BYTES)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("ready must be true or false")
        entries = await self._repository.index(only_ready=only_ready)
        return answer([asdict(entry) for entry in entries])

    async def _load(self, request: web.BaseRequest) -> web.Response:
        # until the end, as the files stay in memory until they are in place
        with held_body(request, self._budget) as held:
            given = _parameters(await _body(request, self._max_body, held))
            await self._repository.load(request["model_id"], given, **ids_of(request))
        return answer({})

    async def _unload(self, request: web.BaseRequest) -> web.Response:
        given = _parameters(await _body(request, CONTROL_BODY_BYTES))
        await self._repository.unload(request["model_id"], given, **ids_of(request))
        return answer({})


async def _body(
    request: web.BaseRequest, limit: int, held: HeldBody | None = None
) -> dict[str, Any]:
    """An empty body means what an empty object does."""
    raw = await whole_body(request, limit, held)
    return json_object(raw, "the body") if raw else {}


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters", {})
    if not isinstance(found, dict):
        raise InvalidRequest("parameters must be a JSON object")
    return found


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


class V2Models:
    """`load_wait_seconds`: how long a call waits for the end of its model's load. `serving`: how it
    comes to its model, by default one that is loaded.
    """

    def __init__(
        self,
        control: ModelControl,
        dataplane: V2DataPlane,
        inferences: Inferences,
        *,
        load_wait_seconds: float,
        serving: Serving | None = None,
    ) -> None:
        self._control = control
        self._of = serving or control.serving
        self._dataplane = dataplane
        self._inferences = inferences
        self._load_wait = load_wait_seconds

    def of_path(self, request: web.BaseRequest, path: Sequence[str]) -> Route | None:
        """`path` is what stands behind /v2/models; None when that is nothing of ours."""
        match path:
            case ["stats"]:
                return Route("all_statistics", {"GET": self._all_statistics})
            case [name, "versions", number, *rest] if number.isascii() and number.isdigit():
                version = f"/versions/{number}"
            case [name, *rest]:
                version = ""
            case _:
                return None
        request["model_id"] = model_id = parse_model_id(name)
        return self._of_model(model_id, version, rest)

    def _of_model(self, model_id: ModelId, version: str, rest: Sequence[str]) -> Route | None:
        call = "/".join([version, *rest])
        match rest:
            case []:
                return Route("metadata", {"GET": partial(self._about, call, _rename)})
            case ["config"]:
                return Route("config", {"GET": partial(self._about, call, _rename)})
            case ["stats"]:
                return Route("statistics", {"GET": partial(self._about, call, _rename_statistics)})
            case ["ready"]:
                return Route("ready", {"GET": partial(self._ready, call)})
            case ["infer" | "generate" | "generate_stream" as operation]:
                inference = Inference("v2", operation, model_id, call)
                return Route(operation, {"POST": partial(self._inferences.serve, inference)})
            case ["trace", "setting"] if not version:  # Triton has none for versions
                trace = partial(self._trace, call)
                return Route("trace", {"GET": trace, "POST": trace}, needs="trace")
        return None

    async def _serving(self, request: web.BaseRequest) -> Lease:
        return await self._of(request["model_id"], self._load_wait)

    async def _about(
        self, path: str, rename: Rename, request: web.BaseRequest
    ) -> web.StreamResponse:
        lease = await self._serving(request)
        with lease as record:
            async with self._dataplane.forward(_call(request, record, path), lease) as found:
                if not record.is_renamed:
                    return await relay(found)
                return answer(rename(json.loads(await found.read()), record))

    async def _ready(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        """Without waiting for a load: not to be ready is an answer."""
        lease = self._control.lease(request["model_id"])
        with lease as record:
            call = _call(request, record, path, is_probe=True)
            async with self._dataplane.forward(call, lease) as found:
                return await relay(found)

    async def _trace(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        method = request.method
        headers = call_headers(request.headers, is_rewritten=False)
        body = await whole_body(request, CONTROL_BODY_BYTES) if method == "POST" else None
        lease = await self._serving(request)
        with lease as record:
            call = V2Call(method, f"/models/{record.name}{path}", headers, body)
            async with self._dataplane.forward(call, lease) as found:
                return await relay(found)

    async def _all_statistics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Of all that Triton has; what is not ours keeps its name."""
        headers = call_headers(request.headers, is_rewritten=True)
        async with self._dataplane.forward(V2Call("GET", "/models/stats", headers), None) as found:
            listed = json.loads(await found.read())["model_stats"]
        ids = {record.name: record.asked_for for record in self._control.registry.records()}
        named = [one | {"name": ids.get(one["name"], one["name"])} for one in listed]
        return answer({"model_stats": named})


def _call(
    request: web.BaseRequest, record: ModelRecord, path: str, *, is_probe: bool = False
) -> V2Call:
    headers = call_headers(request.headers, is_rewritten=record.is_renamed)
    return V2Call("GET", f"/models/{record.name}{path}", headers, is_probe=is_probe)


async def relay(found: V2Answer) -> web.Response:
    """Triton's answer as it came."""
    headers = passed_on(found.headers)
    return web.Response(status=found.status, headers=headers, body=await found.read())


def _rename(described: dict[str, Any], record: ModelRecord) -> dict[str, Any]:
    """Metadata and configurations have the name on top."""
    return described | {"name": record.asked_for}


def _rename_statistics(found: dict[str, Any], record: ModelRecord) -> dict[str, Any]:
    return {"model_stats": [one | {"name": record.asked_for} for one in found["model_stats"]]}
