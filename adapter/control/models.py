"""Load, unload, replace and lease models for callers.

Each operation runs in a task that outlives its caller, under the lock of its model. Models wait for
each other only for memory, for Triton's load slots, and for turns after an exit of Triton.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from adapter.control.leases import Lease, Leases
from adapter.control.loader import Loader, StoreFiles
from adapter.control.memory import LoadTerms
from adapter.control.operations import Kind, Operation, Operations
from adapter.control.ports import Packages, TimeLimits
from adapter.control.triton import (
    Phase,
    TritonStatus,
    TritonWatcher,
    explain_given_up,
)
from adapter.control.unloader import Unloader
from adapter.core import times
from adapter.core.admission import Purpose
from adapter.core.artifacts import ArtifactKey
from adapter.core.blame import Blame, Requester
from adapter.core.forgotten import ForgottenModels
from adapter.core.ledger import ForgottenSize
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord, OnExit
from adapter.core.registry import Registry
from adapter.core.requests import Replaces, RoomMaker
from adapter.core.states import LOADED, ModelEvent, ModelState
from adapter.core.wanted import Wanted, WantedReason
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    ModelNotFound,
    ModelNotReady,
    UnloadedMeanwhile,
)
from adapter.runtime import clock

log = logging.getLogger(__name__)

# A caller waits this much longer than the time limit, for the undo of a load or for an unload.
_LATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Describes a load that somebody asks for."""

    source: ModelSource
    loaded_for: LoadedFor = LoadedFor.PLATFORM
    terms: LoadTerms = field(default_factory=LoadTerms)
    on_exit: OnExit = OnExit.FORGET  # until it serves
    key: ArtifactKey | None = None  # of a model of a store
    log_fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Models:
    """Has the verbs for models; each operation outlives its caller."""

    registry: Registry
    wanted: Wanted
    forgotten: ForgottenModels
    blame: Blame
    operations: Operations
    leases: Leases
    loader: Loader
    unloader: Unloader
    status: TritonStatus
    watcher: TritonWatcher
    packages: Packages
    files: StoreFiles
    limits: TimeLimits

    # -- calls ------------------------------------------------------------------------------

    def lease(self, model_id: ModelId) -> Lease:
        """Return a lease of a READY model. Raises ModelNotReady and ModelNotFound."""
        try:
            return self.leases.make(self.registry.serving(model_id))
        except ModelNotFound as error:
            self.status.refuse_unless_open()  # the registry is not complete before
            operation = self.operations.load_of(model_id)
            if operation is None:
                raise self._explain_absence(model_id, error) from None
        doing = "updated" if operation.kind is Kind.REPLACE else "loaded"
        raise ModelNotReady(f"model {model_id!r} is being {doing}", model_id=model_id)

    async def wait_for_lease(self, model_id: ModelId, limit_seconds: float) -> Lease:
        """Return a lease; wait for a load or an update of the model that is in progress, and for a
        Triton that is away.
        """
        deadline = clock.monotonic() + limit_seconds
        if not self._can_serve(model_id):
            with self.leases.count_caller(model_id):
                await self._wait_until_ready(model_id, deadline)
        return self.lease(model_id)

    async def _wait_until_ready(self, model_id: ModelId, deadline: float) -> None:
        """Wait while a load is in progress, or the model comes back after an exit of Triton."""
        while not self._can_serve(model_id) and clock.monotonic() < deadline:
            operation = self.operations.load_of(model_id)
            if operation is not None:
                await operation.wait(deadline - clock.monotonic())
            elif self._should_reload(model_id):
                await self.status.changes.wait(times.POLL_SECONDS)
            else:
                return

    def _can_serve(self, model_id: ModelId) -> bool:
        """Return whether the model is loaded in a Triton that has not exited."""
        return self.registry.find_ready(model_id) is not None and not self.status.has_exited

    def is_being_loaded(self, model_id: ModelId) -> bool:
        """Return whether a load or an update is in progress, which `wait_for_lease` waits for."""
        return self.operations.load_of(model_id) is not None

    async def wait_for_load(self, model_id: ModelId) -> ModelRecord:
        """Return the record of a loaded model. Wait for a load of it that is in progress, and raise
        the failure of that load.
        """
        operation = self.operations.load_of(model_id)
        if operation is not None and self.registry.find_ready(model_id) is None:
            await self._join(operation)
        return self.registry.serving(model_id)

    def forget(self, model_id: ModelId) -> ForgottenSize:
        """Forget what loads of the model's package have shown of its size.

        Raises ModelNotFound if no load of the model was ever begun.
        """
        return self.loader.memory.forget(model_id)

    # -- loads ------------------------------------------------------------------------------

    async def load(
        self,
        model_id: ModelId,
        source: ModelSource,
        room_maker: RoomMaker = RoomMaker.ADAPTER,
        /,
        **log_fields: str,
    ) -> ModelRecord:
        """Load a model, or raise why it cannot be loaded.

        Raises AlreadyLoaded at once, also while its load is in progress; a model that calls have
        loaded then stays. Raises GivenUp for a platform's load of a model that makes Triton exit.
        """
        self.status.refuse_unless_open()
        await self.wait_for_exit(model_id)
        self.refuse_loaded(model_id)
        self.refuse_given_up(model_id, Requester.PLATFORM)
        self.operations.refuse_when_full(model_id)
        is_planned = room_maker is RoomMaker.MESH
        terms = LoadTerms(Purpose.PLANNED if is_planned else Purpose.EXPLICIT)
        on_exit = OnExit.RELOAD if self.wanted.get(model_id) else OnExit.FORGET
        request = LoadRequest(source, terms=terms, on_exit=on_exit, log_fields=log_fields)
        operation = self.start_load(model_id, request)
        record = await self._wait_for_outcome(operation)
        if record is not operation.record:  # the unload that it waited for was not done
            raise AlreadyLoaded(f"model {model_id!r} is loaded already", model_id=model_id)
        return record

    def refuse_loaded(self, model_id: ModelId) -> None:
        """Raise AlreadyLoaded if the model is loaded or being loaded; it then stays until somebody
        unloads it.
        """
        state = self._describe_presence(model_id)
        if state:
            self.keep_loaded(model_id)
            raise AlreadyLoaded(f"model {model_id!r} is {state}", model_id=model_id)

    def _describe_presence(self, model_id: ModelId) -> str:
        """Return in words that the model is loaded or being loaded; "" if it is neither, or is
        about to be unloaded.
        """
        if self.operations.load_of(model_id) is not None:
            return "being loaded"
        if self.operations.is_unloading(model_id):
            return ""
        if self.registry.find_ready(model_id) is not None:
            return "loaded already"
        record = self.registry.get(model_id)
        if record is not None and record.state is ModelState.LOST and self.wanted.get(model_id):
            return "being loaded again"
        return ""

    def refuse_given_up(self, model_id: ModelId, requester: Requester) -> None:
        """Raise GivenUp if the model makes Triton exit, unless a person wants to try it."""
        given_up = self.blame.request_load(model_id, requester, clock.monotonic())
        if given_up is not None:
            raise explain_given_up(model_id, given_up)

    def keep_loaded(self, model_id: ModelId) -> None:
        """Have the model stay until somebody unloads it: from now on no call evicts it."""
        for record in self.list_versions(model_id):
            record.loaded_for = LoadedFor.PLATFORM

    def list_versions(self, model_id: ModelId) -> list[ModelRecord]:
        """Return the version that callers of the model get, and the one that is being loaded."""
        operation = self.operations.load_of(model_id)
        records = [self.registry.get(model_id), operation.record if operation else None]
        return [record for record in records if record is not None]

    def start_load(self, model_id: ModelId, request: LoadRequest) -> Operation[ModelRecord]:
        """Start a load that nobody has to wait for, or join the load or update in progress."""
        operation = self.operations.load_of(model_id)
        if operation is not None:
            return operation
        record = ModelRecord(
            model_id,
            TritonName(""),
            request.source,
            request.loaded_for,
            request.on_exit,
            key=request.key,
            is_source_complete=not request.source.files,
        )
        work = partial(self._load, record, request)
        started = self.operations.start(model_id, Kind.LOAD, work)
        started.record = record
        return started

    async def _load(self, record: ModelRecord, request: LoadRequest) -> ModelRecord:
        ready = self.registry.find_ready(record.id)
        if ready is not None:
            if request.loaded_for is LoadedFor.PLATFORM:
                self.keep_loaded(record.id)
            return ready
        present = self.registry.get(record.id)
        if present is not None and present.state is ModelState.DEAD:
            with suppress(BackendTimeout):  # the model is STUCK, and its id is free
                await self.unloader.unload(present, request.log_fields)
        record.name = self.registry.free_name(record.id)
        await self.loader.load(record, request.terms, request.log_fields)
        return record

    async def _join(self, operation: Operation[ModelRecord]) -> None:
        """Wait for a load or an update that somebody else has asked for. Raise its failure, except
        that of an update after which the old version serves.
        """
        try:
            await self._wait_for_outcome(operation)
        except AdapterError:
            is_served = self.registry.find_ready(operation.model_id) is not None
            if operation.reason is not None or not is_served:
                raise

    async def _wait_for_outcome(self, operation: Operation[ModelRecord]) -> ModelRecord:
        """Return the record that a load or an update ends with. Raise BackendTimeout once a load
        has lasted for its time limit, and do not wait for its undo.
        """
        waited_seconds = clock.monotonic() - operation.started_at
        limit_seconds = self.limits.load + _LATE_SECONDS - waited_seconds
        # an update may be two loads, and has no limit of its own
        is_update = operation.kind is Kind.REPLACE
        try:
            return await operation.outcome(None if is_update else max(0.0, limit_seconds))
        except TimeoutError:
            raise self._explain_limit(operation) from None

    def _explain_limit(self, operation: Operation[ModelRecord]) -> BackendTimeout:
        """Return the error of a load whose caller has waited for as long as a load may last."""
        model_id = operation.model_id
        record = operation.record
        text = f"model {model_id!r} did not load within {self.limits.load:g} s"
        ending = "what there is of it is being taken down"
        if record is not None and record.state is None:
            text = f"model {model_id!r} did not begin to load within {self.limits.load:g} s"
            ending = "what there was of it before is still being taken down, and the load follows"
        elif record is not None:
            text = str(self.loader.explain_timeout(record))
        return BackendTimeout(f"{text}; {ending}", model_id=model_id)

    # -- unloads ----------------------------------------------------------------------------

    async def unload(self, model_id: ModelId, **log_fields: str) -> None:
        """Unload a model, or end its load. Return when it and its memory are gone."""
        self.status.refuse_unless_open()
        if self.operations.is_unloading(model_id):  # the first unload is never refused
            self.operations.refuse_when_full(model_id)
        was_wanted = self._forget_wanted(model_id)
        is_loading = self.operations.load_of(model_id) is not None
        if not is_loading and not self.registry.records_of(model_id):
            raise _explain_nothing_to_unload(model_id, was_wanted=was_wanted)
        text = f"model {model_id!r} was unloaded while it was being loaded"
        reason = UnloadedMeanwhile(text, model_id=model_id)
        self.operations.end_loads(model_id, reason)
        work = partial(self._unload, model_id, log_fields, has_ended_load=is_loading)
        operation = self.operations.start(model_id, Kind.UNLOAD, work)
        try:
            await operation.outcome(self.limits.unload + _LATE_SECONDS)
        except TimeoutError:
            text = f"model {model_id!r} was not gone within {self.limits.unload:g} s"
            raise BackendTimeout(
                f"{text}; its unload is still in progress", model_id=model_id
            ) from None

    async def _unload(
        self, model_id: ModelId, log_fields: Mapping[str, str], *, has_ended_load: bool
    ) -> None:
        # the model may have been wanted again while this unload waited
        was_wanted = self._forget_wanted(model_id)
        if not has_ended_load and not self.registry.records_of(model_id):
            # another unload has unloaded the model
            raise _explain_nothing_to_unload(model_id, was_wanted=was_wanted)
        record = self.registry.get(model_id)
        if record is not None and record.state is ModelState.LOST:
            self.registry.apply(record, ModelEvent.FORGOTTEN)
        elif record is not None and record.state in LOADED:
            await self.unloader.unload(record, log_fields)
        stuck = self.registry.records_of(model_id)
        if stuck and record is None:
            raise _explain_stuck(stuck[0])

    def _forget_wanted(self, model_id: ModelId) -> bool:
        """Make the adapter load the model no more by itself; return whether it was wanted."""
        model = self.wanted.get(model_id)
        if model is not None and model.reason is not WantedReason.LOST:
            log.info("adapter.wanted_no_more", extra={"model_id": model_id})
        self.forgotten.remove(model_id)
        return self.wanted.remove(model_id)

    async def unload_all(self, **log_fields: str) -> None:
        """Unload every model, end every load, and unload what was loaded past the adapter."""
        self.status.refuse_unless_open()
        ids = {record.id for record in self.registry.records()}
        ids |= {model.model_id for model in self.wanted.models()}
        unloads = [self._unload_if_present(model_id, log_fields) for model_id in sorted(ids)]
        await asyncio.gather(*unloads)
        await self.watcher.unload_strangers()

    async def _unload_if_present(self, model_id: ModelId, log_fields: Mapping[str, str]) -> None:
        try:
            await self.unload(model_id, **log_fields)
        except ModelNotFound:
            return

    # -- updates ----------------------------------------------------------------------------

    async def replace(
        self, model_id: ModelId, source: ModelSource, replaces: Replaces, **log_fields: str
    ) -> None:
        """Have the model loaded from the package of `source`, whatever is loaded now.

        This loads a model that is absent, and waits for a load in progress. A package with a fault,
        or one that is too large, changes nothing. If both versions fit, no call fails or waits.
        Otherwise the old version is unloaded first, and calls wait as for any load; if the new
        version then fails to load, the old version is loaded again.
        """
        self.status.refuse_unless_open()
        self.refuse_given_up(model_id, Requester.PERSON)
        self.operations.refuse_when_full(model_id)
        operation = self.operations.load_of(model_id)
        if operation is not None and replaces is not Replaces.ALWAYS:
            await self._join(operation)
        work = partial(self._replace, model_id, source, replaces, log_fields)
        await self.operations.start(model_id, Kind.REPLACE, work).outcome()

    async def _replace(
        self,
        model_id: ModelId,
        source: ModelSource,
        replaces: Replaces,
        log_fields: Mapping[str, str],
    ) -> ModelRecord:
        old = self.registry.find_ready(model_id)
        if old is None:
            record = ModelRecord(
                model_id,
                TritonName(""),
                source,
                LoadedFor.PLATFORM,
                is_source_complete=not source.files,
            )
            return await self._load(record, LoadRequest(source, log_fields=log_fields))
        if replaces is Replaces.CHANGED_FILES:
            if not await self._has_changed(old):
                old.loaded_for = LoadedFor.PLATFORM
                return old
            source = old.source if not source.files else source
        elif replaces is Replaces.OTHER_SOURCE and _is_same_source(old.source, source):
            # callers name no source of a store, so that a platform has loaded this model already
            return old
        new = _make_version(old, source, None)
        new.loaded_for = LoadedFor.PLATFORM
        return await self._exchange(old, new, log_fields, log_fields)

    async def _has_changed(self, record: ModelRecord) -> bool:
        """Return whether the model's files are others than those that were loaded."""
        since = record.load_started_at or clock.wall()
        content_key = record.inspected.content_key
        return await self.packages.has_changed(record.source, content_key, since)

    async def update(self, old: ModelRecord, key: ArtifactKey, **unload_fields: str) -> None:
        """Replace a model of a store by the version that the store has now."""
        work = partial(self._update, old, key, unload_fields)
        await self.operations.start(old.id, Kind.REPLACE, work).outcome()

    async def _update(
        self, old: ModelRecord, key: ArtifactKey, unload_fields: Mapping[str, str]
    ) -> ModelRecord:
        if not self.registry.is_serving(old):
            return old
        new = _make_version(old, old.source, key)
        return await self._exchange(old, new, {}, unload_fields)

    async def _exchange(
        self,
        old: ModelRecord,
        new: ModelRecord,
        log_fields: Mapping[str, str],
        unload_fields: Mapping[str, str],
    ) -> ModelRecord:
        """Load the new version beside the old one if both fit, else in its place. Return the record
        of the new one.
        """
        fields = {"replaced_by": str(new.id), **unload_fields}
        if self._can_load_beside(old):
            try:
                return await self._load_beside(old, new, log_fields, fields)
            except CapacityError:
                new = _make_version(new, new.source, new.key)  # a load needs a record of its own
        return await self._load_in_place(old, new, log_fields, fields)

    def _can_load_beside(self, old: ModelRecord) -> bool:
        """Return whether another version may be loaded beside this one. Other models may call a
        pinned one by its name in Triton, which it has to keep.
        """
        is_pinned = self.loader.eviction.is_pinned(old.id)
        return old.can_run_beside and not is_pinned and self.loader.memory.has_room_beside(old)

    async def _load_beside(
        self,
        old: ModelRecord,
        new: ModelRecord,
        log_fields: Mapping[str, str],
        unload_fields: Mapping[str, str],
    ) -> ModelRecord:
        new.name = self.registry.free_name(new.id)
        await self.loader.load_beside(new, old, log_fields)
        with suppress(BackendTimeout):  # the old version is STUCK, and the new one serves
            await self.unloader.unload(old, unload_fields)
        return new

    async def _load_in_place(
        self,
        old: ModelRecord,
        new: ModelRecord,
        log_fields: Mapping[str, str],
        unload_fields: Mapping[str, str],
    ) -> ModelRecord:
        """Load the new version in the place of the old one; return its record. If it fails and the
        old one serves no more, load that again from its own files, and raise the failure.
        """
        new.name = self.registry.free_name(new.id)
        aside_path = await self.packages.set_aside(old.name) if old.name else ""
        restored = _make_version(old, replace(old.source, kept=aside_path), old.key)
        restored.files = old.files
        if old.files is not None:
            # for another load of the old version, which the store may not have any more
            self.files.retain(old.files)
        try:
            await self.loader.load_in_place(new, old, LoadTerms(), log_fields, unload_fields)
        except AdapterError as error:
            # Triton may have exited, or be stuck with the old version
            is_of_version = old.state is None and not isinstance(error, BackendUnavailable)
            restored.failed_update = new.files if is_of_version else None
            if self.registry.get(old.id) is None and self.status.is_open:
                await self._load_old(old, restored, error, log_fields)
            raise
        finally:
            if old.files is not None:
                self.files.release(old.files)
            await self.packages.discard(aside_path)
        return new

    async def _load_old(
        self,
        old: ModelRecord,
        restored: ModelRecord,  # the record for this load of the old version
        error: AdapterError,
        log_fields: Mapping[str, str],
    ) -> None:
        """Load the old version again after an update failed with `error`; add to the text of
        `error` whether that succeeded.
        """
        restored.name = self.registry.free_name(old.id)
        try:
            await self.loader.load(restored, LoadTerms(), log_fields)
        except AdapterError as failure:
            outcome = f"the model that was there could not be loaded again: {failure}"
        else:
            # its files are those that were read then, which `has_changed` compares with
            restored.load_started_at = old.load_started_at
            outcome = "the model that was there was loaded again"
        error.args = (f"{error}; {outcome}",)

    # -- stop -------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse operations from now on."""
        self.status.phase = Phase.STOPPING
        self.operations.close()

    # -- inside -----------------------------------------------------------------------------

    def _should_reload(self, model_id: ModelId) -> bool:
        """Return whether Triton has exited with the model, which the adapter loads again."""
        ready = self.registry.find_ready(model_id)
        if ready is not None:
            return self.status.has_exited and not self.status.has_lost(ready)
        record = self.registry.get(model_id)
        return record is not None and record.state is ModelState.LOST

    def _explain_absence(self, model_id: ModelId, error: ModelNotFound) -> AdapterError:
        """Return the error for a call of a model that is not loaded.

        It is the same kind for a model that was given up: a platform that does not hear that a
        model is gone would send requests to it for ever.
        """
        given_up = self.blame.find_given_up(model_id, clock.monotonic())
        if given_up is None:
            return error
        return ModelNotFound(str(explain_given_up(model_id, given_up)), model_id=model_id)

    async def wait_for_exit(self, model_id: ModelId) -> None:
        """Wait until the watcher has handled an exit of Triton: before, its models seem loaded."""
        deadline = clock.monotonic() + times.PATIENCE_SECONDS
        while self.status.has_exited and self.registry.find_ready(model_id) is not None:
            if clock.monotonic() > deadline:
                text = "Triton has exited, and is not back yet"
                raise BackendUnavailable(text, model_id=model_id, delivered=False)
            await self.status.changes.wait(times.POLL_SECONDS)


def _explain_nothing_to_unload(model_id: ModelId, *, was_wanted: bool) -> ModelNotFound:
    """Return the error for an unload of a model that is not loaded."""
    text = f"model {model_id!r} is not loaded"
    if was_wanted:
        text = f"{text}; its unload ends the adapter's own attempts to load it"
    return ModelNotFound(text, model_id=model_id)


def _explain_stuck(record: ModelRecord) -> BackendTimeout:
    """Return the error for an unload of a model whose load Triton does not finish."""
    started_at = record.load_started_at
    since = (
        "since an earlier run" if started_at is None else f"for {clock.wall() - started_at:.0f} s"
    )
    return BackendTimeout(
        f"model {record.id!r} cannot be unloaded yet: Triton has been loading it {since}, and"
        " nothing else can end the load; the unload follows it, and until then the memory stays"
        " reserved; see docs/operations.md#a-load-hangs",
        model_id=record.id,
    )


def _make_version(old: ModelRecord, source: ModelSource, key: ArtifactKey | None) -> ModelRecord:
    """Return the record of another version of a model. The load chooses its name in Triton."""
    new = ModelRecord(
        old.id,
        TritonName(""),
        source,
        old.loaded_for,
        old.on_exit,
        key=key,
        is_source_complete=not source.files,
    )
    new.usage.used_at = old.usage.used_at
    new.usage.called_at = old.usage.called_at
    return new


def _is_same_source(one: ModelSource, other: ModelSource) -> bool:
    return one == replace(other, files=())
