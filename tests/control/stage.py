"""Control with fakes around it, and an oracle that judges it."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import pytest

from adapter.app.parts import Control, build_control
from adapter.control.models import Replaces
from adapter.control.ports import (
    MemorySettings,
    NoProcesses,
    Settings,
    StoreSettings,
    TimeLimits,
    World,
    keep_no_headroom,
)
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import ModelRecord, OnExit
from adapter.core.sizes import Sizes
from adapter.core.states import ModelState
from adapter.errors import AdapterError
from adapter.telemetry.metrics import Metrics
from tests.control.fakes import MIB, FakePackages, FakeStore, FakeTriton, Script, Staged
from tests.simulation.loop import Draws, virtual

A = ModelId("a")
B = ModelId("b")
C = ModelId("c")

_WATCH_SECONDS = 0.05
_REST_SECONDS = 60.0


def played(sequence: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a test of a coroutine, which runs in virtual time."""

    @functools.wraps(sequence)
    def test() -> None:
        with virtual(Draws(1)) as run:
            run(sequence())

    del test.__wrapped__  # pytest would take it for a coroutine
    return test


class Stage:
    """Control with fakes around it. Leaving the block asks the oracle.

    `scripts`: by the folder that `load` names, as "a", or by NAME@VERSION in the store for `call`.
    """

    def __init__(
        self,
        scripts: dict[str, Script],
        *,
        limit_mib: int | None = None,
        device_mib: int = 1000,
        devices: int = 1,
        on_exit: OnExit | None = OnExit.RELOAD,
        load_seconds: float = 100.0,
        is_embedded: bool = True,
        places_gpus: bool = False,
        stores: StoreSettings | None = None,
        mesh_default_mib: int | None = None,
        load_threads: int = 4,
        headroom_of: Callable[[int], int] = keep_no_headroom,
    ) -> None:
        self.triton = FakeTriton(scripts, device_mib, devices)
        self.packages = FakePackages(self.triton)
        self.store = FakeStore({name.partition("@")[0] for name in scripts if "@" in name})
        world = World(
            self.triton,
            self.packages,
            self.triton,
            self.triton if is_embedded else None,
            self.triton if is_embedded else NoProcesses(),
            artifacts=self.store,
        )
        default = None if mesh_default_mib is None else mesh_default_mib * MIB
        memory = MemorySettings(
            None if limit_mib is None else limit_mib * MIB,
            headroom_of,
            places_gpus=places_gpus,
            mesh_default_bytes=default,
        )
        settings = Settings(
            TimeLimits(load=load_seconds),
            memory,
            stores or StoreSettings(),
            on_exit,
            load_threads,
        )
        self.metrics = Metrics()
        self.control: Control = build_control(world, self.metrics, settings, Sizes())
        self.models = self.control.models
        self.served: list[str] = []  # folders whose models have answered
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.control.open()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await asyncio.sleep(_REST_SECONDS)
                self.judge_rest()
        finally:
            failure = self.end_watch()
            await self.control.stop()
        if error is None and failure is not None:
            raise failure

    def end_watch(self) -> BaseException | None:
        """Watch no more; return what was not as it should be."""
        watcher = self._watcher
        if watcher is None:
            return None
        self._watcher = None
        failure = watcher.exception() if watcher.done() else None
        watcher.cancel()
        return failure

    # -- the oracle -------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Hold at any time: what takes requests is loaded, and no more is used than there is."""
        while True:
            if self.control.status.is_up:
                for record in self.control.registry.records():
                    is_ready = record.state is ModelState.READY
                    is_known = record.name in self.triton.loaded or record.id in self._unwatched
                    assert not is_ready or is_known, record
            used = self.triton.used
            assert all(count <= self.triton.device_bytes for count in used.values()), used
            await asyncio.sleep(_WATCH_SECONDS)

    _unwatched: frozenset[ModelId] = frozenset()  # models that somebody unloads in Triton

    def judge_rest(self) -> None:
        """Hold at rest: table, Triton, repository, ledger and store say the same."""
        control = self.control
        records = control.registry.records()
        ready = {r.name for r in records if r.state is ModelState.READY}
        stuck = {r.name for r in records if r.state is ModelState.STUCK}
        assert len(ready | stuck) == len(records), records
        assert set(self.triton.loaded) == ready, (set(self.triton.loaded), ready)
        assert {*self.triton.loading, *self.triton.unloading} <= stuck
        assert set(self.triton.repository) == ready | stuck, self.triton.repository
        ledger = control.ledger
        assert set(ledger.models) == ready, ledger.models
        assert set(ledger.stuck) <= stuck, ledger.stuck
        assert not ledger.loads, ledger.loads
        assert not ledger.unloads, ledger.unloads
        assert not ledger.returning, ledger.returning
        kept = +self.store.kept
        folders = sorted(r.files.folder for r in records if r.files is not None)
        assert sorted(kept.elements()) == folders, (kept, folders)
        assert all(r.usage.in_flight == 0 for r in records), records
        assert len(control.operations) == 0
        assert set(control.slots._holders) <= {r for r in records if r.state is ModelState.STUCK}
        assert control.leases.started == control.leases.ended
        assert control.leases.waiting == 0
        assert control.leases.abandoned == 0
        assert not control.models.loader.turns.loading

    def check(self, *serving: ModelId) -> None:
        """Hold now: these models take requests, and no others."""
        ready = [r.id for r in self.control.registry.records() if r.state is ModelState.READY]
        assert sorted(ready) == sorted(serving)

    # -- what callers do --------------------------------------------------------------------

    async def load(self, model_id: ModelId, folder: str = "") -> ModelRecord:
        return await self.models.load(model_id, ModelSource(folder or model_id))

    async def replace(self, model_id: ModelId, folder: str) -> None:
        await self.models.replace(model_id, ModelSource(folder), Replaces.ALWAYS)

    async def update(self, model_id: ModelId) -> None:
        """Load the version that the store has now."""
        record = self.control.registry.serving(model_id)
        assert record.key is not None
        await self.models.update(record, record.key)

    async def leave_loaded(self, model_id: ModelId) -> TritonName:
        """Have an earlier run leave a model in Triton; return its name there."""
        name = TritonName(model_id)
        package = await self.packages.prepare(name, model_id, ModelSource(model_id))
        self.triton.repository[name] = Staged(package, None)
        await self.triton.load(name, model_id)
        return name

    async def invoke(self, model_id: ModelId, seconds: float = 0.1) -> str:
        """Call a model as SageMaker's contract does: it does not wait."""
        with self.models.lease(model_id) as record:
            folder = await self.triton.infer(record, seconds)
        self.served.append(folder)
        return folder

    async def call(self, model_id: ModelId, seconds: float = 0.1, caller: str = "") -> str:
        """Call a model of the store."""
        on_demand = self.control.on_demand
        assert on_demand is not None
        key = ArtifactKey("", model_id)
        lease, _ = await on_demand.wait_for_lease(model_id, key, caller)
        with lease as record:
            return await self.triton.infer(record, seconds)

    async def wait_and_invoke(self, model_id: ModelId) -> str:
        """Call as V2 does: wait for a load that is in progress."""
        with await self.models.wait_for_lease(model_id, 50) as record:
            folder = await self.triton.infer(record)
        self.served.append(folder)
        return folder


async def fails(work: Awaitable[object], error: type[AdapterError]) -> AdapterError:
    """Hold that the work raises this error, and no subclass of it; return the error."""
    with pytest.raises(error) as caught:
        await work
    raised = caught.value
    assert type(raised) is error, repr(raised)
    return raised
