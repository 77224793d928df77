"""Reconciles the registry with Triton: at the start, after a restart of Triton, and in between."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from adapter.control.desired import DesiredModels
from adapter.control.memory import Memory
from adapter.control.operations import Operations
from adapter.control.ports import Ports
from adapter.control.triton_status import TritonStatus
from adapter.control.unloader import Unloader
from adapter.core.model import (
    ModelId,
    ModelSource,
    Placement,
    StagedModel,
    TritonName,
)
from adapter.core.registry import LostModel, ModelRecord, Registry
from adapter.core.state import LOADED, ModelEvent, ModelState
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    ModelNotFound,
    ModelNotReady,
    StubDied,
)
from adapter.runtime import clock

log = logging.getLogger(__name__)

_MOST_NAMED = 5
_LOST = "Triton has ended, or unloaded it"


class Reconciler:
    """Compares the registry with Triton, and forgets, adopts or unloads models, or has them return.

    `load_threads`: how many loads Triton runs at a time.
    """

    def __init__(
        self,
        registry: Registry,
        memory: Memory,
        ports: Ports,
        unloader: Unloader,
        operations: Operations,
        *,
        desired: DesiredModels,
        triton_status: TritonStatus,
        load_threads: int,
    ) -> None:
        self._registry, self._memory = registry, memory
        self._triton = ports.triton
        self._server = ports.server
        self._processes = ports.processes
        self._packages = ports.packages
        self._unloader = unloader
        self._operations, self._start = operations, operations.start
        self._desired, self._trials = desired, desired.trials
        self._triton_status = triton_status
        self._load_threads = load_threads
        self._checks: dict[ModelRecord, asyncio.Task[None]] = {}  # under way, of processes
        self._reconciling: asyncio.Task[None] | None = None

    async def take_stock(self) -> None:
        """Adopt the models that an earlier run loaded and Triton still serves, and unload whatever
        else that run left. To be called before the first load.
        """
        incarnation = self._triton_status.now()
        staged = await self._packages.staged()
        ready = await self._triton.ready()
        are_left = False
        for model in staged:
            # what calls have loaded is loaded again by the next; its files may leave the disk
            is_kept = model.is_loaded and not model.source.is_cached
            if is_kept and ready.issuperset(model.placement.names):
                await self._adopt(model)
            else:
                await self._unload_staged(model)
                are_left = True
        if are_left:  # else their memory counts as Triton's own
            await self._memory.readings.until_shown()
        await self._memory.rebase()
        # whatever it was, it has ended none of our models
        self._triton_status.follows_an_end(incarnation)
        self._triton_status.confirm(incarnation)

    async def _unload_staged(self, model: StagedModel) -> None:
        record = ModelRecord(model.model_id, model.name, ModelSource(""))
        record.placement = model.placement
        try:
            await self._unloader.unload(record)
        except BackendTimeout as error:  # Triton is stuck with this model; all else works
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})
        else:
            await self._packages.remove(model.name)

    async def unload_strangers(self) -> None:
        """Unload the models that somebody has loaded into Triton past the adapter. Models of
        Triton's own repository are not seen where loads carry their files.
        """
        ready = await self._triton.ready()
        strangers = sorted(name for name in ready if not self._registry.is_owned(TritonName(name)))
        if not strangers:
            return
        log.warning("triton.strangers_unloaded", extra={"triton_names": strangers})
        for name in map(TritonName, strangers):
            record = ModelRecord(ModelId(name), name, ModelSource(""))
            record.placement = Placement((name,))
            await self._unloader.unload(record)
        await self._memory.readings.until_shown()
        await self._memory.rebase()

    async def _adopt(self, model: StagedModel) -> None:
        record = self._registry.adopt(model.model_id, model.name, model.source)
        record.usage.used_at = clock.monotonic()
        self._registry.place(record, model.placement)
        record.package_key, record.gpu = model.content_key, model.gpu
        record.can_load_again = model.can_load_again
        record.content_types = model.content_types
        self._memory.adopt(record, model.held)
        record.unclassified = await self._triton.unclassified(record.name)
        log.info("model.adopted", extra={"model_id": model.model_id})

    async def reconcile(self) -> None:
        """Forget the models that Triton no longer has: it was restarted, or unloaded them."""
        # taken before Triton is asked: a model that becomes ready later must not count as lost
        before = [r for r in self._registry.records() if r.state in LOADED]
        incarnation = self._triton_status.now()
        ready = await self._triton.ready()
        gone = [
            r
            for r in before
            if r.name not in ready and self._registry.get(r.id) is r and r.state in LOADED
        ]
        given_up = None
        self._trials.lost(gone)
        if self._triton_status.follows_an_end(incarnation) and not any(
            r.name in ready for r in before
        ):
            given_up = self._trials.triton_ended()
        vanished = self._lose(gone, given_up)
        self._triton_status.confirm(incarnation)
        self._trials.clear_served()
        self._desired.begin()
        if gone:
            log.warning("triton.models_vanished", extra={"models": [r.id for r in gone]})
            self._operations.history.lost(_what_becomes_of(gone, given_up))
        if vanished:
            # not awaited: a load of the same id may be under way by now, for minutes
            self._start("clear away", None, self._clear_vanished(vanished))

    async def _clear_vanished(self, vanished: Sequence[ModelRecord]) -> None:
        """Clear away what is left of models, one after the other; none waits for another's load."""
        turn, present, loading = asyncio.Lock(), set[str](), set[str]()
        with suppress(AdapterError):  # Triton has ended once more, and has nothing of them
            present = await self._triton.present()
            loading = await self._triton.being_loaded()

        async def clear(record: ModelRecord) -> None:
            async with self._operations.lock(record.id), turn:
                if record.id not in self._registry and record.name not in self._registry.stuck:
                    names = {*record.placement.names} & present
                    # an unload that was given up has had it loaded again
                    is_loading = bool(names & loading)
                    hangs = is_loading or (bool(names) and await self._has_died(record))
                    await self.clear_away(record, also_the_entry=hangs)

        await asyncio.gather(*map(clear, vanished))

    def _lose(self, gone: Sequence[ModelRecord], given_up: ModelId | None) -> list[ModelRecord]:
        """Note the models that Triton has lost; return those that do not come back."""
        vanished = []
        for record in gone:
            self._memory.unloaded(record)
            if self._triton_status.comes_back(record) and record.id != given_up:
                # its load clears away what is left of it
                self._registry.apply(record, ModelEvent.LOST)
                continue
            self._registry.apply(record, ModelEvent.VANISHED)
            vanished.append(record)
            if not record.is_on_demand and record.id != given_up:
                self._registry.lose(record.id, LostModel(clock.wall(), _LOST))
        if (waiting := self._registry.returning(given_up)) is not None:
            self._registry.apply(waiting, ModelEvent.VANISHED)
            vanished.append(waiting)
        return vanished

    async def _has_died(self, record: ModelRecord) -> bool:
        """Return whether a process is gone: Triton's own unload of such a model never ends."""
        try:
            found = await self._processes.instances([*map(TritonName, record.placement.names)])
        except BackendUnavailable:  # processes cannot be seen
            return False
        living = {each for instances in found.values() for each in instances}
        # even one of several that is gone fails each request that it is given
        return bool(record.instances - living) or any(not each for each in found.values())

    async def judge(self, record: ModelRecord, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`."""
        await self._confirm_death(error, record)
        judged = await self._memory.readings.judged(error, record.name)
        if isinstance(judged, CapacityError | StubDied):
            self._operations.history.failed("infer", record.asked_for, judged)
        if isinstance(judged, StubDied) and record.state is ModelState.DEAD:
            said = str(judged).rstrip(".")  # Triton's words, which do not tell what to do
            why = f"{said}. A python process of the model has ended: load it again, or unload it"
            return StubDied(why, model_id=record.asked_for, suspected=judged.suspected)
        return judged

    async def _confirm_death(self, error: AdapterError, record: ModelRecord) -> None:
        """Check whether the model has lost its process, if the text of `error` says so, before the
        inference is answered: the next request must find the model dead.
        """
        if isinstance(error, StubDied):
            self._suspect(record)
            if (check := self._checks.get(record)) is not None:
                await asyncio.shield(check)

    def note_failure(self, record: ModelRecord, error: BaseException) -> BaseException:
        """Handle the error of a request; return the error for its caller."""
        # an OutOfMemory may wrap a StubDied; then the model is dead too
        if isinstance(error, StubDied) or isinstance(error.__cause__, StubDied):
            self._suspect(record)
        elif isinstance(error, BackendUnavailable):
            self._trials.call_failed(record.id, error)
        elif isinstance(error, ModelNotFound):
            self._begin_reconcile()
            # "not found" would make the caller load it as well
            if self._triton_status.comes_back(record) or self._is_loaded_again(record):
                again = f"model {record.id!r} is being loaded again"
                return ModelNotReady(again, model_id=record.id)
        return error

    def _is_loaded_again(self, record: ModelRecord) -> bool:
        """Return whether the loss that a call reports is known, and the model on its way back."""
        known = self._registry.get(record.id)
        return known is not None and (known is not record or known.state is ModelState.LOST)

    def _begin_reconcile(self) -> asyncio.Task[None]:
        if self._reconciling is None or self._reconciling.done():
            self._reconciling = self._start("reconcile", None, self.reconcile())
        return self._reconciling

    async def catch_up(self, model_id: ModelId) -> None:
        """Forget the models of a Triton that has ended, before anything is said of this one. Raises
        BackendUnavailable where the next one does not answer yet.
        """
        known = self._registry.get(model_id)
        if self._triton_status.has_lost_all or (
            known is not None and self._triton_status.has_lost(known)
        ):
            await asyncio.shield(self._begin_reconcile())

    def _suspect(self, record: ModelRecord) -> None:
        """Handle an error text that says that a python process of the model has died. With an
        embedded server that is checked: a model may repeat any text that its caller sent.
        """
        if not self._processes.are_seen:
            self._registry.died(record)
        elif record not in self._checks and record.state is ModelState.READY:
            check = self._check_processes(record)
            self._checks[record] = self._start("look for death", record.id, check)

    async def _check_processes(self, record: ModelRecord) -> None:
        try:
            if await self._has_died(record):
                self._registry.died(record)
        finally:
            del self._checks[record]

    async def triton_restarted(self) -> None:
        """Handle a restart of Triton, which has lost all models."""
        await self.free_stuck()
        await self.reconcile()
        self._triton_status.is_restarting = False

    def why_stuck(self) -> str | None:
        """Return why no load can succeed any more; None while loads can."""
        stuck = len(self._registry.stuck)
        if stuck < self._load_threads:
            return None
        return f"{stuck} loads are stuck in Triton and keep all of its {self._load_threads} threads"

    async def restart_if_stuck(self) -> None:
        """Restart an embedded Triton whose load threads are all stuck: nothing else frees them."""
        reason = self.why_stuck()
        if (
            reason is not None
            and self._server is not None
            and not self._triton_status.is_restarting
        ):
            self._triton_status.is_restarting = True
            await self._server.restart(reason)

    async def free_stuck(self) -> None:
        """Clear away models that were given up, once Triton has finished with them. A Triton that
        answers again may have ended, or only have been slow: then it has loaded them meanwhile.
        """
        if not self._registry.stuck:
            return
        present, ready = await self._triton.present(), await self._triton.ready()
        for record in [*self._registry.stuck.values()]:
            names, lock = set(record.placement.names), self._operations.lock(record.id)
            if names & (present - ready) and not await self._never_ends(record):
                await self._unloader.end_loading(record)
                continue
            if lock.locked():  # by a load under another name
                continue
            async with lock:  # no load may take the name before its folder is cleared
                if self._registry.stuck.get(record.name) is not record:
                    continue  # done meanwhile by another call
                self._registry.apply(record, ModelEvent.FREED)
                self._memory.freed(record)
                await self.clear_away(record, also_the_entry=bool(names & present))

    async def _never_ends(self, record: ModelRecord) -> bool:
        """Return whether Triton unloads the model for ever, as its process has died."""
        is_loading = not (await self._triton.being_loaded()).isdisjoint(record.placement.names)
        return not is_loading and await self._has_died(record)

    async def clear_away(self, record: ModelRecord, *, also_the_entry: bool = False) -> None:
        """Unload what Triton still has of the package, and remove its folders."""
        try:
            if also_the_entry or len(record.placement.names) > 1:
                await self._unloader.unload(record)
            await self._packages.remove(record.name)
        except AdapterError as error:
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})


def _what_becomes_of(gone: Sequence[ModelRecord], given_up: ModelId | None) -> str:
    """Say of models that Triton has lost which come back, and how."""
    returning = [r.id for r in gone if r.state is ModelState.LOST]
    left = [r for r in gone if r.state is not ModelState.LOST and r.id != given_up]
    parts = {
        "given up, because it may crash Triton": [r.id for r in gone if r.id == given_up],
        "loaded again by the adapter": returning,
        "loaded again by the next call": [r.id for r in left if r.is_on_demand],
        "not found (404) until loaded again": [r.id for r in left if not r.is_on_demand],
    }
    said = "; ".join(f"{what}: {_named(ids)}" for what, ids in parts.items() if ids)
    return f"Triton has lost {len(gone)} model{'' if len(gone) == 1 else 's'}. {said}."


def _named(ids: Sequence[ModelId]) -> str:
    more = len(ids) - _MOST_NAMED
    return ", ".join(ids[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
