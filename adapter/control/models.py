"""The control plane: loads, unloads and leases models. Serialised per model, undone on failure.

An operation runs in a task of its own and outlives its caller. Each model runs one operation at a
time, in order of arrival; models wait for each other only for memory (core/admission.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

from adapter.control.desired import DesiredModels
from adapter.control.housekeeping import Housekeeping
from adapter.control.lease import Lease, Leases
from adapter.control.load_limit import LimitedLoad, LoadLimit, LoadThreads
from adapter.control.loader import Loader
from adapter.control.memory import Memory, goes_on
from adapter.control.operations import Operations
from adapter.control.orphans import OrphanProcesses
from adapter.control.ports import Evictor, Options, Ports
from adapter.control.progress import step
from adapter.control.reconciler import Reconciler
from adapter.control.triton_status import Phase, TritonStatus
from adapter.control.unloader import Unloader, still_loading
from adapter.control.unloads import Unloads
from adapter.control.updates import Updates
from adapter.core.ledger import Ledger
from adapter.core.memory import NO_BYTES, Bytes, total
from adapter.core.model import ModelId, ModelSource, Package, fresh_name
from adapter.core.registry import ModelRecord, Registry, not_loaded
from adapter.core.requests import Replaces, RoomMaker
from adapter.core.residency.terms import Terms
from adapter.core.sizing import Sizes
from adapter.core.state import ModelEvent, ModelState, WaitsFor
from adapter.errors import (
    AboutMemory,
    AdapterError,
    AlreadyLoaded,
    BackendUnavailable,
    ModelNotFound,
    ModelNotReady,
    UnloadedMeanwhile,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.traffic import leave_out

log = logging.getLogger(__name__)

_THERE = {ModelState.READY: "loaded already", ModelState.LOST: "being loaded again"}
_Act = Callable[[], object]
_Raised = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]
_Ended = Sequence[ModelRecord | None]
# Of the 30 s from SIGTERM to SIGKILL the drain and Triton's stop take up to 22.
_UNDO_SECONDS = 4.0


class ModelControl:
    def __init__(
        self,
        ports: Ports,
        ledger: Ledger,
        sizes: Sizes,
        metrics: Metrics,
        options: Options,
    ) -> None:
        self._limits, self._packages, threads = options.limits, ports.packages, options.load_threads
        self.registry = registry = Registry(clock.now)
        self.operations = operations = Operations(metrics)
        self.leases = leases = Leases(metrics.history)
        orphans = OrphanProcesses(registry, ports.processes, metrics)
        books, shared = (ports, ledger, sizes, metrics, options), orphans.are_there
        self.memory = memory = Memory(*books, requests=leases.counts, is_shared=shared)
        self.loads = LoadLimit(self._limits.load)
        self.load_threads = LoadThreads(registry, memory, threads, self.loads)
        outside = (registry, ports, self._limits, orphans)
        self._unloader = unloader = Unloader(*outside, lose_requests=leases.lose)
        inside = (ports, unloader, memory, metrics, self._limits)
        self._loader = Loader(*inside, threads=self.load_threads)
        mesh, again = memory.mesh, options.loads_again
        self.triton_status = status = TritonStatus(ports, mesh, loads_again=again)
        self.evictor: Evictor | None = None  # makes room for loads; set by Residency
        self.desired = desired = self._make_desired(threads)
        self._reconciler = found = Reconciler(
            *(registry, memory, ports, unloader, operations),
            desired=desired,
            triton_status=status,
            load_threads=threads,
        )
        self.why_stuck, self.catch_up = found.why_stuck, found.catch_up
        self.reconcile = found.reconcile
        leases.failures = found
        self.unloads = self._make_unloads()
        self.updates = Updates(
            registry,
            memory,
            operations,
            loads=self.loads,
            status=status,
            packages=ports.packages,
            load_seconds=options.limits.load,
            begin_load=self._begin_load,
            make_way=self.make_way,
            is_pinned=self._is_pinned,
        )
        kept = (registry, memory, orphans, ports, found)
        housekeeping = Housekeeping(*kept, operations=operations)
        self._housekeeping, self.run_housekeeping = housekeeping, housekeeping.run

    def _make_desired(self, load_threads: int) -> DesiredModels:
        return DesiredModels(
            *(self.registry, self.triton_status, load_threads),
            load=self._load_or_wait,
            bring_back=lambda lost: self._begin_load(lost.id, lost.source, lost, Terms()).task,
            hangs=self._hangs,
        )

    def _make_unloads(self) -> Unloads:
        return Unloads(
            *(self.registry, self.memory, self.operations, self.leases, self._unloader),
            packages=self._packages,
            triton_status=self.triton_status,
            drain_seconds=self._limits.unload / 2,
        )

    def _is_pinned(self, model_id: ModelId) -> bool:
        return self.evictor is not None and self.evictor.is_pinned(model_id)

    @property
    def is_open(self) -> bool:
        return self.triton_status.is_open

    # -- what callers ask -------------------------------------------------------------------

    def lease(self, model_id: ModelId) -> Lease:
        try:
            return self.leases.of(self.registry.serving(model_id))
        except ModelNotFound as error:
            self.refuse_unless_open()  # the registry is not complete before `open`
            if model_id not in self.updates.in_place:
                raise
            why = f"model {model_id!r} is being updated"
            raise ModelNotReady(why, model_id=model_id) from error

    async def wait_for_lease(self, model_id: ModelId, limit_seconds: float) -> Lease:
        """Return a lease; wait for a load or an update of the model that is in progress."""
        if limit_seconds and (work := self._work_on(model_id)) is not None:
            leave_out()
            await asyncio.wait({work}, timeout=limit_seconds)
        return self.lease(model_id)

    def _work_on(self, model_id: ModelId) -> asyncio.Future[Any] | None:
        """Return what ends when the model may be served: its update in place, or its load."""
        if (update := self.updates.in_place.get(model_id)) is not None:
            return update
        load = self.loads.in_progress.get(model_id)
        return None if load is None else load.task

    async def load(
        self,
        model_id: ModelId,
        source: ModelSource,
        room_maker: RoomMaker = RoomMaker.ADAPTER,
        /,
        **log_fields: str,
    ) -> ModelRecord:
        """Load the model for a platform, or raise why it cannot be loaded.

        Raises AlreadyLoaded at once, also while the same load is still in progress. A model that
        was loaded on demand is not evicted any more once somebody else has asked for its load.
        """
        terms = Terms(is_planned=room_maker is RoomMaker.MESH)
        return await self.load_on_terms(model_id, source, terms, log_fields)

    async def load_on_terms(
        self,
        model_id: ModelId,
        source: ModelSource,
        terms: Terms,
        log_fields: Mapping[str, str] = MappingProxyType({}),
    ) -> ModelRecord:
        """Load the model as `load` does, on other terms than a platform's."""
        self.refuse_unless_open()
        if model_id in self.registry:
            await self.catch_up(model_id)
        known = self.registry.get(model_id)
        there = "being loaded" if model_id in self.loads.in_progress else None
        if doing := there or (known and _THERE.get(known.state)):
            if not terms.is_on_demand:
                self._keep(model_id)
            raise AlreadyLoaded(f"model {model_id!r} is {doing}", model_id=model_id)
        self.operations.refuse_when_full(model_id)
        load = self._begin_load(model_id, source, None, terms, **log_fields)
        return await self.loads.outcome(load)

    def _keep(self, model_id: ModelId) -> None:
        """Have no call evict the model any more, however often its load in progress is tried."""
        if (known := self.registry.get(model_id)) is not None:
            known.is_on_demand = False
        if (load := self.loads.in_progress.get(model_id)) is not None:
            load.terms.is_on_demand = False

    async def wait_for_load(self, model_id: ModelId) -> ModelRecord:
        """Return the record of a loaded model, or the outcome of its load in progress."""
        if (load := self.loads.in_progress.get(model_id)) is not None:
            return await self.loads.outcome(load)
        return self.registry.serving(model_id)

    async def join_load(
        self, model_id: ModelId, source: ModelSource, since: float
    ) -> ModelRecord | None:
        """Return what `wait_for_load` does; None once a load that has failed is undone.

        Raises the failure of one from `source` that began at `since` (the loop's time) or later,
        and ModelNotReady for a model that Triton has lost and that waits for its load.
        """
        load = self.loads.in_progress.get(model_id)
        try:
            return await self.wait_for_load(model_id)
        except AdapterError as error:
            is_the_same = load is not None and load.source == source and load.begun >= since
            if is_the_same and not isinstance(error, UnloadedMeanwhile):
                raise
            if load is not None:
                await asyncio.wait({load.task})
            elif self.registry.returning(model_id) is not None:
                raise
            return None

    def is_being_loaded(self, model_id: ModelId) -> bool:
        """Return whether a load of the model is in progress, or an update in its place."""
        return self._work_on(model_id) is not None

    async def unload(self, model_id: ModelId, **log_fields: str) -> None:
        """Unload the model, which is wanted no more; end a load of it. Return when it and its
        memory are gone.
        """
        self.refuse_unless_open()
        self.registry.lost.pop(model_id, None)
        with self.desired.no_more(model_id) as begun:
            replacing = self.loads.end(model_id)
            task = self._begin_unload(model_id, begun, log_fields)
            await self._unloader.outcome(model_id, task)
            if replacing:  # loads of other versions, whose memory is to be free as well
                await asyncio.wait(replacing, timeout=self._limits.unload)

    async def make_way(self, model_id: ModelId, **log_fields: str) -> None:
        """Unload the model as `unload` does, but to load it again: it is wanted as before, and what
        has begun is waited for, however long it takes.
        """
        self.refuse_unless_open()
        await asyncio.shield(self._begin_unload(model_id, bool, log_fields))

    def _begin_unload(
        self, model_id: ModelId, begun: _Act, log_fields: Mapping[str, str]
    ) -> asyncio.Task[Bytes]:
        if model_id not in self.registry and model_id not in self.loads.in_progress:
            raise not_loaded(model_id)
        known = self.registry.get(model_id)
        ended = [known] if self.loads.is_ended(model_id) else []
        work = self.operations.logged(
            *("unload", model_id, self._unload(model_id, begun, ended), total),
            log_fields=log_fields,
            in_flight=known.usage.in_flight if known else 0,
        )
        return self.operations.start("unload", model_id, work)

    async def unload_all(self, **log_fields: str) -> None:
        """Unload every model, end every load, and unload what was loaded past the adapter."""
        while ids := {record.id for record in self.registry.records()} | {*self.loads.in_progress}:
            unloads = (self._unload_if_there(each, log_fields) for each in sorted(ids))
            for outcome in await asyncio.gather(*unloads, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        await self._reconciler.unload_strangers()

    async def _unload_if_there(self, model_id: ModelId, log_fields: Mapping[str, str]) -> None:
        with suppress(ModelNotFound):
            await self.unload(model_id, **log_fields)

    # -- replacements -----------------------------------------------------------------------

    async def replace(
        self, model_id: ModelId, source: ModelSource, replaces: Replaces, **log_fields: str
    ) -> None:
        """Have the model loaded from the package of `source`, whatever is loaded now.

        A model that is not loaded is loaded, and a load in progress is waited for. A model that
        serves is updated (updates.py), whether or not the caller waits.
        """
        work = self._replace(model_id, source, replaces, log_fields)
        await asyncio.shield(self.operations.start("load", model_id, work))

    async def _replace(
        self,
        model_id: ModelId,
        source: ModelSource,
        replaces: Replaces,
        log_fields: Mapping[str, str],
    ) -> None:
        started_at = asyncio.get_running_loop().time()
        known = self.registry.get(model_id)
        is_ready = known is not None and known.state is ModelState.READY
        if known is not None and is_ready and replaces is Replaces.CHANGED_FILES:
            if not await self._has_changed(known):
                known.is_on_demand = False  # the caller of a load wants the model to stay
                return
            source = _source_again(known, source)
            replaces = Replaces.ALWAYS
        is_forced = replaces is Replaces.ALWAYS
        if is_forced and await self._update_loaded(model_id, source, log_fields):
            return
        while not await self._load_or_join(model_id, source, replaces, log_fields, started_at):
            pass

    async def _load_or_join(
        self,
        model_id: ModelId,
        source: ModelSource,
        replaces: Replaces,
        log_fields: Mapping[str, str],
        started_at: float,
    ) -> bool:
        """Load the model, or wait for its load in progress; return False to try again."""
        try:
            await self.load(model_id, source, **log_fields)
        except AlreadyLoaded:
            loaded_as = replace(source, files=())
            known = await self.join_load(model_id, loaded_as, started_at)
            if known is None:
                return False
            return await self._keep_or_update(known, source, replaces, log_fields)
        return True

    async def _update_loaded(
        self, model_id: ModelId, source: ModelSource, log_fields: Mapping[str, str]
    ) -> bool:
        """Update the model if it is loaded; return whether it was. One that is not ready makes way
        for a load.
        """
        while (record := self.registry.get(model_id)) is not None:
            if record.state is not ModelState.READY:
                with suppress(ModelNotFound):
                    await self.make_way(model_id, **log_fields)
                return False
            if await self.updates.update(record, source, **log_fields):
                return True
        return False

    async def _keep_or_update(
        self,
        known: ModelRecord,
        source: ModelSource,
        replaces: Replaces,
        log_fields: Mapping[str, str],
    ) -> bool:
        """Update a model that somebody else has loaded, unless it will do. Return False if it was
        unloaded meanwhile.
        """
        if replaces is not Replaces.CHANGED_FILES and known.source != replace(source, files=()):
            return await self.updates.update(known, source, **log_fields)
        # its load may have read older files
        if replaces is not Replaces.OTHER_SOURCE and await self._has_changed(known):
            return await self.updates.update(known, _source_again(known, source), **log_fields)
        return True

    async def _has_changed(self, record: ModelRecord) -> bool:
        """Return whether the model's files are others than those that were loaded; False where that
        cannot be told. Raises as a load does when the files can no longer be served.
        """
        since = record.begun_at or clock.wall()
        return await self._packages.has_changed(record.source, record.package_key, since)

    # -- start, housekeeping and stop ---------------------------------------------------------

    async def open(self) -> None:
        """Adopt or unload what an earlier run left in Triton; loads are accepted afterwards."""
        await self._reconciler.take_stock()
        self.triton_status.phase = Phase.OPEN

    async def triton_restarted(self) -> None:
        """Handle a restart of Triton, which has lost all models."""
        self.desired.doubt()
        await self._reconciler.triton_restarted()
        self.desired.begin()

    def close(self) -> None:
        """Accept no more operations."""
        self.triton_status.phase = Phase.STOPPING
        self.desired.stop()

    async def drain(self, seconds: float) -> None:
        """Close, and wait for the operations in progress; then end the loads that still are."""
        self.close()
        await self.operations.drain(seconds)
        self.loads.stop()
        with suppress(AdapterError):  # a disk error must not keep the adapter from stopping
            await self._housekeeping.save()

    async def undone(self) -> None:
        """Wait, for a bounded time, until what `drain` has ended is undone."""
        await self.operations.drain(_UNDO_SECONDS)

    # -- operations -------------------------------------------------------------------------

    def _begin_load(
        self,
        model_id: ModelId,
        source: ModelSource,
        lost: ModelRecord | None,
        terms: Terms,
        /,
        **log_fields: str,
    ) -> LimitedLoad:
        """Begin a load; `lost`: the model that it is to bring back."""
        load = self.loads.begin(model_id, source, terms)
        asked_for = terms.takes_over.asked_for if terms.takes_over else model_id
        work = self.operations.logged(
            *("load", asked_for, self._load(load, source, lost), self._size_of),
            log_fields=log_fields,
            url=source.url,
        )
        load.task = self.operations.start("load", model_id, work)
        load.task.add_done_callback(lambda _: self.loads.done(load))
        return load

    async def _load_or_wait(self, model_id: ModelId, source: ModelSource) -> None:
        try:
            await self.load(model_id, source)
        except AlreadyLoaded:  # by a caller, by an earlier run, or it is coming back
            await self.wait_for_load(model_id)

    def _hangs(self, name: str) -> bool:
        known = self.registry.get(ModelId(name))
        return known is not None and self.load_threads.hangs_since(known) is not None

    def _size_of(self, record: ModelRecord) -> int:
        return total(self.memory.ledger.of(record.name))

    async def _load(
        self, load: LimitedLoad, source: ModelSource, lost: ModelRecord | None
    ) -> ModelRecord:
        """Load, and again each time that room could be made after it ran out of memory."""
        evictor = self.evictor if load.terms.evicts else None
        async with AsyncExitStack() as turn:
            if load.terms.unloads_first:
                await self.make_way(load.model_id)
            async with self.loads.of(load):
                await turn.enter_async_context(self.operations.lock(load.model_id))
            while True:
                try:
                    return await self._load_once(load, source, lost, evictor)
                except AboutMemory as error:
                    # a load that Triton does not end has released its files
                    has_files = load.model_id in self.registry.coming
                    if lost is not None or (load.terms.is_on_demand and not has_files):
                        raise
                    if not await goes_on(error, load.terms, evictor):
                        raise

    async def _load_once(
        self,
        load: LimitedLoad,
        source: ModelSource,
        lost: ModelRecord | None,
        evictor: Evictor | None,
    ) -> ModelRecord:
        model_id, terms = load.model_id, load.terms
        async with AsyncExitStack() as undo, self.loads.of(load):  # ends it, not its undo
            record = await self._begin_record(model_id, source, lost, terms)
            record.is_on_demand, record.begun_at = terms.is_on_demand, clock.wall()
            undo.push(partial(self._load_failed, record, lost))
            # pushed before each act: one that failed or was given up may still have done its work
            undo.push_async_callback(self._undo, record, lambda: self.unloads.remove(record))
            step(record, WaitsFor.PACKAGE)
            if lost is not None:
                await self._reconciler.clear_away(lost)
            package = await self._prepare(record, source)
            self._loader.note_package(record, source, package)
            estimate = await self.memory.admit(record, package, terms, evictor)
            undo.push_async_callback(self._loader.load_undone, record)
            step(record, WaitsFor.FILES)
            placement = await self._packages.place(
                record.name, record.asked_for, package, record.gpu
            )
            self.registry.place(record, placement)
            self.memory.placed(record)
            undo.push_async_callback(self._undo, record, lambda: self._loader.undo(record))
            undo.push(lambda _, error, __: self.desired.trials.call_failed(record.asked_for, error))
            step(record, WaitsFor.TRITON)
            process = await self._loader.load(record, package, estimate)
            held = self.memory.ledger.of(record.name)
            await self._packages.confirm(record.name, source, package.content_key, held)
            self.triton_status.refuse_ended(process, model_id)  # `reconcile` would not notice
            await self._serve(record, source, terms)
            undo.pop_all()
            self.desired.loaded(record.id, source)
            return record

    async def _prepare(self, record: ModelRecord, source: ModelSource) -> Package:
        """Prepare the package. One that asks for Triton's response cache gets a name in Triton that
        no model had: Triton finds cached answers by name, version and inputs, and keeps those of
        models that are unloaded.
        """
        package = await self._packages.prepare(record.name, record.asked_for, source)
        if not package.asks_for_cache:
            return package
        await self._packages.remove(record.name)
        self.registry.rename(record, fresh_name(record.asked_for))
        return await self._packages.prepare(record.name, record.asked_for, source)

    async def _serve(self, record: ModelRecord, source: ModelSource, terms: Terms) -> None:
        """Let the model that was loaded have calls; those of another if it is to take its place."""
        async with AsyncExitStack() as turn:
            if (old := terms.takes_over) is not None:
                await turn.enter_async_context(self.operations.lock(old.asked_for))
                self.registry.refuse_unless_served(old)
                if terms.is_on_demand:
                    self.registry.refuse_unless_evictable(old)
            record.source = replace(source, files=(), kept="")
            # what is loaded on demand is loaded again by the next call for it
            record.can_load_again = not source.files and not terms.is_on_demand
            self.registry.apply(record, ModelEvent.LOADED)
            if old is not None:
                self.registry.exchange(record, old)

    async def _begin_record(
        self, model_id: ModelId, source: ModelSource, lost: ModelRecord | None, terms: Terms
    ) -> ModelRecord:
        known = self.registry.get(model_id)
        if lost is not None and known is not lost:  # it was unloaded meanwhile
            raise not_loaded(model_id)
        if known is not None and known.state is ModelState.DEAD:
            await self.unloads.unload(model_id)
        elif known is not None and lost is None and not terms.is_on_demand:
            known.is_on_demand = False  # an unload has failed: this load is refused, and keeps it
        asked_for = terms.takes_over.asked_for if terms.takes_over else model_id
        name = self.registry.free_name(asked_for, model_id, replaced=lost)
        return self.registry.begin_load(model_id, name, source, asked_for)

    def _load_failed(
        self, record: ModelRecord, lost: ModelRecord | None, *raised: *_Raised
    ) -> None:
        self._loader.tell_what_was_undone(record, raised[1])
        event, is_stuck = ModelEvent.LOAD_FAILED, record.state is ModelState.STUCK
        if lost is not None and not is_stuck:
            event = self.desired.after(record.id, raised[1])
        elif record.files is not None and record.files.is_tried_again and not is_stuck:
            event = ModelEvent.PUT_BACK
        self.registry.apply(record, event)

    async def _unload(self, model_id: ModelId, begun: _Act, ended: _Ended) -> Bytes:
        """`ended`: the record of a load that is being undone, None in a load that has none yet."""
        async with self.operations.lock(model_id):
            begun()
            known = self.registry.get(model_id)
            if known is None and ended:
                if ended[0] is not None and ended[0].state is ModelState.STUCK:
                    raise still_loading(ended[0])
                return NO_BYTES
            if known is None or known.state is not ModelState.LOST:
                return await self.unloads.unload(model_id)
            self.registry.apply(known, ModelEvent.VANISHED)
            await self._reconciler.clear_away(known)
            return NO_BYTES

    async def _undo(self, record: ModelRecord, act: Callable[[], Awaitable[None]]) -> None:
        step(record, WaitsFor.UNDOING)
        try:
            await act()
        except AdapterError as error:
            # nothing more can be done, and the failure of the load itself is raised
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})

    def refuse_unless_open(self) -> None:
        if not self.is_open:
            raise BackendUnavailable("the adapter is starting or stopping", delivered=False)


def _source_again(record: ModelRecord, source: ModelSource) -> ModelSource:
    """Return where to load the model from again: `source` if its request brought its files."""
    return record.source if record.can_load_again else source
