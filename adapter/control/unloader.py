"""Unloads a model from Triton until its processes have ended; keeps a list of stuck models."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from adapter.control.leftovers import Leftovers
from adapter.control.ports import Server, TimeLimits, Triton
from adapter.core.model import ModelId, ProcessId, TritonName
from adapter.core.names import replacement_name, triton_name
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable
from adapter.runtime.threads import PROCESSES
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# How long Triton takes at most to unload a model whose process has ended normally.
_NORMAL_SECONDS = 1.0
_POLL_FIRST_SECONDS, _POLL_LAST_SECONDS = 0.01, 0.25

_Processes = frozenset[ProcessId]


class Unloader:
    """Unloads models, and kills processes that outlive their model.

    `stuck`: models whose load does not end, by name. Each keeps one of Triton's few load threads,
    mostly until Triton is restarted.
    """

    def __init__(
        self,
        triton: Triton,
        server: Server | None,
        limits: TimeLimits,
        leftovers: Leftovers,
        metrics: Metrics,
    ) -> None:
        self.stuck: dict[TritonName, ModelRecord] = {}
        self._triton = triton
        self._server = server
        self._limits = limits
        self._leftovers = leftovers
        self._metrics = metrics

    def give_up(self, record: ModelRecord) -> None:
        """Mark a model as stuck: Triton never ends its load, and an unload would wait for that."""
        self.stuck[record.name] = record
        log.error("model.load_stuck", extra={"model_id": record.id, "stuck": len(self.stuck)})

    def free_name(self, model_id: ModelId) -> TritonName:
        """Return the model's name in Triton, or another while Triton is stuck with that one."""
        name, number = triton_name(model_id), 0
        while name in self.stuck:
            number += 1
            name = replacement_name(model_id, number)
        return name

    async def unload(
        self,
        record: ModelRecord,
        *,
        is_dead: bool = False,
        to_the_end: bool = False,
    ) -> None:
        """Unload the model; return when Triton no longer has it and, with an embedded server, its
        processes and all that they started have ended. A stuck model is left alone.

        The processes of an unload without progress are killed. Raises BackendTimeout if some
        survive; `to_the_end` waits for them without limit instead.
        """
        if record.name in self.stuck:
            return
        names = frozenset(record.placement.names)
        # taken now: `_unload_again` starts others under the same names
        processes = await self._processes_of(names)
        try:
            for name in reversed(record.placement.load):
                await self._triton.unload(name, record.id)
        except BackendTimeout:
            if record.state is ModelState.LOADING:  # the unload waits for that load
                self.give_up(record)
            raise
        left = await self._triton.wait_gone(names, _NORMAL_SECONDS)
        was_reloaded = bool(left) and await self._hurry(record, left, processes, is_dead=is_dead)
        await self._see_ended(record, processes, asks_leases=was_reloaded, to_the_end=to_the_end)

    async def _hurry(
        self,
        record: ModelRecord,
        left: set[str],
        processes: _Processes,
        *,
        is_dead: bool,
    ) -> bool:
        """Hasten the unload of `left`. Returns whether `_unload_again` was needed."""
        is_dead = is_dead or any([await self._has_lost_its_process(name) for name in left])
        # a model that seems dead gets a second too: its process may just have ended normally; one
        # that still computes had its time during the drain
        is_hopeless = is_dead or record.in_flight > 0
        grace_seconds = _NORMAL_SECONDS if is_hopeless else self._limits.stall
        left = await self._triton.wait_gone(left, grace_seconds)
        if not left:
            return False
        log.warning("model.unload_stalled", extra={"model_id": record.id, "names": left})
        if await self._kill(record, processes):
            left = await self._triton.wait_gone(left, _NORMAL_SECONDS)
        if left:
            await self._unload_again(record, left, is_dead=is_dead)
        return bool(left)

    async def _unload_again(self, record: ModelRecord, left: set[str], *, is_dead: bool) -> None:
        """The unload of a model whose python process has died stays in UNLOADING for ever. Loading
        the same name again gives Triton a live process, and the unload of that one completes.
        Of the first process Triton then says nothing any more (docs/design/triton.md).
        """
        for name in map(TritonName, left):
            try:
                await self._triton.load(name, record.id)
            except AdapterError as error:
                if not is_dead:
                    raise _not_gone(record) from error
                # Its files are gone as well: only a line in Triton's index is left.
                reason = {"model_id": record.id, "reason": str(error)}
                log.warning("model.abandoned", extra=reason)
                left = left - {name}
                continue
            await self._triton.unload(name, record.id)
        if await self._triton.wait_gone(left, self._limits.unload / 2):
            raise _not_gone(record)

    # -- processes that outlive the unload ----------------------------------------------------

    async def _see_ended(
        self, record: ModelRecord, processes: _Processes, *, asks_leases: bool, to_the_end: bool
    ) -> None:
        """Wait until the model's processes have ended, and kill those that do not.

        After `_unload_again` Triton's index says nothing of the process that computes. Where that
        cannot be seen either, `asks_leases` waits for the requests in flight instead.
        """

        async def is_left() -> bool:
            nonlocal processes
            processes = await self._left(record, processes)
            return bool(processes) or (asks_leases and record.in_flight > 0)

        if not await _outlasts(is_left, self._limits.linger):
            return
        await self._kill(record, processes)
        if not await _outlasts(is_left, self._limits.killed):
            return
        if not to_the_end:
            raise _not_gone(record)
        with self._leftovers.unended(record, processes):
            while await _outlasts(is_left, self._limits.killed):
                await self._kill(record, processes)

    async def _left(self, record: ModelRecord, processes: _Processes) -> _Processes:
        """Return the processes that live, and daemons that the model has started since."""
        try:
            others = await self._processes_of(record.placement.names)
        except BackendUnavailable:  # processes cannot be seen
            return processes
        return others | await self._living(processes)

    async def _kill(self, record: ModelRecord, processes: _Processes) -> bool:
        """Kill the processes that live; return whether there were any."""
        if self._server is None or not (living := await self._living(processes)):
            return False
        pids = sorted(process.pid for process in living)
        fields = {"model_id": record.id, "processes": pids}
        log.warning("model.processes_killed", extra=fields)
        self._metrics.processes_killed.inc(len(pids))
        await self._server.kill(living)
        return True

    async def _processes_of(self, names: Collection[str]) -> _Processes:
        if self._server is None:
            return frozenset()
        return await self._server.processes_of([*map(TritonName, names)])

    async def _living(self, processes: _Processes) -> _Processes:
        if self._server is None or not processes:
            return frozenset()
        return await self._server.living(processes)

    async def _has_lost_its_process(self, name: str) -> bool:
        if self._server is None:
            return False
        return await PROCESSES.run(self._server.has_live_stub, TritonName(name)) is False


async def _outlasts(is_left: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Poll until nothing is left, for `seconds` at most; return whether something is."""
    end, pause = time.monotonic() + seconds, _POLL_FIRST_SECONDS
    while await is_left():
        if time.monotonic() + pause > end:
            return True
        await asyncio.sleep(pause)
        pause = min(pause * 2, _POLL_LAST_SECONDS)
    return False


def _not_gone(record: ModelRecord) -> BackendTimeout:
    return BackendTimeout(f"Triton does not let go of model {record.id!r}", model_id=record.id)
