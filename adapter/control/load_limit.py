"""Ends loads at their time limit and for an unload, and has them wait for a load thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from adapter.control.memory import Memory
from adapter.control.progress import step
from adapter.core.model import ModelId, ModelSource
from adapter.core.registry import ModelRecord, Registry
from adapter.core.residency.terms import Terms
from adapter.core.state import ModelState, WaitsFor
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable, UnloadedMeanwhile
from adapter.runtime import clock

_UNDO_SECONDS = 1.0  # so long a caller waits for the undo
# How often a load that waits looks when no other load reports its end.
_POLL_SECONDS = 0.25
# A load that has taken no more memory for so long is said to hang. One that reads, converts or
# compiles takes some within seconds.
_HANGS_SECONDS = 30.0


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class LimitedLoad:
    """One load on `terms`, of `source` less its files, by `task`. `ended` is set once it is ended
    before its limit, `running` what is cancelled then. `is_unloaded`: an unload has ended it;
    `is_hanging`: another load that waits for a thread.
    """

    model_id: ModelId
    source: ModelSource
    terms: Terms
    task: asyncio.Task[ModelRecord] = field(init=False)
    begun: float = field(default_factory=_loop_time)
    ended: asyncio.Future[None] = field(default_factory=_future)
    running: asyncio.Timeout | None = None
    is_unloaded: bool = False
    is_hanging: bool = False

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self.running is not None:
            with suppress(RuntimeError):  # it is past its limit already
                self.running.reschedule(0)


class LoadLimit:
    """Holds the loads `in_progress`. Cancels those that take longer than `seconds`, or that are
    ended before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.in_progress: dict[ModelId, LimitedLoad] = {}  # they have no record until their turn
        self._is_stopped = False

    def begin(self, model_id: ModelId, source: ModelSource, terms: Terms) -> LimitedLoad:
        self.in_progress[model_id] = load = LimitedLoad(model_id, replace(source, files=()), terms)
        if self._is_stopped:
            load.end()
        return load

    def done(self, load: LimitedLoad) -> None:
        if self.in_progress.get(load.model_id) is load:
            del self.in_progress[load.model_id]

    @asynccontextmanager
    async def of(self, load: LimitedLoad) -> AsyncIterator[None]:
        """Cancel what is done within, once the load has to end. Raises BackendTimeout at the limit,
        UnloadedMeanwhile for an unload, and BackendUnavailable at the stop of the adapter.
        """
        at = 0 if load.ended.done() else load.begun + self._seconds
        load.running = limit = asyncio.timeout_at(at)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._error(load) from None
        finally:
            load.running = None

    async def outcome(self, load: LimitedLoad) -> ModelRecord:
        """Return the outcome of a load that runs within `of`. Raises the errors of `of` a second
        after the load has to end, and at once when the adapter stops: callers do not wait for the
        undo.
        """
        first, seconds = asyncio.FIRST_COMPLETED, self._seconds + _UNDO_SECONDS
        either: set[asyncio.Future[ModelRecord] | asyncio.Future[None]] = {load.task, load.ended}
        await asyncio.wait(either, timeout=seconds, return_when=first)
        if load.is_unloaded and not load.task.done():
            await asyncio.wait({load.task}, timeout=_UNDO_SECONDS)
        if not load.task.done():
            error = self._error(load)
            error.args = (f"{error}; what there is of it is being taken down",)
            raise error
        return await asyncio.shield(load.task)

    def end(self, model_id: ModelId) -> list[asyncio.Task[ModelRecord]]:
        """End the load of this model, if there is one, and those of other versions that are to take
        its place, for its unload. Return the tasks of these others.
        """
        replacing = [
            load
            for load in self.in_progress.values()
            if load.terms.takes_over is not None and load.terms.takes_over.asked_for == model_id
        ]
        own = self.in_progress.get(model_id)
        for load in [*replacing, *([] if own is None else [own])]:
            load.is_unloaded = load.is_unloaded or not self._is_over(load)
            load.end()
        return [load.task for load in replacing]

    def end_hanging(self, model_id: ModelId) -> None:
        """End the load of this model, which hangs, for others that wait for a load thread."""
        load = self.in_progress.get(model_id)
        if load is not None and not self._is_over(load):
            load.is_hanging = True
            load.end()

    def is_ended(self, model_id: ModelId) -> bool:
        """Return whether a load of the model has to end, and is being undone."""
        load = self.in_progress.get(model_id)
        return load is not None and self._is_over(load)

    def _is_over(self, load: LimitedLoad) -> bool:
        return load.ended.done() or _loop_time() > load.begun + self._seconds

    def stop(self) -> None:
        """End all loads, whose callers are answered at once."""
        self._is_stopped = True
        for load in self.in_progress.values():
            load.end()

    def _error(self, load: LimitedLoad) -> AdapterError:
        model_id = load.model_id
        if load.is_unloaded:
            why = f"model {model_id!r} was unloaded while it was being loaded"
            return UnloadedMeanwhile(why, model_id=model_id)
        if self._is_stopped:
            why = f"model {model_id!r} was not loaded before the adapter stopped"
            return BackendUnavailable(why, model_id=model_id, delivered=False)
        if load.is_hanging:
            why = f"the load of model {model_id!r} was ended for others: all of Triton's load "
            why += f"threads hung, and it had taken no memory for {_HANGS_SECONDS:g} s or more"
            return BackendTimeout(why, model_id=model_id)
        why = f"model {model_id!r} did not load within {self._seconds:g} s"
        return BackendTimeout(why, model_id=model_id)


class LoadThreads:
    """Triton has `count` of them. A load has one until Triton has answered, or has unloaded what
    the load has left; a stuck one until it is freed. While all hang and another load waits, the
    longest hanging one that was begun for calls is ended.
    """

    def __init__(self, registry: Registry, memory: Memory, count: int, limit: LoadLimit) -> None:
        self.count = count
        self._limit = limit
        self._registry = registry
        self._memory = memory
        # what Triton answers; a few, whatever the number of models
        self._inside: dict[ModelRecord, asyncio.Future[None] | None] = {}
        self._queue = asyncio.Lock()
        self._changed = asyncio.Event()

    async def take(self, record: ModelRecord) -> None:
        """Wait for a free thread, in order of arrival, and take it."""
        if self._queue.locked() or len(self.holders()) >= self.count:
            step(record, WaitsFor.THREAD, self.ids())
        async with self._queue:
            while len(self.holders()) >= self.count:
                record.awaits = self.ids()
                self._end_one_of_calls()
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._changed.wait()
            self._inside[record] = None
        if record.waits_for is WaitsFor.THREAD:
            step(record, WaitsFor.TRITON)

    def asked(self, record: ModelRecord, load: asyncio.Future[None]) -> None:
        """Keep the call of a load that has a thread."""
        self._inside[record] = load

    def call_of(self, record: ModelRecord) -> asyncio.Future[None] | None:
        """Return the call of a load that Triton has not answered, as far as anybody knows."""
        return self._inside.get(record)

    def give_back(self, record: ModelRecord) -> None:
        load = self._inside.pop(record, None)
        if load is not None and not load.cancel() and not load.cancelled():
            load.exception()  # the load was ended, and nobody waits for its outcome
        self._changed.set()

    def has(self, record: ModelRecord) -> bool:
        return record in self._inside

    def holders(self) -> list[ModelRecord]:
        return [*dict.fromkeys([*self._inside, *self._registry.stuck.values()])]

    def ids(self) -> tuple[ModelId, ...]:
        return tuple(record.id for record in self.holders())

    def hangs_since(self, record: ModelRecord) -> float | None:
        """Return since when the model's load in Triton has taken no memory (time.monotonic); None
        while that is not long, and for what Triton does not load. A stuck load hangs.
        """
        if record.state is ModelState.STUCK:
            return record.state_since
        since = self._memory.accounts.quiet_since(record.name) if self.has(record) else None
        is_long = since is not None and clock.monotonic() - since >= _HANGS_SECONDS
        return since if is_long else None

    def _end_one_of_calls(self) -> None:
        """End the load that hangs longest, of those begun for calls, if all hang and none ends."""
        hanging = [(self.hangs_since(record), record) for record in self.holders()]
        if any(since is None or self._limit.is_ended(record.id) for since, record in hanging):
            return
        of_calls = [(since or 0.0, r) for since, r in hanging if r.is_on_demand and self.has(r)]
        if of_calls:
            _, record = min(of_calls, key=lambda each: each[0])
            self._limit.end_hanging(record.id)

    def notes(self) -> list[str]:
        """Return that hanging loads keep all threads, and which; nothing while one is left."""
        now, told = clock.monotonic(), []
        for record in self.holders():
            if (since := self.hangs_since(record)) is None:
                return []
            told.append(f"{record.id!r} (for {now - since:.0f} s)")
        if len(told) < self.count:
            return []
        why = f"loads that hang keep all {self.count} load threads of Triton, and other loads wait"
        advice = "unload these models to end their loads; see docs/operations.md#a-load-hangs"
        return [f"{why}: {', '.join(told)}; {advice}"]
