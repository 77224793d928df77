"""Follow Triton from life to life: what a new one has, and what becomes of models at an exit.

What happens to a model whose Triton exits while it is

- fetched or inspected: nothing; the load waits for the next Triton, for ten seconds at most.
- LOADING: the load fails. One that should be loaded anyway is LOST, and loaded by the next Triton;
  a call tries once more; a caller of its own gets 503, and decides.
- READY or DEAD: LOST if the adapter loads it again, else absent; a call loads it again.
- UNLOADING: it is unloaded.
- STUCK: it is free.

The life of an embedded Triton is the pid of its process. Of another Triton only the connection is
seen: when that comes back and none of the models is there any more, Triton has exited.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from functools import partial
from typing import NoReturn

from adapter.control.leases import AtWork
from adapter.control.memory import Memory
from adapter.control.operations import Journal, Kind, Operations, make_drain_refusal
from adapter.control.ports import Packages, Processes, Server, Triton
from adapter.control.readings import Readings
from adapter.control.unloader import Unloader, explain_unreleased, log_killed
from adapter.core import times
from adapter.core.blame import Blame, Verdict
from adapter.core.blame import GivenUp as GivenUpUntil
from adapter.core.model import (
    ModelId,
    ModelSource,
    Placement,
    ProcessId,
    StagedModel,
    TritonName,
)
from adapter.core.record import LoadedFor, ModelRecord, OnExit, describe_staged
from adapter.core.registry import Registry
from adapter.core.states import AT_REST, LOADED, ModelEvent, ModelState
from adapter.core.wanted import Wanted, WantedReason
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    CapacityError,
    GivenUp,
    ModelNotFound,
    ModelNotReady,
    StubDied,
)
from adapter.runtime import background, clock
from adapter.runtime.clock import Changes

log = logging.getLogger(__name__)

# Triton's index takes time in proportion to its models.
_CHECK_SECONDS_PER_MODEL = 0.001
_LEFTOVERS_SECONDS = 10.0
# From the first closed connection of a process to its end: it frees gigabytes of GPU memory.
_END_SECONDS = 5.0
_MAX_NAMED = 5  # models in a text


class Phase(Enum):
    """The adapter's phase of life. It takes operations while it is OPEN."""

    STARTING = auto()
    OPEN = auto()
    STOPPING = auto()


# -- is Triton up? ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TritonStatus:
    """Says whether Triton is up: it answers, and the registry matches what it has."""

    triton: Triton
    server: Server | None
    changes: Changes
    on_exit_setting: OnExit | None  # None: reload, unless a ModelMesh loads its models again itself
    phase: Phase = Phase.STARTING
    has_mesh: bool = False
    is_restarting: bool = False  # the adapter has ended Triton
    _confirmed_life: int | None = None

    @property
    def life(self) -> int | None:
        """Return the number of Triton's present life; None while an embedded one is away."""
        return self.triton.lives if self.server is None else self.server.pid

    @property
    def is_open(self) -> bool:
        """Return whether the adapter takes operations: it has started, and does not stop."""
        return self.phase is Phase.OPEN

    @property
    def is_up(self) -> bool:
        """Return whether Triton answers, and the registry matches it."""
        life = self.life
        return self.triton.live and life is not None and life == self._confirmed_life

    @property
    def has_exited(self) -> bool:
        """Return whether an embedded Triton has exited, and the registry still has its models."""
        is_known = self.server is not None and self._confirmed_life is not None
        return is_known and self.life != self._confirmed_life

    @property
    def on_exit(self) -> OnExit:
        """Return what becomes of a platform's models when Triton exits."""
        if self.is_restarting:
            return OnExit.RELOAD
        return OnExit(self.on_restart[0])

    @property
    def on_restart(self) -> tuple[str, str]:
        """Return what happens to the models when Triton restarts, and the reason."""
        if self.on_exit_setting is not None:
            return self.on_exit_setting.value, "on_triton_restart says so"
        if self.has_mesh:
            return "forget", "a ModelMesh has called runtimeStatus"
        return "reload", "auto: no platform is known that would load them again"

    def explain_mismatch(self) -> str | None:
        """Return why the models of Triton are not known; None while they are."""
        if self.is_up or not self.triton.live:
            return None
        return "Triton has been restarted; its models are looked for"

    def choose_on_exit(self, record: ModelRecord) -> OnExit:
        """Return whether the adapter loads this model again after an exit of Triton.

        What a call has loaded is loaded again by the next call; files that came with a load request
        are not kept.
        """
        is_of_platform = record.loaded_for is LoadedFor.PLATFORM
        can_reload = is_of_platform and record.is_source_complete
        return self.on_exit if can_reload else OnExit.FORGET

    def has_lost(self, record: ModelRecord) -> bool:
        """Return whether Triton has exited with this model, which comes back by a call alone."""
        return self.has_exited and self.choose_on_exit(record) is OnExit.FORGET

    def refuse_lost(self, model_id: ModelId) -> None:
        """Raise ModelNotFound while a platform has to load its models anew."""
        if self.phase is Phase.STARTING:
            text = f"the adapter is starting, and does not know model {model_id!r} yet: load it"
            raise ModelNotFound(text, model_id=model_id)
        if self.has_exited and self.on_exit is OnExit.FORGET:
            raise self.explain_lost(model_id)

    def explain_lost(self, model_id: ModelId) -> ModelNotFound:
        """Return the error for a call of a model that Triton has exited with."""
        text = f"Triton exited, and model {model_id!r} with it"
        return ModelNotFound(text, model_id=model_id)

    def note_mesh(self) -> None:
        """Note that a ModelMesh is there, which loads its models again itself."""
        self.has_mesh = True

    def refuse_unless_open(self) -> None:
        """Raise BackendUnavailable while the adapter starts, and once it drains."""
        if self.phase is Phase.STARTING:
            raise BackendUnavailable("the adapter is starting: try again soon", delivered=False)
        if self.phase is Phase.STOPPING:
            raise make_drain_refusal()

    def confirm(self, life: int) -> None:
        """Record that the registry matches this life of Triton."""
        self._confirmed_life = life
        self.changes.notify()

    async def was_caused_by_exit(self, error: BackendUnavailable) -> bool:
        """Return whether a call failed because an embedded Triton has exited, and a platform has to
        load the models again. Where the adapter loads them again, return False at once.

        Wait for the exit to show, for five seconds at most: a process closes its connections before
        it has ended.
        """
        is_plain = type(error) is BackendUnavailable  # subclasses do not mean that Triton is down
        if not is_plain or self.server is None or self.on_exit is OnExit.RELOAD:
            return False
        life = self._confirmed_life
        deadline = clock.monotonic() + _END_SECONDS
        while life is not None and clock.monotonic() < deadline:
            if self.life != life:
                return True
            await self.changes.wait(times.POLL_SECONDS)
        return False

    async def wait_until_up(self, deadline: float = math.inf) -> None:
        """Wait until the adapter is open and Triton is up. Raises BackendUnavailable at `deadline`,
        by time.monotonic.
        """
        while not self.is_up or self.phase is Phase.STARTING:
            if self.phase is Phase.STOPPING:
                raise make_drain_refusal()
            if clock.monotonic() >= deadline:
                is_starting = self.phase is Phase.STARTING
                text = "the adapter did not start" if is_starting else "Triton did not come back"
                raise BackendUnavailable(f"{text} in time", delivered=False)
            await self.changes.wait(times.POLL_SECONDS)


# -- turns to load ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class LoadTurns:
    """Lets loads begin as `core/blame.py` says: what may have made Triton exit comes last."""

    blame: Blame
    registry: Registry
    status: TritonStatus
    changes: Changes
    _waiting: list[ModelId] = field(default_factory=list)
    # loads that have not ended, and when each was allowed to begin
    loading: dict[ModelRecord, float] = field(default_factory=dict)

    async def wait(self, record: ModelRecord) -> None:
        """Wait until Triton is up and the model may be loaded. Raises GivenUp, and
        BackendUnavailable if Triton stays away for ten seconds.
        """
        model_id = record.id
        self.loading.pop(record, None)
        self._waiting.append(model_id)
        try:
            while True:
                await self.status.wait_until_up(clock.monotonic() + times.PATIENCE_SECONDS)
                now = clock.monotonic()
                given_up = self.blame.find_given_up(model_id, now)
                if given_up is not None:
                    raise explain_given_up(model_id, given_up)
                waiting = set(self._waiting)
                loading = {load.id: started_at for load, started_at in self.loading.items()}
                if model_id in self.blame.select_loads(now, waiting, loading, self.list_loaded()):
                    break
                await self.changes.wait(times.POLL_SECONDS)
        finally:
            self._waiting.remove(model_id)
        self.loading[record] = clock.monotonic()

    def end(self, record: ModelRecord) -> None:
        """Record that the load has ended, well or not. Harmless if it had no turn."""
        self.loading.pop(record, None)
        self.changes.notify()

    def list_loaded(self) -> dict[ModelId, float]:
        """Return the loaded models, and when the load of each has ended."""
        return {
            record.id: record.state_since
            for record in self.registry.records()
            if record.state is ModelState.READY
        }


def explain_given_up(model_id: ModelId, given_up: GivenUpUntil) -> GivenUp:
    """Return the error for a load of a model that may make Triton exit."""
    seconds = given_up.until - clock.monotonic()
    until = datetime.fromtimestamp(clock.wall() + seconds, UTC).strftime("%H:%M")
    text = (
        f"model {model_id!r} is given up until {until} UTC: it was at work at {given_up.exits}"
        " exits of Triton; load it by V2 to try it now"
    )
    return GivenUp(text, model_id=model_id)


# -- from life to life --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TritonWatcher:
    """Follows Triton from life to life, and finds models that it has lost in between."""

    registry: Registry
    wanted: Wanted
    blame: Blame
    at_work: AtWork
    turns: LoadTurns
    status: TritonStatus
    operations: Operations
    memory: Memory
    readings: Readings
    unloader: Unloader
    journal: Journal
    changes: Changes
    triton: Triton
    packages: Packages
    server: Server | None
    processes: Processes
    load_threads: int
    _checked_at: float = -math.inf
    _leftovers_at: float = -math.inf
    _abandoned: frozenset[ProcessId] = frozenset()
    _ownerless: frozenset[TritonName] = frozenset()

    async def open(self) -> None:
        """Adopt what an earlier run loaded and Triton still serves, and unload whatever else that
        run left. Loads are accepted afterwards.
        """
        life = await self._wait_until_live()
        staged = await self.packages.staged()
        ready = await self.triton.ready()
        # first, so that no memory of what is unloaded now counts as that of an empty Triton
        await self.readings.read()
        for model in staged:
            # a call loads its model again; its files may have left the disk
            is_kept = model.is_loaded and not model.source.is_cached
            if is_kept and ready.issuperset(model.placement.names):
                await self._adopt(model)
            else:
                await self._unload_staged(model)
        self._start_life(life)
        self.status.phase = Phase.OPEN
        self.changes.notify()

    async def run(self) -> NoReturn:
        """Go from exit to exit. A step that fails is tried again a moment later."""
        await background.forever(
            self.follow_life,
            self.check_models,
            self.end_leftovers,
            seconds=times.POLL_SECONDS,
            expected=AdapterError,  # Triton cannot be reached, or the disk refuses
        )

    async def follow_life(self) -> None:
        """Check whether Triton has exited; if so, handle the exit and wait for the next life."""
        if self.status.is_up:
            return
        if self.server is None:
            if self.triton.live:
                await self._check_for_exit(self.status.life or 0)
            return
        # a Triton that does not answer may be about to exit; its models are lost once it has exited
        if self.status.has_exited:
            await self._handle_exit()
            life = await self._wait_until_live()
            self._start_life(life)

    async def _check_for_exit(self, life: int) -> None:
        """Find out by its models whether an external Triton that answers again, in this life, has
        exited meanwhile: then none of them is there any more. Handle its exit.
        """
        names = {record.name for record in self.registry.records()}
        # of what was uploaded only ready models are seen
        present = await self.triton.ready() | await self.triton.present()
        if names.isdisjoint(present):
            await self._handle_exit()
            self._start_life(life)
            return
        self.status.confirm(life)
        await self.check_models(is_forced=True)

    def _start_life(self, life: int) -> None:
        self.blame.start_life(clock.monotonic())
        self.at_work.start_life()
        self.memory.ledger.sizes.triton_version = self.triton.version
        self.status.is_restarting = False
        self.status.confirm(life)

    async def _wait_until_live(self) -> int:
        """Wait until Triton answers; return the number of its life."""
        while True:
            life = self.status.life
            if self.triton.live and life is not None:
                return life
            await self.changes.wait(times.POLL_SECONDS)

    # -- an exit ----------------------------------------------------------------------------

    async def _handle_exit(self) -> None:
        """Charge the exit to one model or none; mark all models at rest as LOST or absent."""
        now = clock.monotonic()
        at_work = self.at_work.collect(now)
        self.journal.metrics.triton_exits.inc()
        verdict = self.blame.judge_exit(now, at_work, self.turns.list_loaded())
        _log_verdict(verdict)
        self.wanted.note_exit()
        self.memory.start_life()
        # other loads may use the names once the models are LOST or absent: clear the folders first
        cleared = self._list_at_rest()
        for record in cleared:
            await self._close_undo(record)
        # an operation may have moved some of them meanwhile
        still_at_rest = [record for record in cleared if record.state in AT_REST]
        loaded = [record for record in still_at_rest if record.state in LOADED]
        for record in still_at_rest:
            self._lose(record, self.status.choose_on_exit(record))
        if loaded:
            log.warning("triton.models_vanished", extra={"models": [r.id for r in loaded]})
            given_up = verdict.charged if verdict.given_up else None
            self.journal.metrics.history.lost(_describe_lost(loaded, given_up))

    def _list_at_rest(self) -> list[ModelRecord]:
        return [record for record in self.registry.records() if record.state in AT_REST]

    def _lose(self, record: ModelRecord, on_exit: OnExit) -> None:
        """Move the record of a model at rest that Triton no longer has: to LOST if the adapter
        loads the model again, which is wanted then, else to absent.
        """
        record.on_exit = on_exit
        if record.state is not ModelState.STUCK and self.registry.should_reload(record):
            self.registry.apply(record, ModelEvent.LOST)
            self.wanted.want(record.id, record.origin, WantedReason.LOST)
        else:
            self.registry.apply(record, ModelEvent.TRITON_EXITED)

    async def _close_undo(self, record: ModelRecord) -> None:
        """Undo what the load of a model has done outside of Triton."""
        self.at_work.forget(record)
        await record.undo.aclose()

    # -- the start --------------------------------------------------------------------------

    async def _adopt(self, model: StagedModel) -> None:
        """Register a model that an earlier run has loaded, and that Triton still serves."""
        record = ModelRecord(
            id=model.model_id,
            name=model.name,
            source=model.source,
            loaded_for=LoadedFor.PLATFORM,
            is_source_complete=model.can_load_again,
            package=describe_staged(model),
            gpu=model.gpu,
        )
        record.usage.used_at = clock.monotonic()
        self.registry.add(record, ModelEvent.ADOPTED)
        self.registry.place(record, model.placement)
        self._register_staged(record, model)
        record.unclassified = await self.triton.unclassified(record.name)
        log.info("model.adopted", extra={"model_id": model.model_id})

    async def _unload_staged(self, model: StagedModel) -> None:
        """Unload what an earlier run has left. What Triton does not release is STUCK, like a load
        that was undone in vain.
        """
        record = _make_stranger(model.model_id, model.name, model.placement)
        self._register_staged(record, model)
        self.memory.begin_unload(record)
        if await self.unloader.remove_from_triton(record):
            await record.undo.aclose()
            return
        self.registry.add_beside(record)
        self.registry.place(record, model.placement)
        self.registry.apply(record, ModelEvent.LOAD_SENT)
        self.registry.apply(record, ModelEvent.LOAD_FAILED)
        await self.unloader.give_up(record)

    def _register_staged(self, record: ModelRecord, model: StagedModel) -> None:
        """Book the memory of what an earlier run has left, and prepare its undo."""
        self.memory.ledger.adopt(record.name, model.held)
        record.undo.callback(self.memory.release, record)
        record.undo.push_async_callback(remove_folder, self.packages, record.id, record.name)

    async def unload_strangers(self) -> None:
        """Unload the models that somebody has loaded into Triton past the adapter. Models of
        Triton's own repository are not seen where loads carry their files.

        Raises BackendTimeout if Triton does not release one of them.
        """
        ready = await self.triton.ready()
        names = [TritonName(name) for name in sorted(ready)]
        strangers = [name for name in names if self.registry.is_free(name)]
        if not strangers:
            return
        log.warning("triton.strangers_unloaded", extra={"triton_names": strangers})
        for name in strangers:
            record = _make_stranger(ModelId(name), name, Placement((name,)))
            if not await self.unloader.remove_from_triton(record):
                raise explain_unreleased(record)
        await self.readings.read()

    # -- in between -------------------------------------------------------------------------

    async def check_models(self, *, is_forced: bool = False) -> None:
        """Find models that Triton has lost though it lives, and stuck ones that it has released."""
        now = clock.monotonic()
        pause_seconds = max(times.PAUSE_SECONDS, len(self.registry) * _CHECK_SECONDS_PER_MODEL)
        is_due = is_forced or now - self._checked_at >= pause_seconds
        if not is_due or not self.status.is_up:
            return
        self._checked_at = now
        # taken before Triton is asked: a model that becomes ready later must not count as lost
        records = self._list_at_rest()
        stuck = [record for record in records if record.state is ModelState.STUCK]
        ready = await self.triton.ready()
        for record in records:
            if record.state in LOADED and record.name not in ready:
                self._start_removal(record)
        if stuck:
            await self._check_stuck(stuck, ready)

    def _start_removal(self, record: ModelRecord) -> None:
        """Start to take down a model that Triton has lost though it lives, unless an operation of
        the model is in progress.
        """
        if not self.operations.is_busy(record.id):
            work = partial(self._remove_vanished, record)
            self.operations.start(record.id, Kind.UNLOAD, work)

    async def _remove_vanished(self, record: ModelRecord) -> None:
        """Take down a model that Triton has lost though it lives, under the model's lock.

        Somebody may have unloaded it past the adapter on purpose: the adapter loads it again only
        with the setting `reload`, or if it is restarting Triton itself.
        """
        if record.state not in LOADED or not self.status.is_up:
            return
        if record.name in await self.triton.ready():
            return
        may_be_on_purpose = self.status.on_exit_setting is None and not self.status.is_restarting
        on_exit = OnExit.FORGET if may_be_on_purpose else self.status.choose_on_exit(record)
        await self.unloader.remove_from_triton(record, is_dead=record.state is ModelState.DEAD)
        await self._close_undo(record)
        if record.state in LOADED:  # Triton has not exited meanwhile
            self._lose(record, on_exit)
            log.warning("triton.models_vanished", extra={"models": [record.id]})
            self.journal.metrics.history.lost(_describe_lost([record], None))
            self.changes.notify()

    async def _check_stuck(self, stuck: Sequence[ModelRecord], ready: Collection[str]) -> None:
        """Start to take down stuck models that Triton has finished with; restart a Triton whose
        load threads are all stuck.
        """
        present = await self.triton.present()
        for record in stuck:
            names = set(record.placement.names)
            is_working = bool(names & (present - set(ready)))
            if is_working:
                await self.unloader.kill_loading(names)
            elif not self.operations.is_busy(record.id):
                work = partial(self._free_stuck, record)
                self.operations.start(record.id, Kind.UNLOAD, work)
        reason = self.explain_stuck()
        if reason is not None and self.server is not None and not self.status.is_restarting:
            self.status.is_restarting = True
            await self.server.restart(reason)

    async def _free_stuck(self, record: ModelRecord) -> None:
        """Unload what Triton has loaded after all, and take down the rest of a stuck model."""
        if record.state is not ModelState.STUCK:
            return
        if not await self.unloader.remove_from_triton(record):
            return
        await self._close_undo(record)
        if record.state is ModelState.STUCK:
            self.registry.apply(record, ModelEvent.FREED)

    def explain_stuck(self) -> str | None:
        """Return why no load can succeed any more; None while loads can. A stuck unload takes none
        of Triton's load threads.
        """
        if self.registry.counts()[ModelState.STUCK] < self.load_threads:
            return None
        records = [r for r in self.registry.records() if r.state is ModelState.STUCK]
        stuck = sum(not record.load_seconds for record in records)
        if stuck < self.load_threads:
            return None
        return f"{stuck} loads are stuck in Triton and keep all of its {self.load_threads} threads"

    async def end_leftovers(self) -> None:
        """End daemons of models that are gone, and report processes that belong to no model.

        A daemon is ended by the second call that finds it, as a load may be between two processes.
        """
        now = clock.monotonic()
        if not self.processes.are_seen or now - self._leftovers_at < _LEFTOVERS_SECONDS:
            return
        self._leftovers_at = now
        abandoned = await self.processes.abandoned()
        found_twice = abandoned & self._abandoned
        self._abandoned = abandoned
        killed = await self.processes.kill(found_twice)
        log_killed(killed)
        running = await self.processes.models()
        ownerless = frozenset(name for name in running if self.registry.is_free(name))
        new = ownerless - self._ownerless
        self._ownerless = ownerless
        if new:
            log.warning("model.left_running", extra={"triton_names": sorted(new)})


# -- failed requests ----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RequestFailures:
    """Learns from requests that failed: that a process has died, or that Triton lost a model."""

    registry: Registry
    memory: Memory
    status: TritonStatus
    watcher: TritonWatcher
    journal: Journal
    changes: Changes
    processes: Processes
    _checks: dict[ModelRecord, asyncio.Task[None]] = field(default_factory=dict)
    _model_check: asyncio.Task[None] | None = None

    def note_failure(self, record: ModelRecord, error: BaseException) -> BaseException:
        """Handle the error of a request; return the one for its caller."""
        # an OutOfMemory may wrap a StubDied; then the model is dead too
        if isinstance(error, StubDied) or isinstance(error.__cause__, StubDied):
            self._suspect_death(record)
        elif isinstance(error, ModelNotFound):
            self._start_model_check()
            if self._is_being_reloaded(record):
                # "not found" would make the caller load the model as well
                text = f"model {record.id!r} is being loaded again"
                return ModelNotReady(text, model_id=record.id)
        return error

    def _is_being_reloaded(self, record: ModelRecord) -> bool:
        """Return whether the adapter loads a model again that Triton does not know, or will do so
        once the watcher has found the loss. While Triton is up that is sure only if
        on_triton_restart is set.
        """
        present = self.registry.get(record.id)
        is_replaced = present is not None and present is not record
        is_lost = present is not None and present.state is ModelState.LOST
        if is_replaced or is_lost:
            return True
        is_reloaded_after_exit = self.status.choose_on_exit(record) is OnExit.RELOAD
        is_sure = self.status.on_exit_setting is not None or not self.status.is_up
        return is_reloaded_after_exit and is_sure

    async def judge(self, record: ModelRecord, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`.

        Whether a process has died is found out first: the next request must find the model dead.
        """
        if isinstance(error, StubDied):
            self._suspect_death(record)
            check = self._checks.get(record)
            if check is not None:
                await asyncio.shield(check)
        judged = await self.memory.judge_inference(record, error)
        if isinstance(judged, CapacityError | StubDied):
            self.journal.metrics.history.failed("infer", record.id, judged)
        if isinstance(judged, StubDied) and record.state is ModelState.DEAD:
            reported = str(judged).rstrip(".")  # Triton's text does not say what to do
            text = (
                f"{reported}. A python process of the model has ended: load it again, or unload it"
            )
            return StubDied(text, model_id=record.id, suspected=judged.suspected)
        return judged

    def _suspect_death(self, record: ModelRecord) -> None:
        """Check whether a python process of the model has died, where processes are seen: a model
        may repeat any text that its caller sent.
        """
        if record.state is not ModelState.READY or record in self._checks:
            return
        if not self.processes.are_seen:
            self.registry.apply(record, ModelEvent.PROCESS_DIED)
            return
        check = asyncio.create_task(self._check_processes(record))
        self._checks[record] = check
        check.add_done_callback(lambda _: self._checks.pop(record, None))

    async def _check_processes(self, record: ModelRecord) -> None:
        """Mark a READY model as DEAD if it has lost a process."""
        has_died = False
        with suppress(BackendUnavailable):  # Triton is exiting
            has_died = await has_lost_a_process(record, self.processes)
        if has_died and record.state is ModelState.READY:
            self.registry.apply(record, ModelEvent.PROCESS_DIED)
            self.changes.notify()

    def _start_model_check(self) -> None:
        """Look at once for models that Triton has lost."""
        if self._model_check is None or self._model_check.done():
            self._model_check = asyncio.create_task(self._check_models())

    async def _check_models(self) -> None:
        with suppress(AdapterError):
            await self.watcher.check_models(is_forced=True)


async def has_lost_a_process(record: ModelRecord, processes: Processes) -> bool:
    """Return whether a process is gone: even one of several fails each request it is given."""
    instances = await processes.instances(record.placement.names)
    living = {name for names in instances.values() for name in names if name is not None}
    return bool(record.instances - living) or not all(instances.values())


# -- inside -------------------------------------------------------------------------------------


async def remove_folder(packages: Packages, model_id: ModelId, name: TritonName) -> None:
    """Remove what was prepared and placed for a model, and log a failure to do so."""
    try:
        await packages.remove(name)
    except AdapterError as error:
        log.warning("model.undo_failed", extra={"model_id": model_id, "reason": str(error)})


def _make_stranger(model_id: ModelId, name: TritonName, placement: Placement) -> ModelRecord:
    """Return a record of a model that is only unloaded, and never in the registry."""
    record = ModelRecord(model_id, name, ModelSource(""), LoadedFor.PLATFORM)
    record.placement = placement
    return record


def _log_verdict(verdict: Verdict) -> None:
    if verdict.charged is None:
        return
    fields: dict[str, object] = {
        "model_id": verdict.charged,
        "charges": verdict.charges,
        "limit": verdict.limit,
    }
    if verdict.given_up is None:
        log.warning("triton.exit_charged", extra=fields)
        return
    fields["seconds"] = round(verdict.given_up.until - clock.monotonic(), 3)
    log.error("model.given_up", extra=fields)


def _describe_lost(records: Sequence[ModelRecord], given_up: ModelId | None) -> str:
    """Return which of the models that Triton has lost come back, and how."""
    healthy = [r for r in records if r.id != given_up]
    returning = [r.id for r in healthy if r.state is ModelState.LOST]
    absent = [r for r in healthy if r.state is not ModelState.LOST]
    by_calls = [r.id for r in absent if r.loaded_for is LoadedFor.CALLS]
    by_platform = [r.id for r in absent if r.loaded_for is LoadedFor.PLATFORM]
    parts = {
        "given up, because it may crash Triton": [r.id for r in records if r.id == given_up],
        "loaded again by the adapter": returning,
        "loaded again by the next call": by_calls,
        "not found (404) until loaded again": by_platform,
    }
    text = "; ".join(f"{fate}: {_list_names(ids)}" for fate, ids in parts.items() if ids)
    plural = "" if len(records) == 1 else "s"
    return f"Triton has lost {len(records)} model{plural}: {text}."


def _list_names(ids: Sequence[ModelId]) -> str:
    unnamed = len(ids) - _MAX_NAMED
    more = f" and {unnamed} more" if unnamed > 0 else ""
    return ", ".join(ids[:_MAX_NAMED]) + more
