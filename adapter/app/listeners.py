"""Builds the HTTP and gRPC listeners, with the contracts that they serve."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from grpc import GenericRpcHandler

from adapter.control.door import ControlState, MeshBooks, Models, StoreModels, WaitForLease
from adapter.core import versions
from adapter.core.calls import V2DataPlane
from adapter.core.model import ModelId
from adapter.core.triton_errors import Faults
from adapter.core.triton_input import HeaderTable
from adapter.frontends.access import Access, Extensions, SitePolicy
from adapter.frontends.admin.store_models import ModelListing
from adapter.frontends.drain import Drain
from adapter.frontends.endpoint.contract import EndpointCalls
from adapter.frontends.endpoint.invoke import Endpoint, refuse_endpoint
from adapter.frontends.endpoint.members import Endpoints
from adapter.frontends.endpoint.signatures import Key, SigV4Authenticator
from adapter.frontends.endpoint.streams import Streams
from adapter.frontends.grpc import modelmesh
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.grpc.health import Health, reflection_services
from adapter.frontends.grpc.mesh_sizes import MeshSizes
from adapter.frontends.grpc.relay_policy import RelayPolicy
from adapter.frontends.grpc.v2 import SERVICE, V2Service
from adapter.frontends.http.calls import Calls
from adapter.frontends.http.connection import Parts
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.handled_inference import Inferences
from adapter.frontends.http.instrumentation import Clock, Instrumentation
from adapter.frontends.http.plans import Heads
from adapter.frontends.http.sagemaker import SageMaker
from adapter.frontends.http.serve import Find, Handle, Service
from adapter.frontends.http.server import Connections, HttpServer
from adapter.frontends.http.v2 import V2
from adapter.frontends.openai.contract import OpenAI
from adapter.frontends.repository import Repository
from adapter.frontends.unready import UnreadyConnections
from adapter.relay.listener import RelayListener, connect_to
from adapter.relay.policy import RelayContext
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns
from adapter.settings import Address, Settings, parse_endpoint_key
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.tracing import Tracing
from adapter.triton.client import TritonControl
from adapter.triton.grpc import GrpcDataPlane
from adapter.triton.http import HttpDataPlane
from adapter.triton.traced import TracedHttp, TracedRpc

# How long a call of V2 waits for a load of its model by somebody else. Most loads end within
# seconds; after that a client gets 503, and may try another copy.
LOAD_WAIT_SECONDS = 5.0
# The default of the adapter that ModelMesh brings along for Triton.
_MESH_LOADS = 1


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all listeners are built from."""

    settings: Settings
    metrics: Metrics
    tracing: Tracing | None
    models: Models
    state: ControlState
    stores: StoreModels | None  # None without a store
    mesh_books: MeshBooks
    drain: Drain
    unready: UnreadyConnections
    budget: ByteBudget  # of callers' bytes
    turns: Turns  # of all that takes long on the event loop
    rpc: GrpcDataPlane  # for calls that the proxy does not send to Triton itself
    faults: Faults
    is_ready: Callable[[], bool]
    max_connections: int  # of each listener
    single_model: ModelId | None  # served at /invocations
    unload_seconds: float  # how long an unload of ModelMesh may wait for Triton
    listing: ModelListing

    @property
    def traced_rpc(self) -> GrpcDataPlane | TracedRpc:
        """Return `rpc`, with a span for each call if requests are traced."""
        return TracedRpc(self.rpc, self.tracing) if self.tracing else self.rpc

    @property
    def on_demand(self) -> WaitForLease | None:
        """Return the function that loads models for calls of V2; None if they load none."""
        if self.stores is not None and self.settings.on_demand:
            return self.stores.wait_for_named
        return None


def access_at(
    settings: Settings, name: str, address: Address, *, infers_only: bool = False
) -> Access:
    """Return what callers of the listener `name` may do."""
    return Access(
        name,
        infers_only=infers_only,
        token=settings.token_at(address),
        is_keyed=settings.is_keyed_at(address),
    )


def passthrough_at(settings: Settings, access: Access) -> frozenset[str]:
    """Return the items of `passthrough` that are open at a listener: none where callers only
    infer.
    """
    return frozenset(() if access.infers_only else settings.passthrough)


def headers_to_triton(settings: Settings, protocol: Literal["http", "grpc"]) -> HeaderTable:
    """Return which headers Triton is handed. The arguments of an external one are not known."""
    arguments = settings.triton_args if settings.triton == "embedded" else None
    return HeaderTable(f"--{protocol}-header-forward-pattern", arguments)


def list_endpoints(settings: Settings) -> Endpoints:
    """Return the endpoints by name, with the store that takes all other names."""
    names = [endpoint.name for endpoint in settings.endpoints]
    return Endpoints(names, takes_all=settings.model_store is not None)


def build_callers(lines: Sequence[str]) -> SigV4Authenticator | None:
    """Build what judges signatures by `endpoint_keys`; None without any."""
    keys = [parse_endpoint_key(line, os.environ) for line in lines]
    known_keys = {key.access_key: Key(key.secret, key.models) for key in keys}
    return SigV4Authenticator(known_keys) if known_keys else None


class Rpc:
    """Builds the services and proxies of the gRPC listeners."""

    def __init__(self, shared: Shared, triton: TritonControl, limits: MessageLimits) -> None:
        self._shared = shared
        self._triton = triton
        self._limits = limits
        self._calls = {name: self._build_calls(name) for name in ("grpc", "grpc_data")}

    def _build_calls(self, listener: str, frontend: str | None = None) -> GrpcCalls:
        """Build what all gRPC calls of a listener have in common."""
        shared = self._shared
        return GrpcCalls(
            shared.metrics,
            self._find_access(listener),
            self._limits,
            frontend=frontend,
            tracing=shared.tracing,
        )

    def services(self, repository: Repository) -> dict[str, Sequence[GenericRpcHandler]]:
        """Build the services of each listener, for the server behind its proxy."""
        runtime = self._build_runtime().service(self._build_calls("grpc", "modelmesh"))
        everything = [self._build_v2("grpc", repository), runtime]
        return {
            "grpc": [*everything, *self._build_about(SERVICE, modelmesh.SERVICE)],
            "grpc_data": [self._build_v2("grpc_data"), *self._build_about(SERVICE)],
        }

    def _build_about(self, *names: str) -> list[GenericRpcHandler]:
        """Build the health and the reflection of these services."""
        return [Health(names, self._shared.is_ready).service(), *reflection_services(names)]

    def _build_v2(self, listener: str, repository: Repository | None = None) -> GenericRpcHandler:
        """Build V2's service of a listener, with the model repository where there is one."""
        shared = self._shared
        service = V2Service(
            shared.models,
            shared.state.triton,
            shared.traced_rpc,
            shared.faults,
            repository=repository,
            is_live=lambda: self._triton.live,
            is_ready=shared.is_ready,
            load_wait_seconds=LOAD_WAIT_SECONDS,
            passthrough=passthrough_at(shared.settings, self._find_access(listener)),
            budget=shared.budget,
            on_demand=shared.on_demand,
        )
        return service.service(self._calls[listener])

    def _find_access(self, listener: str) -> Access:
        """Return what callers of a gRPC listener may do."""
        settings = self._shared.settings
        infers_only = listener == "grpc_data"
        return access_at(settings, listener, getattr(settings, listener), infers_only=infers_only)

    def _build_runtime(self) -> modelmesh.ModelRuntime:
        """Build ModelMesh's runtime."""
        shared = self._shared
        settings = shared.settings
        sizes = MeshSizes(
            shared.models,
            shared.state,
            shared.mesh_books,
            default_bytes=settings.modelmesh_default_size,
            size_factor=settings.size_factor,
            capacity_bytes=settings.modelmesh_capacity,
        )
        options = modelmesh.Options(
            load_seconds=settings.load_timeout_seconds,
            unload_seconds=shared.unload_seconds,
            load_concurrency=settings.load_concurrency or _MESH_LOADS,
            model_concurrency=settings.modelmesh_model_concurrency,
        )
        return modelmesh.ModelRuntime(
            shared.models,
            shared.state.triton,
            self._triton,
            sizes,
            options=options,
            metrics=shared.metrics,
            is_ready=shared.is_ready,
        )

    def proxy(
        self,
        name: str,
        server: str,  # the address of the gRPC server that takes what Triton does not
    ) -> RelayListener:
        """Build the proxy of a listener, which sends inferences to Triton."""
        shared = self._shared
        policy = RelayPolicy(
            shared.models,
            shared.state.triton,
            shared.faults,
            self._calls[name],
            metadata=headers_to_triton(shared.settings, "grpc"),
            shares_memory="shared_memory"
            in passthrough_at(shared.settings, self._find_access(name)),
            is_direct=shared.tracing is None and not self._find_access(name).is_keyed,
            load_wait_seconds=LOAD_WAIT_SECONDS,
            on_demand=shared.on_demand,
            takes_cancels=lambda: versions.survives_cancels(self._triton.version),
        )
        context = RelayContext(
            policy,
            connect_to(lambda: self._triton.address),
            connect_to(lambda: server),
            timeout_seconds=shared.settings.infer_timeout_seconds,
            max_message_bytes=self._limits.direct,
            budget=shared.budget,
            turns=shared.turns,
            on_shed=shared.metrics.shedding(name, "refused", "flood", "streams"),
        )
        proxy = RelayListener(context, max_connections=shared.max_connections)
        shared.drain.on_noticed(proxy.start_drain_deadline)
        shared.unready.add(proxy.renew_connections)
        shared.metrics.connections.labels(name).set_function(lambda: proxy.connections)
        return proxy


@dataclass(frozen=True, slots=True)
class Rest:
    """One HTTP listener with the name and address of its setting."""

    name: str
    address: Address
    heads: Heads  # inferences are planned once their `host`, Triton's, is set
    listener: HttpServer


def build_rest(shared: Shared, plane: HttpDataPlane, repository: Repository) -> list[Rest]:
    """Build `http`, and `http_data` where it is a listener of its own."""
    settings = shared.settings
    listeners = [
        _build_listener(shared, plane, repository, access_at(settings, "http", settings.http))
    ]
    if settings.has_http_data:
        access = access_at(settings, "http_data", settings.http_data, infers_only=True)
        listeners.append(_build_listener(shared, plane, repository, access))
    return listeners


def _build_listener(
    shared: Shared, plane: HttpDataPlane, repository: Repository, access: Access
) -> Rest:
    """Build an HTTP listener, with the contracts that it serves to callers with this access."""
    settings = shared.settings
    name = access.name
    address: Address = getattr(settings, name)
    sites = SitePolicy(address, settings.allowed_hosts, settings.token_at(address))
    contracts = ContainerContracts(
        shared.models,
        shared.state.triton,
        on_demand=shared.on_demand,
        load_wait_seconds=LOAD_WAIT_SECONDS,
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
        Service(parts, _build_find(shared, inferences, repository, access)),
        parts,
        heads,
        drain=shared.drain,
        connections=_count_connections(shared, name),
        turns=shared.turns,
        is_endpoint=shared.stores is not None,
    )
    shared.unready.add(server.renew_connections)
    return Rest(name, address, heads, server)


def _count_connections(shared: Shared, name: str) -> Connections:
    """Return what counts and limits the connections of a listener."""
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
    """Build what serves inferences whose bodies are read whole."""
    settings = shared.settings
    return Inferences(
        dataplane,
        contracts,
        max_body_bytes=settings.max_body_bytes,
        default_model=shared.single_model,
        operation=settings.inference_type,
        shares_memory=parts.shares_memory,
    )


def _build_find(
    shared: Shared, inferences: Inferences, repository: Repository, access: Access
) -> Find:
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
        "openai": OpenAI(inferences, shared.listing, shared.faults).handlers,
    }
    endpoint = _build_endpoint(shared, inferences)
    return Calls(access, handlers, passthrough, endpoint).find


def _build_endpoint(shared: Shared, inferences: Inferences) -> Handle:
    """Build what answers calls of the endpoint, also by a refusal without a store."""
    if shared.stores is None:
        return refuse_endpoint
    settings = shared.settings
    streams = Streams(
        shared.traced_rpc,
        shared.faults,
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
