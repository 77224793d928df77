"""Loads a staged model into Triton, within time limits, warms it up, and retries once memory is
free.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from adapter.control.load_limit import LoadThreads
from adapter.control.memory import Memory
from adapter.control.ports import Ports, TimeLimits
from adapter.control.progress import step
from adapter.control.unloader import ENDED, Unloader
from adapter.core import versions
from adapter.core.account import Unloaded
from adapter.core.limits import EvictionLoopBreaker
from adapter.core.measuring import GpuBytes
from adapter.core.model import ModelSource, Package, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.residency.terms import can_be_doubled
from adapter.core.sizing import Estimate
from adapter.core.state import ModelState, WaitsFor
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    InsufficientMemory,
    LoadFailed,
    ModelTooLarge,
    OutOfMemory,
    Overloaded,
    StubDied,
    UnloadedMeanwhile,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# What Triton says to a model that it could not read, whatever the reason.
_SAYS_NOTHING = "failed to poll from model repository"
_POLL_SECONDS = 0.25
# Polls more often at first: a process that fails at its start lives for tenths of a second.
_FIRST_POLL_SECONDS, _FIRST_SECONDS = 0.1, 3.0


class Loader:
    def __init__(
        self,
        ports: Ports,
        unloader: Unloader,
        memory: Memory,
        metrics: Metrics,
        limits: TimeLimits,
        *,
        threads: LoadThreads,
    ) -> None:
        self._triton = ports.triton
        self._server = ports.server
        self._processes = ports.processes
        self._unloader = unloader
        self._memory, self._readings = memory, memory.readings
        self._metrics = metrics
        self._limits = limits
        self._threads = threads
        self._breaker = EvictionLoopBreaker()

    def note_package(self, record: ModelRecord, source: ModelSource, package: Package) -> None:
        """Note what the package says of the model."""
        if package.warnings:
            fields = {"model_id": record.id, "warnings": package.warnings}
            log.warning("model.package_odd", extra=fields)
        record.package_key, record.warnings = package.content_key, package.warnings
        record.can_be_doubled = can_be_doubled(package)
        record.content_types, record.outputs = package.content_types, package.outputs
        record.declared_bytes, record.disk_bytes = package.declared_bytes, package.size_bytes
        self._memory.sizes.known_at(source.url, package)
        self._memory.sizes.known_as(record.asked_for, package)

    async def load(self, record: ModelRecord, package: Package, estimate: Estimate) -> int | None:
        """Load every model of the package, and measure what they take as far as possible.

        Returns the pid of the embedded server, None without one. A load that has taken more than
        the limit is refused after all.

        A load that ran out of memory is undone and, when memory came back, tried once more
        (docs/memory.md), unless Triton is stuck with it. Raises the final error.
        """
        ended, before = self._memory.accounts.ended_unloads, await self._readings.read()
        error = await self._try(record, estimate)
        if isinstance(error, OutOfMemory) and record.state is not ModelState.STUCK:
            step(record, WaitsFor.MEMORY)
            await self._unloader.unload(record)
            if await self._readings.is_worth_a_retry(before, ended):
                self._metrics.load_retries.inc()
                log.info("model.load_retried", extra={"model_id": record.id, "reason": str(error)})
                step(record, WaitsFor.TRITON)
                error = await self._try(record, estimate)
        if error is not None:
            raise self._final_error(error, package, record) from error.__cause__
        process = self._server.pid if self._server else None
        await self._memory.loaded(record, package, await self._usage(record))
        if (refusal := await self._excess(record)) is not None:
            raise self._exceeded(record, refusal)
        record.instances = await self._instances(record)
        record.unclassified = await self._triton.unclassified(record.name)
        record.usage.used_at = record.usage.used_at or clock.monotonic()
        self._breaker.succeeded(package.content_key)
        return process

    async def undo(self, record: ModelRecord) -> None:
        """Unload what a failed load has left in Triton. One that Triton has not answered is ended
        first, if it can be; else the model is stuck.
        """
        self._memory.undoing(record)
        try:
            await self._unloader.unload(record, load=self._threads.call_of(record))
        finally:
            self._threads.give_back(record)

    def tell_what_was_undone(self, record: ModelRecord, error: BaseException | None) -> None:
        """Add to the error of a load that was ended what became of it."""
        done = ENDED if record.was_ended else "what there was of it was taken down"
        if record.state is ModelState.STUCK:
            done = "Triton still works on it, which keeps one of its load threads"
        if isinstance(error, BackendTimeout | UnloadedMeanwhile):
            error.args = (f"{error}; {done}",)

    async def load_undone(self, record: ModelRecord) -> None:
        """Account for a load undone in Triton; wait for the memory of one that passed the limit."""
        exceeded = self._memory.accounts.models[record.name].exceeded
        is_stuck = record.state is ModelState.STUCK
        keeps = is_stuck and await self._unloader.may_hold_memory(record)
        await self._memory.not_loaded(record, is_stuck=keeps)
        if exceeded is not None:
            await self._readings.until_back(exceeded)

    async def _excess(self, record: ModelRecord) -> AdapterError | None:
        """Return a refusal if what the load took has passed a limit, and no unload makes room."""
        memory, limits = self._memory, self._memory.limits
        refusal = limits.excess(record, self._readings.last, clock.monotonic())
        if refusal is not None and memory.is_to_come:
            await memory.wait_for_room()
            refusal = limits.excess(record, await self._readings.read(), clock.monotonic())
        return refusal

    def _exceeded(self, record: ModelRecord, refusal: AdapterError) -> AdapterError:
        held, booked = self._memory.ledger.of(record.name), self._memory.ledger.snapshot()
        last, accounts = self._readings.last, self._memory.accounts
        exceeded = Unloaded(held, held, last, booked, accounts.apart(record.name))
        accounts.models[record.name].exceeded = exceeded
        return refusal

    async def _usage(self, record: ModelRecord) -> list[GpuBytes]:
        """Return what Triton reports of each model's memory; of an ensemble, of its steps."""
        if not self._memory.reports.asks(self._triton.lives):
            return []
        placed = record.placement
        names = (*placed.load[:-1], *placed.along) if placed.along else placed.load
        try:
            return [await self._triton.gpu_bytes(name) for name in names]
        except AdapterError:  # readings are left
            return []

    async def _instances(self, record: ModelRecord) -> frozenset[str]:
        with suppress(BackendUnavailable):  # processes cannot be seen
            found = await self._processes.instances([*map(TritonName, record.placement.names)])
            return frozenset(each for living in found.values() for each in living if each)
        return frozenset()

    async def _try(self, record: ModelRecord, estimate: Estimate) -> AdapterError | None:
        """Load once; return None, or the failure as its text and the readings of memory show it."""
        begun = clock.monotonic()
        try:
            for name in record.placement.load:
                await self._load_one(record, name)
            if self._limits.warm_up is not None:
                await self._warm_up(record, estimate, self._limits.warm_up)
            record.load_seconds = clock.monotonic() - begun
        except (InsufficientMemory, ModelTooLarge) as refusal:
            return refusal.with_traceback(None)  # it has this frame, which would have it
        except AdapterError as error:
            judged = await self._readings.judged(
                error, record.name, since=begun, predicted=estimate.needs
            )
            if judged.__cause__ is None:
                judged.__cause__ = error.__cause__
            return judged.with_traceback(None)
        return None

    def _final_error(
        self, error: AdapterError, package: Package, record: ModelRecord
    ) -> AdapterError:
        """Return the final error: a model that can never fit must not evict all others for ever."""
        warnings = (*package.warnings, *record.placement.warnings)
        if isinstance(error, LoadFailed) and warnings:
            # Triton names neither file nor line: a warning of the inspection may be the reason
            says_nothing = _SAYS_NOTHING in str(error)
            found = "perhaps because" if says_nothing else "what else is odd about the package:"
            text = f"{error}; {found} {'; '.join(warnings)}"
            return LoadFailed(text, model_id=error.model_id)
        if not isinstance(error, OutOfMemory):
            return error
        book = self._memory.ledger.snapshot()
        hopeless = self._breaker.out_of_memory(
            package.content_key,
            alone=book.models <= 1,
            requested_bytes=error.figures.needed_bytes,
            limit_bytes=book.most_of_one(error.figures),
        )
        if hopeless is None:
            return error
        return ModelTooLarge(
            f"model {error.model_id!r} {hopeless.value}; other models need not go for it: {error}",
            model_id=error.model_id,
            figures=error.figures,
            matched=error.matched,
            pattern=error.pattern,
            was_tried=True,
        )

    async def _load_one(self, record: ModelRecord, name: TritonName) -> None:
        """Load one model. Triton never answers if the model's python process is killed at the wrong
        moment (docs/design/triton.md): that is detected here, and the load is given up.
        """
        await self._threads.take(record)
        load = asyncio.ensure_future(self._triton.load(name, record.id))
        self._threads.asked(record, load)
        is_slow = versions.has(versions.SLOW_POLLS, self._triton.version)
        gone_seconds = self._limits.stub_gone_slow if is_slow else self._limits.stub_gone
        names = {name, *record.placement.along}
        monitor = _StubMonitor(names, gone_seconds, self._limits.stub_unseen)
        begun, refusal = clock.monotonic(), None
        try:
            while not (await asyncio.wait({load}, timeout=_pause(begun)))[0]:
                if not self._processes.are_seen:
                    continue
                refusal = refusal or await self._end_overrun(record)
                if (lost := await self._lost_stub(monitor)) is None:
                    continue
                self._unloader.give_up(record)
                raise refusal or LoadFailed(
                    f"the python process of {lost!r} ended while the model was being loaded",
                    model_id=record.id,
                    suspected="python process ended",
                )
            if refusal is not None:
                raise refusal
            await load
        finally:
            if _has_answered(load):
                self._threads.give_back(record)

    async def _warm_up(self, record: ModelRecord, estimate: Estimate, seconds: float) -> None:
        """Warm the entry up. Raises what leaves no model to serve, and a lack of memory; all else
        is only logged, as zeros may be nothing that the model is made for.
        """
        begun = clock.monotonic()
        try:
            skipped = await self._watched_warm_up(record, seconds)
        except (CapacityError, ModelTooLarge):
            raise
        except StubDied as error:
            raise LoadFailed(
                f"a python process of the model ended during its warm-up: {error}",
                model_id=record.id,
                suspected="python process ended",
            ) from error
        except AdapterError as error:
            if isinstance(error, BackendUnavailable) and not isinstance(error, Overloaded):
                raise  # Triton is gone, or cannot be reached
            judged = await self._readings.judged(
                error, record.name, since=begun, predicted=estimate.needs
            )
            if isinstance(judged, CapacityError):
                raise judged from error
            log.warning("model.warm_up_failed", extra={"model_id": record.id, "reason": str(error)})
            return
        if skipped is not None:
            log.info("model.warm_up_skipped", extra={"model_id": record.id, "reason": skipped})
            return
        taken = round(clock.monotonic() - begun, 3)
        log.info("model.warmed_up", extra={"model_id": record.id, "seconds": taken})

    async def _watched_warm_up(self, record: ModelRecord, seconds: float) -> str | None:
        """Return why there was no warm-up; None where there was one."""
        call = asyncio.ensure_future(self._triton.warm_up(record.name, record.id, seconds))
        begun, refusal = clock.monotonic(), None
        try:
            while not (await asyncio.wait({call}, timeout=_pause(begun)))[0]:
                if self._processes.are_seen:
                    refusal = refusal or await self._end_overrun(record)
            if refusal is not None:
                call.exception()  # of processes that were killed
                raise refusal
            return await call
        finally:
            call.cancel()

    async def _end_overrun(self, record: ModelRecord) -> AdapterError | None:
        """End a load that exceeds the limit by more than the reserve: if it took still more, the
        kernel might kill other processes for it.
        """
        last = self._readings.last
        if last is None or last.of_models is None:
            return None
        refusal = self._memory.limits.overrun(
            record, await self._readings.read(), clock.monotonic()
        )
        if refusal is None:
            return None
        log.warning("model.load_ended", extra={"model_id": record.id, "reason": str(refusal)})
        await self._processes.kill_models([*map(TritonName, record.placement.names)])
        return self._exceeded(record, refusal)

    async def _lost_stub(self, monitor: "_StubMonitor") -> str | None:
        living: Mapping[TritonName, Sequence[str | None]] = {}
        with suppress(BackendUnavailable):  # processes cannot be seen
            living = await self._processes.instances([*map(TritonName, monitor.names)])
        lives = {
            name: bool(living[TritonName(name)]) if name in living else None
            for name in monitor.names
        }
        return monitor.lost(lives, clock.monotonic())


def _has_answered(load: asyncio.Future[None]) -> bool:
    """Return whether Triton has ended the load, as far as anybody knows."""
    if not load.done() or load.cancelled():
        return False
    return not isinstance(load.exception(), BackendTimeout)


def _pause(begun: float) -> float:
    is_first = clock.monotonic() - begun < _FIRST_SECONDS
    return _FIRST_POLL_SECONDS if is_first else _POLL_SECONDS


class _StubMonitor:
    """Detects that the python process of a model has ended during its load.

    Triton starts a python process twice: to complete the configuration, and to serve. There is none
    for less than a second in between.
    """

    def __init__(self, names: Collection[str], gone_seconds: float, unseen_seconds: float) -> None:
        self.names = frozenset(names)
        self._gone_seconds, self._unseen_seconds = gone_seconds, unseen_seconds
        self._started: set[str] = set()  # of the names of one load
        self._alive_at: dict[str, float] = {}

    def lost(self, lives: dict[str, bool | None], now: float) -> str | None:
        """Return the name of a model whose process has been missing for too long. None in `lives`
        stands for a model without a python process.
        """
        for name, alive in lives.items():
            if alive:
                self._started.add(name)
            has_started = name in self._started
            if alive is not False:
                self._alive_at[name] = now
            grace_seconds = self._gone_seconds if has_started else self._unseen_seconds
            if now - self._alive_at.setdefault(name, now) > grace_seconds:
                return name
        return None
