"""Finds processes that still run below Triton though their model is gone.

While there are any, no memory measurement is valid.
"""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from adapter.control.ports import Processes
from adapter.core.model import ProcessId, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.errors import AdapterError
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class OrphanProcesses:
    """Finds and kills processes whose model is gone."""

    def __init__(self, registry: Registry, processes: Processes, metrics: Metrics) -> None:
        self._registry = registry
        self._processes = processes
        self._metrics = metrics
        self._unended = 0  # unloads that wait for processes to end
        self._ownerless: frozenset[TritonName] = frozenset()  # no record has these names
        self._abandoned: frozenset[ProcessId] = frozenset()

    async def are_there(self) -> bool:
        """Return whether an ownerless process runs below Triton; True if that cannot be seen."""
        with self._registry.disowned() as unloaded:
            try:
                found = await self._processes.models()
            except AdapterError:
                return True
        # a model that was loaded or unloaded meanwhile owns its processes
        left = (name for name in found - unloaded if not self._registry.is_owned(name))
        self._found(frozenset(left))
        return bool(self._ownerless) or self._unended > 0

    async def end_abandoned(self) -> None:
        """End daemons of models that are gone without an unload, or have lost their process.

        A daemon is ended by the second call that finds it, as a load may be between two processes.
        Raises BackendUnavailable when processes cannot be seen.
        """
        found = await self._processes.abandoned()
        again, self._abandoned = found & self._abandoned, found
        if again:
            await self.kill(again)

    async def kill(self, processes: Collection[ProcessId], **log_fields: str) -> bool:
        """Kill processes that live, and all that they started; return whether there were any."""
        killed = await self._processes.kill(processes) if processes else ()
        if not killed:
            return False
        pids = sorted(process.pid for process in killed)
        log.warning("model.processes_killed", extra={**log_fields, "processes": pids})
        self._metrics.processes_killed.inc(len(pids))
        return True

    @contextmanager
    def unended(self, record: ModelRecord, processes: Collection[ProcessId]) -> Iterator[None]:
        """Report the model as left running while its unload waits for processes to end."""
        self._unended += 1
        self._count()
        pids = sorted(process.pid for process in processes)
        fields = {"model_id": record.id, "processes": pids, "in_flight": record.usage.in_flight}
        log.warning("model.left_running", extra=fields)
        try:
            yield
        finally:
            self._unended -= 1
            self._count()

    def _found(self, names: frozenset[TritonName]) -> None:
        new, self._ownerless = names - self._ownerless, names
        self._count()
        if new:
            log.warning("model.left_running", extra={"triton_names": sorted(new)})

    def _count(self) -> None:
        self._metrics.left_running.set(len(self._ownerless) + self._unended)
