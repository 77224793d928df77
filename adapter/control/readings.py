"""Reads memory, and judges by the readings: what may be measured from them, whether a failure of
Triton was a lack of memory, and whether the memory of an unloaded model is free again.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable

from adapter.control.ports import MemoryReader, Processes, TimeLimits
from adapter.core.account import Unloaded
from adapter.core.accounts import Accounts, MemorySplit
from adapter.core.evidence import (
    SUSPECTED,
    MemorySample,
    Suspicion,
    corroborated,
    is_of_gpu,
    sample_of,
    view_of,
    view_of_shm,
)
from adapter.core.ledger import DeviceBook, Ledger
from adapter.core.measuring import Measured
from adapter.core.memory import HOST, NO_BYTES, Bytes, MemoryReading, total
from adapter.core.model import TritonName
from adapter.errors import (
    AdapterError,
    CapacityError,
    MemoryFigures,
    ModelFailed,
    OutOfMemory,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

_SAMPLES = 512
# A hundredth of a device: a change of that size must show in a reading sooner or later.
_NOTICEABLE_SHARE = 100
# Loads that have taken nothing for so long are no longer waited for.
_STILL_SECONDS = 1.5
_STILL_SHARE_OF_ALONE = 0.5  # where no reading tells processes apart
# How far back to look for a call that has just failed and whose start is not known.
_RECENT_SECONDS = 2.5
_POLL_SECONDS = 0.1
# An unload that frees less is not waited for: the noise of other processes is of that size.
_WORTH_WAITING_BYTES = 16 * 2**20
# Share of the footprint that must be free again (Ollama's figure; docs/memory.md).
_BACK_SHARE = 0.75


class Readings:
    """Takes readings, and keeps the recent ones as `samples`, each with its clock.monotonic().

    `is_shared` returns whether a process takes memory that belongs to no model. `changed_at`: when
    an operation last changed memory (time.monotonic).
    """

    def __init__(
        self,
        reader: MemoryReader,
        ledger: Ledger,
        accounts: Accounts,
        metrics: Metrics,
        limits: TimeLimits,
        *,
        is_shared: Callable[[], Awaitable[bool]],
        processes: Processes,
    ) -> None:
        self.samples: deque[tuple[float, MemorySample]] = deque(maxlen=_SAMPLES)
        self.changed_at = -math.inf
        self._reader = reader
        self._processes = processes
        self._ledger, self._accounts = ledger, accounts
        self._metrics, self._limits = metrics, limits
        self._ask_shared, self._is_shared = is_shared, False
        self._suspicion = Suspicion()

    async def read(self) -> MemoryReading | None:
        # first: such a process may end before the reading
        self._is_shared = await self._ask_shared()
        reading = await self._reader.read()
        self._ledger.open(reading)
        if reading is None:
            return None
        self.samples.append((clock.monotonic(), sample_of(self._ledger.snapshot(), reading)))
        if reading.of_models is not None and self._accounts.are_apart:
            self._ledger.settle_baseline(reading.shared)
        if self._accounts.loads:
            await self._watch(reading)
        return reading

    async def _watch(self, reading: MemoryReading) -> None:
        """Note which loads stand still. One imports and reads files before it takes memory of a
        GPU: where readings do not tell processes apart, the host memory of these counts as well.
        """
        shared, seconds = total(reading.shared.used), _STILL_SECONDS
        if (of_models := reading.of_models) is None:
            resident = await self._processes.resident_bytes()
            shared, of_models = shared + resident.get("", 0), resident
            seconds = max(seconds, self._limits.alone * _STILL_SHARE_OF_ALONE)
        self._accounts.watch(
            MemorySplit(shared, of_models),
            clock.monotonic(),
            seconds + reading.lag_seconds,
            unloads=bool(self._accounts.unloads),
        )

    @property
    def last(self) -> MemoryReading | None:
        return self._reader.last

    @property
    def lag_seconds(self) -> float:
        return self._reader.last.lag_seconds if self._reader.last else 0.0

    def changed(self) -> None:
        """Note a change of memory: readings may be from before it, for as long as they lag."""
        self.changed_at = clock.monotonic()

    async def until_shown(self) -> None:
        """Note a change of memory, and wait until readings show it."""
        await self._reader.read()
        self.changed()
        await asyncio.sleep(self.lag_seconds)

    def must_show(self, amounts: Bytes, since: float) -> None:
        """Expect the reader to show a change by `amounts`, from `since` (time.monotonic) on; small
        changes are ignored.
        """
        if self._is_noticeable(amounts):
            self._reader.changed(since)

    def missed(self, measured: Measured, expected: Bytes) -> bool:
        """Return whether a zero measurement means a late or frozen reader, or memory that others
        gave back, as all do when Triton ends; not a load that took nothing. A reader that shows a
        part of the load has moved, and is believed.
        """
        is_doubted = self.lag_seconds > 0 or not measured.exact
        return is_doubted and total(measured.bytes) == 0 and self._is_noticeable(expected)

    def is_settling(self, reading: MemoryReading | None) -> bool:
        """Return whether the reading may be older than the last change, or frozen."""
        if reading is None:
            return False
        age = clock.monotonic() - self.changed_at
        return age < reading.lag_seconds or self._reader.is_in_doubt

    def settled(self, reading: MemoryReading | None) -> MemoryReading | None:
        """Return `reading`, or None if nothing may be measured from it."""
        return None if self._is_shared or self.is_settling(reading) else reading

    def _is_noticeable(self, amounts: Bytes) -> bool:
        books = self._ledger.snapshot().devices
        return any(
            count * _NOTICEABLE_SHARE >= books[device].limit_bytes
            for device, count in amounts.items()
            if device in books
        )

    # -- failures ---------------------------------------------------------------------------

    async def judged(
        self,
        error: AdapterError,
        name: TritonName,
        *,
        since: float | None = None,
        predicted: Bytes = NO_BYTES,
    ) -> AdapterError:
        """Return the error to answer with, memory figures included.

        An error whose text may mean a lack of memory becomes OutOfMemory where memory was low since
        `since` (clock.monotonic(); None: within the last seconds).
        """
        if not isinstance(error, CapacityError) and not _is_suspected(error):
            return error
        reading = await self.read()
        samples = self._samples(since)
        is_of_shm = isinstance(error, ModelFailed) and error.of_shm
        view = view_of_shm(samples) if is_of_shm else view_of(samples, predicted=predicted)
        judged = corroborated(error, view, MemoryFigures())
        is_inference = since is None
        if is_inference and isinstance(judged, OutOfMemory) and judged is error:
            judged = self._believed(judged, name, reading)
        if isinstance(judged, CapacityError) and not self._is_of_unseen_gpu(judged):
            # an inference lacked memory beyond what its loaded model takes
            needs = NO_BYTES if is_inference else self._ledger.of(name)
            judged.figures = self._figures(judged.figures, needs, reading)
        return judged

    def _is_of_unseen_gpu(self, error: CapacityError) -> bool:
        """Return whether the text of the error is about a GPU, and none is measured. The figures of
        host memory would seem to refute such an error.
        """
        is_by_text = isinstance(error, OutOfMemory) and error.pattern != SUSPECTED
        return is_by_text and is_of_gpu(error) and self._ledger.snapshot().devices.keys() <= {HOST}

    def _believed(
        self, error: OutOfMemory, name: TritonName, reading: MemoryReading | None
    ) -> AdapterError:
        """Check the text of an inference that claims to have run out of memory."""
        book = self._ledger.snapshot()
        devices = reading.devices if reading and not reading.lag_seconds else {}
        free = {d: max(0, book.devices[d].limit_bytes - r.used_bytes) for d, r in devices.items()}
        return self._suspicion.judged(
            error,
            self._accounts.key_of(name) or name,
            free=free,
            is_alone=book.models <= 1,
        )

    def _samples(self, since: float | None) -> list[MemorySample]:
        """Return the last sample from before the call and all samples after it."""
        if since is None:
            first = clock.monotonic() - _RECENT_SECONDS
        else:
            first = max((at for at, _ in self.samples if at <= since), default=since)
        return [sample for at, sample in self.samples if at >= first]

    def _figures(
        self, known: MemoryFigures, needs: Bytes, reading: MemoryReading | None
    ) -> MemoryFigures:
        """Complete the figures of the failure's text by the ledger's, for the tightest device."""
        book = self._ledger.snapshot()
        device = book.tightest(needs, reading)
        if device is None:
            return known
        free = book.free(reading)[device]
        return MemoryFigures(
            needed_bytes=known.needed_bytes or needs.get(device) or None,
            free_bytes=free if known.free_bytes is None else known.free_bytes,
            limit_bytes=known.limit_bytes or book.devices[device].limit_bytes,
            device=known.device or device,
        )

    # -- what comes back --------------------------------------------------------------------

    async def is_worth_a_retry(self, before: MemoryReading | None, ended_unloads: int) -> bool:
        """Return whether more memory is free than when a load began that has run out of it.

        Waits a few seconds for the memory that the undone load itself took and for unloads in
        progress. Without readings only an unload that has ended since `ended_unloads` counts.
        """
        deadline = clock.monotonic() + self._limits.recovery
        while True:
            reading = await self.read()
            if self._accounts.ended_unloads > ended_unloads:
                return True
            if before is not None and reading is not None:
                if _is_more(before, reading):
                    return True
                if not self._accounts.unloads and _is_as_much(before, reading):
                    return False
            elif not self._accounts.unloads:
                return False
            if clock.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)

    async def until_back(self, unloaded: Unloaded) -> None:
        """Wait until readings show most of the model's memory free, for five seconds at most."""
        before = unloaded.before
        if before is None or not _worth(unloaded.taken):
            return
        begun = clock.monotonic()
        while clock.monotonic() - begun < self._limits.recovery:
            reading = await self.read()
            if reading is None or _has_ended(unloaded.apart, reading):
                break
            if self._is_back(unloaded, before, reading):
                break
            await asyncio.sleep(_POLL_SECONDS)
        self._metrics.recovery_seconds.observe(clock.monotonic() - begun)

    def _is_back(self, unloaded: Unloaded, before: MemoryReading, now: MemoryReading) -> bool:
        """Return whether most of it is free, allowing for what other loads took meanwhile."""
        books, booked = self._ledger.snapshot().devices, unloaded.booked.devices
        return all(
            now.used.get(device, 0)
            <= before.used.get(device, 0)
            - _BACK_SHARE * count
            + _loaded_since(books[device], booked[device], unloaded.held.get(device, 0))
            for device, count in _worth(unloaded.taken).items()
            # the ledger drops a placeholder device once a reading names the real ones
            if device in booked and device in books
        )


def _is_suspected(error: AdapterError) -> bool:
    return isinstance(error, ModelFailed) and error.suspected is not None


def _worth(taken: Bytes) -> Bytes:
    return {device: count for device, count in taken.items() if count >= _WORTH_WAITING_BYTES}


def _has_ended(apart: frozenset[str], now: MemoryReading) -> bool:
    """Return whether the model's own processes have all ended, which frees what they held.

    The sum over all processes does not show it: others grow, and pages that python processes share
    count for more in each process that is left.
    """
    return bool(apart) and now.of_models is not None and apart.isdisjoint(now.of_models)


def _loaded_since(now: DeviceBook, before: DeviceBook, unloaded: int) -> int:
    """An upper bound: part of what is reserved now may have been taken before."""
    settled = now.held_bytes - (before.held_bytes - unloaded)
    return now.reserved_bytes + max(0, settled)


def _is_more(before: MemoryReading, now: MemoryReading) -> bool:
    return any(
        before.used.get(device, 0) - figures.used_bytes
        >= max(_WORTH_WAITING_BYTES, figures.limit_bytes // 100)
        for device, figures in now.devices.items()
    )


def _is_as_much(before: MemoryReading, now: MemoryReading) -> bool:
    return all(
        figures.used_bytes - before.used.get(device, 0) < _WORTH_WAITING_BYTES
        for device, figures in now.devices.items()
    )
