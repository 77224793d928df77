"""Bring one model into Triton, and take it down again if that fails.

A load is: files, package, turn, memory, folder, Triton, warm-up, measurement. What it does outside
of Triton goes onto the stack of its record (`undo`), which a later unload closes as well.

A load ends at its time limit, wherever it is. Triton never answers some loads: the undo ends the
call of such a load, or leaves the model to Triton (STUCK).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from adapter.control.eviction import Eviction, OldVersionFirst
from adapter.control.leases import AtWork, Leases, is_exit
from adapter.control.memory import LoadTerms, Memory
from adapter.control.operations import Journal, note_step
from adapter.control.ports import (
    Artifacts,
    DiskEvictor,
    Evictor,
    Packages,
    Processes,
    TimeLimits,
    Triton,
)
from adapter.control.triton import LoadTurns, TritonStatus, remove_folder
from adapter.control.unloader import Unloader
from adapter.core import times, versions
from adapter.core.admission import Purpose
from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, FetchProgress
from adapter.core.memory import total
from adapter.core.model import ModelSource, Package, Placement, TritonName, fresh_name
from adapter.core.record import LoadedFor, ModelRecord, Step
from adapter.core.registry import Registry
from adapter.core.states import LOADED, ModelEvent, ModelState
from adapter.core.wanted import Wanted
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    ArtifactNotFound,
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    InsufficientMemory,
    LoadFailed,
    ModelTooLarge,
    NoRoom,
    OutOfMemory,
    StoreDenied,
    StoreUnavailable,
    StubDied,
)
from adapter.runtime import clock
from adapter.runtime.clock import Changes, run_to_end
from adapter.runtime.slots import FairSlots

log = logging.getLogger(__name__)

_NO_CALLER = ("",)
# What Triton says to a model that it could not read, whatever the reason.
_EMPTY_FAILURE = "failed to poll from model repository"
# For a Triton before 25.09 to notice that a process of a model is gone (times.KILLED_SECONDS).
_STUB_GONE_SECONDS = 5.0
_STUB_UNSEEN_SECONDS = 60.0  # if none was ever seen


# -- files of stores ----------------------------------------------------------------------------


class StoreFiles:
    """Fetches files of stores, and keeps them on disk for as long as anybody needs them."""

    def __init__(self, artifacts: Artifacts | None) -> None:
        self._artifacts = artifacts
        self._retained: Counter[Artifact] = Counter()  # beyond the fetches

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        evictor: DiskEvictor | None,  # None unloads no model for room on disk
        callers: Collection[str],
    ) -> tuple[Artifact, CacheUse]:
        """Return the files in the store's version, and where they were; kept until `release`."""
        if self._artifacts is None:
            raise ArtifactNotFound(f"there is no store, and so no {key}")
        return await self._artifacts.fetch(key, progress, evictor=evictor, callers=callers)

    def retain(self, artifact: Artifact) -> None:
        """Keep files that are on disk for one more `release`."""
        self._retained[artifact] += 1

    def release(self, artifact: Artifact, *, idle_seconds: float = 0.0) -> None:
        """Let the files leave the disk, unless somebody else needs them.

        Their last use was `idle_seconds` ago.
        """
        if artifact in self._retained:
            self._retained[artifact] -= 1
            self._retained = +self._retained
        elif self._artifacts is not None:
            self._artifacts.release(artifact, idle_seconds=idle_seconds)


# -- load threads -------------------------------------------------------------------------------


class LoadSlots:
    """Bounds loads: those in Triton, which runs a few at a time, and those that calls wait for.

    A load that has lasted 30 s hangs and no longer counts, so that others may begin. At most as
    many loads as there are slots hang so.
    Callers have their turns (`FairSlots`); whoever loads without a call counts as one of them.
    """

    def __init__(
        self,
        count: int,
        leases: Leases,
        step: Step = Step.THREAD,  # shown of a load that waits for a slot
    ) -> None:
        self.count = count
        self._step = step
        self._leases = leases
        self._slots = FairSlots(count, self._is_exempt)
        self._holders: dict[ModelRecord, float] = {}  # since when each has a slot

    async def acquire(self, record: ModelRecord) -> None:
        """Wait for a slot. Harmless if the load has one."""
        if record in self._holders:
            return

        def show_wait() -> None:
            note_step(record, self._step, tuple(holder.id for holder in self._holders))

        callers = self._leases.callers_of(record.id) or _NO_CALLER
        await self._slots.acquire(record.name, callers, show_wait)
        self._holders[record] = clock.monotonic()

    def release(self, record: ModelRecord) -> None:
        """Free the slot of a load that has ended. Harmless without a slot."""
        if self._holders.pop(record, None) is not None:
            self._slots.release(record.name)

    def hangs_since(self, record: ModelRecord) -> float | None:
        """Return since when Triton has been at the load of a model; None while that is not long."""
        since = self._holders.get(record)
        is_long = since is not None and clock.monotonic() - since >= times.HANG_SECONDS
        return since if is_long else None

    def explain(self) -> str:
        """Return which loads hang, for the error of one that waits for a slot; "" if none does."""
        now = clock.monotonic()
        hanging = [
            f"{record.id!r} (for {now - self._holders[record]:.0f} s)"
            for record in self._list_hanging()
        ]
        if not hanging:
            return ""
        return (
            f"loads that hang keep Triton's load threads: {', '.join(hanging)}; unload these models"
            " to end their loads; see docs/operations.md#a-load-hangs"
        )

    def _list_hanging(self) -> list[ModelRecord]:
        return [record for record in self._holders if self.hangs_since(record) is not None]

    def _is_exempt(self, name: str) -> bool:
        """Return whether a load keeps its slot and does not count: it hangs, and is one of the
        first loads that do, as many as there are slots.
        """
        return name in {record.name for record in self._list_hanging()[: self.count]}


class _StubMonitor:
    """Detects that the python process of a model has ended during its load.

    Triton starts a python process twice: to complete the configuration, and to serve. There is none
    for less than a second in between.
    """

    def __init__(self, names: Collection[TritonName], gone_seconds: float) -> None:
        self.names = frozenset(names)
        self._gone_seconds = gone_seconds
        self._lost_at: dict[TritonName, float] = {}  # unless a process is seen before

    def find_lost(
        self,
        instances: Mapping[TritonName, Collection[str | None]],  # with a live process
        now: float,
    ) -> TritonName | None:
        """Return the name of a model whose process has been missing for too long."""
        for name in self.names & instances.keys():  # models without python are missing
            if instances[name]:
                self._lost_at[name] = now + self._gone_seconds
            elif now > self._lost_at.setdefault(name, now + _STUB_UNSEEN_SECONDS):
                return name
        return None


# -- loads --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Loader:
    """Loads models into Triton, beside or in place of other versions of them."""

    registry: Registry
    wanted: Wanted
    memory: Memory
    eviction: Eviction
    unloader: Unloader
    turns: LoadTurns
    slots: LoadSlots
    call_slots: LoadSlots  # of loads that calls wait for
    at_work: AtWork
    leases: Leases
    status: TritonStatus
    journal: Journal
    changes: Changes
    triton: Triton
    packages: Packages
    processes: Processes
    files: StoreFiles
    limits: TimeLimits
    # loads that Triton has not answered
    _calls: dict[ModelRecord, asyncio.Future[None]] = field(default_factory=dict)

    async def load(
        self, record: ModelRecord, terms: LoadTerms, log_fields: Mapping[str, str]
    ) -> None:
        """Load a model; return when it is READY. Raises the failure once it is undone."""
        async with self._undo_on_failure(record, log_fields):
            self.registry.add(record)
            await self._prepare(record, self.eviction)
            await self._reserve(record, terms, self.eviction)
            await self._run(record, terms)
            self._serve(record)

    async def load_beside(
        self, record: ModelRecord, old: ModelRecord, log_fields: Mapping[str, str]
    ) -> None:
        """Load another version beside `old` and give it the calls of `old`, if both fit.

        Raises InsufficientMemory if they do not; `old` serves on, as after any other failure.
        """
        terms = LoadTerms()
        async with self._undo_on_failure(record, log_fields):
            self.registry.add_beside(record)
            await self._prepare(record, None)
            record.undo.callback(self.turns.end, record)
            await self._wait_for_turn(record)
            note_step(record, Step.MEMORY)
            if not record.can_run_beside or not self.memory.try_reserve(record, terms):
                text = f"two versions of model {record.id!r} do not fit"
                raise InsufficientMemory(text, model_id=record.id)
            record.undo.callback(self.memory.release, record)
            await self._run(record, terms, may_retry=False)
            if old.state not in LOADED:  # a DEAD version makes way as well
                text = f"Triton exited while model {record.id!r} was updated"
                raise BackendUnavailable(text, model_id=record.id, delivered=True)
            if old.loaded_for is LoadedFor.PLATFORM and record.loaded_for is LoadedFor.CALLS:
                text = f"a platform has asked for model {record.id!r} amid its update, and keeps it"
                raise AlreadyLoaded(text, model_id=record.id)
            self._serve(record)
            self.registry.switch(old, record)

    async def load_in_place(
        self,
        record: ModelRecord,
        old: ModelRecord,
        terms: LoadTerms,
        log_fields: Mapping[str, str],
        unload_fields: Mapping[str, str],
    ) -> None:
        """Load another version in the place of `old`. The admission of the new one unloads `old`.

        `old` keeps serving if the files are at fault, or if its memory would not suffice.
        """
        room = OldVersionFirst(old, self.unloader, self.eviction, unload_fields)
        async with self._undo_on_failure(record, log_fields):
            await self._prepare(record, None)
            await self._reserve(record, terms, room)
            if old.state in LOADED:
                await self.unloader.unload(old, unload_fields)
            await self._renew_turn(record)
            await self._take_own_name(record)
            # the old version may have been called since the load of this one began
            record.usage.used_at = max(record.usage.used_at, old.usage.used_at)
            if old.loaded_for is LoadedFor.PLATFORM:  # which may have asked for it since
                record.loaded_for = old.loaded_for
            self.registry.add(record)
            await self._run(record, terms)
            self._serve(record)

    # -- before Triton ----------------------------------------------------------------------

    def _release_files(self, record: ModelRecord, artifact: Artifact) -> None:
        """Release the files of a model; their last use was its last inference, not this unload."""
        used_at = record.usage.used_at
        idle_seconds = clock.monotonic() - used_at if used_at else 0.0
        self.files.release(artifact, idle_seconds=idle_seconds)

    async def _prepare(self, record: ModelRecord, evictor: DiskEvictor | None) -> None:
        """Fetch and inspect the files. `evictor` may unload models for room on disk.

        An update has no evictor. Nobody waits for the new version, and the model itself could be
        the victim: the fetch would wait for its own update.
        """
        if record.files is not None:  # an older version is loaded again, from its own files
            self.files.retain(record.files)
            record.undo.callback(self._release_files, record, record.files)
        elif record.key is not None:
            await self._fetch(record, record.key, evictor)
        note_step(record, Step.PACKAGE)
        package = await self._inspect(record)
        if package.asks_for_cache:
            # Triton finds cached answers by name, version and inputs, and keeps those of models
            # that are unloaded: a package with a response cache gets a name that no model had
            await self.packages.remove(record.name)
            self._rename(record, fresh_name(record.id))
            package = await self._inspect(record)
        record.package = package
        record.warnings = package.warnings
        if package.warnings:
            fields = {"model_id": record.id, "warnings": package.warnings}
            log.warning("model.package_odd", extra=fields)
        sizes = self.memory.ledger.sizes
        sizes.remember_place(record.source.url, package.content_key)
        sizes.remember_model(record.id, package.content_key)

    async def _inspect(self, record: ModelRecord) -> Package:
        """Inspect the package under the record's name, which is cleared by the undo."""
        # pushed first: a `prepare` that fails or is cancelled may still have made the folder
        record.undo.push_async_callback(remove_folder, self.packages, record.id, record.name)
        return await self.packages.prepare(record.name, record.id, record.source)

    async def _take_own_name(self, record: ModelRecord) -> None:
        """Give a package that needs the model's own name in Triton that name, which is free now."""
        if record.can_run_beside or record.inspected.asks_for_cache:
            return
        old_name = record.name
        await self.packages.remove(old_name)
        record.name = self.registry.free_name(record.id)
        self.memory.ledger.rename_load(old_name, record.name)
        record.package = await self._inspect(record)  # its files are in another folder now

    def _rename(self, record: ModelRecord, name: TritonName) -> None:
        if record.state is None:  # a version in place of another, which is not in the table yet
            record.name = name
        else:
            self.registry.rename(record, name)

    async def _fetch(
        self, record: ModelRecord, key: ArtifactKey, evictor: DiskEvictor | None
    ) -> None:
        """Fetch the files of a model of a store, and keep them on disk until the undo."""
        note_step(record, Step.FETCH)
        started_at = clock.monotonic()
        metrics = self.journal.metrics
        progress = FetchProgress()
        record.progress = progress
        callers = self.leases.callers_of(record.id)
        try:
            artifact, use = await self.files.fetch(key, progress, evictor, callers)
        except AdapterError as error:
            error.is_of_fetch = True
            if isinstance(error, StoreDenied | StoreUnavailable):
                metrics.endpoint_store_failures.labels(type(error).__name__).inc()
            elif isinstance(error, NoRoom) and evictor is not None:  # an update may wait
                metrics.endpoint_no_room.inc()
            seconds = clock.monotonic() - started_at
            metrics.history.failed("fetch", record.id, error, seconds)
            raise
        record.files = artifact
        record.undo.callback(self._release_files, record, artifact)
        record.source = make_store_source(artifact.folder, str(artifact.key))
        seconds = clock.monotonic() - started_at
        record.fetch_seconds = seconds - progress.waited_seconds
        record.cache_use = use
        if use is CacheUse.MISS:
            metrics.endpoint_downloading_seconds.observe(seconds)
            metrics.history.done("fetch", record.id, seconds, artifact.size_bytes)

    async def _wait_for_turn(self, record: ModelRecord) -> None:
        """Wait for Triton, and for the turn of a model that may have made it exit."""
        note_step(record, Step.TURN if self.status.is_up else Step.TRITON_START)
        await self.turns.wait(record)
        record.life = self.status.life or 0

    async def _reserve(self, record: ModelRecord, terms: LoadTerms, evictor: Evictor) -> None:
        """Wait for Triton, for the model's turn, and for memory."""
        record.undo.callback(self.turns.end, record)
        await self._wait_for_turn(record)
        if terms.purpose is Purpose.ON_DEMAND:
            record.undo.callback(self.call_slots.release, record)
            await self.call_slots.acquire(record)
        await self.memory.reserve(record, terms, evictor)
        record.undo.callback(self.memory.release, record)

    # -- in Triton --------------------------------------------------------------------------

    async def _run(self, record: ModelRecord, terms: LoadTerms, *, may_retry: bool = True) -> None:
        """Load into Triton; try once more if the load ran out of memory and there is more."""
        record.undo.callback(self.slots.release, record)
        error = await self._try_load(record)
        if isinstance(error, OutOfMemory) and may_retry:
            error = await self._retry(record, terms, error)
        if error is not None:
            raise _complete_error(record, error)
        reports = await self._ask_for_reports(record)
        await self.memory.settle(record, self.memory.map_reports(reports))
        record.instances = await self._find_instances(record)
        record.unclassified = await self.triton.unclassified(record.name)
        await self._note_loaded(record)
        if self.status.life != record.life:
            text = f"Triton exited while it was loading model {record.id!r}"
            raise BackendUnavailable(text, model_id=record.id, delivered=True)

    async def book_late(self) -> None:
        """Book the models whose memory readings show only now, and note what they take."""
        for record in self.memory.book_late():
            if record.state is ModelState.READY:
                await self._note_loaded(record)

    async def _note_loaded(self, record: ModelRecord) -> None:
        """Note for later runs that Triton serves the model, and what it takes."""
        content_key = record.inspected.content_key
        size = self.memory.held(record)
        await self.packages.confirm(record.name, record.source, content_key, size)

    async def _try_load(self, record: ModelRecord) -> AdapterError | None:
        """Place and load the package once; return the failure, as readings of memory explain it."""
        await self._renew_turn(record)
        note_step(record, Step.FILES)
        placement = await self._place(record)
        record.warnings = (*record.inspected.warnings, *placement.warnings)
        await self.slots.acquire(record)
        while not self._has_turn(record):
            self.slots.release(record)
            await self._renew_turn(record)
            await self.slots.acquire(record)
        started_at = clock.monotonic()
        self.registry.apply(record, ModelEvent.LOAD_SENT)
        note_step(record, Step.TRITON)
        self.memory.ledger.send_load(record.name)
        self.at_work.start_load(record, started_at)
        try:
            for name in placement.load:
                await self._load_one(record, name)
            if self.limits.warm_up is not None:
                await self._warm_up(record, self.limits.warm_up)
        except (InsufficientMemory, ModelTooLarge) as refusal:
            # drop the traceback: its frame refers to the exception
            return refusal.with_traceback(None)
        except AdapterError as error:
            judged = await self.memory.judge_load(record, error, started_at)
            return judged.with_traceback(None)
        record.load_seconds = clock.monotonic() - started_at
        self.at_work.end_load(record)
        self.slots.release(record)
        return None

    async def _place(self, record: ModelRecord) -> Placement:
        """Place the package in the repository; again if a load that has begun meanwhile has taken
        the name of one of its models.
        """

        def is_taken(name: TritonName) -> bool:
            return self.registry.is_taken(name, record)

        while True:
            placement = await self.packages.place(
                record.name, record.id, record.inspected, record.gpu, is_taken=is_taken
            )
            if not any(map(is_taken, placement.names)):
                self.registry.place(record, placement)
                return placement

    async def _renew_turn(self, record: ModelRecord) -> None:
        """Wait for another turn if Triton has exited since the last one. When that comes, the
        folders of the models of the earlier Triton are gone, and their names are free.
        """
        while not self._has_turn(record):
            await self._wait_for_turn(record)

    def _has_turn(self, record: ModelRecord) -> bool:
        """Return whether Triton is up, and has not exited since the model got its turn."""
        return self.status.is_up and self.status.life == record.life

    async def _retry(
        self, record: ModelRecord, terms: LoadTerms, error: OutOfMemory
    ) -> AdapterError | None:
        """Have Triton undo a load that ran out of memory, and load once more with more memory
        reserved. Return the failure of the second try, or `error` if Triton does not undo the load.
        """
        call = self._calls.pop(record, None)
        if not await self.unloader.remove_from_triton(record, call=call):
            return error
        self.at_work.end_load(record)
        self.slots.release(record)
        self.registry.apply(record, ModelEvent.OUT_OF_MEMORY)
        await self.memory.reserve_again(record, terms, self.eviction, error)
        self.journal.metrics.load_retries.inc()
        fields = {"model_id": record.id, "reason": str(error)}
        log.info("model.load_retried", extra=fields)
        return await self._try_load(record)

    async def _load_one(self, record: ModelRecord, name: TritonName) -> None:
        """Load one model of the package, and watch its processes and the memory meanwhile."""
        call = asyncio.ensure_future(self.triton.load(name, record.id))
        call.add_done_callback(_note_seen)
        self._calls[record] = call
        is_slow = versions.has(versions.SLOW_POLLS, self.triton.version)
        gone_seconds = times.KILLED_SECONDS if is_slow else _STUB_GONE_SECONDS
        monitor = _StubMonitor({name, *record.placement.along}, gone_seconds)
        await self._watch(record, call, monitor)
        del self._calls[record]
        call.result()

    async def _watch(
        self,
        record: ModelRecord,
        call: asyncio.Future[Any],
        monitor: _StubMonitor | None,
    ) -> None:
        """Wait until Triton has answered. Raises if the load has to end before."""
        while not call.done():
            await asyncio.wait({call}, timeout=times.POLL_SECONDS)
            if call.done():
                return
            if self.memory.readings.lag_seconds == 0:
                await self.memory.readings.read()  # a load grows by gigabytes in a second
            overrun = self.memory.find_overrun(record)
            if overrun is not None:
                fields = {"model_id": record.id, "reason": str(overrun)}
                log.warning("model.load_ended", extra=fields)
                await self.unloader.kill_loading(record.placement.names)
                raise overrun
            if monitor is not None:
                await self._refuse_dead(record, monitor)

    async def _refuse_dead(self, record: ModelRecord, monitor: _StubMonitor) -> None:
        """Raise LoadFailed if a python process of the model has ended: Triton may never answer."""
        if not self.processes.are_seen:
            return
        with suppress(BackendUnavailable):  # Triton is exiting, and its answer will say so
            instances = await self.processes.instances(monitor.names)
            name = monitor.find_lost(instances, clock.monotonic())
            if name is not None:
                raise LoadFailed(
                    f"the python process of {name!r} ended while the model was being loaded",
                    model_id=record.id,
                    suspected="python process ended",
                )

    async def _warm_up(self, record: ModelRecord, limit_seconds: float) -> None:
        """Warm the package's entry up by an inference of zeros. Raises the failure if a process of
        the model, or Triton, has ended by it, or if memory was lacking. Other failures are only
        logged, because the model may not be made for zeros.
        """
        started_at = clock.monotonic()
        call = asyncio.ensure_future(self.triton.warm_up(record.name, record.id, limit_seconds))
        try:
            await self._watch(record, call, None)
            skipped = call.result()
        except StubDied as error:
            raise LoadFailed(
                f"a python process of the model ended during its warm-up: {error}",
                model_id=record.id,
                suspected="python process ended",
            ) from error
        except AdapterError as error:
            judged = await self.memory.judge_load(record, error, started_at)
            if is_exit(error) or isinstance(judged, CapacityError | ModelTooLarge):
                raise  # `_try_load` judges the load as a whole
            fields = {"model_id": record.id, "reason": str(error)}
            log.warning("model.warm_up_failed", extra=fields)
            return
        finally:
            call.cancel()
        if skipped is not None:
            log.info("model.warm_up_skipped", extra={"model_id": record.id, "reason": skipped})
            return
        seconds = round(clock.monotonic() - started_at, 3)
        log.info("model.warmed_up", extra={"model_id": record.id, "seconds": seconds})

    async def _ask_for_reports(self, record: ModelRecord) -> list[Mapping[int, int]]:
        """Return what Triton reports of each model's memory; of an ensemble, of its steps."""
        placement = record.placement
        names = placement.load
        if placement.along:
            names = (*placement.load[:-1], *placement.along)
        try:
            return [await self.triton.gpu_bytes(name) for name in names]
        except AdapterError as error:
            if is_exit(error):
                raise
            return []  # readings remain

    async def _find_instances(self, record: ModelRecord) -> frozenset[str]:
        """Return the names of the model's instances that have a live python process; none where
        processes cannot be seen now.
        """
        with suppress(BackendUnavailable):
            instances = await self.processes.instances(record.placement.names)
            living = [name for names in instances.values() for name in names if name is not None]
            return frozenset(living)
        return frozenset()

    def _serve(self, record: ModelRecord) -> None:
        """Let the model take requests."""
        # drop the files that came with the load request: they may take much memory
        record.source = replace(record.source, files=(), kept="")
        self.registry.apply(record, ModelEvent.LOADED)
        record.usage.used_at = record.usage.used_at or clock.monotonic()
        record.on_exit = self.status.choose_on_exit(record)
        if record.loaded_for is LoadedFor.CALLS:
            self.journal.metrics.endpoint_loading_seconds.observe(record.load_seconds)
        self.turns.end(record)
        self.call_slots.release(record)
        self.wanted.note_loaded(record.id)
        self.changes.notify()

    # -- undo -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _undo_on_failure(
        self, record: ModelRecord, log_fields: Mapping[str, str]
    ) -> AsyncIterator[None]:
        """Run the load in the block under its time limit, and undo it if it fails. Write its log
        lines.
        """
        record.load_started_at = clock.wall()
        url = record.source.shown_url
        with self.journal.record("load", record.id, log_fields, url=url) as entry:
            try:
                async with asyncio.timeout(self.limits.load):
                    yield
            except BaseException as error:
                failure = error
                if isinstance(error, TimeoutError):
                    failure = self.explain_timeout(record)
                is_loading = record.state is ModelState.LOADING
                is_suspect = self._is_warm_up_suspect(record)
                await run_to_end(self._undo(record, failure))
                if is_loading and is_exit(error) and self.status.life != record.life:
                    failure = self._explain_exit(record, error, is_warm_up=is_suspect)
                if failure is error:
                    raise
                raise failure from error
            entry.size_bytes = total(self.memory.held(record))

    def _is_warm_up_suspect(self, record: ModelRecord) -> bool:
        """Return whether an exit of Triton would have to do with the samples of this package: there
        Triton has a race, and nothing else is being loaded.

        A model that comes back after an exit is not suspect: Triton has answered its load once.
        """
        should_reload = self.registry.should_reload(record)
        if should_reload or not record.has_warm_up or self.status.server is None:
            return False
        works = self.at_work.collect(clock.monotonic())
        return [model_id for model_id, work in works.items() if work.is_load] == [record.id]

    def _explain_exit(
        self,
        record: ModelRecord,
        error: BaseException,
        *,
        is_warm_up: bool,  # the exit has probably to do with the samples of the package
    ) -> BaseException:
        """Return the error of a load that an exit of Triton has broken off."""
        if is_warm_up:
            return _explain_warm_up(record)
        server = self.status.server
        if server is None or not server.exit_reason:
            return error
        text = (
            f"Triton {server.exit_reason} while it was loading model {record.id!r}, and is started"
            " again; see docs/operations.md#after-a-restart-of-triton"
        )
        is_delivered = isinstance(error, BackendUnavailable) and error.delivered
        return BackendUnavailable(text, model_id=record.id, delivered=is_delivered)

    def explain_timeout(self, record: ModelRecord) -> BackendTimeout:
        """Return the error of a load that has passed its time limit."""
        text = f"model {record.id!r} did not load within {self.limits.load:g} s"
        hanging = self.slots.explain() if record.step is Step.THREAD else ""
        if hanging:
            text = f"{text}; {hanging}"
        return BackendTimeout(text, model_id=record.id)

    async def _undo(self, record: ModelRecord, error: BaseException) -> None:
        """Undo what a failed load has done, in Triton and outside. The record ends up absent, LOST
        or STUCK.
        """
        note_step(record, Step.UNDOING)
        call = self._calls.pop(record, None)
        is_out_of_memory = self.memory.is_out_of_memory(error)
        has_exited = is_exit(error)
        if record.state is ModelState.LOADING and not has_exited:
            self.at_work.end_load(record)
            await self.unloader.undo_load(record, call, is_out_of_memory=is_out_of_memory)
            return
        if record.state is ModelState.LOADING:
            if is_exit(error) and error.delivered:
                self.at_work.break_off_load(record, clock.monotonic())
            self.at_work.end_load(record)
            # only the connection may have been lost: then Triton still has the model
            if not await self.unloader.remove_from_triton(record):
                self.registry.apply(record, ModelEvent.LOAD_FAILED)
                await self.unloader.give_up(record)
                return
        await record.undo.aclose()
        if record.state is not None:
            self.registry.apply(record, self._choose_event(record, has_exited=has_exited))
        self.changes.notify()

    def _choose_event(self, record: ModelRecord, *, has_exited: bool) -> ModelEvent:
        """Return the event that follows from a failed load, for the state of the model."""
        is_wanted = self.wanted.get(record.id) is not None
        if has_exited and is_wanted and self.registry.should_reload(record):
            log.warning("model.return_broken_off", extra={"model_id": record.id})
            return ModelEvent.LOST
        is_loading = record.state is ModelState.LOADING
        return ModelEvent.TRITON_EXITED if is_loading else ModelEvent.LOAD_FAILED


def _explain_warm_up(record: ModelRecord) -> LoadFailed:
    """Return the error of a load in which Triton has exited. The caller need not try it again."""
    return LoadFailed(
        f"Triton exited while it was loading model {record.id!r}, probably in its model_warmup:"
        " let none of its samples raise; see docs/triton.md",
        model_id=record.id,
    )


def _note_seen(call: asyncio.Future[None]) -> None:
    """Mark the failure of a call as seen: nobody waits for one whose load was ended."""
    if not call.cancelled():
        call.exception()


def make_store_source(folder: str, key: str) -> ModelSource:
    """Return the source of a model whose files are in the disk cache."""
    return ModelSource(folder, is_cached=True, key=key)


def _complete_error(record: ModelRecord, error: AdapterError) -> AdapterError:
    """Add to a failure what is odd about the package: Triton names neither file nor line."""
    warnings = (*record.inspected.warnings, *record.placement.warnings)
    if not isinstance(error, LoadFailed) or not warnings:
        return error
    is_empty = _EMPTY_FAILURE in str(error)
    hint = "perhaps because" if is_empty else "what else is odd about the package:"
    return LoadFailed(f"{error}; {hint} {'; '.join(warnings)}", model_id=error.model_id)
