"""Run one load, unload or update of a model at a time, each in a task that outlives its caller."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from adapter.core.model import ModelId
from adapter.core.record import ModelRecord, Step
from adapter.core.states import ModelState
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    InsufficientMemory,
    ModelTooLarge,
    OutOfMemory,
    Overloaded,
    was_refused,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]

# Loads outlive their callers, so no limit on callers bounds them.
_MAX_OPERATIONS = 1000


class Kind(Enum):
    """Names the kinds of operations."""

    LOAD = "load"
    REPLACE = "replace"
    UNLOAD = "unload"


class Operation(Generic[T]):
    """Runs once the model's lock is free. Callers wait for `outcome`, and may leave."""

    record: ModelRecord | None = None  # of a load

    def __init__(self, model_id: ModelId, kind: Kind, work: Work[T], lock: asyncio.Lock) -> None:
        self.model_id = model_id
        self.kind = kind
        self.started_at = clock.monotonic()
        self._lock = lock
        self._reason: asyncio.Future[AdapterError] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[T] = asyncio.create_task(self._run(work))

    async def _run(self, work: Work[T]) -> T:
        async with self._lock:
            return await work()

    @property
    def reason(self) -> AdapterError | None:
        """Return why the operation was ended; None if it was not."""
        return self._reason.result() if self._reason.done() else None

    @property
    def is_load(self) -> bool:
        """Return whether this is a load or an update that has neither been ended nor failed.

        A load that has failed does not count: while it is undone, its model is being unloaded.
        """
        has_failed = self.record is not None and self.record.state is ModelState.UNLOADING
        has_ended = self.reason is not None or has_failed
        return self.kind is not Kind.UNLOAD and not has_ended

    def end(self, reason: AdapterError) -> None:
        """End the operation and undo it; its callers get `reason` at once."""
        if not self._reason.done():
            self._reason.set_result(reason)
            self.task.cancel()

    async def wait(self, limit_seconds: float | None = None) -> bool:
        """Wait for the end, whatever it is; return whether it came within `limit_seconds`."""
        endings: set[asyncio.Future[Any]] = {self.task, self._reason}
        done, _ = await asyncio.wait(
            endings, timeout=limit_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    async def outcome(self, limit_seconds: float | None = None) -> T:
        """Return the result, or raise the failure. Raises TimeoutError while it is in progress."""
        if not await self.wait(limit_seconds):
            raise TimeoutError
        if self._reason.done():
            raise self._reason.result().with_traceback(None)
        error = None if self.task.cancelled() else self.task.exception()
        if error is not None:
            raise error.with_traceback(None)  # other callers get the same exception
        try:
            return self.task.result()
        except asyncio.CancelledError:  # the loop ends, and with it the adapter
            raise BackendUnavailable("the adapter is stopping", delivered=False) from None


class Operations:
    """Starts operations, and knows which model is being loaded, replaced or unloaded."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()
        self._of_model: defaultdict[ModelId, list[Operation[Any]]] = defaultdict(list)
        self._by_task: dict[asyncio.Task[Any], Operation[Any]] = {}
        self._is_open = True

    def __len__(self) -> int:
        return len(self._by_task)

    def refuse_when_full(self, model_id: ModelId) -> None:
        """Raise Overloaded while too many operations are in progress."""
        if len(self) >= _MAX_OPERATIONS:
            raise Overloaded(
                f"{len(self)} loads and unloads are in progress already",
                model_id=model_id,
                delivered=False,
            )

    def start(self, model_id: ModelId, kind: Kind, work: Work[T]) -> Operation[T]:
        """Start an operation, which waits for those of the same model before it."""
        if not self._is_open:
            raise make_drain_refusal()
        lock = self._locks.setdefault(model_id, asyncio.Lock())
        operation = Operation(model_id, kind, work, lock)
        self._by_task[operation.task] = operation
        self._of_model[model_id].append(operation)
        operation.task.add_done_callback(partial(self._forget, operation))
        return operation

    def _forget(self, operation: Operation[Any], task: asyncio.Task[Any]) -> None:
        del self._by_task[task]
        operations = self._of_model[operation.model_id]
        operations.remove(operation)
        if not operations:
            del self._of_model[operation.model_id]
        # the callers may have left, and a bug must be seen
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AdapterError):
            fields = {"operation": operation.kind.value, "model_id": operation.model_id}
            log.error("operation.failed", exc_info=error, extra=fields)

    def load_of(self, model_id: ModelId) -> Operation[Any] | None:
        """Return the newest load or update of this model, queued or in progress."""
        operations = self._of_model.get(model_id, [])
        loads = [operation for operation in operations if operation.is_load]
        return loads[-1] if loads else None

    def is_unloading(self, model_id: ModelId) -> bool:
        """Return whether an unload of this model is queued or in progress."""
        operations = self._of_model.get(model_id, [])
        return any(operation.kind is Kind.UNLOAD for operation in operations)

    def is_busy(self, model_id: ModelId) -> bool:
        """Return whether any operation of this model is queued or in progress."""
        return model_id in self._of_model

    def end_loads(self, model_id: ModelId, reason: AdapterError) -> None:
        """End all loads and updates of this model, queued or in progress."""
        for operation in self._of_model.get(model_id, []):
            if operation.kind is not Kind.UNLOAD:
                operation.end(reason)

    def find_reason(self) -> AdapterError | None:
        """Return why the operation of the present task was ended; None if it was not."""
        task = asyncio.current_task()
        operation = None if task is None else self._by_task.get(task)
        return None if operation is None else operation.reason

    # -- stop -------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new operations from now on."""
        self._is_open = False

    async def drain(self, limit_seconds: float) -> None:
        """Wait for the operations in progress, at most for `limit_seconds`."""
        if self._by_task:
            await asyncio.wait(self._by_task.keys(), timeout=limit_seconds)

    def end_all_loads(self) -> None:
        """End all loads and updates, because the adapter stops."""
        for model_id in list(self._of_model):
            text = f"model {model_id!r} was not loaded before the adapter stopped"
            reason = BackendUnavailable(text, model_id=model_id, delivered=False)
            self.end_loads(model_id, reason)


def make_drain_refusal() -> BackendUnavailable:
    """Return the error for a load or an unload that comes when the adapter drains."""
    text = "the adapter is draining, and loads and unloads nothing any more: use another one"
    return BackendUnavailable(text, delivered=False)


def note_step(record: ModelRecord, step: Step, blockers: tuple[ModelId, ...] = ()) -> None:
    """Show operators what a load or an unload spends its time on now, and which models it waits
    for.
    """
    if step is not record.step:
        log.debug("model.step", extra={"model_id": record.id, "waits_for": step.value})
    record.step = step
    record.blockers = blockers


@dataclass(slots=True)
class JournalEntry:
    """Holds what the last log line of a load or an unload says beside its duration."""

    size_bytes: int = 0  # taken by the load, or freed by the unload


class Journal:
    """Writes a line when a load or an unload begins and when it ends, and counts them."""

    def __init__(self, metrics: Metrics, operations: Operations) -> None:
        self.metrics = metrics
        self.evictions: Counter[str] = Counter()  # by reason
        self._operations = operations

    @contextmanager
    def record(
        self,
        operation: str,  # load or unload
        model_id: ModelId,
        log_fields: Mapping[str, str],  # for both lines
        **begin_fields: object,  # for the first line
    ) -> Iterator[JournalEntry]:
        """Log the begin and the end of the operation in the block; count it in metrics and history.
        The block sets the size in the entry.
        """
        started_at = clock.monotonic()
        entry = JournalEntry()
        fields: dict[str, object] = {"model_id": model_id, **log_fields}
        log.info(f"model.{operation}ing", extra=fields | begin_fields)  # noqa: G004 - the event's name
        in_progress = self.metrics.operations_in_flight.labels(operation)
        try:
            with in_progress.track_inprogress():
                yield entry
        except asyncio.CancelledError:
            reason = self._operations.find_reason()
            if reason is not None:
                self._record_failure(operation, model_id, reason, started_at, fields)
            raise
        except AdapterError as error:
            self._record_failure(operation, model_id, error, started_at, fields)
            raise
        except Exception:
            seconds = self._count(operation, "bug", started_at)
            # the error itself has a line of its own (operation.failed)
            log.info(f"model.{operation}_failed", extra=fields | {"seconds": seconds})  # noqa: G004
            raise
        if operation == "load":
            self.metrics.loaded_bytes.observe(entry.size_bytes)
        seconds = self._count(operation, "ok", started_at)
        self.metrics.history.done(operation, model_id, seconds, entry.size_bytes, log_fields)
        if "evicted" in log_fields:
            self._count_eviction(log_fields["evicted"], seconds)
        fields |= {"bytes": entry.size_bytes, "seconds": seconds}
        log.info(f"model.{operation}ed", extra=fields)  # noqa: G004 - the event's name

    def _record_failure(
        self,
        operation: str,
        model_id: ModelId,
        error: AdapterError,
        started_at: float,
        fields: dict[str, object],
    ) -> None:
        """Log, count and list for operators an operation that ended with an error."""
        is_refused = was_refused(error)
        error_name = type(error).__name__
        seconds = self._count(operation, error_name, started_at)
        # a failure of the fetch is logged for each caller, and listed by the fetch
        if not error.is_of_fetch:
            error.is_logged = True
            self.metrics.history.failed(operation, model_id, error, seconds)
        if isinstance(error, InsufficientMemory | OutOfMemory | ModelTooLarge):
            phase = "refused" if is_refused else "load"
            self.metrics.count_out_of_memory(phase, error.pattern)
        event = "model.load_refused" if is_refused else f"model.{operation}_failed"
        level = logging.INFO if is_refused else logging.WARNING
        failure = {"reason": str(error), "error": error_name, "seconds": seconds}
        log.log(level, event, extra=fields | failure)

    def _count_eviction(self, reason: str, seconds: float) -> None:
        """Count an eviction by its reason, and the seconds that the unload took."""
        self.evictions[reason] += 1
        self.metrics.endpoint_evictions.labels("memory", reason).inc()
        self.metrics.endpoint_unloading_seconds.observe(seconds)

    def _count(self, operation: str, outcome: str, started_at: float) -> float:
        """Count an operation that has ended; return how many seconds it took."""
        seconds = clock.monotonic() - started_at
        self.metrics.operations.labels(operation, outcome).inc()
        self.metrics.operation_seconds.labels(operation).observe(seconds)
        return round(seconds, 3)
