"""Unloads models to the end: requests answered, Triton done, folders removed, memory back."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from adapter.control.lease import Leases
from adapter.control.memory import Memory
from adapter.control.operations import Operations
from adapter.control.ports import Packages
from adapter.control.progress import step
from adapter.control.triton_status import TritonStatus
from adapter.control.unloader import Unloader
from adapter.core.account import Unloaded
from adapter.core.memory import NO_BYTES, Bytes, total
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import LOADED, ModelEvent, ModelState, WaitsFor

log = logging.getLogger(__name__)


class Unloads:
    """`drain_seconds`: how long an unload waits for requests in flight."""

    def __init__(
        self,
        registry: Registry,
        memory: Memory,
        operations: Operations,
        leases: Leases,
        unloader: Unloader,
        *,
        packages: Packages,
        triton_status: TritonStatus,
        drain_seconds: float,
    ) -> None:
        self.registry, self.memory = registry, memory
        self._operations, self.leases = operations, leases
        self._unloader, self._packages = unloader, packages
        self._triton_status = triton_status
        self._drain_seconds = drain_seconds

    async def evict(
        self, model_id: ModelId, may_go: Callable[[ModelRecord], bool], **log_fields: str
    ) -> bool:
        """Unload the model if it has no request in flight, and `may_go` agrees at that moment;
        return whether it was unloaded.
        """
        work = self._evict(model_id, may_go, log_fields)
        return await asyncio.shield(self._operations.start("unload", model_id, work))

    async def _evict(
        self,
        model_id: ModelId,
        may_go: Callable[[ModelRecord], bool],
        log_fields: Mapping[str, str],
    ) -> bool:
        async with self._operations.lock(model_id):
            known = self.registry.get(model_id)
            is_idle = known is not None and known.state in LOADED and known.usage.in_flight == 0
            is_open = self._triton_status.is_open
            if not is_open or known is None or not is_idle or not may_go(known):
                return False
            # its requests are refused before anything is awaited
            work = self.unload(model_id)
            await self._operations.logged("unload", model_id, work, total, log_fields=log_fields)
            return True

    async def unload(self, model_id: ModelId) -> Bytes:
        """Unload the model; return what it held."""
        known = self.registry.get(model_id)
        is_dead = known is not None and known.state is ModelState.DEAD
        record = self.registry.begin_unload(model_id)  # from here on new requests get a 404
        async with self.memory.unloading(record):
            try:
                step(record, WaitsFor.REQUESTS)
                if not await self.leases.drained(record, self._drain_seconds):
                    log.warning("model.drain_timed_out", extra={"model_id": record.id})
                step(record, WaitsFor.TRITON)
                before, booked = (
                    await self.memory.begin_unload(record),
                    self.memory.ledger.snapshot(),
                )
                await self._unloader.unload(record, is_dead=is_dead, to_the_end=True)
            except BaseException:
                await self._failed(record, is_dead=is_dead)
                raise
            try:
                await self.remove(record)
            finally:  # Triton has unloaded the model, even if the folders stay
                apart = self.memory.accounts.apart(record.name)
                ended = is_dead and len(record.placement.names) == 1  # with all that it held
                taken = NO_BYTES if ended else self.memory.taken(record)
                held = self.memory.unloaded(record)
                self.registry.apply(record, ModelEvent.UNLOADED)
                if is_dead:
                    # what its processes left was free only after `before`
                    await self.memory.readings.read()
                await self.memory.readings.until_back(Unloaded(held, taken, before, booked, apart))
            return held

    async def _failed(self, record: ModelRecord, *, is_dead: bool) -> None:
        """Note that the model is still there as far as anybody knows, or stuck in Triton."""
        if record.state is ModelState.STUCK:
            held = self.memory.unloaded(record)
            if await self._unloader.may_hold_memory(record):
                self.memory.stuck(record, held)
            return
        failed = ModelEvent.DEAD_UNLOAD_FAILED if is_dead else ModelEvent.UNLOAD_FAILED
        self.registry.apply(record, failed)

    async def remove(self, record: ModelRecord) -> None:
        """Remove the folders, unless Triton is stuck with the model: it may still read them."""
        if record.state is not ModelState.STUCK:
            await self._packages.remove(record.name)
