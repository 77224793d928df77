"""V2 REST under /v2: Triton's own calls, under the callers' names; docs/v2.md has the differences.

What loads and unloads goes through control, so that the ledger never loses sight of a model.
Everything else is passed on to Triton as it is.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

from adapter.control.door import ModelRecord, Models, TritonState
from adapter.core.calls import V2Answer, V2Call
from adapter.errors import InvalidRequest
from adapter.frontends.access import Extensions
from adapter.frontends.bodies import HeldBody, json_object
from adapter.frontends.http.inference import SlowPath
from adapter.frontends.http.instrumentation import call_headers, passed_on
from adapter.frontends.http.middleware import (
    CONTROL_BODY_BYTES,
    Serve,
    answer,
    held_body,
    ids_of,
    whole_body,
)
from adapter.frontends.model_repository import Repository, find_ensemble
from adapter.frontends.routes import Match

Rename = Callable[[dict[str, Any], ModelRecord], dict[str, Any]]


class V2:
    """`extensions`: those of Triton's that the listener serves. `max_body_bytes`: of a load, which
    may bring files.
    """

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        slow_path: SlowPath,
        repository: Repository,
        *,
        extensions: Extensions,
        max_body_bytes: int,
    ) -> None:
        self._models = models
        self._triton = triton
        self._dataplane, self._budget = slow_path.dataplane, slow_path.budget
        self._contract, self._slow_path = slow_path.contracts.v2, slow_path
        self._extensions = extensions
        self._repository = repository
        self._max_body = max_body_bytes
        self.handlers: Mapping[str, Serve] = {
            "server_metadata": self._metadata,
            "live": partial(self._probe, "live"),
            "server_ready": self._server_ready,
            "all_statistics": self._all_statistics,
            "metadata": partial(self._about, _rename),
            "config": partial(self._about, _rename),
            "statistics": partial(self._about, _rename_statistics),
            "ready": self._ready,
            **dict.fromkeys(("infer", "generate", "generate_stream"), self._infer),
            **dict.fromkeys(("shared_memory", "trace", "logging"), self._pass),
            "repository_index": self._index,
            "repository_load": self._load,
            "repository_unload": self._unload,
        }

    async def _server_ready(self, request: web.BaseRequest) -> web.StreamResponse:
        self._triton.refuse_unless_open()
        return await self._probe("ready", request)

    async def _probe(self, what: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer Triton's empty 200 with the body that the protocol gives it."""
        headers = call_headers(request.headers, is_rewritten=False)
        call = V2Call("GET", _match(request).below_v2(), headers, is_probe=True)
        async with self._dataplane.forward(call, None) as found:
            return answer({what: True}) if found.status == HTTPStatus.OK else await relay(found)

    async def _metadata(self, request: web.BaseRequest) -> web.StreamResponse:
        """Leave out the extensions that are not open here."""
        headers = call_headers(request.headers, is_rewritten=True)
        async with self._dataplane.forward(V2Call("GET", "", headers), None) as found:
            described = json.loads(await found.read())
        return answer(described | {"extensions": self._extensions.served(described["extensions"])})

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        """Pass the call on as it is; the name of its model, if it has one, as Triton has it."""
        headers = call_headers(request.headers, is_rewritten=False)
        is_post, path = request.method == "POST", _match(request).below_v2()
        body = await whole_body(request, CONTROL_BODY_BYTES) if is_post else None
        with ExitStack() as held:
            lease = None
            if "model_name" in _match(request).names:
                lease = await self._contract.wait(request["model_id"], request)
                lease.is_inference = False
                record = held.enter_context(lease)
                path = f"/models/{record.name}{_match(request).below_model()}"
            method = "POST" if is_post else "GET"
            call = V2Call(method, path, headers, body, is_restricted=True)
            async with self._dataplane.forward(call, lease) as found:
                return await relay(found)

    # -- about one model --------------------------------------------------------------------

    async def _infer(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._slow_path.infer(request, _match(request).below_model())

    async def _about(self, rename: Rename, request: web.BaseRequest) -> web.StreamResponse:
        ensemble = find_ensemble(self._models.registry, request["model_id"])
        if ensemble is not None:
            return await self._about_step(ensemble, request)
        lease = await self._contract.wait(request["model_id"], request)
        lease.is_inference = False
        with lease as record:
            async with self._dataplane.forward(_call(request, record), lease) as found:
                if not record.is_renamed:
                    return await relay(found)
                return answer(rename(json.loads(await found.read()), record))

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer at once, without waiting for a load."""
        ensemble = find_ensemble(self._models.registry, request["model_id"])
        if ensemble is not None:
            return await self._about_step(ensemble, request)
        lease = self._models.lease(request["model_id"])
        lease.is_inference = False
        with lease as record:
            async with self._dataplane.forward(_call(request, record), lease) as found:
                return await relay(found)

    async def _about_step(
        self, ensemble: ModelRecord, request: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer about a step, which the config of its ensemble names as Triton does."""
        path = f"/models/{request['model_id']}{_match(request).below_model()}"
        call = V2Call("GET", path, call_headers(request.headers, is_rewritten=False))
        lease = self._models.lease(ensemble.id)
        lease.is_inference = False
        with lease:
            async with self._dataplane.forward(call, lease) as found:
                return await relay(found)

    async def _all_statistics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Of all that Triton has; what is not ours keeps its name."""
        headers = call_headers(request.headers, is_rewritten=True)
        async with self._dataplane.forward(V2Call("GET", "/models/stats", headers), None) as found:
            listed = json.loads(await found.read())["model_stats"]
        ids = {record.name: record.asked_for for record in self._models.registry.records()}
        named = [one | {"name": ids.get(one["name"], one["name"])} for one in listed]
        return answer({"model_stats": named})

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


def _match(request: web.BaseRequest) -> Match:
    match: Match = request["match"]
    return match


def _call(request: web.BaseRequest, record: ModelRecord) -> V2Call:
    headers = call_headers(request.headers, is_rewritten=record.is_renamed)
    path = f"/models/{record.name}{_match(request).below_model()}"
    return V2Call("GET", path, headers)


async def relay(found: V2Answer) -> web.Response:
    """Triton's answer as it came."""
    headers = passed_on(found.headers)
    return web.Response(status=found.status, headers=headers, body=await found.read())


def _rename(described: dict[str, Any], record: ModelRecord) -> dict[str, Any]:
    """Metadata and configurations have the name on top."""
    return described | {"name": record.asked_for}


def _rename_statistics(found: dict[str, Any], record: ModelRecord) -> dict[str, Any]:
    return {"model_stats": [one | {"name": record.asked_for} for one in found["model_stats"]]}
