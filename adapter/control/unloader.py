"""Take one model out of Triton: its requests, Triton itself, processes, and what its load did."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from adapter.control.leases import AtWork, Leases, is_exit
from adapter.control.memory import Memory
from adapter.control.operations import Journal, note_step
from adapter.control.ports import Processes, Server, TimeLimits, Triton
from adapter.control.readings import Readings
from adapter.core import times
from adapter.core.memory import total
from adapter.core.model import ProcessId, TritonName
from adapter.core.record import ModelRecord, Step
from adapter.core.registry import Registry
from adapter.core.states import ModelEvent, ModelState
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable
from adapter.runtime import clock
from adapter.runtime.clock import run_to_end

log = logging.getLogger(__name__)

# How long Triton takes at most to unload a model whose process has ended normally.
_NORMAL_SECONDS = 1.0
# A load may end alone for this time: Triton never answers one that is killed as it ends.
_GRACE_SECONDS = 1.5
_KILLED = "its python processes were killed, so that Triton ends its load"

_Processes = frozenset[ProcessId]


@dataclass(slots=True, eq=False)
class Unloader:
    """Unloads models, and kills processes that outlive their model."""

    registry: Registry
    leases: Leases
    at_work: AtWork
    memory: Memory
    readings: Readings
    journal: Journal
    triton: Triton
    server: Server | None
    processes: Processes
    limits: TimeLimits

    async def unload(self, record: ModelRecord, log_fields: Mapping[str, str]) -> None:
        """Unload a model that is READY or DEAD. Return when it and its memory are gone.

        Raises BackendTimeout if Triton does not release the model, which is STUCK then. An unload
        that has started is never cancelled: a half unloaded model can neither serve nor be loaded.
        """
        is_dead = record.state is ModelState.DEAD
        self.registry.apply(record, ModelEvent.UNLOAD_STARTED)  # new requests get a 404
        await run_to_end(self._unload(record, log_fields, is_dead=is_dead))

    async def _unload(
        self, record: ModelRecord, log_fields: Mapping[str, str], *, is_dead: bool
    ) -> None:
        in_flight = record.usage.in_flight
        with self.journal.record("unload", record.id, log_fields, in_flight=in_flight) as entry:
            entry.size_bytes = await self._wait_and_take_down(record, is_dead=is_dead)

    async def _wait_and_take_down(self, record: ModelRecord, *, is_dead: bool) -> int:
        """Wait until the model is gone; return the bytes that were booked for it."""
        note_step(record, Step.REQUESTS)
        if not await self.leases.wait_until_idle(record, self.limits.unload / 2):
            log.warning("model.drain_timed_out", extra={"model_id": record.id})
        note_step(record, Step.TRITON)
        await self.readings.read()
        leaving = self.memory.begin_unload(record)
        if not await self.remove_from_triton(record, is_dead=is_dead):
            await self.give_up(record)
            raise explain_unreleased(record)
        await record.undo.aclose()
        self.at_work.forget(record)
        await self.readings.wait_until_back(leaving)
        self.registry.apply(record, ModelEvent.UNLOADED)
        return total(leaving.booked)

    async def undo_load(
        self, record: ModelRecord, call: asyncio.Future[None] | None, *, is_out_of_memory: bool
    ) -> None:
        """Unload what a failed load has left in Triton. The record ends up absent or STUCK.

        `call` is the load that Triton has not answered, if there is one; `is_out_of_memory` is True
        if the load has failed for lack of memory.
        """
        self.registry.apply(record, ModelEvent.LOAD_FAILED)
        note_step(record, Step.UNDOING)
        if not await self.remove_from_triton(record, call=call):
            await self.give_up(record, is_out_of_memory=is_out_of_memory)
            return
        self.memory.release(record, is_out_of_memory=is_out_of_memory)
        await record.undo.aclose()
        self.registry.apply(record, ModelEvent.UNLOADED)

    async def give_up(self, record: ModelRecord, *, is_out_of_memory: bool = False) -> None:
        """Leave a model to Triton, which does not finish with it: it is STUCK until that changes.

        `is_out_of_memory` is True if its load has failed for lack of memory.
        A stuck load keeps one of Triton's few load threads, mostly until Triton is restarted.
        """
        if await self._have_processes_ended(record.placement.names):
            self.memory.release(record, is_out_of_memory=is_out_of_memory)
        else:
            self.memory.strand(record, is_out_of_memory=is_out_of_memory)
        self.registry.apply(record, ModelEvent.GIVEN_UP)
        stuck = self.registry.counts()[ModelState.STUCK]
        log.error("model.load_stuck", extra={"model_id": record.id, "stuck": stuck})

    # -- Triton -----------------------------------------------------------------------------

    async def remove_from_triton(
        self,
        record: ModelRecord,
        *,
        call: asyncio.Future[None] | None = None,
        is_dead: bool = False,
    ) -> bool:
        """Have Triton unload the model, and end its processes; return False if Triton is stuck.

        A Triton that exits meanwhile has released everything.
        """
        names = frozenset(record.placement.names)
        if not names:
            return True
        pid = self.server.pid if self.server else None
        deadline = clock.monotonic() + self.limits.unload / 2
        while True:
            try:
                return await self._remove(record, names, call, is_dead=is_dead)
            except AdapterError as error:
                if not is_exit(error):
                    fields = {"model_id": record.id, "reason": str(error)}
                    log.warning("model.undo_failed", extra=fields)
                    return False
            # only the connection may have been lost: then Triton still has the model
            if await self._wait_for_exit(pid, deadline):
                return True
            if clock.monotonic() >= deadline:
                return False
            call = None

    async def _wait_for_exit(self, pid: int | None, deadline: float) -> bool:
        """Wait until Triton answers again, or until `deadline`; return whether an embedded one,
        whose process was `pid`, has exited meanwhile.
        """
        while clock.monotonic() < deadline:
            await asyncio.sleep(times.POLL_SECONDS)
            if self.server is not None and self.server.pid != pid:
                return True
            if self.triton.live:
                return False
        return False

    async def _remove(
        self,
        record: ModelRecord,
        names: frozenset[TritonName],
        call: asyncio.Future[None] | None,
        *,
        is_dead: bool,
    ) -> bool:
        """Have Triton unload the model, and end its processes; return False if Triton is stuck.
        Raises BackendUnavailable if Triton exits meanwhile, or cannot be reached.
        """
        # claimed first: `_load_and_unload` starts other processes under the same names
        processes = await self.processes.claim(names)
        if call is not None and not await self._wait_for_answer(record, names, call):
            return False
        for name in reversed(record.placement.load):
            if not await self._ask_for_unload(record, names, name):
                return False
        remaining = await self.triton.wait_gone(names, _NORMAL_SECONDS)
        reloaded: set[str] = set()
        if remaining:
            reloaded = await self._hasten_unload(record, remaining, processes, is_dead=is_dead)
            if await self.triton.wait_gone(names, _NORMAL_SECONDS):
                return False
        await self._end_processes(record, processes, reloaded)
        await self._free_regions(record)
        return True

    async def _ask_for_unload(
        self, record: ModelRecord, names: frozenset[TritonName], name: TritonName
    ) -> bool:
        """Ask Triton for an unload, which waits for a load of the same model in Triton. Return
        False if Triton will not answer.
        """
        call = asyncio.ensure_future(self.triton.unload(name, record.id))
        try:
            if not await self._wait_for_answer(record, names, call):
                return False
            await call
        finally:
            call.cancel()
        return True

    async def _wait_for_answer(
        self, record: ModelRecord, names: frozenset[TritonName], call: asyncio.Future[None]
    ) -> bool:
        """Wait until Triton has answered a load or an unload; return False if it probably never
        will.

        If that takes long, kill the processes in which Triton initializes these models: their loads
        fail then, and an unload that waits for one of them goes on.
        """
        await asyncio.wait({call}, timeout=_GRACE_SECONDS)
        deadline = clock.monotonic() + self.limits.unload / 2
        while not call.done():
            if await self.kill_loading(names):
                deadline = min(deadline, clock.monotonic() + times.KILLED_SECONDS)
                log.warning("model.load_ended", extra={"model_id": record.id, "reason": _KILLED})
            elif await self._have_processes_ended(names):
                deadline = min(deadline, clock.monotonic() + _NORMAL_SECONDS)
            if clock.monotonic() > deadline:
                return False
            await asyncio.wait({call}, timeout=_NORMAL_SECONDS)
        if not call.cancelled():
            call.exception()  # mark the failure as seen: asyncio would log it otherwise
        return True

    async def kill_loading(self, names: Collection[str]) -> bool:
        """Kill the processes in which Triton initializes these models, so that their load fails;
        return whether there were any. Processes of loaded models stay, and of those that are being
        unloaded: such an unload would never end.
        """
        if not self.processes.are_seen:
            return False
        loading = await self.triton.being_loaded()
        return await self.processes.end_loads([TritonName(n) for n in names if n in loading])

    async def _hasten_unload(
        self, record: ModelRecord, names: set[str], processes: _Processes, *, is_dead: bool
    ) -> set[str]:
        """Hasten an unload that takes long: kill the processes of the models, and load and unload
        once more what Triton still has then. Return the names of the latter.
        """
        # the requests in flight had half of the unload's time limit to end by themselves
        is_computing = record.usage.in_flight > 0
        is_hopeless = is_dead or is_computing or await self._has_lost_a_process(names)
        grace_seconds = _NORMAL_SECONDS if is_hopeless else times.HANG_SECONDS
        remaining = await self.triton.wait_gone(names, grace_seconds)
        if not remaining:
            return set()
        fields = {"model_id": record.id, "names": sorted(remaining)}
        log.warning("model.unload_stalled", extra=fields)
        if await self._kill(record, processes):
            remaining = await self.triton.wait_gone(remaining, _NORMAL_SECONDS)
        # do so also where every process seems to live: those of another container are not seen
        for name in remaining:
            await self._load_and_unload(record, TritonName(name))
        return remaining

    async def _load_and_unload(self, record: ModelRecord, name: TritonName) -> None:
        """Free a model whose python process has died: Triton's unload of it never ends.

        Loading the same name again gives Triton a live process, and the unload of that one
        completes. Triton is silent about the first process from then on (docs/design/triton.md).
        """
        load = asyncio.ensure_future(self.triton.load(name, record.id))
        try:
            if not await self._wait_for_answer(record, frozenset({name}), load):
                return
            await load
        except AdapterError as error:
            if is_exit(error):
                raise
            # without its files Triton has a line of the model in its index at most
            fields = {"model_id": record.id, "reason": str(error)}
            log.warning("model.abandoned", extra=fields)
        finally:
            load.cancel()
        await self.triton.unload(name, record.id)
        # the process is a new one, so this unload may take as long as that of any model
        await self.triton.wait_gone({name}, times.HANG_SECONDS)

    # -- processes --------------------------------------------------------------------------

    async def _end_processes(
        self, record: ModelRecord, processes: _Processes, reloaded: set[str]
    ) -> None:
        """Wait for the model's processes to end, and kill those that do not. They get less time if
        some models of the package (`reloaded`) had to be loaded once more, to be rid of them.
        """
        linger_seconds = _NORMAL_SECONDS if reloaded else times.LINGER_SECONDS
        names = record.placement.names
        living = await self.processes.wait(names, processes, linger_seconds)
        if living:
            await self._kill(record, living)
            living = await self.processes.wait(names, living, times.KILLED_SECONDS)
        if living:
            fields = {
                "model_id": record.id,
                "processes": sorted(process.pid for process in living),
                "in_flight": record.usage.in_flight,
            }
            log.warning("model.left_running", extra=fields)
        elif reloaded and await self._has_lost_a_process(reloaded):
            self.leases.lose(record)  # no process is left to answer the requests in flight

    async def _kill(self, record: ModelRecord, processes: _Processes) -> bool:
        """Kill the processes that live; return whether there were any."""
        killed = await self.processes.kill(processes)
        log_killed(killed, model_id=record.id)
        return bool(killed)

    async def _has_lost_a_process(self, names: Collection[str]) -> bool:
        """Return whether one of these models has lost its python process."""
        has_process = await self._map_processes(names)
        return not all(has_process.values())

    async def _have_processes_ended(self, names: Collection[str]) -> bool:
        """Return whether all these models are python models whose processes are gone."""
        has_process = await self._map_processes(names)
        are_all_python = bool(names) and len(has_process) == len(names)
        return are_all_python and not any(has_process.values())

    async def _map_processes(self, names: Collection[str]) -> Mapping[TritonName, bool]:
        """Return which of these models are python models, and of each whether a process of it
        lives; nothing while processes cannot be seen.
        """
        with suppress(BackendUnavailable):
            instances = await self.processes.instances([TritonName(name) for name in names])
            return {name: bool(living) for name, living in instances.items()}
        return {}

    async def _free_regions(self, record: ModelRecord) -> None:
        """Free what Triton never does: the shared memory of processes that have died."""
        with suppress(BackendUnavailable):  # processes cannot be seen: Triton may be exiting
            freed_bytes = await self.processes.free_regions(record.placement.names)
            if freed_bytes:
                fields = {"model_id": record.id, "bytes": freed_bytes}
                log.info("model.regions_freed", extra=fields)


def log_killed(processes: _Processes, **log_fields: str) -> None:
    """Log processes of models that were killed, if there were any."""
    if not processes:
        return
    pids = sorted(process.pid for process in processes)
    log.warning("model.processes_killed", extra={**log_fields, "processes": pids})


def explain_unreleased(record: ModelRecord) -> BackendTimeout:
    """Return the error for an unload that Triton does not finish."""
    return BackendTimeout(
        f"Triton does not release model {record.id!r}: its name and its memory stay taken until it"
        " does; see docs/operations.md#a-load-hangs",
        model_id=record.id,
    )
