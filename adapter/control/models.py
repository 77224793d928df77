"""The control plane: loads, unloads and leases models. Serialised per model, undone on failure.

An operation runs in a task of its own and outlives its caller. Each model runs one operation at a
time, in order of arrival; models wait for each other only for memory (core/admission.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

from adapter.control.diagnosis import Diagnosis
from adapter.control.housekeeping import Housekeeping
from adapter.control.lease import Lease, Leases
from adapter.control.leftovers import Leftovers
from adapter.control.loader import Loader
from adapter.control.memory import Memory
from adapter.control.operations import Operations
from adapter.control.ports import MemoryReader, Packages, Server, SizeStore, TimeLimits, Triton
from adapter.control.presence import Presence
from adapter.control.reclaim import Reclaim, Unloaded
from adapter.control.reconciler import Reconciler
from adapter.control.unloader import Unloader
from adapter.core.ledger import Ledger
from adapter.core.memory import total
from adapter.core.model import ModelId, ModelSource
from adapter.core.registry import ModelRecord, Registry, not_loaded
from adapter.core.sizing import Sizes
from adapter.core.state import ModelState
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    BackendTimeout,
    BackendUnavailable,
    ModelNotFound,
)
from adapter.telemetry.metrics import Metrics

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
        server: Server | None = None,
        store: SizeStore | None = None,
        loads_again: bool = False,
        load_threads: int = 4,
        max_abandoned: int = 64,
    ) -> None:
        """`loads_again`: models that Triton has lost are reloaded. `load_threads`: Triton's.

        `max_abandoned`: see Leases.
        """
        self.registry = registry
        self.is_open = False
        left = Leftovers(registry, server, metrics)
        books = (ledger, sizes, memory, metrics, limits)
        self.memory = Memory(*books, requests=self._requests, is_shared=left.are_there)
        self.diagnosis = Diagnosis(self.memory)
        self._reclaim = Reclaim(self.memory, metrics, limits)
        self._packages = packages
        self._limits = limits
        self.operations = Operations(metrics, lambda model_id: total(ledger.of(model_id)))
        self._unloader = Unloader(triton, server, limits, left, metrics)
        self._loader = self._make_loader(triton, server, metrics)
        self.presence = Presence(triton, server, loads_again=loads_again)
        self._reconciler = self._make_reconciler(triton, server, load_threads)
        self.leases = Leases(max_abandoned, self._reconciler.call_failed)
        parts = (registry, self.memory, left, packages, self._reconciler)
        self._housekeeping = Housekeeping(*parts, lock_of=self.operations.lock, store=store)
        self._loading: dict[ModelId, asyncio.Task[ModelRecord]] = {}

    def _requests(self) -> tuple[int, int]:
        """Return how many inferences have begun, and how many of them have ended."""
        return self.leases.begun, self.leases.ended

    def _make_loader(self, triton: Triton, server: Server | None, metrics: Metrics) -> Loader:
        return Loader(
            triton=triton,
            server=server,
            unloader=self._unloader,
            memory=self.memory,
            diagnosis=self.diagnosis,
            reclaim=self._reclaim,
            metrics=metrics,
            limits=self._limits,
        )

    def _make_reconciler(
        self, triton: Triton, server: Server | None, load_threads: int
    ) -> Reconciler:
        return Reconciler(
            registry=self.registry,
            memory=self.memory,
            triton=triton,
            server=server,
            packages=self._packages,
            unloader=self._unloader,
            lock_of=self.operations.lock,
            begin_load=self._begin_load,
            start=self.operations.start,
            presence=self.presence,
            load_threads=load_threads,
        )

    # -- what callers ask -------------------------------------------------------------------

    def lease(self, model_id: ModelId) -> Lease:
        try:
            return self.leases.of(self.registry.serving(model_id))
        except ModelNotFound:
            self._refuse_unless_open()  # the registry is not complete before `open`
            self._reconciler.refuse_returning(model_id)
            raise

    async def serving(self, model_id: ModelId, wait_seconds: float) -> Lease:
        """Return a lease; wait for a load of this model in progress, for `wait_seconds` at most."""
        if (task := self._loading.get(model_id)) is not None:
            await asyncio.wait({task}, timeout=wait_seconds)
        return self.lease(model_id)

    async def load(self, model_id: ModelId, source: ModelSource, **log_fields: str) -> ModelRecord:
        """Load the model. `log_fields` go into the log line: request ids and the like.

        Raises AlreadyLoaded at once, also while the same load is still in progress.
        """
        self._refuse_unless_open()
        known = self.registry.get(model_id)
        if model_id in self._loading or (known and known.state is ModelState.READY):
            doing = "being loaded" if model_id in self._loading else "loaded already"
            raise AlreadyLoaded(f"model {model_id!r} is {doing}", model_id=model_id)
        self.operations.refuse_when_full(model_id)
        return await self._outcome(model_id, self._begin_load(model_id, source, **log_fields))

    async def loaded(self, model_id: ModelId) -> ModelRecord:
        """Return the record of a loaded model, or the outcome of its load in progress."""
        if (task := self._loading.get(model_id)) is not None:
            return await self._outcome(model_id, task)
        return self.registry.serving(model_id)

    async def _outcome(self, model_id: ModelId, task: asyncio.Task[ModelRecord]) -> ModelRecord:
        done, _ = await asyncio.wait({task}, timeout=self._limits.load + 1)
        if not done:
            raise BackendTimeout(
                f"model {model_id!r} did not load within {self._limits.load:g} s; "
                "what there is of it is being taken down",
                model_id=model_id,
            )
        return task.result()

    async def unload(self, model_id: ModelId, **log_fields: str) -> None:
        """Unload the model; return when Triton no longer has it and its memory is free."""
        self._refuse_unless_open()
        if model_id not in self.registry and model_id not in self._loading:
            raise not_loaded(model_id)
        work = self.operations.logged("unload", model_id, self._unload(model_id), log_fields)
        task = self.operations.start("unload", model_id, work)
        done, _ = await asyncio.wait({task}, timeout=self._limits.unload + 1)
        if not done:
            why = f"was not gone within {self._limits.unload:g} s; its unload goes on"
            raise BackendTimeout(f"model {model_id!r} {why}", model_id=model_id)
        task.result()

    def why_stuck(self) -> str | None:
        """Return why no load can succeed until Triton is restarted; None while loads can."""
        return self._reconciler.why_stuck()

    # -- start, housekeeping and stop ---------------------------------------------------------

    async def open(self) -> None:
        """Adopt or unload what an earlier run left in Triton; loads are accepted afterwards."""
        await self._reconciler.take_stock()
        self.is_open = True

    async def run_housekeeping(self) -> NoReturn:
        await self._housekeeping.run()

    async def triton_restarted(self) -> None:
        """Handle a restart of Triton, which has lost all models."""
        await self._reconciler.triton_restarted()

    async def reconcile(self) -> None:
        """Forget the models that Triton no longer has."""
        await self._reconciler.reconcile()

    def close(self) -> None:
        """Accept no more operations."""
        self.is_open = False

    async def drain(self, seconds: float) -> None:
        """Close, and wait for the operations in progress."""
        self.close()
        await self.operations.drain(seconds)
        with suppress(AdapterError):  # a disk error must not keep the adapter from stopping
            await self._housekeeping.save()

    async def judged(self, error: AdapterError, model_id: ModelId) -> AdapterError:
        """Return the error for the caller of an inference that failed with `error`."""
        await self._reconciler.confirm_death(error, model_id)
        return await self.diagnosis.judged(error, model_id)

    # -- operations -------------------------------------------------------------------------

    def _begin_load(
        self, model_id: ModelId, source: ModelSource, **log_fields: str
    ) -> asyncio.Task[ModelRecord]:
        work = self.operations.logged("load", model_id, self._load(model_id, source), log_fields)
        self._loading[model_id] = task = self.operations.start("load", model_id, work)
        task.add_done_callback(partial(self._load_ended, model_id))
        return task

    def _load_ended(self, model_id: ModelId, task: asyncio.Task[ModelRecord]) -> None:
        if self._loading.get(model_id) is task:
            del self._loading[model_id]

    async def _load(self, model_id: ModelId, source: ModelSource) -> ModelRecord:
        async with self.operations.lock(model_id), AsyncExitStack() as undo:
            known = self.registry.get(model_id)
            if known is not None and known.state is ModelState.DEAD:
                await self._unload_model(model_id)
            record = self.registry.begin_load(model_id, self._unloader.free_name(model_id), source)
            undo.callback(self.registry.abort_load, record)
            # pushed before each act: one that failed or was given up may still have done its work
            undo.push_async_callback(self._undo, record, lambda: self._remove(record))
            package = await self._packages.prepare(record.name, model_id, source)
            if package.warnings:
                fields = {"model_id": model_id, "warnings": package.warnings}
                log.warning("model.package_odd", extra=fields)
            record.package_key = package.content_key
            record.declared_bytes, record.disk_bytes = package.declared_bytes, package.size_bytes
            self.memory.sizes.known_at(source.url, package)
            self.memory.sizes.known_as(model_id, package)
            estimate = await self.memory.admit(model_id, package)
            undo.push_async_callback(self._loader.load_undone, record)
            record.placement = await self._packages.place(record.name, model_id, package)
            self.memory.accounts.placed(model_id, record.placement.names)
            undo.push_async_callback(self._undo, record, lambda: self._unloader.unload(record))
            process = await self._loader.load(record, package, estimate)
            held = self.memory.ledger.of(model_id)
            await self._packages.confirm(record.name, source, package.content_key, held)
            self.presence.refuse_ended(process, model_id)  # `reconcile` would not notice
            undo.pop_all()
            record.source, record.can_load_again = replace(source, files=()), not source.files
            self.registry.finish_load(record)
            return record

    async def _unload(self, model_id: ModelId) -> None:
        async with self.operations.lock(model_id):
            await self._unload_model(model_id)

    async def _unload_model(self, model_id: ModelId) -> None:
        known = self.registry.get(model_id)
        is_dead = known is not None and known.state is ModelState.DEAD
        record = self.registry.begin_unload(model_id)  # from here on new requests get a 404
        async with self.memory.unloading(model_id):
            try:
                if not await self.leases.drained(record, self._limits.unload / 2):
                    log.warning("model.drain_timed_out", extra={"model_id": record.id})
                before, booked = await self.memory.begin_unload(), self.memory.ledger.snapshot()
                await self._unloader.unload(record, is_dead=is_dead, to_the_end=True)
            except BaseException:
                self.registry.unload_failed(record, was_dead=is_dead)
                raise
            try:
                await self._remove(record)
            finally:  # Triton has unloaded the model, even if the folders stay
                apart = self.memory.accounts.apart(model_id)
                held = self.memory.unloaded(model_id)
                self.registry.finish_unload(record)
            await self._reclaim.wait(Unloaded(held, before, booked, apart))

    async def _remove(self, record: ModelRecord) -> None:
        """Remove the folders, unless Triton is stuck with the model: it may still read them."""
        if record.name not in self._unloader.stuck:
            await self._packages.remove(record.name)

    async def _undo(self, record: ModelRecord, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except AdapterError as error:
            # nothing more can be done, and the failure of the load itself is raised
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})

    def _refuse_unless_open(self) -> None:
        if not self.is_open:
            raise BackendUnavailable("the adapter is starting or stopping", delivered=False)
