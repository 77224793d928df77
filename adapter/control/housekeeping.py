"""The periodic work of control: polls memory and Triton, saves sizes, ends orphan processes."""

import asyncio
from typing import NoReturn

from adapter.control.memory import Memory
from adapter.control.operations import Operations
from adapter.control.orphans import OrphanProcesses
from adapter.control.ports import Ports
from adapter.control.reconciler import Reconciler
from adapter.core.model import TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelState
from adapter.errors import AdapterError
from adapter.runtime import background, clock

_TICK_SECONDS = 0.5
# A memory reading costs milliseconds for each process; traffic alone changes little.
_PEAK_SECONDS = 2.0
_RECONCILE_SECONDS = 2.0
_LEFTOVERS_SECONDS = 10.0
# Triton's index takes time in proportion to its models.
_RECONCILE_SECONDS_PER_MODEL = 0.001


class Housekeeping:
    """Runs the periodic steps."""

    def __init__(
        self,
        registry: Registry,
        memory: Memory,
        orphans: OrphanProcesses,
        ports: Ports,
        reconciler: Reconciler,
        *,
        operations: Operations,
    ) -> None:
        self._registry, self._memory, self._orphans = registry, memory, orphans
        self._packages, self._store = ports.packages, ports.sizes
        self._reconciler = reconciler
        self._operations = operations
        self._peaks_at = self._reconciled_at = self._left_at = clock.monotonic()

    async def run(self) -> NoReturn:
        """Run for ever. A step that fails is tried again at the next tick."""
        await asyncio.sleep(_TICK_SECONDS)
        await background.forever(
            self._poll_memory,
            self.save,
            self._reconciler.restart_if_stuck,
            self._poll_triton,
            self._poll_leftovers,
            seconds=_TICK_SECONDS,
            expected=AdapterError,  # the disk refuses, or Triton cannot be reached
        )

    async def save(self) -> None:
        """Save the learned sizes for the next run, and update the notes of the models concerned."""
        sizes = self._memory.sizes
        if sizes.is_changed and self._store is not None:
            sizes.is_changed = False
            try:
                await self._store.save(sizes.as_dict())
            except AdapterError:
                sizes.is_changed = True
                raise
        for record in [*self._memory.relearned]:
            await self._note(record)

    async def _note(self, record: ModelRecord) -> None:
        """Update the model's note under its lock: no half unloaded model may be noted as loaded.

        The note of a busy model is written later.
        """
        lock = self._operations.lock(record.id)
        if lock.locked():
            return
        self._memory.relearned.discard(record)
        async with lock:
            is_here = self._registry.get(record.id) is record
            if not is_here or record.state is not ModelState.READY or not record.package_key:
                return
            held = self._memory.ledger.of(record.name)
            try:
                await self._packages.confirm(record.name, record.source, record.package_key, held)
            except AdapterError:
                self._memory.relearned.add(record)
                raise

    async def _poll_memory(self) -> None:
        now = clock.monotonic()
        lag = self._memory.readings.lag_seconds
        if self._memory.is_busy:
            await self._memory.tick(())
        elif now - self._peaks_at >= max(_PEAK_SECONDS, lag):
            self._peaks_at = now
            # a sensor that lags shows only now what the models active before have taken
            await self._memory.tick(self._active(and_before=lag > 0))

    def _active(self, *, and_before: bool) -> set[TritonName]:
        """Return the names of the models that had requests since the last call, or `and_before`."""
        active = set()
        for record in self._registry.records():
            ended = record.usage.served - record.usage.in_flight
            is_active = record.usage.in_flight > 0 or ended != record.ended_before
            if is_active or (and_before and record.was_active):
                active.add(record.name)
            record.ended_before, record.was_active = ended, is_active
        return active

    async def _poll_triton(self) -> None:
        now, models = clock.monotonic(), len(self._registry)
        pause = max(_RECONCILE_SECONDS, models * _RECONCILE_SECONDS_PER_MODEL)
        if now - self._reconciled_at >= pause:
            self._reconciled_at = now
            await self._reconciler.reconcile()
            await self._reconciler.free_stuck()

    async def _poll_leftovers(self) -> None:
        """End abandoned processes, and report orphans even while nothing is being measured."""
        now = clock.monotonic()
        if now - self._left_at >= _LEFTOVERS_SECONDS:
            self._left_at = now
            await self._orphans.end_abandoned()
            await self._orphans.are_there()
