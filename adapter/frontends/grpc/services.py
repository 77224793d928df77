"""The services of the gRPC listeners."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from adapter.control.models import ModelControl
from adapter.core.calls import RpcDataPlane
from adapter.core.faults import Faults
from adapter.frontends.grpc import modelmesh
from adapter.frontends.grpc.fast_path import FRONTEND, GrpcFastPath
from adapter.frontends.grpc.health import Health, add_reflection
from adapter.frontends.grpc.limits import message_limits
from adapter.frontends.grpc.modelmesh_sizes import MeshSizes
from adapter.frontends.grpc.v2 import SERVICE, V2Service
from adapter.frontends.listeners import GrpcService
from adapter.frontends.model_repository import Repository
from adapter.settings import Settings
from adapter.telemetry.metrics import Metrics


class Triton(modelmesh.Triton, Protocol):
    @property
    def live(self) -> bool: ...
    def versions(self) -> Awaitable[Mapping[str, Sequence[str]]]: ...


@dataclass(frozen=True, slots=True)
class ListenerServices:
    """Of one listener: what goes to Triton directly, and the services of its fallback server."""

    name: str
    policy: GrpcFastPath
    services: Sequence[GrpcService]


class GrpcServices:
    """`everything` is for the listener `grpc`, `inference` for `grpc_data`."""

    def __init__(
        self,
        *,
        control: ModelControl,
        is_traced: bool,
        triton: Triton,
        dataplane: RpcDataPlane,
        faults: Faults,
        metrics: Metrics,
        settings: Settings,
        roots: Sequence[Path],
        is_ready: Callable[[], bool],
    ) -> None:
        limits = message_limits(settings)
        policy = partial(GrpcFastPath, control, faults, metrics, limits, is_traced=is_traced)
        v2 = partial(
            V2Service,
            control,
            dataplane,
            faults,
            metrics,
            is_live=lambda: triton.live,
            is_ready=is_ready,
            load_wait_seconds=settings.load_wait_seconds,
            passthrough=settings.passthrough,
            limits=limits,
        )
        sizes = MeshSizes(control, settings, roots)
        runtime = modelmesh.ModelRuntime(
            control, triton, sizes, settings, metrics, is_ready=is_ready
        )
        names = [SERVICE, modelmesh.SERVICE]
        everything = (
            v2(repository=Repository(control, triton.versions, roots)).add_to,
            runtime.add_to,
            *_about(names, is_ready),
        )
        inference = (v2(repository=None, frontend=FRONTEND).add_to, *_about([SERVICE], is_ready))
        self.everything = ListenerServices("grpc", policy(frontend="grpc"), everything)
        self.inference = ListenerServices(FRONTEND, policy(frontend=FRONTEND), inference)


def _about(names: Sequence[str], is_ready: Callable[[], bool]) -> Sequence[GrpcService]:
    return (Health(names, is_ready).add_to, partial(add_reflection, services=names))
