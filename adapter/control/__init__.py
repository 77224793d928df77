"""The control plane: load, unload, list. Slow, serialised per model, and undone when it fails.

An operation outlives its caller: it runs in a task of its own, and a caller who goes away does
not stop it. Per model one operation runs at a time, in order of arrival; models never wait for
each other.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from adapter.control.lease import Lease
from adapter.control.operations import Operations
from adapter.control.ports import MemoryReader, Packages, Processes, TimeLimits, Triton
from adapter.control.teardown import Teardown
from adapter.core.admission import admit
from adapter.core.ledger import Ledger, MemoryReading
from adapter.core.model import ModelId, ModelSource, Package
from adapter.core.names import triton_name
from adapter.core.registry import ModelRecord, Registry, not_loaded
from adapter.core.sizing import Sizes
from adapter.core.state import ModelState
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    BackendTimeout,
    BackendUnavailable,
    CapacityError,
    MemoryFigures,
    ModelNotFound,
    OutOfMemory,
    StubDied,
)
from adapter.metrics import Metrics

__all__ = ["Lease", "ModelControl", "TimeLimits"]

log = logging.getLogger(__name__)


class ModelControl:
    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        sizes: Sizes,
        triton: Triton,
        packages: Packages,
        memory: MemoryReader,
        metrics: Metrics,
        limits: TimeLimits,
        processes: Processes | None = None,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.is_open = False
        self._sizes = sizes
        self._triton = triton
        self._packages = packages
        self._memory = memory
        self._limits = limits
        self._teardown = Teardown(triton, processes, limits)
        self._operations = Operations(metrics, ledger.of)
        self._loading: set[ModelId] = set()
        self._drained: dict[ModelId, asyncio.Event] = {}
        self._reconciling: asyncio.Task[None] | None = None

    # -- what callers ask -------------------------------------------------------------------

    def lease(self, model_id: ModelId) -> Lease:
        return Lease(self.registry.serving(model_id), self._lease_ended)

    async def load(self, model_id: ModelId, source: ModelSource, **seen: str) -> ModelRecord:
        """Bring the model up. `seen` goes into the log line: request ids and the like.

        Raises AlreadyLoaded at once, also while the same load is still going on.
        """
        self._refuse_unless_open()
        known = self.registry.get(model_id)
        if model_id in self._loading or (known and known.state is ModelState.READY):
            doing = "being loaded" if model_id in self._loading else "loaded already"
            raise AlreadyLoaded(f"model {model_id!r} is {doing}", model_id=model_id)
        self._loading.add(model_id)
        work = self._operations.logged("load", model_id, self._load(model_id, source), seen)
        task = self._operations.start(work)
        task.add_done_callback(lambda _: self._loading.discard(model_id))
        done, _ = await asyncio.wait({task}, timeout=self._limits.load + 1)
        if not done:
            raise BackendTimeout(
                f"model {model_id!r} did not load within {self._limits.load:g} s; "
                "what there is of it is being taken down",
                model_id=model_id,
            )
        return task.result()

    async def unload(self, model_id: ModelId, **seen: str) -> None:
        """Take the model down; return when Triton no longer has it."""
        self._refuse_unless_open()
        if model_id not in self.registry and model_id not in self._loading:
            raise not_loaded(model_id)
        work = self._operations.logged("unload", model_id, self._unload(model_id), seen)
        task = self._operations.start(work)
        done, _ = await asyncio.wait({task}, timeout=self._limits.unload + 1)
        if not done:
            raise BackendTimeout(
                f"model {model_id!r} was not gone within {self._limits.unload:g} s; "
                "its unload goes on",
                model_id=model_id,
            )
        task.result()

    async def with_figures(self, error: CapacityError, model_id: ModelId) -> CapacityError:
        """Complete the error's bytes with what the ledger and the memory reader know now."""
        known, reading = error.figures, await self._memory.read()
        book = self.ledger.snapshot()
        used = reading.used_bytes if reading else None
        error.figures = MemoryFigures(
            needed_bytes=known.needed_bytes or self.ledger.of(model_id) or None,
            free_bytes=book.free_bytes(used) if known.free_bytes is None else known.free_bytes,
            limit_bytes=known.limit_bytes or book.limit_bytes,
        )
        return error

    async def look_at_memory(self) -> MemoryReading | None:
        return await self._memory.read()

    # -- the life of the whole --------------------------------------------------------------

    async def purge(self) -> None:
        """Before the first load: take down what an earlier run of ours left in Triton."""
        for staged in await self._packages.staged():
            record = ModelRecord(staged.model_id, staged.name, ModelSource(""))
            record.placement = staged.placement
            await self._teardown.bring_down(record)
            await self._packages.remove(staged.name)
        reading = await self._memory.read()
        self.ledger.baseline_bytes = reading.used_bytes if reading else 0
        self.is_open = True

    async def reconcile(self) -> None:
        """Forget the models that Triton no longer has: it was restarted, or they were taken."""
        settled = (ModelState.READY, ModelState.DEAD)
        # noted before the look at Triton: what becomes ready after it must not be missed there
        before = [r for r in self.registry.records() if r.state in settled]
        ready = await self._triton.ready()
        lost = [
            r
            for r in before
            if self.registry.get(r.id) is r and r.state in settled and r.name not in ready
        ]
        for record in lost:
            self.registry.vanished(record)
            self.ledger.release(record.id)
        for record in lost:
            async with self._operations.turn(record.id):
                if record.id not in self.registry:
                    await self._undo(record, partial(self._clear_away, record))
        if lost:
            log.warning("triton.models_vanished", extra={"models": [r.id for r in lost]})

    async def _clear_away(self, record: ModelRecord) -> None:
        """The entry is gone from Triton; its helpers need not be."""
        if len(record.placement.names) > 1:
            await self._teardown.bring_down(record)
        await self._packages.remove(record.name)

    async def drain(self, seconds: float) -> None:
        """Take no more operations; wait for those under way."""
        self.is_open = False
        await self._operations.drain(seconds)

    def _lease_ended(self, record: ModelRecord, error: BaseException | None) -> None:
        if record.in_flight == 0 and (event := self._drained.get(record.id)) is not None:
            event.set()
        if isinstance(error, StubDied):
            self.registry.died(record)
        elif isinstance(error, ModelNotFound) and (
            self._reconciling is None or self._reconciling.done()
        ):
            self._reconciling = self._operations.start(self.reconcile())

    # -- operations -------------------------------------------------------------------------

    async def _load(self, model_id: ModelId, source: ModelSource) -> ModelRecord:
        async with self._operations.turn(model_id), AsyncExitStack() as undo:
            known = self.registry.get(model_id)
            if known is not None and known.state is ModelState.DEAD:
                await self._take_down(model_id)
            record = self.registry.begin_load(model_id, triton_name(model_id), source)
            undo.callback(self.registry.abort_load, record)
            # pushed before each act: one that failed or was given up may still have done its work
            undo.push_async_callback(self._undo, record, lambda: self._packages.remove(record.name))
            package = await self._packages.prepare(record.name, model_id, source)
            if package.warnings:
                fields = {"model_id": model_id, "warnings": package.warnings}
                log.warning("model.package_odd", extra=fields)
            before = await self._reserve(record, package)
            undo.callback(self.ledger.release, model_id)
            record.placement = await self._packages.place(record.name, model_id, package)
            undo.push_async_callback(self._undo, record, lambda: self._teardown.bring_down(record))
            await self._load_all(record)
            await self._settle(record, package, before)
            undo.pop_all()
            self.registry.finish_load(record)
            return record

    async def _load_all(self, record: ModelRecord) -> None:
        try:
            for name in record.placement.load:
                await self._triton.load(name, record.id)
        except OutOfMemory as error:
            raise await self.with_figures(error, record.id) from error.__cause__

    async def _unload(self, model_id: ModelId) -> None:
        async with self._operations.turn(model_id):
            await self._take_down(model_id)

    async def _take_down(self, model_id: ModelId) -> None:
        known = self.registry.get(model_id)
        is_dead = known is not None and known.state is ModelState.DEAD
        record = self.registry.begin_unload(model_id)  # from here on new requests get a 404
        try:
            await self._wait_drained(record)
            await self._teardown.bring_down(record, is_dead=is_dead)
        except BaseException:
            self.registry.unload_failed(record)
            if is_dead:
                self.registry.died(record)
            raise
        try:
            await self._packages.remove(record.name)
        finally:  # Triton has let go, whatever the disk says
            self.ledger.release(model_id)
            self.registry.finish_unload(record)

    async def _undo(self, record: ModelRecord, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except AdapterError as error:
            # Nothing more can be done from here, and the load's own failure is what is raised.
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})

    async def _wait_drained(self, record: ModelRecord) -> None:
        if record.in_flight == 0:
            return
        event = self._drained[record.id] = asyncio.Event()
        try:
            await asyncio.wait_for(event.wait(), self._limits.unload / 2)
        except TimeoutError:
            log.warning("model.drain_timed_out", extra={"model_id": record.id})
        finally:
            del self._drained[record.id]

    # -- memory -----------------------------------------------------------------------------

    async def _reserve(
        self, record: ModelRecord, package: Package
    ) -> tuple[MemoryReading | None, int]:
        """Admit and reserve in one breath; returns what the load will be measured against."""
        changes = self._operations.changes
        reading = await self._memory.read()
        estimate = self._sizes.estimate(package)
        book = self.ledger.snapshot()
        admit(record.id, estimate, book, reading.used_bytes if reading else None)
        self.ledger.reserve(record.id, estimate.size_bytes)
        return (reading if len(self._operations) == 1 else None), changes

    async def _settle(
        self, record: ModelRecord, package: Package, before: tuple[MemoryReading | None, int]
    ) -> None:
        """Hold what was measured; where another operation ran meanwhile, what was reserved."""
        reading, changes = before
        after = await self._memory.read()
        if reading is None or after is None or changes != self._operations.changes:
            self.ledger.settle(record.id, None)
            return
        measured = self.ledger.settle(record.id, after.used_bytes - reading.used_bytes)
        self._sizes.learn(package, measured)

    def _refuse_unless_open(self) -> None:
        if not self.is_open:
            raise BackendUnavailable("the adapter is starting or stopping", delivered=False)
