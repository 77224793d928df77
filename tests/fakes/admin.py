"""The admin listener before the fake world, and models that are there without a load."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from adapter.core.calls import Hold, V2Answer, V2Call
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.states import ModelEvent
from adapter.frontends.access import Access, SitePolicy
from adapter.frontends.admin.actions import ModelActions
from adapter.frontends.admin.models import Resident
from adapter.frontends.admin.pages import Admin, Probes, application
from adapter.frontends.admin.state import DebugState
from adapter.frontends.admin.store_models import ModelListing
from adapter.frontends.catalogue import Catalogue
from adapter.frontends.drain import Drain
from adapter.frontends.repository import Repository
from adapter.settings import parse_address
from tests.fakes.control import ControlOnFakes

WELL = {
    "is_ready": True,
    "reasons": [],
    "notes": [],
    "is_triton_live": True,
    "is_draining": False,
}


class NoDataPlane:
    """Has no Triton to infer in."""

    def forward(self, call: V2Call, hold: Hold | None) -> AbstractAsyncContextManager[V2Answer]:
        raise NotImplementedError(call.path)


async def list_no_versions() -> dict[str, list[str]]:
    return {}


def admin_of(fakes: ControlOnFakes, catalogue: Catalogue | None = None) -> TestClient[Any, Any]:
    """Return the admin listener; with a catalogue, that of an adapter with a store."""
    probes = Probes(
        fakes.control_state,
        fakes.metrics,
        why_not_live=lambda: None,
        why_not_started=lambda: None,
        why_not_ready=lambda: None,
    )
    state = DebugState(
        fakes.control,
        fakes.control_state,
        fakes.metrics.history,
        about={"version": "1"},
        health=lambda: WELL,
    )
    admin = Admin(
        state,
        Resident(fakes.control.registry, fakes.control_state),
        ModelListing(
            fakes.control.registry,
            fakes.control_state,
            fakes.metrics.history,
            catalogue,
            is_by_name=False,
        ),
        fakes.control,
        actions=ModelActions(
            fakes.control,
            fakes.control_state.triton,
            Repository(fakes.control, list_no_versions, ()),
            NoDataPlane(),
            None,
        ),
        access=Access("admin"),
        model_access=Access("admin"),
        drain=Drain(fakes.control, fakes.control_state, fakes.metrics.traffic, 0),
        drain_seconds=1,
        config={},
    )
    sites = SitePolicy(parse_address("127.0.0.1:0"), ())
    return TestClient(TestServer(application(sites, probes, admin)))


def adopt(fakes: ControlOnFakes, name: str, size: int = 0) -> None:
    """Have a model be there without a load, booked with so many bytes."""
    record = ModelRecord(
        ModelId(name), TritonName(name), ModelSource(f"/{name}"), LoadedFor.PLATFORM
    )
    fakes.triton.models.add(record.name)
    fakes.control.registry.add(record, ModelEvent.ADOPTED)
    fakes.parts.memory.ledger.adopt(record.name, {HOST: size})
    fakes.triton.models.add(name)
    fakes.sizes[name] = size
