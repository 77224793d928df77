"""Builds control of its parts, in the order of need."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from adapter.control.desired import Desired
from adapter.control.eviction import Eviction
from adapter.control.leases import AtWork, Leases
from adapter.control.loader import Loader, LoadSlots, StoreFiles
from adapter.control.memory import Memory
from adapter.control.models import Models
from adapter.control.on_demand import OnDemand
from adapter.control.operations import Journal, Operations
from adapter.control.ports import Settings, SizeStore, World
from adapter.control.readings import Readings
from adapter.control.state import State, StoreState
from adapter.control.triton import (
    LoadTurns,
    RequestFailures,
    TritonStatus,
    TritonWatcher,
)
from adapter.control.unloader import Unloader
from adapter.control.updates import Updates
from adapter.core import times
from adapter.core.artifacts import ArtifactKey
from adapter.core.blame import Blame
from adapter.core.forgotten import ForgottenModels
from adapter.core.ledger import Ledger
from adapter.core.mesh_books import MeshBooks
from adapter.core.record import Step
from adapter.core.registry import Registry
from adapter.core.sizes import Sizes
from adapter.core.victims import Cost
from adapter.core.wanted import Wanted
from adapter.errors import AdapterError, InvalidRequest
from adapter.runtime import background, clock
from adapter.runtime.clock import Changes
from adapter.telemetry.metrics import Metrics


@dataclass(slots=True, eq=False)
class Housekeeping:
    """Polls memory, and saves the sizes of packages for the next run."""

    readings: Readings
    loader: Loader
    ledger: Ledger
    sizes: SizeStore | None
    _saved: object = field(init=False)

    def __post_init__(self) -> None:
        self._saved = self.ledger.sizes.as_dict()

    async def run(self) -> NoReturn:
        """Do the periodic work for ever."""
        await background.forever(
            self.readings.poll,
            self.loader.book_late,
            self.save,
            seconds=times.PAUSE_SECONDS / 4,
            expected=AdapterError,
        )

    async def save(self) -> None:
        """Save the sizes of packages, if they have changed."""
        data = self.ledger.sizes.as_dict()
        if self.sizes is not None and data != self._saved:
            await self.sizes.save(data)
            self._saved = data


@dataclass(slots=True, eq=False)
class Control:
    """Holds the parts that frontends, probes and pages ask, and runs those that work by
    themselves.
    """

    registry: Registry
    ledger: Ledger
    wanted: Wanted
    operations: Operations
    leases: Leases
    memory: Memory
    readings: Readings
    slots: LoadSlots
    mesh: MeshBooks
    models: Models
    on_demand: OnDemand | None  # None without a store
    eviction: Eviction
    updates: Updates | None
    desired: Desired
    watcher: TritonWatcher
    status: TritonStatus
    housekeeping: Housekeeping
    state: State
    changes: Changes
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def open(self) -> None:
        """Adopt what an earlier run has left, and begin the work that nobody asks for."""
        await self.watcher.open()
        works = {
            "housekeeping": self.housekeeping.run(),
            "watcher": self.watcher.run(),
            "eviction": self.eviction.run(),
            "desired": self.desired.run(),
        }
        if self.updates is not None:
            works["updates"] = self.updates.run()
        self._tasks = [background.begin(name, work) for name, work in works.items()]

    def key_of(self, name: str) -> ArtifactKey:
        """Return the key that `name` is, ENDPOINT/KEY or KEY. Raises InvalidRequest."""
        if self.on_demand is None:
            raise InvalidRequest(f"there is no store for {name!r}")
        return self.on_demand.key_of(name)

    async def note_triton_back(self) -> None:
        """Note that Triton answers again, so that nobody waits for the next poll."""
        self.changes.notify()

    async def drain(self, limit_seconds: float) -> None:
        """Start nothing any more; wait for what is in progress, then end the loads among it."""
        self.close()
        await self.operations.drain(limit_seconds)
        self.operations.end_all_loads()
        with suppress(AdapterError):  # a disk error must not keep the adapter from stopping
            await self.housekeeping.save()

    def close(self) -> None:
        """Accept no more operations."""
        self.desired.close()
        if self.updates is not None:
            self.updates.close()
        self.models.close()

    async def end_work(self) -> None:
        """End the work that nobody asks for."""
        for task in self._tasks:
            background.end(task)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def stop(self) -> None:
        """Wait, for a bounded time, until what `drain` has ended is undone; end all tasks."""
        await self.operations.drain(times.UNDO_SECONDS)
        await self.end_work()


def build_control(world: World, metrics: Metrics, settings: Settings, sizes: Sizes) -> Control:
    """Build all parts of control around the ports."""
    # state
    registry = Registry(clock.now)
    wanted = Wanted()
    forgotten = ForgottenModels(clock.wall)
    registry.subscribe(forgotten.note_move)
    blame = Blame(clock.monotonic())
    ledger = Ledger({}, sizes)
    mesh = MeshBooks()

    # coordination
    changes = Changes()
    operations = Operations()
    journal = Journal(metrics, operations)
    at_work = AtWork()
    leases = Leases(
        at_work=at_work,
        changes=changes,
        history=metrics.history,
    )
    status = TritonStatus(
        triton=world.triton,
        server=world.server,
        changes=changes,
        setting=settings.on_exit,
    )
    turns = LoadTurns(
        blame=blame,
        registry=registry,
        status=status,
        changes=changes,
    )
    slots = LoadSlots(settings.load_threads, leases)
    call_slots = LoadSlots(settings.stores.load_concurrency, leases, Step.TURN)
    files = StoreFiles(world.artifacts)

    # memory
    readings = Readings(
        reader=world.memory,
        ledger=ledger,
        settings=settings.memory,
        metrics=metrics,
    )
    memory = Memory(
        registry=registry,
        ledger=ledger,
        readings=readings,
        changes=changes,
        mesh=mesh,
        metrics=metrics,
        settings=settings.memory,
    )

    # loads and unloads of one model
    unloader = Unloader(
        registry=registry,
        leases=leases,
        at_work=at_work,
        memory=memory,
        readings=readings,
        journal=journal,
        triton=world.triton,
        server=world.server,
        processes=world.processes,
        limits=settings.limits,
    )
    eviction = Eviction(
        registry=registry,
        operations=operations,
        leases=leases,
        memory=memory,
        unloader=unloader,
        policy=Cost(),
        settings=settings.stores,
    )
    loader = Loader(
        registry=registry,
        wanted=wanted,
        memory=memory,
        eviction=eviction,
        unloader=unloader,
        turns=turns,
        slots=slots,
        call_slots=call_slots,
        at_work=at_work,
        leases=leases,
        status=status,
        journal=journal,
        changes=changes,
        triton=world.triton,
        packages=world.packages,
        processes=world.processes,
        files=files,
        limits=settings.limits,
    )

    # Triton's lives
    watcher = TritonWatcher(
        registry=registry,
        wanted=wanted,
        blame=blame,
        at_work=at_work,
        turns=turns,
        status=status,
        operations=operations,
        memory=memory,
        readings=readings,
        unloader=unloader,
        journal=journal,
        changes=changes,
        triton=world.triton,
        packages=world.packages,
        server=world.server,
        processes=world.processes,
        load_threads=settings.load_threads,
    )
    leases.failures = RequestFailures(
        registry=registry,
        memory=memory,
        status=status,
        watcher=watcher,
        journal=journal,
        changes=changes,
        processes=world.processes,
    )

    # operations on all models
    models = Models(
        registry=registry,
        wanted=wanted,
        forgotten=forgotten,
        blame=blame,
        operations=operations,
        leases=leases,
        loader=loader,
        unloader=unloader,
        status=status,
        watcher=watcher,
        packages=world.packages,
        files=files,
        limits=settings.limits,
    )
    on_demand: OnDemand | None = None
    updates: Updates | None = None
    if world.artifacts is not None:
        on_demand = OnDemand(
            registry=registry,
            leases=leases,
            models=models,
            eviction=eviction,
            status=status,
            artifacts=world.artifacts,
            metrics=metrics,
            settings=settings.stores,
            limits=settings.limits,
        )
        updates = Updates(
            registry=registry,
            models=models,
            artifacts=world.artifacts,
            interval_seconds=settings.stores.revalidate_seconds,
        )
        metrics.endpoint_loaded.set_function(eviction.count)
        metrics.endpoint_waiting.set_function(lambda: leases.waiting)
    desired = Desired(
        registry=registry,
        wanted=wanted,
        forgotten=forgotten,
        blame=blame,
        status=status,
        operations=operations,
        changes=changes,
        models=models,
        on_demand=on_demand,
        slots=asyncio.Semaphore(2 * settings.load_threads),  # as many as LoadSlots lets in
    )
    housekeeping = Housekeeping(
        readings=readings,
        loader=loader,
        ledger=ledger,
        sizes=world.sizes,
    )
    store_state: StoreState | None = None
    if world.artifacts is not None:
        store_state = StoreState(
            registry=registry,
            leases=leases,
            eviction=eviction,
            operations=operations,
            journal=journal,
            artifacts=world.artifacts,
        )
    state = State(
        registry=registry,
        ledger=ledger,
        memory=memory,
        readings=readings,
        operations=operations,
        leases=leases,
        slots=slots,
        desired=desired,
        watcher=watcher,
        triton=status,
        forgotten_models=forgotten,
        stores=store_state,
    )
    return Control(
        registry=registry,
        ledger=ledger,
        wanted=wanted,
        operations=operations,
        leases=leases,
        memory=memory,
        readings=readings,
        slots=slots,
        mesh=mesh,
        models=models,
        on_demand=on_demand,
        eviction=eviction,
        updates=updates,
        desired=desired,
        watcher=watcher,
        status=status,
        housekeeping=housekeeping,
        state=state,
        changes=changes,
    )
