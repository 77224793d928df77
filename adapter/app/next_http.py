"""Builds the HTTP listeners whose connections are coroutines, for tests alone.

They take the place of those of adapter/app/listeners.py once all that these do has been shown.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adapter.app import listeners
from adapter.app.listeners import (
    Shared,
    access_at,
    build_callers,
    headers_to_triton,
    list_endpoints,
    passthrough_at,
)
from adapter.core.calls import V2DataPlane
from adapter.dataplane.http import HttpDataPlane
from adapter.dataplane.traced import TracedHttp
from adapter.frontends.access import Access, Extensions, SitePolicy
from adapter.frontends.http.engine.calls import Calls
from adapter.frontends.http.engine.contracts import ContainerContracts
from adapter.frontends.http.engine.endpoint import Endpoint, refuse_endpoint
from adapter.frontends.http.engine.endpoint_contract import EndpointCalls
from adapter.frontends.http.engine.handled_inference import Inferences
from adapter.frontends.http.engine.heads import Heads
from adapter.frontends.http.engine.sagemaker import SageMaker
from adapter.frontends.http.engine.serve import Handle, Parts, Service
from adapter.frontends.http.engine.server import Connections, HttpServer
from adapter.frontends.http.engine.streams import Streams
from adapter.frontends.http.engine.v2 import V2
from adapter.frontends.http.instrumentation import Clock, Instrumentation
from adapter.frontends.model_repository import Repository
from adapter.settings import Address

if TYPE_CHECKING:
    from collections.abc import Mapping

# The variable of the environment with which tests choose these listeners, and its value.
VARIABLE = "TRITON_ADAPTER_HTTP"
NEXT = "next"


@dataclass(frozen=True, slots=True)
class NextRest:
    """One HTTP listener with the name and address of its setting."""

    name: str
    address: Address
    heads: Heads  # inferences are planned once their `host`, Triton's, is set
    listener: HttpServer


def build_next_rest(shared: Shared, plane: HttpDataPlane, repository: Repository) -> list[NextRest]:
    """Build `http`, and `http_data` where it is a listener of its own."""
    settings = shared.settings
    listeners = [_build(shared, plane, repository, access_at(settings, "http", settings.http))]
    if settings.has_http_data:
        access = access_at(settings, "http_data", settings.http_data, infers_only=True)
        listeners.append(_build(shared, plane, repository, access))
    return listeners


def _build(
    shared: Shared, plane: HttpDataPlane, repository: Repository, access: Access
) -> NextRest:
    settings = shared.settings
    name = access.name
    address: Address = getattr(settings, name)
    sites = SitePolicy(address, settings.allowed_hosts, settings.token_at(address))
    contracts = ContainerContracts(
        shared.models,
        shared.state.triton,
        on_demand=shared.on_demand,
        load_wait_seconds=listeners.LOAD_WAIT_SECONDS,
    )
    heads = Heads(
        shared.metrics.traffic.served,
        contracts,
        default_model=shared.single_model,
        max_body_bytes=settings.max_body_bytes,
        sites=sites,
        calls=_build_calls(shared),
        headers=headers_to_triton(settings, "http"),
        invokes=settings.inference_type == "infer",
        plans=not access.is_keyed and shared.tracing is None,
    )
    parts = Parts(
        plane,
        Instrumentation(shared.metrics, name),
        Clock(),
        shared.budget,
        sites,
        max_body_bytes=settings.max_body_bytes,
        shares_memory="shared_memory" in passthrough_at(settings, access),
        tracing=shared.tracing,
    )
    dataplane = TracedHttp(plane, shared.tracing) if shared.tracing else plane
    inferences = _build_inferences(shared, dataplane, contracts, parts)
    server = HttpServer(
        Service(parts, _build_handle(shared, inferences, repository, parts, access)),
        parts,
        heads,
        drain=shared.drain,
        connections=_count_connections(shared, name),
        turns=shared.turns,
        is_endpoint=shared.stores is not None,
    )
    return NextRest(name, address, heads, server)


def _count_connections(shared: Shared, name: str) -> Connections:
    shed = shared.metrics.shedding(name, "closed", "refused", "pipelined")
    connections = Connections(shared.max_connections, shed)
    shared.metrics.connections.labels(name).set_function(lambda: len(connections))
    return connections


def _build_calls(shared: Shared) -> EndpointCalls | None:
    """Return what plans calls of an endpoint; None without one, or where calls are signed."""
    if shared.stores is None or shared.settings.endpoint_keys:
        return None
    return EndpointCalls(list_endpoints(shared.settings), shared.stores)


def _build_inferences(
    shared: Shared, dataplane: V2DataPlane, contracts: ContainerContracts, parts: Parts
) -> Inferences:
    settings = shared.settings
    return Inferences(
        dataplane,
        contracts,
        max_body_bytes=settings.max_body_bytes,
        default_model=shared.single_model,
        operation=settings.inference_type,
        shares_memory=parts.shares_memory,
    )


def _build_handle(
    shared: Shared, inferences: Inferences, repository: Repository, parts: Parts, access: Access
) -> Handle:
    """Build what answers the calls that are no planned inferences."""
    passthrough = passthrough_at(shared.settings, access)
    v2 = V2(
        shared.models,
        shared.state.triton,
        inferences,
        repository,
        extensions=Extensions(passthrough, has_repository=not access.infers_only),
        max_body_bytes=shared.settings.gathered_bytes,
    )
    sagemaker = SageMaker(shared.models, inferences, is_ready=shared.is_ready)
    handlers: Mapping[str, Mapping[str, Handle]] = {
        "sagemaker": sagemaker.handlers,
        "v2": v2.handlers,
    }
    endpoint = _build_endpoint(shared, inferences, parts)
    return Calls(access, handlers, passthrough, endpoint).handle


def _build_endpoint(shared: Shared, inferences: Inferences, parts: Parts) -> Handle:
    if shared.stores is None:
        return refuse_endpoint
    settings = shared.settings
    streams = Streams(
        shared.traced_rpc,
        shared.faults,
        parts.instrumentation,
        timeout_seconds=settings.infer_timeout_seconds,
    )
    return Endpoint(
        inferences,
        streams,
        shared.stores,
        list_endpoints(settings),
        shared.budget,
        callers=build_callers(settings.endpoint_keys),
    ).handle
