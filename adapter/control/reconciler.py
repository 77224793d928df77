"""Reconciles the registry with Triton: at the start, after a restart of Triton, and in between."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from adapter.control.memory import Memory
from adapter.control.ports import Packages, Server, Triton
from adapter.control.presence import Presence
from adapter.control.unloader import Unloader
from adapter.core.model import ModelId, ModelSource, StagedModel
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelState
from adapter.errors import AdapterError, BackendTimeout, ModelNotFound, ModelNotReady, StubDied
from adapter.runtime.threads import PROCESSES

log = logging.getLogger(__name__)

_SETTLED = (ModelState.READY, ModelState.DEAD)


class Reconciler:
    """Compares the registry with Triton, and forgets, adopts, unloads or reloads models.

    `load_threads`: how many loads Triton runs at a time. `lock_of` returns the operation lock of a
    model. `begin_load` does not wait for the load, nor `start` for the work.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        memory: Memory,
        triton: Triton,
        server: Server | None,
        packages: Packages,
        unloader: Unloader,
        lock_of: Callable[[ModelId], asyncio.Lock],
        begin_load: Callable[[ModelId, ModelSource], object],
        start: Callable[[str, ModelId | None, Coroutine[Any, Any, None]], asyncio.Task[None]],
        presence: Presence,
        load_threads: int,
    ) -> None:
        self._registry = registry
        self._memory = memory
        self._triton = triton
        self._server = server
        self._packages = packages
        self._unloader = unloader
        self._lock_of = lock_of
        self._begin_load = begin_load
        self._start = start
        self._presence = presence
        self._load_threads = load_threads
        self._suspects: dict[ModelRecord, asyncio.Task[None]] = {}
        self._reconciling: asyncio.Task[None] | None = None
        self._returning: set[ModelId] = set()

    async def take_stock(self) -> None:
        """Adopt the models that an earlier run loaded and Triton still serves, and unload whatever
        else that run left. To be called before the first load.
        """
        life = self._presence.now()
        staged = await self._packages.staged()
        ready = await self._triton.ready()
        for model in staged:
            if model.is_loaded and ready.issuperset(model.placement.names):
                self._adopt(model)
            else:
                await self._unload_staged(model)
        await self._memory.rebase()
        self._presence.confirm(life)

    async def _unload_staged(self, model: StagedModel) -> None:
        record = ModelRecord(model.model_id, model.name, ModelSource(""))
        record.placement = model.placement
        try:
            await self._unloader.unload(record)
        except BackendTimeout as error:  # Triton is stuck with this model; all else works
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})
        else:
            await self._packages.remove(model.name)

    def _adopt(self, model: StagedModel) -> None:
        record = self._registry.adopt(model.model_id, model.name, model.source)
        record.used_at = time.monotonic()
        record.placement, record.package_key = model.placement, model.content_key
        record.can_load_again = model.can_load_again
        self._memory.adopt(model.model_id, model.held)
        log.info("model.adopted", extra={"model_id": model.model_id})

    async def reconcile(self) -> None:
        """Forget the models that Triton no longer has: it was restarted, or unloaded them."""
        # taken before Triton is asked: a model that becomes ready later must not count as lost
        before = [r for r in self._registry.records() if r.state in _SETTLED]
        life = self._presence.now()
        ready = await self._triton.ready()
        lost = [
            r
            for r in before
            if r.name not in ready and self._registry.get(r.id) is r and r.state in _SETTLED
        ]
        again = [r for r in lost if self._comes_back(r)]
        self._returning |= {r.id for r in again}
        for record in lost:
            self._registry.vanished(record)
            self._memory.unloaded(record.id)
        self._presence.confirm(life)
        if lost:
            log.warning("triton.models_vanished", extra={"models": [r.id for r in lost]})
        for record in lost:
            async with self._lock_of(record.id):
                if record.id not in self._registry:
                    await self._clear_away(record)
            if record in again:
                self._begin_load(record.id, record.source)
                self._returning.discard(record.id)

    def _comes_back(self, record: ModelRecord) -> bool:
        return self._presence.come_back and record.can_load_again

    def refuse_returning(self, model_id: ModelId, found_gone: ModelRecord | None = None) -> None:
        """Raise ModelNotReady for a model that Triton lost and that is about to be loaded again:
        "not found" would make the caller load it as well. `found_gone`: an inference has just found
        this model to be gone.
        """
        is_back_soon = found_gone is not None and self._comes_back(found_gone)
        if is_back_soon or model_id in self._returning:
            raise ModelNotReady(f"model {model_id!r} is being loaded again", model_id=model_id)

    async def confirm_death(self, error: AdapterError, model_id: ModelId) -> None:
        """Check whether the model has lost its process, if the text of `error` says so, before the
        inference is answered: the next request must find the model dead.
        """
        record = self._registry.get(model_id)
        if isinstance(error, StubDied) and record is not None:
            self._suspect(record)
            if (check := self._suspects.get(record)) is not None:
                await asyncio.shield(check)

    def call_failed(self, record: ModelRecord, error: BaseException) -> BaseException:
        """Handle the error of an inference; return the error for its caller."""
        # an OutOfMemory may wrap a StubDied; then the model is dead too
        if isinstance(error, StubDied) or isinstance(error.__cause__, StubDied):
            self._suspect(record)
        elif isinstance(error, ModelNotFound):
            if self._reconciling is None or self._reconciling.done():
                self._reconciling = self._start("reconcile", None, self.reconcile())
            try:
                self.refuse_returning(record.id, record)
            except ModelNotReady as not_ready:
                return not_ready
        return error

    def _suspect(self, record: ModelRecord) -> None:
        """Handle an error text that says that a python process of the model has died. With an
        embedded server that is checked: a model may repeat any text that its caller sent.
        """
        if self._server is None:
            self._registry.died(record)
        elif record not in self._suspects and record.state is ModelState.READY:
            check = self._check_processes(record, self._server)
            self._suspects[record] = self._start("look for death", record.id, check)

    async def _check_processes(self, record: ModelRecord, server: Server) -> None:
        try:
            if await PROCESSES.run(_has_lost_a_process, record, server):
                self._registry.died(record)
        finally:
            del self._suspects[record]

    async def triton_restarted(self) -> None:
        await self.free_stuck(restarted=True)
        await self.reconcile()
        self._presence.is_restarting = False

    def why_stuck(self) -> str | None:
        """Return why no load can succeed any more; None while loads can."""
        stuck = len(self._unloader.stuck)
        if stuck < self._load_threads:
            return None
        return f"{stuck} loads are stuck in Triton and keep all of its {self._load_threads} threads"

    async def restart_if_stuck(self) -> None:
        """Restart an embedded Triton whose load threads are all stuck: nothing else frees them."""
        reason = self.why_stuck()
        if reason is not None and self._server is not None and not self._presence.is_restarting:
            self._presence.is_restarting = True
            await self._server.restart(reason)

    async def free_stuck(self, *, restarted: bool) -> None:
        """Clear away models that were given up, once Triton has finished with them."""
        if not self._unloader.stuck:
            return
        present = set() if restarted else await self._triton.present()
        ready = set() if restarted else await self._triton.ready()
        for record in [*self._unloader.stuck.values()]:
            names, lock = set(record.placement.names), self._lock_of(record.id)
            if names & (present - ready) or lock.locked():  # by a load under another name
                continue
            async with lock:  # no load may take the name before its folder is cleared
                if self._unloader.stuck.get(record.name) is not record:
                    continue  # done meanwhile by another call
                del self._unloader.stuck[record.name]
                await self._clear_away(record, also_the_entry=bool(names & ready))

    async def _clear_away(self, record: ModelRecord, *, also_the_entry: bool = False) -> None:
        """Unload what Triton still has of the package, and remove its folders."""
        try:
            if also_the_entry or len(record.placement.names) > 1:
                await self._unloader.unload(record)
            await self._packages.remove(record.name)
        except AdapterError as error:
            log.warning("model.undo_failed", extra={"model_id": record.id, "reason": str(error)})


def _has_lost_a_process(record: ModelRecord, server: Server) -> bool:
    """Return whether a process is gone: even one of several fails each request it is given."""
    names = record.placement.names
    found = [server.live_instances(name) for name in names]
    if None not in found and record.instances - frozenset().union(*(each or () for each in found)):
        return True
    return any(server.has_live_stub(name) is False for name in names)
