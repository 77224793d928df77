"""Which services the gRPC doors have."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from adapter.control import ModelControl
from adapter.core.faults import Faults
from adapter.core.rpc import RpcDataPlane
from adapter.frontends import modelmesh
from adapter.frontends.doors import GrpcService
from adapter.frontends.grpc_health import Health, add_reflection
from adapter.frontends.grpc_lane import FRONTEND, LaneGate
from adapter.frontends.grpc_limits import message_limits
from adapter.frontends.grpc_v2 import SERVICE, V2Service
from adapter.frontends.modelmesh_sizes import MeshSizes
from adapter.frontends.repository import Repository
from adapter.metrics import Metrics
from adapter.settings import Settings


class Triton(modelmesh.Triton, Protocol):
    @property
    def live(self) -> bool: ...
    def versions(self) -> Awaitable[Mapping[str, Sequence[str]]]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """At one listener: what goes straight to Triton, and the services for all else."""

    name: str
    gate: LaneGate
    adds: Sequence[GrpcService]


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
        is_well: Callable[[], bool],
    ) -> None:
        limits = message_limits(settings)
        gate = partial(LaneGate, control, faults, metrics, limits, is_traced=is_traced)
        v2 = partial(
            V2Service,
            control,
            dataplane,
            faults,
            metrics,
            is_live=lambda: triton.live,
            is_ready=is_well,
            load_wait_seconds=settings.load_wait_seconds,
            passthrough=settings.passthrough,
            limits=limits,
        )
        sizes = MeshSizes(control, settings, roots)
        runtime = modelmesh.ModelRuntime(control, triton, sizes, settings, metrics, is_well=is_well)
        names = [SERVICE, modelmesh.SERVICE]
        everything = (
            v2(repository=Repository(control, triton.versions, roots)).add_to,
            runtime.add_to,
            *_about(names, is_well),
        )
        inference = (v2(repository=None, frontend=FRONTEND).add_to, *_about([SERVICE], is_well))
        self.everything = Served("grpc", gate(frontend="grpc"), everything)
        self.inference = Served(FRONTEND, gate(frontend=FRONTEND), inference)


def _about(names: Sequence[str], is_well: Callable[[], bool]) -> Sequence[GrpcService]:
    return (Health(names, is_well).add_to, partial(add_reflection, services=names))
