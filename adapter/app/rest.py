"""Builds the HTTP listeners, with the REST contracts that they serve."""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from adapter.app.endpoint import build_endpoint, inference_kind, plain_calls
from adapter.app.shared import Shared, access_at
from adapter.core.calls import V2DataPlane
from adapter.core.model import ModelId
from adapter.dataplane.http import HttpDataPlane
from adapter.dataplane.traced import TracedHttp
from adapter.frontends import openapi
from adapter.frontends.access import Access
from adapter.frontends.http.connections import Connections
from adapter.frontends.http.endpoint.endpoint import EndpointDialect, no_endpoint
from adapter.frontends.http.fast_path import FastPath
from adapter.frontends.http.head import Heads
from adapter.frontends.http.inference import Inferences
from adapter.frontends.http.middleware import Dialect, HttpMiddleware, Serve
from adapter.frontends.http.observer import Clock, Observer, path_segments
from adapter.frontends.http.sagemaker import SageMaker
from adapter.frontends.http.server import HttpListener
from adapter.frontends.http.v2 import V2
from adapter.frontends.http.vertex import Vertex
from adapter.frontends.model_repository import Repository
from adapter.frontends.sites import SitePolicy
from adapter.frontends.traced import traced
from adapter.settings import Address

_DIALECTS: Mapping[str, Dialect] = {"endpoint": EndpointDialect()}


@dataclass(frozen=True, slots=True)
class Rest:
    """One listener: the name and the address of its setting. `heads` take inferences by the fast
    path once they know where Triton is.
    """

    name: str
    address: Address
    heads: Heads
    listener: HttpListener


def build_rest(shared: Shared, plane: HttpDataPlane, repository: Repository) -> list[Rest]:
    """Build `http`, and `http_data` where it is a listener of its own."""
    settings = shared.settings
    placed = [(access_at(settings, "http", settings.http), settings.http)]
    if settings.has_http_data:
        address = settings.http_data
        placed.append((access_at(settings, "http_data", address, infers_only=True), address))
    return [_build(shared, plane, repository, *one) for one in placed]


def _build(
    shared: Shared, plane: HttpDataPlane, repository: Repository, access: Access, address: Address
) -> Rest:
    settings, name = shared.settings, access.name
    sites = SitePolicy(address, settings.allowed_hosts)
    observer = Observer(shared.metrics, name)
    heads = Heads(
        shared.metrics.traffic.served,
        default_model=shared.single_model,
        # nothing is plain where each call is asked who sends it
        max_body_bytes=0 if access.is_keyed else settings.max_body_bytes,
        sites=sites,
        calls=plain_calls(shared),
        invokes=settings.inference_type == "infer",
    )
    routes = _build_routes(shared, plane, repository, observer, access)
    serve: Serve = HttpMiddleware(routes, observer, sites, _DIALECTS).serve
    if shared.tracing is not None:
        serve = traced(serve, shared.tracing)
    listener = HttpListener(
        serve,
        FastPath(
            *(shared.control, plane, observer, Clock(), shared.budget),
            make=inference_kind(shared),
            loads_for_calls=shared.serving is not None,
        ),
        heads,
        observer,
        drain=shared.drain,
        connections=_count_connections(shared, name),
        turns=shared.turns,
        is_endpoint=shared.residency is not None,
    )
    return Rest(name, address, heads, listener)


def _count_connections(shared: Shared, name: str) -> Connections:
    shed = shared.metrics.shedding(name, "closed", "refused", "pipelined")
    connections = Connections(shared.max_connections, shed)
    shared.metrics.connections.labels(name).set_function(lambda: len(connections))
    return connections


def _build_routes(
    shared: Shared, plane: HttpDataPlane, repository: Repository, observer: Observer, access: Access
) -> Serve:
    dataplane = TracedHttp(plane, shared.tracing) if shared.tracing else plane
    inferences = _build_inferences(shared, dataplane)
    sagemaker = SageMaker(shared.control, inferences, access=access, is_ready=shared.is_ready)
    endpoint = build_endpoint(shared, dataplane, inferences, observer)
    v2 = _build_v2(shared, dataplane, inferences, repository, access)
    vertex = _build_vertex(shared, v2, inferences, access)
    handlers = {
        "v2": v2.handle,
        openapi.NAME: openapi.OpenApi(access).handle,
        "endpoints": no_endpoint if endpoint is None else endpoint.handle,
    }

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        is_aws = request["contract"] == "endpoint"
        segments = ["endpoints"] if is_aws else path_segments(request.raw_path)
        if vertex is not None and vertex.has(segments):
            return await vertex.handle(request)
        return await handlers.get(segments[0], sagemaker.handle)(request)

    return serve


def _build_vertex(shared: Shared, v2: V2, inferences: Inferences, access: Access) -> Vertex | None:
    routes, model = shared.vertex_routes, shared.settings.vertex_model
    if routes is None:
        return None
    return Vertex(
        v2,
        inferences,
        access=access,
        routes=routes,
        model_id=shared.single_model if model is None else ModelId(model),
        is_ready=shared.is_ready,
    )


def _build_inferences(shared: Shared, dataplane: V2DataPlane) -> Inferences:
    settings = shared.settings
    return Inferences(
        shared.control,
        dataplane,
        load_wait_seconds=settings.load_wait_seconds,
        max_body_bytes=settings.max_body_bytes,
        default_model=shared.single_model,
        budget=shared.budget,
        serving=shared.serving,
        operation=settings.inference_type,
    )


def _build_v2(
    shared: Shared,
    dataplane: V2DataPlane,
    inferences: Inferences,
    repository: Repository,
    access: Access,
) -> V2:
    settings = shared.settings
    return V2(
        shared.control,
        dataplane,
        inferences,
        repository,
        access=access,
        load_wait_seconds=settings.load_wait_seconds,
        budget=shared.budget,
        max_body_bytes=settings.gathered_bytes,
        passthrough=frozenset(() if access.infers_only else settings.passthrough),
        serving=shared.serving,
    )
