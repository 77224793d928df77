"""Admits loads to memory, and books what each model takes. How memory works:

Three things say how much memory a model takes. None is enough alone.

- An estimate (core/sizing.py) says it before the load: it was learned from the same package, or is
  declared, or guessed from the files.
- The ledger (core/ledger.py) has bytes for each model and device: reserved from its admission on,
  held once it is loaded, released when Triton has unloaded it.
- A reading (readings.py) says what is in use. It may be old, it does not know of loads that have
  only begun, and it tells models apart only where they have processes of their own.

Free memory is the limit less the headroom, less the larger of two figures: the bytes booked, or the
bytes read plus those reserved.

A load calls, in this order:

    admit        waits for its turn, then decides (core/admission.py) and reserves in one step
    placed       names the processes by which readings tell the model apart
    loaded       holds the estimate, and replaces it by a measurement
    not_loaded   instead of `loaded`: releases what was reserved, once Triton has undone the load

An unload runs within `unloading`: `begin_unload`, then Triton's unload, then `unloaded`.

A model is measured by its own processes, or by what Triton reports of it. Otherwise it is measured
by the growth of its device between two quiet moments (core/measuring.py). A moment is quiet if no
load or unload is under way, and the reading is newer than the last change. The account of the model
(core/account.py) says how far that has come: Stage is its state machine. Later growth counts if
one model alone had requests. The ledger holds the most that a package was ever measured to take.

A refusal makes a platform unload other models. So there is one only if the need is known, nothing
that may make room is under way, and something could go. All else is tried, and judged afterwards:

- what passes a limit that only the adapter enforces, during or after its load: core/limits.py
- whether a failure of Triton was a lack of memory: Readings.judged, by core/evidence.py
- whether a load that ran out of memory is worth another try: Readings.is_worth_a_retry

An unload is answered when its memory was seen free, or after some seconds: Readings.until_back.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress

from adapter.control.ports import Evictor, Options, Ports
from adapter.control.progress import Admission
from adapter.control.readings import Readings
from adapter.core.account import Account, Stage
from adapter.core.accounts import Accounts, Reports
from adapter.core.admission import AdmissionInput, Answer, MeshBooks, waits_its_turn
from adapter.core.ledger import Ledger
from adapter.core.limits import Limits
from adapter.core.measuring import GpuBytes, Measured
from adapter.core.memory import NO_BYTES, Bytes, MemoryReading, total
from adapter.core.model import ModelId, Package, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.residency.placement import Placer, choose_place
from adapter.core.residency.terms import Terms
from adapter.core.sizing import KNOWN, Basis, Estimate, Sizes, tells_size
from adapter.core.state import WaitsFor
from adapter.errors import AboutMemory, CapacityError, InsufficientMemory
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# How often a load that waits polls memory when no operation reports a change.
_POLL_SECONDS = 0.25
_EARLY_SECONDS = 0.1  # how early a timer of the event loop may fire


class Memory:
    """The only writer of `ledger` and `sizes`.

    `requests` returns how many inferences have begun and how many have ended, `is_shared` whether
    a process runs below Triton that belongs to no model.
    `relearned`: models whose notes lack their latest figures.
    """

    def __init__(
        self,
        ports: Ports,
        ledger: Ledger,
        sizes: Sizes,
        metrics: Metrics,
        options: Options,
        *,
        requests: Callable[[], tuple[int, int]],
        is_shared: Callable[[], Awaitable[bool]],
    ) -> None:
        self.ledger, self.sizes, self.accounts = ledger, sizes, Accounts()
        self._metrics, self._limits = metrics, options.limits
        books = (ledger, self.accounts, metrics, options.limits)
        self.readings = Readings(
            ports.memory,
            *books,
            is_shared=is_shared,
            processes=ports.processes,
        )
        # failed loads that Triton still has: a few, whatever the number of models
        self._undone: set[ModelRecord] = set()
        self.relearned: set[ModelRecord] = set()
        self._admitting = asyncio.Lock()
        self._first: tuple[ModelId, ...] = ()  # the load that has the lock
        self._changed = asyncio.Event()
        self._operations = 0
        self.reports = Reports(ledger, sizes)
        self.mesh = MeshBooks()
        self.limits = Limits(ledger, sizes, self.accounts, self.mesh)
        self.placer = Placer(sizes, self.limits.oversize, options.placing)
        self._requests = requests
        self._is_behind = False  # a load ended, and something else was still going on
        self._audited_at = -math.inf  # when the ledger was last held against a reading
        self._measurements: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self.accounts.loads or self.accounts.unloads)

    @property
    def is_to_come(self) -> bool:
        """Return whether an unload, or the undo of a load, is about to free memory."""
        return bool(self.accounts.unloads or self._undone)

    # -- loads ------------------------------------------------------------------------------

    async def admit(
        self, record: ModelRecord, package: Package, terms: Terms, evictor: Evictor | None
    ) -> Estimate:
        """Reserve what the model is expected to take, or raise a refusal; `evictor` makes room.

        Waits for loads before it while these take memory, and for memory that is about to be freed;
        each for a bounded time.
        """
        told, begun, short_since = Admission(record), clock.monotonic(), 0.0
        async with self._turn(record):
            while True:
                reading, now = await self.readings.read(), clock.monotonic()
                inputs = self._inputs(
                    package,
                    reading,
                    loads=self._waited_for(begun, now),
                    may_wait=not short_since or now - short_since < self._limits.recovery,
                    can_evict=evictor is not None and evictor.can_evict,
                    is_planned=terms.is_planned,
                )
                options = self.placer.options(record, package, terms, inputs, reading, now=now)
                try:
                    answer, estimate = choose_place(record.id, options, terms)
                    if answer is Answer.ADMIT:
                        break
                except InsufficientMemory as error:
                    if not inputs.can_evict or terms.ran_out:
                        raise
                    told.waits(WaitsFor.MEMORY, options[0][0], inputs.book, reading)
                    evictor = evictor if await goes_on(error, terms, evictor) else None
                    short_since = 0.0
                    continue
                why = WaitsFor.TURN if waits_its_turn(estimate, inputs) else WaitsFor.MEMORY
                told.waits(why, estimate, inputs.book, reading, self._awaited())
                short_since = short_since or (0.0 if why is WaitsFor.TURN else now)
                await self._wait_for_change()
            self._reserve(Account(record, package.content_key, estimate, now), inputs, reading)
            told.admitted(estimate, inputs.book, reading, terms)
        return estimate

    def _awaited(self) -> tuple[ModelId, ...]:
        loads = (account.record for account in self.accounts.moving)
        awaited = (*loads, *self.accounts.unloads, *self._undone)  # a load may be unloaded too
        return tuple(dict.fromkeys(each.id for each in awaited))

    def _reserve(
        self, account: Account, inputs: AdmissionInput, reading: MemoryReading | None
    ) -> None:
        account.is_planned, account.is_told = inputs.is_planned, inputs.is_told
        self._begin(reading, unloads=0)
        self.ledger.reserve(account.name, account.estimate.needs)
        self.accounts.add(account)
        if self.limits.is_below(account.estimate):  # it seems too large, and is tried only once
            self.limits.oversize.tried(account.package_key)

    async def wait_for_room(self) -> None:
        """Wait while memory is above a limit and is about to be freed, for a moment at most."""
        deadline = clock.monotonic() + self._limits.recovery
        while self.is_to_come and clock.monotonic() < deadline:
            left = self.ledger.snapshot().left(await self.readings.read())
            if all(count >= 0 for count in left.values()):
                return
            await self._wait_for_change()

    def has_room_beside(self, record: ModelRecord) -> bool:
        """Return whether a model of the same size fits into what is free; one that was put on a GPU
        may go to another.
        """
        held = self.ledger.of(record.name)
        free = self.ledger.snapshot().free(self.readings.last)
        if record.gpu is not None:
            return total(held) <= max(free.values(), default=0)
        return all(count <= free.get(device, count) for device, count in held.items())

    def placed(self, record: ModelRecord) -> None:
        """Note the model's names in Triton, and those of its helpers and steps."""
        self.accounts.models[record.name].names = frozenset(record.placement.names)

    async def loaded(
        self, record: ModelRecord, package: Package, usage: Collection[GpuBytes] = ()
    ) -> None:
        """Note that Triton serves the model, and measure it: now or, with a sensor that lags, a
        little later; until then the ledger holds the estimate. `usage` is what Triton reports of
        each model of the package: where it does, that is held at once.
        """
        account = self.accounts.models[record.name]
        self.reports.came(account, package, usage)
        held = self.ledger.settle(record.name, None)
        self.readings.changed()
        if not account.is_guessed:
            self.readings.must_show(held, account.begun)
        known = account.basis is Basis.LEARNED and self.sizes.is_exact(account.package_key)
        # models that readings do not tell apart are measured at the next quiet moment
        last = self.readings.last
        told_apart = last is not None and last.of_models is not None
        reading = await self.readings.read() if told_apart else last
        measured = self.accounts.loaded(account, reading, known=known)
        if measured is not None:
            self._learn(measured, account.estimate)
        task = asyncio.create_task(self._measure(account, self.readings.lag_seconds))
        self._measurements.add(task)
        task.add_done_callback(self._measurements.discard)
        if self.readings.lag_seconds == 0 or self.limits.is_below_the_device(reading):
            await task

    def undoing(self, record: ModelRecord) -> None:
        """Note that a failed load is unloaded: others that do not fit wait for it until
        `not_loaded`, for a moment.
        """
        self._undone.add(record)

    async def not_loaded(self, record: ModelRecord, *, is_stuck: bool) -> None:
        """Note that the load is undone. Memory that it may have left cannot be attributed.
        `is_stuck`: Triton still works on it, and its bytes stay booked until `freed`.
        """
        held = NO_BYTES if is_stuck else self.ledger.of(record.name)
        self.accounts.undone(record.name, held)
        self.readings.changed()
        try:
            await self._catch_up(record)
        finally:
            held = self.ledger.of(record.name)
            self._undone.discard(record)
            self._forget(record)
            if is_stuck:
                self.stuck(record, held)
            self._changed.set()

    def stuck(self, record: ModelRecord, held: Bytes) -> None:
        """Keep so many bytes booked for a load that Triton is stuck with, until `freed`."""
        self.ledger.hold(record.name, held)

    def freed(self, record: ModelRecord) -> None:
        """Note that Triton has ended a load that it was stuck with."""
        self.ledger.release(record.name)
        self.readings.changed()
        self._changed.set()

    # -- unloads ----------------------------------------------------------------------------

    @asynccontextmanager
    async def unloading(self, record: ModelRecord) -> AsyncIterator[None]:
        """Mark an unload as in progress: loads that do not fit wait for it for a moment."""
        self.accounts.unloads[record] = None
        try:
            yield
            await self._catch_up(record)
        finally:
            del self.accounts.unloads[record]
            self.accounts.ended_unloads += 1
            self._changed.set()

    async def begin_unload(self, record: ModelRecord) -> MemoryReading | None:
        """Note that Triton is about to be asked. To be called within `unloading`."""
        reading = await self.readings.read()
        self._begin(reading, unloads=1)
        self.accounts.models[record.name].asked_at = clock.monotonic()
        return reading

    def unloaded(self, record: ModelRecord) -> Bytes:
        """Note that Triton has unloaded the model; return the bytes that it held."""
        held, account = self.ledger.of(record.name), self.accounts.models.get(record.name)
        self.accounts.released(record.name, held)
        self.readings.changed()
        is_asked = record in self.accounts.unloads  # else it vanished at an unknown time
        if is_asked and account is not None and account.asked_at and not account.is_guessed:
            self.readings.must_show(held, account.asked_at)
        self._forget(record)
        self._changed.set()
        return held

    def taken(self, record: ModelRecord) -> Bytes:
        """Return what of the bytes in the ledger the model takes now, as far as that was measured:
        the ledger keeps what its package took at most.
        """
        held, measured = self.ledger.of(record.name), self.accounts.taken(record.name)
        return {d: min(count, measured.get(d, count)) for d, count in held.items()}

    # -- in between -------------------------------------------------------------------------

    async def tick(self, active: Collection[TritonName]) -> None:
        """Measure growth under traffic, and loads during which nothing could be read. `active`:
        models with requests since the last call.
        """
        is_audited = self._audited_at >= self.readings.changed_at
        is_due = bool(active) or self.is_busy or self.accounts.are_unread or not is_audited
        operations, now = self._operations, clock.monotonic()
        reading = await self.readings.read() if is_due else None
        if reading is not None and operations == self._operations:
            settled = None if self.is_busy else self.readings.settled(reading)
            if settled is not None and not self._undone:
                self.ledger.audit(settled)
                self._audited_at = now
            baseline = self.ledger.snapshot().baseline
            expected = {each.name: each.estimate for each in self.accounts.loads}
            for measured in self.accounts.tick(reading, settled, active, baseline):
                self._learn(measured, expected.get(measured.name))

    def adopt(self, record: ModelRecord, held: Bytes) -> None:
        """Add a model of an earlier run that Triton still serves."""
        known = Estimate(held, Basis.LEARNED)
        self.accounts.add(Account(record, record.package_key, known, stage=Stage.SETTLED))
        self.ledger.hold(record.name, held)

    async def rebase(self) -> None:
        """Attribute what is used beyond what models hold to Triton itself, which has started."""
        settled = self.readings.settled(await self.readings.read())
        self.ledger.rebase(settled)
        if settled is not None and not self.is_busy:
            self.ledger.started(settled)

    # -- inside -----------------------------------------------------------------------------

    def _begin(self, reading: MemoryReading | None, *, unloads: int) -> None:
        """Note that an operation begins to change memory; `unloads`: 1 if it is an unload, else 0.

        If no other is in progress, this is a quiet moment, and the next measurement starts from
        `reading`; nothing is measured if the reading is not recent enough.
        """
        if not self.accounts.moving and len(self.accounts.unloads) == unloads:
            settled = self.readings.settled(reading)
            if self.ledger.snapshot().models == 0:
                self.ledger.rebase(settled and settled.shared)
            _, ended = self._requests()
            self.accounts.open(settled, ended)
            self._is_behind = False
        self._operations += 1

    def _inputs(
        self,
        package: Package,
        reading: MemoryReading | None,
        *,
        loads: Collection[Account],
        may_wait: bool,
        can_evict: bool,
        is_planned: bool,
    ) -> AdmissionInput:
        return AdmissionInput(
            book=self.ledger.snapshot(),
            reading=self.limits.less_reserved(reading),
            loads=len(loads),
            unknown_loads=sum(not (e.is_told or e.estimate.basis in KNOWN) for e in loads),
            unloads=self._count_unloads(is_planned=is_planned),
            is_settling=self.readings.is_settling(reading),
            may_wait=may_wait,
            unknown_bytes=self.sizes.default_bytes,
            may_be_wrong=self.limits.oversize.may_try(package.content_key),
            can_evict=can_evict,
            is_planned=is_planned,
            processes=package.processes,
            # ModelMesh has made room by sizes on disk: two such loads may share what both take
            is_told=self.reports.is_due(package) or (is_planned and tells_size(package)),
        )

    def _count_unloads(self, *, is_planned: bool) -> int:
        """Return how many unloads may free memory. One that ModelMesh is about to send counts for
        the loads that it has planned.
        """
        is_evicting = is_planned and self.mesh.is_evicting
        return len(self.accounts.unloads) + len(self._undone) + is_evicting

    def _waited_for(self, begun: float, now: float) -> list[Account]:
        """Return the loads that one begun at `begun` waits for; none if it has waited too long.

        Beside a load that stands still it waits for no other that was admitted after it came: it
        would wait for several that hang one after the other.
        """
        if now - begun >= self._limits.alone:
            return []
        moving = self.accounts.moving
        if len(moving) == len(self.accounts.loads):
            return moving
        return [each for each in moving if each.begun < begun]

    @asynccontextmanager
    async def _turn(self, record: ModelRecord) -> AsyncIterator[None]:
        """Admit loads one after the other: one that waits for memory is not overtaken, but blocks
        those behind it for `alone` seconds at most.
        """
        held, record.awaits = False, self._first
        with self._metrics.waiting_load("memory"):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.alone):
                    await self._admitting.acquire()
                held, record.awaits, self._first = True, (), (record.id,)
            try:
                yield
            finally:
                if held:
                    self._first = ()
                    self._admitting.release()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await self._changed.wait()

    async def _measure(self, account: Account, lag_seconds: float) -> None:
        if lag_seconds:
            await asyncio.sleep(lag_seconds + _EARLY_SECONDS)
        if account.stage is not Stage.LOADED:
            return  # unloaded meanwhile, and maybe being loaded again
        self._is_behind = True
        try:
            if account.record not in self.accounts.unloads:
                await self._catch_up(account.record)
        finally:
            self.accounts.load_ended(account, self.readings.last)
            self._changed.set()

    async def _catch_up(self, record: ModelRecord) -> None:
        """Measure what was loaded, if no operation on another model is in progress. Otherwise the
        last of them measures at its own end.
        """
        expected = {each.name: each.estimate for each in self.accounts.moving}
        busy = {*(each.record for each in self.accounts.moving), *self.accounts.unloads}
        if not self._is_behind or not busy <= {record}:
            return
        operations, reading = self._operations, await self.readings.read()
        if operations == self._operations:
            self._is_behind = False
            requests, _ = self._requests()
            settled = self.readings.settled(reading)
            for measured in self.accounts.close(settled, requests):
                if self.readings.missed(measured, self.ledger.of(measured.name)):
                    continue
                account = self.accounts.models[measured.name]
                if account.reported is None:
                    self._learn(measured, expected.get(measured.name))
                else:
                    self._compare(account, measured.bytes, settled)

    def _compare(self, account: Account, seen: Bytes, settled: MemoryReading | None) -> None:
        """Hold what a reading shows where that is more than Triton's report."""
        if self.reports.is_news(account, seen):
            read = {"reported_bytes": total(account.reported or {}), "read_bytes": total(seen)}
            log.warning("memory.report_differs", extra={"model_id": account.record.id, **read})
        if (larger := self.reports.larger(account, seen, settled)) is not None:
            self._learn(self.accounts.measured(account.name, larger), None)

    def _learn(self, measured: Measured, expected: Estimate | None) -> None:
        """Learn the size of the package and hold it: the most that it ever took alone, to which it
        may grow again, else its share. `expected` is the estimate of a load that has ended.
        """
        key = measured.package_key
        if measured.exact and expected is not None:
            if expected.basis is not Basis.DEFAULT:
                ratio = total(expected.needs) / max(1, total(measured.bytes))
                self._metrics.prediction_ratio.labels(expected.basis.value).observe(ratio)
            if self.limits.is_below(expected):
                self.sizes.forget(key)
        self.sizes.saw_baseline(self.ledger.snapshot().baseline)
        account, exact = self.accounts.models[measured.name], measured.exact
        is_reported, gpu = account.reported == measured.bytes, account.estimate.gpu
        self.sizes.learn(key, measured.bytes, exact=exact, is_reported=is_reported, gpu=gpu)
        most = self.sizes.learned(key) if self.sizes.is_exact(key) else measured.bytes
        self.ledger.hold(measured.name, most or {})
        account.basis = Basis.LEARNED
        self.relearned.add(account.record)

    def _forget(self, record: ModelRecord) -> None:
        self.ledger.release(record.name)
        self.relearned.discard(record)
        account = self.accounts.forget(record.name)
        if account is not None and account.most is not None:
            self.sizes.lived(account.package_key, account.most, account.estimate.gpu)


async def goes_on(error: AboutMemory, terms: Terms, evictor: Evictor | None) -> bool:
    """Return whether to try a failed load again: elsewhere, or as others were evicted."""
    if (is_elsewhere := terms.goes_elsewhere(error)) or not isinstance(error, CapacityError):
        return is_elsewhere
    return evictor is not None and await evictor.evict_for(error)
