"""Plays the cache of ModelMesh 0.12: one instance, full, that loads, evicts and corrects its books.

The rules are those of docs/modelmesh.md, "What ModelMesh does", in units of 8 KiB. A load counts
with its predicted size from the moment it is queued, and evicts the oldest entries: also those that
are loading or queued, and the new one itself. Memory of models that are evicted but not unloaded
yet counts in a buffer, from which loads borrow: so the load of one model may begin before another's
unload.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from tests.fakes.mesh import UNIT

SPACE_SECONDS = 180.0
# between the removal of an entry, or the failure of its load, and its unload
REMOVED_SECONDS, CANCELLED_SECONDS, SIZING_SECONDS, FAILED_SECONDS = 0.2, 0.5, 1.5, 1.0
BUSY_SECONDS, BUSY_TRIES = 0.5, 8
USES = 8  # of an entry that is evicted before it can be used
LEAST_COPIES = 10  # from so many models on their average size counts for a load behind others
REMEMBERED_SECONDS = 450.0


class Runtime(Protocol):
    async def predict(self, model_id: str) -> int: ...
    async def load(self, model_id: str) -> int: ...
    async def size(self, model_id: str) -> int: ...
    async def unload(self, model_id: str) -> None: ...
    async def infer(self, model_id: str) -> Any: ...


class Churn(Exception):
    """The cache is full, and its oldest entry is too young to go."""


class TooOld(Exception):
    """The entry was evicted before its load was queued."""


class Step(Enum):
    NEW = auto()  # its size is being predicted
    WAITING = auto()  # in the queue, or for space
    LOADING = auto()
    SIZING = auto()
    ACTIVE = auto()
    FAILED = auto()
    REMOVED = auto()


@dataclass(eq=False)
class Entry:
    model_id: str
    weight: int = 0
    is_average: bool = False  # the weight is that of the average model, until the load begins
    used_at: float = 0.0
    step: Step = Step.NEW
    in_flight: int = 0
    failed_at: float = 0.0
    error: Exception | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Task[None] | None = None


@dataclass
class Counts:
    loads: int = 0
    failures: list[tuple[str, Exception]] = field(default_factory=list)
    evictions: int = 0
    underpredicted: int = 0
    churn: int = 0
    too_old: int = 0


class MeshCache:
    """`churn_seconds`: the least age of the oldest entry at which a full cache takes a new one."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        capacity_bytes: int,
        default_bytes: int,
        load_seconds: float,
        load_concurrency: int = 1,
        churn_seconds: float = 100.0,
    ) -> None:
        self.counts = Counts()
        self._runtime = runtime
        self._capacity = capacity_bytes // UNIT
        self._default = max(1, default_bytes // UNIT)
        wanted = load_concurrency * self._default // (2 if load_concurrency <= 2 else 4)
        self._reserve = max(min(wanted, self._capacity // 10), self._capacity // 100)
        self._least_space = max(
            self._default, min(self._default * load_concurrency, self._capacity // 20)
        )
        self._load_seconds = load_seconds
        self._churn_seconds = churn_seconds
        self._loaders = asyncio.Semaphore(load_concurrency)
        self._predicted_loads = load_concurrency + load_concurrency // 3
        self._entries: dict[str, Entry] = {}
        self._occupied = 0  # of entries
        self._unloading = 0  # of removed entries, less what loads have borrowed
        self._deficit = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what clients do --------------------------------------------------------------------

    async def use(self, model_id: str) -> Any:
        """Send one request to the model, which is loaded if it is not here."""
        for _ in range(USES):
            entry = self._entries.get(model_id) or await self._insert(model_id)
            entry.used_at = _now()
            await entry.settled.wait()
            if entry.step is Step.FAILED:
                assert entry.error is not None
                raise entry.error
            if entry.step is Step.REMOVED:
                continue
            entry.in_flight += 1
            try:
                return await self._runtime.infer(model_id)
            finally:
                entry.in_flight -= 1
        raise RuntimeError("retry iterations exhausted")

    async def quiet(self) -> None:
        """Wait until no load or unload is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def age(self, seconds: float) -> None:
        """Let the entries be that much older."""
        for entry in self._entries.values():
            entry.used_at -= seconds

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- the books --------------------------------------------------------------------------

    @property
    def _weighed(self) -> int:
        buffer = min(max(self._reserve, self._unloading), self._capacity)
        return self._occupied + buffer

    def _has_space(self, required: int) -> bool:
        unloading = self._unloading + required
        return unloading <= self._reserve or unloading + self._occupied <= self._capacity

    async def _insert(self, model_id: str) -> Entry:
        """Book a new model at its predicted size, and queue its load."""
        self._forget_old_failures()
        oldest = min((e.used_at for e in self._entries.values()), default=None)
        now = _now()
        is_full = self._capacity - self._weighed < self._least_space
        if is_full and oldest is not None and now - oldest < self._churn_seconds:
            self.counts.churn += 1
            raise Churn(model_id)
        entry = Entry(model_id, used_at=now)
        self._entries[model_id] = entry
        self._grow(entry, 1)
        try:
            units = await self._initial_units(entry)
        except BaseException:
            self._discard(entry)
            raise
        if units > self._capacity:
            self._discard(entry)
        elif entry.step is Step.NEW:
            self._grow(entry, units - entry.weight)
        if entry.step is Step.REMOVED:
            self.counts.too_old += 1
            raise TooOld("Entry too old for cache")
        entry.step = Step.WAITING
        entry.work = self._start(self._load(entry))
        return entry

    async def _initial_units(self, entry: Entry) -> int:
        """Return the predicted size; the average of models if the load is behind many others."""
        steps = (Step.WAITING, Step.LOADING, Step.SIZING)
        loads = sum(each.step in steps for each in self._entries.values())
        copies = sum(each.step is not Step.FAILED for each in self._entries.values())
        if loads > self._predicted_loads and copies >= LEAST_COPIES:
            entry.is_average = True
            return 1 + min(self._capacity, self._weighed) // copies
        return await self._predicted_units(entry)

    async def _predicted_units(self, entry: Entry) -> int:
        return max(1, await self._runtime.predict(entry.model_id) // UNIT)

    def _grow(self, entry: Entry, units: int) -> None:
        """Borrow from the buffer what an entry takes before its load."""
        entry.weight += units
        self._occupied += units
        self._unloading -= units
        self._evict()

    def _evict(self) -> None:
        while self._weighed > self._capacity and self._entries:
            self.counts.evictions += 1
            self._remove(min(self._entries.values(), key=lambda each: each.used_at))

    def _discard(self, entry: Entry) -> None:
        if entry.step is not Step.REMOVED:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.model_id]
        self._occupied -= entry.weight
        self._unloading += entry.weight
        before, entry.step = entry.step, Step.REMOVED
        if entry.work is not None and before in {Step.WAITING, Step.LOADING, Step.SIZING}:
            entry.work.cancel()
        entry.settled.set()
        pauses = {
            Step.LOADING: CANCELLED_SECONDS,
            Step.SIZING: SIZING_SECONDS,
            Step.ACTIVE: REMOVED_SECONDS,
        }
        if before in pauses:
            self._start(self._unload(entry, entry.weight, pauses[before]))
        elif before is Step.FAILED:
            self._start(self._pay(entry.weight, from_unloading=True))

    async def _unload(self, entry: Entry, weight: int, pause: float) -> None:
        await asyncio.sleep(pause)
        for attempt in range(1, BUSY_TRIES):
            if not entry.in_flight:
                break
            await asyncio.sleep(BUSY_SECONDS * 2**attempt)
        await self._runtime.unload(entry.model_id)
        await self._pay(weight, from_unloading=True)

    async def _pay(self, weight: int, *, from_unloading: bool) -> None:
        paid = min(weight, self._deficit)
        self._deficit -= paid
        self._unloading += -(weight - paid) if from_unloading else paid
        async with self._changed:
            self._changed.notify_all()

    # -- loads ------------------------------------------------------------------------------

    async def _load(self, entry: Entry) -> None:
        async with self._loaders:
            try:
                size = await self._loaded_size(entry)
            except Exception as error:  # noqa: BLE001 - whatever the runtime raises
                self._fail(entry, error)
                return
            entry.step = Step.SIZING
            entry.settled.set()
            if size == 0:
                size = await self._runtime.size(entry.model_id)
            entry.step = Step.ACTIVE
            await self._correct(entry, max(1, size // UNIT))

    async def _loaded_size(self, entry: Entry) -> int:
        if entry.is_average:
            predicted = await self._predicted_units(entry)
            if predicted > self._capacity:
                raise RuntimeError(f"predicted {predicted} units, above the capacity")
            if predicted > entry.weight:
                self._grow(entry, predicted - entry.weight)
        async with self._changed, asyncio.timeout(SPACE_SECONDS):
            await self._changed.wait_for(lambda: self._has_space(entry.weight))
        self._unloading += entry.weight
        entry.step = Step.LOADING
        self.counts.loads += 1
        async with asyncio.timeout(self._load_seconds):
            return await self._runtime.load(entry.model_id)

    def _fail(self, entry: Entry, error: Exception) -> None:
        was_begun = entry.step is Step.LOADING
        entry.step, entry.error, entry.failed_at = Step.FAILED, error, _now()
        self.counts.failures.append((entry.model_id, error))
        entry.settled.set()
        less = entry.weight - 1
        self._unloading += less
        self._evict()  # while the failed load counts twice
        if entry.step is Step.FAILED:
            entry.weight = 1
            self._occupied -= less
        if was_begun:
            self._start(self._unload(entry, less, FAILED_SECONDS))
        else:
            self._start(self._pay(less, from_unloading=True))

    async def _correct(self, entry: Entry, units: int) -> None:
        """Note the true size. What exceeds the capacity is a deficit that evictions pay for."""
        delta, remaining = units - entry.weight, self._capacity - self._weighed
        if delta > remaining:
            self.counts.underpredicted += 1
            self._unloading -= delta - remaining
            self._deficit += delta - remaining
        self._occupied += delta
        entry.weight = units
        self._evict()
        if delta < 0:
            await self._pay(-delta, from_unloading=False)

    def _forget_old_failures(self) -> None:
        now = _now()
        for entry in [*self._entries.values()]:
            if entry.step is Step.FAILED and now - entry.failed_at > REMEMBERED_SECONDS:
                self._remove(entry)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()
