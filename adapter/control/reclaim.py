"""Waits until the memory of an unloaded model is free again."""

import asyncio
from dataclasses import dataclass

from adapter.control.memory import Memory
from adapter.control.ports import TimeLimits
from adapter.core.ledger import DeviceBook, LedgerSnapshot
from adapter.core.memory import Bytes, MemoryReading
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

_POLL_SECONDS = 0.1
# An unload that frees less is not waited for: the noise of other processes is of that size.
_WORTH_WAITING_BYTES = 16 * 2**20
# Share of the footprint that must be free again (Ollama's figure; docs/memory.md).
_BACK_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A model that Triton was told to unload: the bytes that it held, and the reading and the
    ledger from before the unload.

    `taken`: what of `held` it had at the end, as far as is known: the ledger keeps its peak, and
    the memory of a process that died was back before. `apart` are its names in Triton where all
    that it held is in processes of its own.
    """

    held: Bytes
    taken: Bytes
    before: MemoryReading | None
    booked: LedgerSnapshot
    apart: frozenset[str]


class Reclaim:
    def __init__(self, memory: Memory, metrics: Metrics, limits: TimeLimits) -> None:
        self._memory = memory
        self._metrics = metrics
        self._limits = limits

    async def is_worth_a_retry(self, before: MemoryReading | None, ended_unloads: int) -> bool:
        """Return whether more memory is free than when a load began that has run out of it.

        Waits a few seconds for the memory that the undone load itself took and for unloads in
        progress. Without readings only an unload that has ended since `ended_unloads` counts.
        """
        deadline = clock.monotonic() + self._limits.recovery
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
            if clock.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)

    async def wait(self, unloaded: Unloaded) -> None:
        """Wait until readings show most of the model's memory free, for five seconds at most."""
        before = unloaded.before
        if before is None or not _worth(unloaded.taken):
            return
        begun = clock.monotonic()
        while clock.monotonic() - begun < self._limits.recovery:
            reading = await self._memory.read()
            if reading is None or _has_ended(unloaded.apart, reading):
                break
            if self._is_back(unloaded, before, reading):
                break
            await asyncio.sleep(_POLL_SECONDS)
        self._metrics.recovery_seconds.observe(clock.monotonic() - begun)

    def _is_back(self, unloaded: Unloaded, before: MemoryReading, now: MemoryReading) -> bool:
        """Return whether most of it is free, allowing for what other loads took meanwhile."""
        books, booked = self._memory.ledger.snapshot().devices, unloaded.booked.devices
        return all(
            now.used.get(device, 0)
            <= before.used.get(device, 0)
            - _BACK_SHARE * count
            + _loaded_since(books[device], booked[device], unloaded.held.get(device, 0))
            for device, count in _worth(unloaded.taken).items()
            # the ledger drops a placeholder device once a reading names the real ones
            if device in booked and device in books
        )


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
