"""Reserve memory for loads, account for what loaded models take, and judge failures.

The decision about a load is `core/admission.py`'s, on figures alone, and is made without an await.
This module asks for it again whenever something has changed, and does what it says: evict, wait,
or refuse.

Loads are admitted in order of arrival, as far as they need the same devices: one that waits for
memory is not overtaken by a smaller one. The exception is an update beside its old version, which
takes what is free now: the old version's memory comes back soon, and in its place the new one would
leave the model without a version that serves.

Whoever waits here holds no lock of a model that may be evicted for others, unless the eviction ends
what he does (`Eviction`).
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from adapter.control.operations import note_step
from adapter.control.ports import Evictor, MemorySettings
from adapter.control.readings import Readings
from adapter.core import times
from adapter.core.admission import (
    Answer,
    Decision,
    MemoryRequest,
    Purpose,
    Reason,
    decide,
    decide_place,
    make_overrun_refusal,
    make_refusal,
)
from adapter.core.evidence import (
    FailedInferences,
    Judgement,
    Outcome,
    Scene,
    can_concern,
    is_refuted,
    judge_inference,
    judge_load,
)
from adapter.core.ledger import ForgottenSize, Leaving, Ledger, Overrun
from adapter.core.memory import NO_BYTES, UNSEEN, Bytes, Device, GpuBytes, total
from adapter.core.mesh_books import MeshBooks
from adapter.core.model import ModelId
from adapter.core.oom import Strength, Verdict
from adapter.core.record import ModelRecord, Step
from adapter.core.registry import Registry
from adapter.core.sizes import MIB, Need, remember
from adapter.errors import (
    AboutMemory,
    AdapterError,
    InferenceFailed,
    InsufficientMemory,
    ModelFailed,
    ModelNotFound,
    ModelTooLarge,
    OutOfMemory,
    StubDied,
)
from adapter.runtime import clock
from adapter.runtime.clock import Changes
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Between two decisions about a load that waits: under traffic models become idle thousands of times
# in a second, and each time the load could be decided on anew.
_MIN_PAUSE_SECONDS = times.POLL_SECONDS / 20
# Triton's report of a model differs from readings if it does so by a tenth, of at least 40 MiB:
# readings vary by some MiB from one moment to the next.
_ODD_SHARE = 0.1
_ODD_BYTES = 40 * MIB


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """Says who asks for a load, and how long it may wait for memory."""

    purpose: Purpose = Purpose.EXPLICIT
    patience_seconds: float = times.PATIENCE_SECONDS  # of loads that are not explicit


@dataclass(slots=True, eq=False)
class _Waiter:
    """A load that waits for memory."""

    record: ModelRecord
    terms: LoadTerms
    devices: Collection[Device]
    started_at: float
    reason: Reason | None = None  # of its last decision
    has_evicted: bool = False


@dataclass(slots=True, eq=False)
class Memory:
    """Keeps the ledger for loads and unloads. All figures are by the model's name in Triton."""

    registry: Registry
    ledger: Ledger
    readings: Readings
    changes: Changes
    mesh: MeshBooks
    metrics: Metrics
    settings: MemorySettings
    _queue: list[_Waiter] = field(default_factory=list)  # in order of arrival
    _queue_changes: Changes = field(default_factory=Changes)
    # what Triton reports of models that serve already, and are booked when a reading is newer than
    # the end of their load
    _unbooked: dict[ModelRecord, Bytes] = field(default_factory=dict)
    _odd_reports: dict[str, None] = field(default_factory=dict)  # by package, as logged
    _failures: FailedInferences = field(default_factory=FailedInferences)

    # -- loads ------------------------------------------------------------------------------

    async def reserve(self, record: ModelRecord, terms: LoadTerms, evictor: Evictor) -> None:
        """Reserve what the load needs; evict others and wait where that helps.

        Raises InsufficientMemory and ModelTooLarge.
        """
        need = self.need_of(record, terms)
        waiter = _Waiter(record, terms, list(need.bytes), clock.monotonic())
        self._queue.append(waiter)
        try:
            with self.metrics.waiting_load("memory"):
                await self._wait_for_memory(waiter, evictor)
        finally:
            self._queue.remove(waiter)
            self._queue_changes.notify()

    def try_reserve(self, record: ModelRecord, terms: LoadTerms) -> bool:
        """Reserve what the load needs if that is free now; return whether it was. Evict nothing for
        it.
        """
        now = clock.monotonic()
        request = MemoryRequest(terms.purpose, started_at=now, deadline=now)
        decision = self._decide(record, terms, request, now)
        if decision.answer is not Answer.ADMIT:
            return False
        self._reserve_admitted(record, decision)
        return True

    async def reserve_again(
        self, record: ModelRecord, terms: LoadTerms, evictor: Evictor, error: OutOfMemory
    ) -> None:
        """Reserve more for another try of a load that ran out of memory.

        Raises `error` if it cannot have more, and ModelTooLarge if unloads cannot change that.
        """
        is_out_of_memory = self.is_out_of_memory(error)
        self.ledger.fail_load(record.name, clock.monotonic(), is_out_of_memory=is_out_of_memory)
        record.gpu = None  # another GPU may have more memory
        try:
            await self.reserve(record, terms, evictor)
        except ModelTooLarge as refusal:
            raise ModelTooLarge(
                f"{refusal}; Triton said: {error}",
                model_id=record.id,
                figures=refusal.figures,
                matched=error.matched,
                pattern=error.pattern,
                was_tried=True,
            ) from error
        except InsufficientMemory:
            raise error from None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether a load failed for lack of memory on a device that the ledger accounts for.
        Of a GPU that the adapter cannot see the ledger learns nothing.
        """
        is_about_memory = isinstance(error, OutOfMemory | ModelTooLarge | InsufficientMemory)
        return is_about_memory and can_concern(str(error), self.ledger.devices)

    def has_room_beside(self, record: ModelRecord) -> bool:
        """Return whether another model of the size of this loaded one would fit."""
        return all(
            count <= self.ledger.free(device)
            for device, count in self.held(record).items()
            if device in self.ledger.devices
        )

    def need_of(self, record: ModelRecord, terms: LoadTerms) -> Need:
        """Return what the load of an inspected package needs."""
        return self.ledger.need_of(
            record.inspected, guess_limit_bytes=self._find_guess_limit(terms.purpose)
        )

    async def settle(self, record: ModelRecord, reported: Bytes) -> None:
        """Book a loaded model, by what Triton reports and what readings show.

        A reading that lags is waited for only where the adapter alone enforces a limit. Raises if
        the load has passed that limit, which is known once no newer load is ended for it.
        """
        self.ledger.end_load(record.name, clock.monotonic())
        await self.readings.read()
        while not self.ledger.can_settle(record.name):
            reserved = self.ledger.loads[record.name].reserved
            if self.readings.lag_seconds > 0 and not self.readings.is_limited(reserved):
                self._unbooked[record] = reported
                return
            await asyncio.sleep(times.POLL_SECONDS)
            await self.readings.read()
            self.ledger.advance(clock.monotonic())
        await self._wait_for_newer_ends(record)
        overrun = self._book(record, reported)
        if overrun is not None:
            self.begin_unload(record)  # no other load is ended for what this one gives back
            raise make_overrun_refusal(record.id, overrun)

    async def _wait_for_newer_ends(self, record: ModelRecord) -> None:
        """Wait while a newer load is being ended because more is used than a limit, for 5 s at
        most. If that brings too little, this one is the next to be ended.
        """
        deadline = clock.monotonic() + times.MEMORY_SECONDS
        while self.ledger.is_overrun_open(record.name) and clock.monotonic() < deadline:
            await asyncio.sleep(times.POLL_SECONDS)
            await self.readings.read()

    def book_late(self) -> list[ModelRecord]:
        """Book the models that serve already and whose memory a reading shows only now; return
        them.
        """
        records = [record for record in self._unbooked if self.ledger.can_settle(record.name)]
        for record in records:
            self._book_at_once(record)
        return records

    def find_overrun(self, record: ModelRecord) -> AboutMemory | None:
        """Return why the load has to end, if more is used than a limit and it is to blame."""
        overrun = self.ledger.overrun_of(record.name)
        if overrun is None:
            return None
        self.ledger.record_overrun(overrun)
        return make_overrun_refusal(record.id, overrun)

    # -- unloads ----------------------------------------------------------------------------

    def held(self, record: ModelRecord) -> Bytes:
        """Return what is booked or reserved for the model."""
        load = self.ledger.loads.get(record.name)
        if load is not None:
            return load.reserved
        return self.ledger.models.get(record.name) or self.ledger.stuck.get(record.name, NO_BYTES)

    def begin_unload(self, record: ModelRecord) -> Leaving:
        """Expect the memory of a loaded model back, and return what is expected: nothing if Triton
        has exited with the model.
        """
        self._book_at_once(record)
        if record.name not in self.ledger.models:
            return Leaving(NO_BYTES, NO_BYTES)
        return self.ledger.begin_unload(record.name)

    def strand(self, record: ModelRecord, *, is_out_of_memory: bool = False) -> None:
        """Keep the bytes of a load or an unload that Triton is stuck with, until `release`.

        `is_out_of_memory` is True for a load that has failed for lack of memory.
        """
        if record.name in self.ledger.loads or record.name in self.ledger.unloads:
            self.ledger.strand(record.name, is_out_of_memory=is_out_of_memory)

    def release(self, record: ModelRecord, *, is_out_of_memory: bool = False) -> None:
        """Release whatever is reserved or booked for the model, once Triton has unloaded it.

        `is_out_of_memory` is True if its load has failed for lack of memory.
        """
        now = clock.monotonic()
        name = record.name
        self._book_at_once(record)
        if name in self.ledger.loads:
            self.ledger.fail_load(name, now, is_out_of_memory=is_out_of_memory)
        if name in self.ledger.models:
            self.ledger.begin_unload(name)
        self.ledger.end_unload(name, now)
        self.ledger.free_stuck(name, now)
        self.changes.notify()

    # -- lives of Triton --------------------------------------------------------------------

    def start_life(self) -> None:
        """Forget what an earlier Triton had loaded."""
        for record in list(self._unbooked):
            self._book_at_once(record)
        self.ledger.start_life()
        self.changes.notify()

    def map_reports(self, reports: Collection[GpuBytes]) -> Bytes:
        """Return the bytes that Triton reports of a package, by device. Return nothing unless the
        reports have bytes of each of its models: Triton reports none of python models and of those
        of libtorch.
        """
        if not reports or not all(any(report.values()) for report in reports):
            return NO_BYTES
        devices = {
            book.number: device
            for device, book in self.ledger.devices.items()
            if book.number is not None
        }
        booked: dict[Device, int] = {}
        for report in reports:
            for number, count in report.items():
                device = devices.get(number)
                if device is None and count:
                    return NO_BYTES
                if device is not None and count:
                    booked[device] = booked.get(device, 0) + count
        return booked

    # -- failures ---------------------------------------------------------------------------

    async def judge_load(
        self, record: ModelRecord, error: AdapterError, since: float
    ) -> AdapterError:
        """Return the failure of a load as its text and the readings since its begin show it."""
        verdict = read_verdict(error)
        if verdict.strength is Strength.NONE:
            return error
        await self.readings.read()
        scene = self._describe_scene(record, since)
        load = self.ledger.loads.get(record.name)
        if load is not None:
            load.is_doubted = is_refuted(verdict, str(error), scene)
        return _convert(error, judge_load(verdict, str(error), scene), verdict)

    async def judge_inference(self, record: ModelRecord, error: AdapterError) -> AdapterError:
        """Return the failure of an inference as its text and recent readings show it."""
        verdict = read_verdict(error)
        if verdict.strength is Strength.NONE:
            return error
        await self.readings.read()
        judgement = judge_inference(
            verdict,
            str(error),
            self._describe_scene(record, None),
            failures=self._count_failure(record, verdict),
            is_only_model=self.ledger.is_only_model(record.name),
        )
        return _convert(error, judgement, verdict)

    def _count_failure(self, record: ModelRecord, verdict: Verdict) -> int:
        """Count a strong failure; return how many the package had before it, in a row."""
        if verdict.strength is not Strength.STRONG:
            return 0
        key = record.package.content_key if record.package else str(record.name)
        return self._failures.add(key, clock.monotonic(), record.usage.answered_at)

    def _describe_scene(self, record: ModelRecord, since: float | None) -> Scene:
        limits = {
            device: book.limit_bytes
            for device, book in self.ledger.devices.items()
            if device != UNSEEN
        }
        return Scene(
            limits,
            self.readings.list_since(since),
            devices=list(self.held(record)),
            free={device: max(0, self.ledger.free(device)) for device in limits},
        )

    # -- what was learned -------------------------------------------------------------------

    def forget(self, model_id: ModelId) -> ForgottenSize:
        """Forget what loads and inferences of a model's package have shown of its size.

        Raises ModelNotFound if no load of the model was ever begun.
        """
        package_key = self.ledger.sizes.key_of_model(model_id)
        if package_key is None:
            text = f"nothing was learned of model {model_id!r}: no load of it has reached its files"
            raise ModelNotFound(text, model_id=model_id)
        self._failures.forget(package_key)
        forgotten = self.ledger.forget(package_key)
        log.info("memory.forgotten", extra={"model_id": model_id})
        self.changes.notify()
        return forgotten

    # -- inside -----------------------------------------------------------------------------

    async def _wait_for_memory(self, waiter: _Waiter, evictor: Evictor) -> None:
        """Decide about the load until it is admitted; evict and wait as each decision says. Raises
        the refusal that a decision may be.
        """
        record = waiter.record
        note_step(record, Step.TURN)
        while True:
            earlier = self._find_earlier(waiter)
            if earlier is not None:
                note_step(record, Step.TURN, (earlier.record.id,))
                await self._queue_changes.wait(times.PAUSE_SECONDS)
                continue
            await self.readings.read()
            now = clock.monotonic()
            request = self._make_request(waiter, evictor)
            decision = self._decide(record, waiter.terms, request, now)
            if decision.answer in {Answer.ADMIT, Answer.TRY}:
                self._reserve_admitted(record, decision)
                return
            if decision.answer is Answer.EVICT:
                # later loads wait from now on: the memory of the victims is meant for this one
                waiter.reason = decision.reason
                note_step(record, Step.MEMORY)
                if await evictor.make_room(decision.victims, record):
                    waiter.has_evicted = True
                    continue
            elif decision.answer is Answer.WAIT:
                self._show_wait(waiter, decision)
            else:
                # only for a load that does not fit: one that has waited too long may fit by now
                if waiter.has_evicted and decision.reason is Reason.DOES_NOT_FIT:
                    self.ledger.record_futile_eviction(decision.need.package_key, now)
                raise make_refusal(record.id, decision)
            await self.changes.wait(times.POLL_SECONDS)
            await asyncio.sleep(_MIN_PAUSE_SECONDS)

    def _find_earlier(self, waiter: _Waiter) -> _Waiter | None:
        """Return a load that came earlier and waits for memory of the same device; None without
        one.
        """
        for earlier in self._queue[: self._queue.index(waiter)]:
            shares_device = any(device in earlier.devices for device in waiter.devices)
            # a load whose reason is TURN waits for a load of unknown need, and not for memory
            if shares_device and earlier.reason is not Reason.TURN:
                return earlier
        return None

    def _make_request(self, waiter: _Waiter, evictor: Evictor) -> MemoryRequest:
        """Return what core/admission.py has to know of a load that waits for memory."""
        purpose = waiter.terms.purpose
        is_planned = purpose is Purpose.PLANNED
        return MemoryRequest(
            purpose,
            waiter.started_at,
            deadline=waiter.started_at + waiter.terms.patience_seconds,
            candidates=() if is_planned else evictor.candidates(waiter.record),
            is_mesh_evicting=is_planned and self.mesh.is_evicting,
        )

    def _decide(
        self, record: ModelRecord, terms: LoadTerms, request: MemoryRequest, now: float
    ) -> Decision:
        """Return what core/admission.py decides about a load; it chooses the GPU of a package that
        leaves the choice open, if the setting `places_gpus` is on and there are several.
        """
        gpus = [device for device in self.ledger.devices if self._find_number(device) is not None]
        has_choice = self.settings.places_gpus and len(gpus) > 1
        if has_choice and record.inspected.leaves_gpu_open:
            guess_limit_bytes = self._find_guess_limit(terms.purpose)
            needs = {
                device: self.ledger.need_of(
                    record.inspected, device=device, guess_limit_bytes=guess_limit_bytes
                )
                for device in gpus
            }
            previous = next((gpu for gpu in gpus if self._find_number(gpu) == record.gpu), None)
            return decide_place(self.ledger, needs, request, now, previous)
        return decide(self.ledger, self.need_of(record, terms), request, now)

    def _find_number(self, device: Device) -> int | None:
        """Return CUDA's number of a GPU; None of host memory or if it is unknown."""
        return self.ledger.devices[device].number

    def _find_guess_limit(self, purpose: Purpose) -> int | None:
        """Return the most that a guessed need may be; None without a limit."""
        return self.settings.mesh_default_bytes if purpose is Purpose.PLANNED else None

    def _reserve_admitted(self, record: ModelRecord, decision: Decision) -> None:
        """Reserve the need of an admitted load. Nothing may be awaited between the decision and
        this.
        """
        self.ledger.begin_load(record.name, decision.need)
        record.basis = decision.need.basis
        figures = self._list_figures(decision.need)
        if decision.device is not None:
            record.gpu = self._find_number(decision.device)
            log.info("model.placed", extra={"model_id": record.id, "gpu": record.gpu} | figures)
        basis = decision.need.basis.value
        log.debug("model.admitted", extra={"model_id": record.id, "basis": basis} | figures)

    def _show_wait(self, waiter: _Waiter, decision: Decision) -> None:
        """Show in the record what the load waits for, and log each new reason."""
        record = waiter.record
        step = Step.TURN if decision.reason is Reason.TURN else Step.MEMORY
        blockers = self._list_blockers()
        note_step(record, step, blockers)
        if waiter.reason is decision.reason:
            return
        waiter.reason = decision.reason
        self._queue_changes.notify()
        fields = {
            "model_id": record.id,
            "waits_for": step.value,
            "reason": decision.reason.value,
            "awaits": list(blockers),
        }
        log.info("model.load_waits", extra=fields | self._list_figures(decision.need))

    def _list_blockers(self) -> tuple[ModelId, ...]:
        """Return the models whose load or unload is in progress: each may change what is free."""
        names = [*self.ledger.loads, *self.ledger.unloads]
        owners = [self.registry.owner_of(name) for name in names]
        return tuple(dict.fromkeys(owner.id for owner in owners if owner is not None))

    def _list_figures(self, need: Need) -> dict[str, object]:
        """Return the needed and the free bytes of each device, as fields of a log line."""
        return {
            "needed_bytes": dict(need.bytes),
            "free_bytes": {device: max(0, self.ledger.free(device)) for device in need.bytes},
        }

    def _book_at_once(self, record: ModelRecord) -> None:
        """Book a model whose memory readings were to show yet. Harmless if it is booked."""
        reported = self._unbooked.pop(record, None)
        if reported is not None:
            self._book(record, reported)

    def _book(self, record: ModelRecord, reported: Bytes) -> Overrun | None:
        """Book a load that has ended; return what is wrong if it has passed the limit."""
        need = self.ledger.loads[record.name].need
        settlement = self.ledger.settle(record.name, reported)
        self._compare(record, reported, settlement.rise)
        if settlement.is_measured:
            ratio = total(need.bytes) / max(1, total(settlement.booked))
            self.metrics.prediction_ratio.labels(need.basis.value).observe(ratio)
        self.changes.notify()
        return settlement.overrun

    def _compare(self, record: ModelRecord, reported: Bytes, measured: Bytes) -> None:
        """Log once for each package that Triton's report of its memory differs from readings."""
        reported_bytes = total(reported)
        read_bytes = sum(measured.get(device, 0) for device in reported)
        key = record.inspected.content_key
        difference = abs(reported_bytes - read_bytes)
        is_odd = difference > _ODD_SHARE * max(reported_bytes, read_bytes, _ODD_BYTES)
        if not is_odd or not measured.keys() >= reported.keys() or key in self._odd_reports:
            return
        remember(self._odd_reports, key, None)
        fields = {"reported_bytes": reported_bytes, "read_bytes": read_bytes}
        log.warning("memory.report_differs", extra={"model_id": record.id, **fields})


# -- errors -------------------------------------------------------------------------------------


def read_verdict(error: AdapterError) -> Verdict:
    """Return what the reader of Triton's texts has found in an error."""
    if isinstance(error, OutOfMemory):
        requested_bytes = error.figures.needed_bytes
        return Verdict(Strength.STRONG, error.matched, error.pattern, requested_bytes)
    if isinstance(error, ModelFailed) and error.suspected is not None:
        return Verdict(Strength.WEAK, error.suspected, None, None, of_shm=error.of_shm)
    return Verdict(Strength.NONE, None, None, None)


def _convert(error: AdapterError, judgement: Judgement, verdict: Verdict) -> AdapterError:
    """Return the error that a judgement makes of a failure."""
    if judgement.outcome is Outcome.FAILED:
        if not isinstance(error, OutOfMemory):
            return error
        text = f"{error}; {judgement.evidence.value}"
        failure = InferenceFailed(text, model_id=error.model_id)
        failure.__cause__ = error.__cause__
        return failure
    is_permanent = judgement.outcome is Outcome.TOO_LARGE
    kind = ModelTooLarge if is_permanent else OutOfMemory
    is_weak = verdict.strength is Strength.WEAK
    text = f"{error}; {judgement.evidence.value}" if is_weak or is_permanent else str(error)
    converted = kind(
        text,
        model_id=error.model_id,
        figures=judgement.figures,
        matched=verdict.matched,
        pattern=verdict.rule or "suspected",
        was_tried=True,
    )
    converted.__cause__ = error if isinstance(error, StubDied) else error.__cause__
    return converted
