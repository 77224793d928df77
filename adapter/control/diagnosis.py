"""Memory around a failure and after an unload: was it low, and is it back?"""

import asyncio
import time
from dataclasses import dataclass

from adapter.control.memory import Memory
from adapter.control.ports import TimeLimits
from adapter.core.doubt import Doubt
from adapter.core.evidence import MemorySample, corroborated, view_of, view_of_shm
from adapter.core.ledger import DeviceBook, LedgerSnapshot
from adapter.core.memory import NO_BYTES, Bytes, MemoryReading
from adapter.core.model import ModelId
from adapter.errors import AdapterError, CapacityError, MemoryFigures, ModelFailed, OutOfMemory
from adapter.telemetry.metrics import Metrics

_POLL_SECONDS = 0.1
# An unload that frees less is not waited for: the noise of other processes is of that size.
_WORTH_WAITING_BYTES = 16 * 2**20
# Of the footprint, to call the memory back (Ollama's figure; docs/design/memory.md).
_BACK_SHARE = 0.75
# Of a call that failed just now, and began nobody knows when.
_A_MOMENT_SECONDS = 2.5


@dataclass(frozen=True, slots=True)
class Left:
    """A model that Triton was told to let go of: what it held, and what was seen and booked before.

    `apart` are its names in Triton where all that it held is in processes of its own.
    """

    held: Bytes
    before: MemoryReading | None
    booked: LedgerSnapshot
    apart: frozenset[str]


class Diagnosis:
    def __init__(self, memory: Memory, metrics: Metrics, limits: TimeLimits) -> None:
        self._memory = memory
        self._metrics = metrics
        self._limits = limits
        self._doubt = Doubt()

    async def judged(
        self,
        error: AdapterError,
        model_id: ModelId,
        *,
        since: float | None = None,
        predicted: Bytes = NO_BYTES,
    ) -> AdapterError:
        """The error to answer with, figures included: out of memory where its text only may mean
        that, and memory was low since `since` (time.monotonic; a moment ago when None).
        """
        if not isinstance(error, CapacityError) and not _is_suspected(error):
            return error
        reading = await self._memory.read()
        samples = self._samples(since)
        is_of_shm = isinstance(error, ModelFailed) and error.of_shm
        view = view_of_shm(samples) if is_of_shm else view_of(samples, predicted=predicted)
        judged = corroborated(error, view, MemoryFigures())
        if since is None and isinstance(judged, OutOfMemory) and judged is error:
            judged = self._believed(judged, model_id, reading)
        if isinstance(judged, CapacityError):
            judged.figures = self._figures(judged.figures, model_id, reading)
        return judged

    def _believed(
        self, error: OutOfMemory, model_id: ModelId, reading: MemoryReading | None
    ) -> AdapterError:
        """An inference that failed says so by its text."""
        book = self._memory.ledger.snapshot()
        seen = reading.devices if reading and not reading.lag_seconds else {}
        return self._doubt.judged(
            error,
            self._memory.accounts.key_of(model_id) or model_id,
            free={d: max(0, book.devices[d].limit_bytes - s.used_bytes) for d, s in seen.items()},
            has_no_gpu=reading is not None and reading.has_no_gpu,
            is_alone=book.models <= 1,
        )

    async def came_back(self, before: MemoryReading | None, ended_unloads: int) -> bool:
        """After a load that ran out of memory was undone: is there more than when it began?

        Waits a few seconds for what it took itself to return, and for unloads in progress. With
        nothing to see memory by, only an unload that has ended since counts.
        """
        deadline = time.monotonic() + self._limits.recovery
        while True:
            reading = await self._memory.read()
            if self._memory.ended_unloads > ended_unloads:
                return True
            if before is not None and reading is not None:
                if _is_more(before, reading):
                    return True
                if not self._memory.unloads and _is_as_much(before, reading):
                    return False
            elif not self._memory.unloads:
                return False
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)

    async def given_back(self, left: Left) -> None:
        """Wait until most of it is seen to be free, or five seconds."""
        worth = {d: count for d, count in left.held.items() if count >= _WORTH_WAITING_BYTES}
        before, booked = left.before, left.booked
        if before is None or not worth:
            return
        begun = time.monotonic()
        while time.monotonic() - begun < self._limits.recovery:
            reading = await self._memory.read()
            if reading is None or _has_ended(left.apart, reading):
                break
            if self._is_back(worth, before, reading, booked):
                break
            await asyncio.sleep(_POLL_SECONDS)
        self._metrics.recovery_seconds.observe(time.monotonic() - begun)

    def _is_back(
        self, held: Bytes, before: MemoryReading, now: MemoryReading, booked: LedgerSnapshot
    ) -> bool:
        """What other loads may have taken meanwhile is allowed for."""
        books = self._memory.ledger.snapshot().devices
        return all(
            now.used.get(device, 0)
            <= before.used.get(device, 0)
            - _BACK_SHARE * count
            + _loaded_since(books[device], booked.devices[device], count)
            for device, count in held.items()
            # one that stood for what nobody read may have gone from the books since
            if device in booked.devices and device in books
        )

    def _samples(self, since: float | None) -> list[MemorySample]:
        """The last from before the call and all after it."""
        if since is None:
            first = time.monotonic() - _A_MOMENT_SECONDS
        else:
            first = max((at for at, _ in self._memory.samples if at <= since), default=since)
        return [sample for at, sample in self._memory.samples if at >= first]

    def _figures(
        self, known: MemoryFigures, model_id: ModelId, reading: MemoryReading | None
    ) -> MemoryFigures:
        """Those of the failure's own text first; then the ledger's, of the tightest device."""
        book = self._memory.ledger.snapshot()
        needs = self._memory.ledger.of(model_id)
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


def _has_ended(apart: frozenset[str], now: MemoryReading) -> bool:
    """What processes held is free when they have ended. The sum of all does not show it: others
    grow, and what python processes share counts for more in each that is left.
    """
    return bool(apart) and now.of_models is not None and apart.isdisjoint(now.of_models)


def _loaded_since(now: DeviceBook, before: DeviceBook, unloaded: int) -> int:
    """At most: of what is reserved some may have been taken before."""
    settled = now.held_bytes - (before.held_bytes - unloaded)
    return now.reserved_bytes + max(0, settled)


def _is_suspected(error: AdapterError) -> bool:
    return isinstance(error, ModelFailed) and error.suspected is not None


def _is_more(before: MemoryReading, now: MemoryReading) -> bool:
    return any(
        before.used.get(device, 0) - seen.used_bytes
        >= max(_WORTH_WAITING_BYTES, seen.limit_bytes // 100)
        for device, seen in now.devices.items()
    )


def _is_as_much(before: MemoryReading, now: MemoryReading) -> bool:
    return all(
        seen.used_bytes - before.used.get(device, 0) < _WORTH_WAITING_BYTES
        for device, seen in now.devices.items()
    )
