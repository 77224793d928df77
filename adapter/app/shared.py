"""What the builders of all frontends take."""

from collections.abc import Callable
from dataclasses import dataclass

from adapter.control.lease import Serving
from adapter.control.models import ModelControl
from adapter.control.residency import Residency
from adapter.core.faults import Faults
from adapter.core.model import ModelId
from adapter.dataplane.grpc import GrpcDataPlane
from adapter.frontends.access import Access
from adapter.frontends.drain import Drain
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns
from adapter.settings import Address, Settings
from adapter.settings.vertex import VertexRoutes
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Shared:
    """`max_connections`: of each listener. `single_model`: the one that /invocations is about.
    `residency`: None without a store. `budget`: of callers' bytes. `turns`: of all that takes long
    on the event loop.
    """

    settings: Settings
    metrics: Metrics
    tracing: Tracing | None
    control: ModelControl
    drain: Drain
    budget: ByteBudget
    turns: Turns
    rpc: GrpcDataPlane
    faults: Faults
    is_ready: Callable[[], bool]
    max_connections: int
    single_model: ModelId | None
    vertex_routes: VertexRoutes | None
    residency: Residency | None

    @property
    def serving(self) -> Serving | None:
        """How calls of V2 load their models; None where they load none."""
        if self.residency is not None and self.settings.on_demand:
            return self.residency.serving
        return None


def access_at(
    settings: Settings, name: str, address: Address, *, infers_only: bool = False
) -> Access:
    """Return what callers of the listener `name` may do."""
    token, is_keyed = settings.token_at(address), settings.is_keyed_at(address)
    return Access(name, infers_only=infers_only, token=token, is_keyed=is_keyed)
