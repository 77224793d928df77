"""V2 calls about one model: passed on to Triton under the name that it has there, and back."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from adapter.control.lease import Lease, Serving
from adapter.control.models import ModelControl
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.model import ModelId, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.frontends.http.inference import Inferences
from adapter.frontends.http.inference import Route as Inference
from adapter.frontends.http.middleware import CONTROL_BODY_BYTES, Route, answer, whole_body
from adapter.frontends.http.observer import call_headers, passed_on

Rename = Callable[[dict[str, Any], ModelRecord], dict[str, Any]]


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

    def route(self, request: web.BaseRequest, path: Sequence[str]) -> Route | None:
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
        return self._route(model_id, version, rest)

    def _route(self, model_id: ModelId, version: str, rest: Sequence[str]) -> Route | None:
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
