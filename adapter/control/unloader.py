"""Unloads a model from Triton until its processes have ended; keeps a list of stuck models."""

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from adapter.control.orphans import OrphanProcesses
from adapter.control.ports import Ports, TimeLimits
from adapter.core import versions
from adapter.core.memory import Bytes
from adapter.core.model import ModelId, ProcessId, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelEvent, ModelState
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable
from adapter.runtime import clock

log = logging.getLogger(__name__)

# How long Triton takes at most to unload a model whose process has ended normally.
_NORMAL_SECONDS = 1.0
_POLL_FIRST_SECONDS, _POLL_LAST_SECONDS = 0.01, 0.25

# Between two looks at the processes of a load that is to end.
_END_FIRST_SECONDS, _END_LAST_SECONDS = 0.1, 1.0
# A load that ends by itself so soon is left alone: Triton never answers one killed as it ends.
_GRACE_SECONDS = 1.5
# within which Triton answers a load that was ended, if it ever does
_ENDED_SECONDS, _ENDED_SLOWLY_SECONDS = 10.0, 25.0
ENDED = "its python processes were killed, so that Triton ends its load"

_LATE_SECONDS = 1.0  # so long beyond its limit a caller waits for an unload

_NOT_LOADED = (ModelState.LOADING, ModelState.STUCK)

_Processes = frozenset[ProcessId]


class Unloader:
    """Unloads models, and kills processes that outlive their model."""

    def __init__(
        self,
        registry: Registry,
        ports: Ports,
        limits: TimeLimits,
        orphans: OrphanProcesses,
        *,
        lose_requests: Callable[[ModelRecord], None],
    ) -> None:
        """`lose_requests` ends the leases of a model whose requests can never be answered."""
        self._registry = registry
        self._triton = ports.triton
        self._processes = ports.processes
        self._limits = limits
        self._orphans = orphans
        self._lose_requests = lose_requests

    def give_up(self, record: ModelRecord) -> None:
        """Mark a model as stuck: Triton never ends its load, and an unload would wait for that.

        It keeps one of Triton's few load threads, mostly until Triton is restarted.
        """
        self._registry.apply(record, ModelEvent.GIVEN_UP)
        stuck = len(self._registry.stuck)
        log.error("model.load_stuck", extra={"model_id": record.id, "stuck": stuck})

    async def outcome(self, model_id: ModelId, task: asyncio.Task[Bytes]) -> None:
        """Wait for an unload, whose error is raised; BackendTimeout a second after its limit."""
        done, _ = await asyncio.wait({task}, timeout=self._limits.unload + _LATE_SECONDS)
        if not done:
            why = f"was not gone within {self._limits.unload:g} s; its unload goes on"
            raise BackendTimeout(f"model {model_id!r} {why}", model_id=model_id)
        task.result()

    async def unload(
        self,
        record: ModelRecord,
        *,
        is_dead: bool = False,
        to_the_end: bool = False,
        load: asyncio.Future[None] | None = None,
    ) -> None:
        """Unload the model; return when Triton no longer has it and, with an embedded server, its
        processes and all that they started have ended. A stuck model is left alone. `load`: the
        call of its load that Triton has not answered; the load is ended.

        The processes of an unload without progress are killed. Raises BackendTimeout if some
        survive; `to_the_end` waits for them without limit instead.
        """
        if record.name in self._registry.stuck:
            return
        names = frozenset(record.placement.names)
        # taken now: `_unload_again` starts others under the same names
        processes = await self._processes.claim([*map(TritonName, names)])
        try:
            if load is not None:
                # an unload sent before may overtake the load, and one that waits may end Triton
                await self._answered(record, load, is_loading=True)
            await self._ask(record, is_loading=load is not None)
            left = await self._triton.wait_gone(names, _NORMAL_SECONDS)
            if left:
                left = await self._end_soon(record, left, processes, is_dead=is_dead)
        except BackendTimeout:
            if self._is_given_up_with(record):
                self.give_up(record)
            raise
        await self._see_ended(record, processes, reloaded=left, to_the_end=to_the_end)
        await self._free_regions(record)

    def _is_given_up_with(self, record: ModelRecord) -> bool:
        """Return whether no record would remain of a model that Triton keeps after a failed unload:
        its load is being undone, or it has left the table.
        """
        if record.name in self._registry.stuck:
            return False  # that is known
        known = self._registry.get(record.id)
        if known is record:
            return record.state in _NOT_LOADED
        return known is None or known.name != record.name

    async def _ask(self, record: ModelRecord, *, is_loading: bool) -> None:
        """Ask Triton for the unload, which waits for loads of these models in Triton."""
        is_forgotten = self._registry.get(record.id) is not record
        for name in reversed(record.placement.load):
            call = asyncio.ensure_future(self._triton.unload(name, record.id))
            try:
                if is_forgotten or record.state in _NOT_LOADED:
                    await self._answered(record, call, is_loading=is_loading or is_forgotten)
                await call
            finally:
                call.cancel()

    async def _answered(
        self, record: ModelRecord, call: asyncio.Future[None], *, is_loading: bool
    ) -> None:
        """Wait until Triton has answered, and end the load of the model if it does not end soon."""
        begun, pause = clock.monotonic(), _END_FIRST_SECONDS
        end = begun + self._limits.unload
        while not (await asyncio.wait({call}, timeout=pause))[0]:
            now, pause = clock.monotonic(), min(pause * 1.2, _END_LAST_SECONDS)
            if now > end:
                raise still_loading(record)
            is_due = is_loading and now - begun > _GRACE_SECONDS
            if is_due and await self.end_loading(record):
                record.was_ended = True
                is_slow = versions.has(versions.SLOW_POLLS, self._triton.version)
                end = min(end, now + (_ENDED_SLOWLY_SECONDS if is_slow else _ENDED_SECONDS))
                log.warning("model.load_ended", extra={"model_id": record.id, "reason": ENDED})

    async def end_loading(self, record: ModelRecord) -> bool:
        """Kill the processes in which Triton initializes the model, so that its load fails; return
        whether there were any. A model that is loaded, or being unloaded, is left alone: its unload
        would never end.
        """
        if not self._processes.are_seen:
            return False
        loading = await self._triton.being_loaded()
        names = [TritonName(n) for n in record.placement.names if n in loading]
        return await self._processes.end_loads(names)

    async def may_hold_memory(self, record: ModelRecord) -> bool:
        """Return whether Triton may still hold memory for a stuck model."""
        names = frozenset(record.placement.names)
        return not names <= await self._lost_processes(names)

    async def _free_regions(self, record: ModelRecord) -> None:
        """Give back what Triton never does: the shared memory of processes that have died."""
        with suppress(BackendUnavailable):  # processes cannot be seen: Triton may be ending
            freed = await self._processes.free_regions([*map(TritonName, record.placement.names)])
            if freed:
                log.info("model.regions_freed", extra={"model_id": record.id, "bytes": freed})

    async def _end_soon(
        self,
        record: ModelRecord,
        left: set[str],
        processes: _Processes,
        *,
        is_dead: bool,
    ) -> set[str]:
        """Hasten the unload of `left`. Returns those for which `_unload_again` was needed."""
        is_dead = is_dead or bool(await self._lost_processes(left))
        # a model that seems dead gets a second too: its process may just have ended normally; one
        # that still computes had its time during the drain
        is_hopeless = is_dead or record.usage.in_flight > 0
        grace_seconds = _NORMAL_SECONDS if is_hopeless else self._limits.stall
        left = await self._triton.wait_gone(left, grace_seconds)
        if not left:
            return left
        log.warning("model.unload_stalled", extra={"model_id": record.id, "names": sorted(left)})
        if await self._kill(record, processes):
            is_dead = True
            left = await self._triton.wait_gone(left, _NORMAL_SECONDS)
        if left:
            await self._unload_again(record, left, is_dead=is_dead)
        return left

    async def _unload_again(self, record: ModelRecord, left: set[str], *, is_dead: bool) -> None:
        """The unload of a model whose python process has died stays in UNLOADING for ever. Loading
        the same name again gives Triton a live process, and the unload of that one completes.
        Of the first process Triton then says nothing any more (docs/design/triton.md).
        """
        for name in map(TritonName, left):
            try:
                await self._load_again(record, name)
            except BackendTimeout as error:
                self.give_up(record)
                why = f"{_not_gone(record)}: it does not end the load that was to free it, and the"
                why += " model is left to it"
                raise BackendTimeout(why, model_id=record.id) from error
            except AdapterError as error:
                if not is_dead:
                    if await self._triton.wait_gone({name}, _NORMAL_SECONDS):
                        raise _not_gone(record) from error
                    left = left - {name}  # its unload was only slow
                    continue
                # Its files are gone, or its load was ended: Triton has a line in its index at most.
                reason = {"model_id": record.id, "reason": str(error)}
                log.warning("model.abandoned", extra=reason)
                left = left - {name}
                continue
            await self._triton.unload(name, record.id)
        if await self._triton.wait_gone(left, self._limits.unload / 2):
            raise _not_gone(record)

    async def _load_again(self, record: ModelRecord, name: TritonName) -> None:
        """Load, and end the load if it does not end soon: `initialize` may hang by now."""
        load = asyncio.ensure_future(self._triton.load(name, record.id))
        try:
            await self._answered(record, load, is_loading=True)
            await load
        finally:
            load.cancel()

    # -- processes that outlive the unload ----------------------------------------------------

    async def _see_ended(
        self, record: ModelRecord, processes: _Processes, *, reloaded: set[str], to_the_end: bool
    ) -> None:
        """Wait until the model's processes have ended, and kill those that do not.

        After `_unload_again`, of the models `reloaded`, Triton's index says nothing of the process
        that computes. The requests in flight are waited for as well then, until it is seen that
        no process is left to answer them; `_hurry` has killed what there was.
        """
        outlasting = partial(self._outlasting, record, reloaded)
        linger_seconds = self._limits.linger
        if reloaded:
            linger_seconds = min(linger_seconds, _NORMAL_SECONDS)
        if (left := await outlasting(processes, linger_seconds)) is None:
            return
        await self._kill(record, left)
        if (left := await outlasting(left, self._limits.killed)) is None:
            return
        if not to_the_end:
            raise _not_gone(record)
        with self._orphans.unended(record, left):
            while left is not None:
                await self._kill(record, left)
                left = await outlasting(left, self._limits.killed)

    async def _outlasting(
        self, record: ModelRecord, reloaded: set[str], processes: _Processes, seconds: float
    ) -> _Processes | None:
        """Return the processes that live after `seconds`; None as soon as nothing is left to wait
        for. An empty set: requests that may still be answered.
        """
        end = clock.monotonic() + seconds
        names = [*map(TritonName, record.placement.names)]
        living = await self._processes.wait(names, processes, seconds)
        if living or not reloaded:
            return living or None
        if not await _outlasts(lambda: record.usage.in_flight > 0, end - clock.monotonic()):
            return None
        if await self._never_answers(record, reloaded):
            self._lose_requests(record)
            return None
        return living

    async def _never_answers(self, record: ModelRecord, reloaded: set[str]) -> bool:
        """Return whether all `reloaded` models have lost the processes that they computed in. An
        ensemble computes nothing by itself.
        """
        placement = record.placement
        ensembles = {*placement.load[-1:]} if placement.along else set()
        computing = reloaded - ensembles
        return computing <= await self._lost_processes(computing)

    async def _kill(self, record: ModelRecord, processes: _Processes) -> bool:
        """Kill the processes that live; return whether there were any."""
        return await self._orphans.kill(processes, model_id=record.id)

    async def _lost_processes(self, names: Collection[str]) -> frozenset[str]:
        """Return which of these models have lost their python processes, as far as that is seen."""
        with suppress(BackendUnavailable):
            found = await self._processes.instances([*map(TritonName, names)])
            return frozenset(name for name, instances in found.items() if not instances)
        return frozenset()


async def _outlasts(is_left: Callable[[], bool], seconds: float) -> bool:
    """Poll until nothing is left, for `seconds` at most; return whether something is."""
    end, pause = clock.monotonic() + seconds, _POLL_FIRST_SECONDS
    while is_left():
        if clock.monotonic() + pause > end:
            return True
        await asyncio.sleep(pause)
        pause = min(pause * 2, _POLL_LAST_SECONDS)
    return False


def still_loading(record: ModelRecord) -> BackendTimeout:
    begun = (
        f"for {clock.wall() - record.begun_at:.0f} s" if record.begun_at else "since an earlier run"
    )
    return BackendTimeout(
        f"model {record.id!r} cannot be unloaded yet: Triton has been loading it {begun}, and "
        "nothing else can end the load; the unload follows it, and until then the memory stays "
        "booked; see docs/operations.md#a-load-hangs",
        model_id=record.id,
    )


def _not_gone(record: ModelRecord) -> BackendTimeout:
    return BackendTimeout(f"Triton does not release model {record.id!r}", model_id=record.id)
