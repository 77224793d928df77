"""Builds the gRPC listeners: their services, and the proxy in front of each server."""

from collections.abc import Callable, Sequence

from adapter.app.shared import Shared, access_at
from adapter.backend.triton import TritonControl
from adapter.core.faults import Faults
from adapter.dataplane.grpc import GrpcDataPlane
from adapter.dataplane.proxy.context import ProxyContext, connect_to
from adapter.dataplane.proxy.listener import ProxyListener
from adapter.dataplane.traced import TracedRpc
from adapter.frontends.access import Access
from adapter.frontends.grpc import modelmesh
from adapter.frontends.grpc.fast_path import FRONTEND, GrpcFastPath
from adapter.frontends.grpc.health import health_services
from adapter.frontends.grpc.middleware import MessageLimits
from adapter.frontends.grpc.modelmesh_sizes import MeshSizes
from adapter.frontends.grpc.v2 import SERVICE, V2Service
from adapter.frontends.listeners import GrpcService
from adapter.frontends.model_repository import Repository

# The default of the adapter that ModelMesh brings along for Triton.
_MESH_LOADS = 1


class Rpc:
    """The gRPC listeners. `plane` goes to Triton for what does not go to it directly."""

    def __init__(
        self,
        shared: Shared,
        triton: TritonControl,
        faults: Faults,
        plane: GrpcDataPlane,
        limits: MessageLimits,
    ) -> None:
        self._shared = shared
        self._triton = triton
        self._faults = faults
        self._plane = plane
        self._limits = limits

    def services(self, repository: Repository) -> dict[str, Sequence[GrpcService]]:
        """Build the services of each listener, for the server behind its proxy."""
        names, is_ready = [SERVICE, modelmesh.SERVICE], self._shared.is_ready
        everything, inference = self._v2("grpc", repository), self._v2(FRONTEND)
        runtime = self._runtime().add_to
        return {
            "grpc": (everything.add_to, runtime, *health_services(names, is_ready)),
            FRONTEND: (inference.add_to, *health_services([SERVICE], is_ready)),
        }

    def _v2(self, frontend: str, repository: Repository | None = None) -> V2Service:
        shared = self._shared
        return V2Service(
            shared.control,
            TracedRpc(self._plane, shared.tracing) if shared.tracing else self._plane,
            self._faults,
            shared.metrics,
            access=self._access(frontend),
            repository=repository,
            is_live=lambda: self._triton.live,
            is_ready=shared.is_ready,
            load_wait_seconds=shared.settings.load_wait_seconds,
            passthrough=shared.settings.passthrough,
            limits=self._limits,
            budget=shared.budget,
            serving=shared.serving,
        )

    def _access(self, listener: str) -> Access:
        settings = self._shared.settings
        return access_at(settings, listener, getattr(settings, listener))

    def _runtime(self) -> modelmesh.ModelRuntime:
        shared, settings = self._shared, self._shared.settings
        sizes = MeshSizes(
            shared.control,
            settings.all_roots,
            default_bytes=settings.modelmesh_default_size,
            size_factor=settings.size_factor,
            memory_bytes=settings.modelmesh_memory,
            buffer_bytes=settings.modelmesh_memory_buffer,
        )
        options = modelmesh.Options(
            load_seconds=settings.load_timeout_seconds,
            unload_seconds=settings.unload_timeout_seconds,
            promised_seconds=settings.modelmesh_load_timeout_seconds,
            load_concurrency=settings.load_concurrency or _MESH_LOADS,
            model_concurrency=settings.modelmesh_model_concurrency,
            version=settings.modelmesh_runtime_version,
        )
        return modelmesh.ModelRuntime(
            shared.control,
            self._triton,
            sizes,
            options,
            shared.metrics,
            access=self._access("grpc"),
            is_ready=shared.is_ready,
        )

    def proxy(self, name: str, triton: Callable[[], str | None], server: str) -> ProxyListener:
        """Build the proxy of a listener. `triton` is the address of Triton, None while there is
        none; `server` that of the server which takes all that does not go to Triton directly.
        """
        shared, metrics = self._shared, self._shared.metrics
        policy = GrpcFastPath(
            shared.control,
            self._faults,
            metrics,
            self._limits,
            frontend=name,
            is_direct=shared.tracing is None and not self._access(name).is_keyed,
            load_wait_seconds=shared.settings.load_wait_seconds,
            serving=shared.serving,
        )
        context = ProxyContext(
            policy,
            connect_to(triton),
            connect_to(lambda: server),
            timeout_seconds=shared.settings.infer_timeout_seconds,
            max_message_bytes=self._limits.direct,
            budget=shared.budget,
            turns=shared.turns,
            on_shed=metrics.shedding(name, "refused", "flood", "streams"),
        )
        proxy = ProxyListener(context, max_connections=shared.max_connections)
        shared.drain.then_refuse(proxy.hurry)
        metrics.connections.labels(name).set_function(lambda: proxy.connections)
        return proxy
