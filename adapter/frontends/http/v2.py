"""Answers V2 REST under /v2: Triton's own calls, under the callers' names (docs/v2.md).

What loads and unloads goes through control, so that the ledger never loses sight of a model.
Everything else is passed on to Triton as it is.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from adapter.control.door import ModelRecord, Models, TritonState
from adapter.core.calls import V2Answer, V2Call
from adapter.errors import InvalidRequest
from adapter.frontends.access import Extensions
from adapter.frontends.bodies import json_object
from adapter.frontends.http.answers import Answer, answer_json
from adapter.frontends.http.calls import CONTROL_BODY_BYTES, model_of, refuse_compressed
from adapter.frontends.http.connection import Request
from adapter.frontends.http.handled_inference import Inferences
from adapter.frontends.http.instrumentation import list_call_headers, passed_on
from adapter.frontends.repository import Repository, find_ensemble

if TYPE_CHECKING:
    from adapter.frontends.http.serve import Handle

Rename = Callable[[dict[str, Any], ModelRecord], dict[str, Any]]


class V2:
    """Answers the calls of V2 REST."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        inferences: Inferences,
        repository: Repository,
        *,
        extensions: Extensions,  # Triton's extensions that the listener serves
        max_body_bytes: int,  # of a load, which may bring files
    ) -> None:
        self._models = models
        self._triton = triton
        self._dataplane = inferences.dataplane
        self._contract = inferences.contracts.v2
        self._inferences = inferences
        self._extensions = extensions
        self._repository = repository
        self._max_body = max_body_bytes
        self.handlers: Mapping[str, Handle] = {
            "server_metadata": self._metadata,
            "live": partial(self._probe, "live"),
            "server_ready": self._server_ready,
            "all_statistics": self._all_statistics,
            "metadata": partial(self._answer_about_model, _rename),
            "config": partial(self._answer_about_model, _rename),
            "statistics": partial(self._answer_about_model, _rename_statistics),
            "ready": self._ready,
            **dict.fromkeys(("infer", "generate", "generate_stream"), self._infer),
            **dict.fromkeys(("shared_memory", "trace", "logging"), self._pass),
            "repository_index": self._index,
            "repository_load": self._load,
            "repository_unload": self._unload,
        }

    async def _server_ready(self, request: Request) -> Answer:
        """Answer whether Triton is ready; refuse while the adapter drains."""
        self._triton.refuse_unless_open()
        return await self._probe("ready", request)

    async def _probe(self, what: str, request: Request) -> Answer:
        """Answer Triton's empty 200 with the body that the protocol gives it."""
        headers = list_call_headers(request.headers, is_rewritten=False)
        call = V2Call("GET", request.match.below_v2(), headers, is_probe=True)
        async with self._dataplane.forward(call, None) as answer:
            if answer.status != HTTPStatus.OK:
                return await _relay(answer)
        return answer_json({what: True})

    async def _metadata(self, request: Request) -> Answer:
        """Leave out the extensions that are not open here."""
        headers = list_call_headers(request.headers, is_rewritten=True)
        async with self._dataplane.forward(V2Call("GET", "", headers), None) as answer:
            described = json.loads(await answer.read())
        extensions = self._extensions.served(described["extensions"])
        return answer_json(described | {"extensions": extensions})

    async def _pass(self, request: Request) -> Answer:
        """Pass the call on as it is; the name of its model, if it has one, as Triton has it."""
        headers = list_call_headers(request.headers, is_rewritten=False)
        is_post = request.method == "POST"
        path = request.match.below_v2()
        body = await request.read_body(CONTROL_BODY_BYTES) if is_post else None
        with ExitStack() as held:
            lease = None
            if "model_name" in request.match.names:
                lease = await self._contract.wait_for_lease(model_of(request), request)
                lease.is_inference = False
                record = held.enter_context(lease)
                path = f"/models/{record.name}{request.match.below_model()}"
            method = "POST" if is_post else "GET"
            call = V2Call(method, path, headers, body, is_restricted=True)
            async with self._dataplane.forward(call, lease) as answer:
                return await _relay(answer)

    # -- about one model --------------------------------------------------------------------

    async def _infer(self, request: Request) -> Answer | None:
        """Answer an inference that has no plan."""
        return await self._inferences.infer(request, request.match.below_model())

    async def _answer_about_model(self, rename: Rename, request: Request) -> Answer:
        """Forward a GET about a model, which is waited for, and answer with the client's name of
        the model.
        """
        ensemble = find_ensemble(self._models.registry, model_of(request))
        if ensemble is not None:
            return await self._about_step(ensemble, request)
        lease = await self._contract.wait_for_lease(model_of(request), request)
        lease.is_inference = False
        with lease as record:
            async with self._dataplane.forward(_make_call(request, record), lease) as answer:
                if not record.is_renamed:
                    return await _relay(answer)
                return answer_json(rename(json.loads(await answer.read()), record))

    async def _ready(self, request: Request) -> Answer:
        """Answer at once, without waiting for a load."""
        ensemble = find_ensemble(self._models.registry, model_of(request))
        if ensemble is not None:
            return await self._about_step(ensemble, request)
        lease = self._models.lease(model_of(request))
        lease.is_inference = False
        with lease as record:
            async with self._dataplane.forward(_make_call(request, record), lease) as answer:
                return await _relay(answer)

    async def _about_step(self, ensemble: ModelRecord, request: Request) -> Answer:
        """Answer about a step, which the config of its ensemble names as Triton does."""
        path = f"/models/{model_of(request)}{request.match.below_model()}"
        call = V2Call("GET", path, list_call_headers(request.headers, is_rewritten=False))
        lease = self._models.lease(ensemble.id)
        lease.is_inference = False
        with lease:
            async with self._dataplane.forward(call, lease) as answer:
                return await _relay(answer)

    async def _all_statistics(self, request: Request) -> Answer:
        """Answer about all models of Triton; one that is not ours keeps its name."""
        headers = list_call_headers(request.headers, is_rewritten=True)
        async with self._dataplane.forward(V2Call("GET", "/models/stats", headers), None) as answer:
            listed = json.loads(await answer.read())["model_stats"]
        ids = {record.name: record.asked_for for record in self._models.registry.records()}
        named = [one | {"name": ids.get(one["name"], one["name"])} for one in listed]
        return answer_json({"model_stats": named})

    # -- Triton's model repository extension: frontends/repository.py in JSON -----------

    async def _index(self, request: Request) -> Answer:
        """Answer the index of the model repository."""
        body = await _read_object(request, CONTROL_BODY_BYTES)
        only_ready = body.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("ready must be true or false")
        repository = body.get("repository_name", "")
        if not isinstance(repository, str):
            raise InvalidRequest("repository_name must be text")
        entries = await self._repository.index(only_ready=only_ready, repository=repository)
        return answer_json([asdict(entry) for entry in entries])

    async def _load(self, request: Request) -> Answer:
        """Answer a load of the model repository."""
        # held until the end, as the files stay in memory until they are in place
        with request.hold_body():
            parameters = _get_parameters(await _read_object(request, self._max_body))
            await self._repository.load(model_of(request), parameters, **request.ids())
        return answer_json({})

    async def _unload(self, request: Request) -> Answer:
        """Answer an unload of the model repository."""
        parameters = _get_parameters(await _read_object(request, CONTROL_BODY_BYTES))
        await self._repository.unload(model_of(request), parameters, **request.ids())
        return answer_json({})


async def _read_object(request: Request, limit: int) -> dict[str, Any]:
    """Return the JSON object of a body; an empty body means what an empty object does."""
    refuse_compressed(request)
    raw = await request.read_body(limit)
    return json_object(raw, "the body") if raw else {}


def _get_parameters(body: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters in a body of the model repository; none if there are none."""
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters must be a JSON object")
    return parameters


def _make_call(request: Request, record: ModelRecord) -> V2Call:
    """Return the GET to send to Triton about a model."""
    headers = list_call_headers(request.headers, is_rewritten=record.is_renamed)
    path = f"/models/{record.name}{request.match.below_model()}"
    return V2Call("GET", path, headers)


async def _relay(answer: V2Answer) -> Answer:
    """Return Triton's answer as it came."""
    return Answer(await answer.read(), passed_on(answer.headers), answer.status)


def _rename(described: dict[str, Any], record: ModelRecord) -> dict[str, Any]:
    """Rename metadata or a configuration, which have the name on top."""
    return described | {"name": record.asked_for}


def _rename_statistics(statistics: dict[str, Any], record: ModelRecord) -> dict[str, Any]:
    """Return the statistics with the client's name of the model."""
    return {"model_stats": [one | {"name": record.asked_for} for one in statistics["model_stats"]]}
