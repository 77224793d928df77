"""Admits loads to memory and measures what models take, by the ledger and the memory reader.

Loads and unloads report here when they begin and end. What each model takes is in the accounts
(core/accounts.py); where readings do not tell models apart, it is the growth of memory from one
quiet moment to the next.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress

from adapter.control.admission_queue import AdmissionQueue
from adapter.control.learning import Learning
from adapter.control.limit import Limit
from adapter.control.ports import MemoryReader, TimeLimits
from adapter.control.sensor import MemorySensor
from adapter.core.accounts import Accounts
from adapter.core.admission import Answer, Outlook, decide, waits_its_turn
from adapter.core.ledger import Ledger
from adapter.core.measuring import Measured
from adapter.core.memory import Bytes, MemoryReading
from adapter.core.model import ModelId, Package
from adapter.core.sizing import Basis, Estimate, Sizes
from adapter.telemetry.metrics import Metrics

# How often a load that waits polls memory when no operation reports a change.
_POLL_SECONDS = 0.25
_EARLY_SECONDS = 0.1  # how early a timer of the event loop may fire
_KNOWN = frozenset({Basis.LEARNED, Basis.DECLARED})


class Memory:
    """The only writer of `ledger` and `sizes`.

    `requests` returns how many inferences have begun and how many have ended, `is_shared` whether
    a process runs below Triton that belongs to no model. `samples`: the recent samples, each
    with its time.monotonic().
    """

    def __init__(
        self,
        ledger: Ledger,
        sizes: Sizes,
        reader: MemoryReader,
        metrics: Metrics,
        limits: TimeLimits,
        *,
        requests: Callable[[], tuple[int, int]],
        is_shared: Callable[[], Awaitable[bool]],
    ) -> None:
        self.ledger = ledger
        self.sizes = sizes
        self.learning = Learning(ledger, sizes, metrics)
        self._sensor = MemorySensor(reader, ledger, is_shared)
        self.samples = self._sensor.samples
        self.ended_unloads = 0
        self.unloads: set[ModelId] = set()
        self._limits = limits
        self._queue = AdmissionQueue(limits.alone, metrics)
        self._changed = asyncio.Event()
        self._loads: dict[ModelId, Estimate] = {}  # admitted, and not measured yet
        # loaded on a guessed size and unmeasured: their removal need not show in a reading
        self._supposed: set[ModelId] = set()
        self._operations = 0
        self._since: dict[ModelId, float] = {}  # when each operation under way got to Triton
        self.accounts = Accounts()
        self.limit = Limit(ledger, sizes, self.accounts)
        self._requests = requests
        self._is_behind = False  # a load ended, and something else was still going on
        self._measurements: set[asyncio.Task[None]] = set()

    async def read(self) -> MemoryReading | None:
        reading = await self._sensor.read()
        if reading is not None and reading.of_models is not None and self.accounts.are_apart:
            self.ledger.settle_baseline(reading.shared)
        return reading

    @property
    def last(self) -> MemoryReading | None:
        return self._sensor.last

    @property
    def lag_seconds(self) -> float:
        return self._sensor.lag_seconds

    @property
    def is_busy(self) -> bool:
        return bool(self._loads or self.unloads)

    @property
    def loads(self) -> int:
        return len(self._loads)  # under way, or not measured yet

    def is_measured(self, model_id: ModelId) -> bool:
        """Return whether what the ledger holds is final, except for growth under traffic."""
        return model_id not in self._loads and self.accounts.is_measured(model_id)

    # -- loads ------------------------------------------------------------------------------

    async def admit(self, model_id: ModelId, package: Package) -> Estimate:
        """Reserve what the model is expected to take, or raise a refusal.

        Waits for earlier loads, for loads of unknown footprint, and for memory that is about to be
        freed; each for a bounded time.
        """
        begun, short_since = time.monotonic(), 0.0
        async with self._queue.slot():
            while True:
                reading = await self.read()
                now = time.monotonic()
                estimate = self.learning.estimate(package)
                outlook = self._outlook(
                    package.content_key,
                    reading,
                    waits_for_others=now - begun < self._limits.alone,
                    may_wait=not short_since or now - short_since < self._limits.recovery,
                )
                if decide(model_id, estimate, outlook) is Answer.ADMIT:
                    break
                if not waits_its_turn(estimate, outlook):
                    short_since = short_since or now
                await self._wait_for_change()
            self._begin(reading, unloads=0)
            self._since[model_id] = now
            self.ledger.reserve(model_id, estimate.needs)
            self._loads[model_id] = estimate
            self.accounts.add(model_id, package.content_key)
            self.limit.tries(package.content_key, estimate)
        return estimate

    async def loaded(self, model_id: ModelId) -> None:
        """Note that Triton serves the model, and measure it: now or, with a sensor that lags, a
        little later; until then the ledger holds the estimate.
        """
        estimate, since = self._loads[model_id], self._since.pop(model_id)
        held = self.ledger.settle(model_id, None)
        self._sensor.changed()
        if estimate.basis in _KNOWN:
            self._sensor.must_show(held, since)
        else:
            self._supposed.add(model_id)
        key = self.accounts.key_of(model_id)
        known = estimate.basis is Basis.LEARNED and self.sizes.is_exact(key)
        # models that readings do not tell apart are measured at the next quiet moment
        told_apart = self.last is not None and self.last.of_models is not None
        reading = await self.read() if told_apart else self.last
        measured = self.accounts.loaded(model_id, estimate.needs, reading, known=known)
        if measured is not None:
            self._learn(measured)
        task = asyncio.create_task(self._measure(model_id, estimate, self.lag_seconds))
        self._measurements.add(task)
        task.add_done_callback(self._measurements.discard)
        if self.lag_seconds == 0 or self.limit.is_below_the_device(reading):
            await task

    async def not_loaded(self, model_id: ModelId) -> None:
        """Note that the load is undone. Memory that it may have left cannot be attributed."""
        self.accounts.disturbed()
        self._sensor.changed()
        try:
            await self._catch_up(model_id)
        finally:
            self._forget(model_id)
            self._changed.set()

    # -- unloads ----------------------------------------------------------------------------

    @asynccontextmanager
    async def unloading(self, model_id: ModelId) -> AsyncIterator[None]:
        """Mark an unload as in progress: loads that do not fit wait for it for a moment."""
        self.unloads.add(model_id)
        try:
            yield
            await self._catch_up(model_id)
        finally:
            self.unloads.discard(model_id)
            self._since.pop(model_id, None)
            self.ended_unloads += 1
            self._changed.set()

    async def begin_unload(self) -> MemoryReading | None:
        """Note that Triton is about to be asked. To be called within `unloading`."""
        reading = await self.read()
        self._begin(reading, unloads=1)
        # an unload that still drains asks later: too early a time only clears a reader too soon
        for model_id in self.unloads:
            self._since.setdefault(model_id, time.monotonic())
        return reading

    def unloaded(self, model_id: ModelId) -> Bytes:
        """Note that Triton has unloaded the model; return the bytes that it held."""
        held = self.ledger.of(model_id)
        self.accounts.released(model_id, held)
        self._sensor.changed()
        since = self._since.get(model_id)  # None when the model vanished at an unknown time
        if since is not None and model_id not in self._supposed:
            self._sensor.must_show(held, since)
        self._forget(model_id)
        self._changed.set()
        return held

    # -- in between -------------------------------------------------------------------------

    async def tick(self, active: Collection[ModelId]) -> None:
        """Measure growth under traffic. `active`: models with requests since the last call."""
        operations, reading = (
            self._operations,
            await self.read() if self.is_busy or active else None,
        )
        if reading is not None and operations == self._operations:
            settled = None if self.is_busy else self._sensor.settled(reading)
            baseline = self.ledger.snapshot().baseline
            for measured in self.accounts.tick(reading, settled, active, baseline):
                self._learn(measured)

    def adopt(self, model_id: ModelId, held: Bytes) -> None:
        """Add a model of an earlier run that Triton still serves."""
        self.accounts.add(model_id, "")
        self.ledger.hold(model_id, held)

    async def rebase(self) -> None:
        """Attribute what is used beyond what models hold to Triton itself."""
        self.ledger.rebase(self._sensor.settled(await self.read()))

    # -- inside -----------------------------------------------------------------------------

    def _begin(self, reading: MemoryReading | None, *, unloads: int) -> None:
        """Note that an operation begins to change memory; `unloads`: 1 if it is an unload, else 0.

        If no other is in progress, this is a quiet moment, and the next measurement starts from
        `reading`; nothing is measured if the reading is not recent enough.
        """
        if not self._loads and len(self.unloads) == unloads:
            settled = self._sensor.settled(reading)
            if self.ledger.snapshot().models == 0:
                self.ledger.rebase(settled and settled.shared)
            _, ended = self._requests()
            self.accounts.open(settled, ended)
            self._is_behind = False
        self._operations += 1

    def _outlook(
        self, key: str, reading: MemoryReading | None, *, waits_for_others: bool, may_wait: bool
    ) -> Outlook:
        """`waits_for_others` is False once a load has waited for others for too long."""
        loads = [e.basis for e in self._loads.values()] if waits_for_others else []
        book = self.ledger.snapshot()
        return Outlook(
            book=book,
            reading=self.limit.less_reserved(reading, self._since.keys() & self._loads.keys()),
            loads=len(loads),
            unknown_loads=sum(basis not in _KNOWN for basis in loads),
            unloads=len(self.unloads),
            is_settling=self._sensor.is_settling(reading),
            may_wait=may_wait,
            unknown_bytes=self.sizes.default_bytes,
            may_be_wrong=self.limit.may_try(key),
            proven=self.limit.proven(key),
        )

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _POLL_SECONDS)

    async def _measure(self, model_id: ModelId, estimate: Estimate, lag_seconds: float) -> None:
        if lag_seconds:
            await asyncio.sleep(lag_seconds + _EARLY_SECONDS)
        if self._loads.get(model_id) is not estimate:
            return  # unloaded meanwhile, and maybe being loaded again
        self._is_behind = True
        try:
            if model_id not in self.unloads:
                await self._catch_up(model_id)
        finally:
            if self._loads.get(model_id) is estimate:
                del self._loads[model_id]
            self._changed.set()

    async def _catch_up(self, model_id: ModelId) -> None:
        """Measure what was loaded, if no operation on another model is in progress. Otherwise the
        last of them measures at its own end.
        """
        if not self._is_behind or not self._loads.keys() | self.unloads <= {model_id}:
            return
        operations, reading = self._operations, await self.read()
        if operations == self._operations:
            self._is_behind = False
            requests, _ = self._requests()
            for measured in self.accounts.close(self._sensor.settled(reading), requests):
                if not self._sensor.missed(measured.bytes, self.ledger.of(measured.model_id)):
                    self._learn(measured)

    def _learn(self, measured: Measured) -> None:
        expected = self._loads.get(measured.model_id)
        was_wrong = expected is not None and self.limit.is_below(expected)
        self.learning.learn(measured, expected, was_wrong=was_wrong)
        self._supposed.discard(measured.model_id)

    def _forget(self, model_id: ModelId) -> None:
        self.ledger.release(model_id)
        self._supposed.discard(model_id)
        self._loads.pop(model_id, None)
        self._since.pop(model_id, None)
        key, most = self.accounts.key_of(model_id), self.accounts.forget(model_id)
        self.learning.ended(model_id, key, most)
