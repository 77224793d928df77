"""Runs operations: each in a task of its own, one at a time per model, one log line each."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
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

_MAX_OPERATIONS = 1000


class Operations:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.history = metrics.history
        self._tasks: set[asyncio.Task[Any]] = set()
        # an operation has its lock before the model has a record, or beyond it
        self._locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()
        self._update_locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()

    def lock(self, model_id: ModelId) -> asyncio.Lock:
        """Return the FIFO lock of this model; an unused lock is garbage collected."""
        return self._locks.setdefault(model_id, asyncio.Lock())

    def update_lock(self, model_id: ModelId) -> asyncio.Lock:
        """Return the lock of the updates of this model, each of which has several operations."""
        return self._update_locks.setdefault(model_id, asyncio.Lock())

    def refuse_when_full(self, model_id: ModelId) -> None:
        """Raise Overloaded at the limit: no limit on callers bounds loads, which outlive them."""
        if len(self._tasks) >= _MAX_OPERATIONS:
            raise Overloaded(
                f"{len(self._tasks)} loads and unloads are under way already",
                model_id=model_id,
                delivered=False,
            )

    def start(
        self, operation: str, model_id: ModelId | None, work: Coroutine[Any, Any, T]
    ) -> asyncio.Task[T]:
        """Run `work` to its end, even if its caller stops waiting. `operation` and `model_id` are
        for the log; None: the operation concerns no single model.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, operation, model_id))
        return task

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    async def drain(self, seconds: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def logged(
        self,
        operation: str,
        model_id: ModelId,
        work: Coroutine[Any, Any, T],
        size_of: Callable[[T], int],
        *,
        log_fields: Mapping[str, str],
        **begun_fields: object,
    ) -> T:
        """Await `work`; write a log line when it begins and when it ends, and update the metrics.

        `size_of`: the bytes that the outcome has taken, or freed. `log_fields` are for both lines,
        `begun_fields` for the first.
        """
        begun, outcome, level = clock.monotonic(), "ok", logging.INFO
        event, fields = f"model.{operation}ed", {"model_id": model_id, **log_fields}
        ending: dict[str, Any] = dict(fields)
        log.info(f"model.{operation}ing", extra=fields | begun_fields)  # noqa: G004 - its name
        try:
            with self._metrics.operations_in_flight.labels(operation).track_inprogress():
                result = await work
        except AdapterError as error:
            outcome = type(error).__name__
            event, level = self._failed(operation, model_id, error, begun)
            ending |= {"reason": str(error), "error": outcome}
            raise
        except BaseException:
            outcome, event = "bug", f"model.{operation}_failed"
            raise
        else:
            ending["bytes"] = size = size_of(result)
            if operation == "load":
                self._metrics.loaded_bytes.observe(size)
            self.history.done(operation, model_id, clock.monotonic() - begun, size, log_fields)
            return result
        finally:
            ending["seconds"] = round(self._measured(operation, outcome, begun), 3)
            log.log(level, event, extra=ending)

    def _measured(self, operation: str, outcome: str, begun: float) -> float:
        """Count an operation that has ended; return how many seconds it took."""
        seconds = clock.monotonic() - begun
        self._metrics.operations.labels(operation, outcome).inc()
        self._metrics.operation_seconds.labels(operation).observe(seconds)
        return seconds

    def _failed(
        self, operation: str, model_id: ModelId, error: AdapterError, begun: float
    ) -> tuple[str, int]:
        """Note a failure; return the event that tells it, and the level of its line."""
        self.history.failed(operation, model_id, error, clock.monotonic() - begun)
        self._count_out_of_memory(error)
        error.is_logged = True
        is_refused = was_refused(error)
        event = f"model.{operation}_{'refused' if is_refused else 'failed'}"
        return event, logging.INFO if is_refused else logging.WARNING

    def _count_out_of_memory(self, error: AdapterError) -> None:
        if isinstance(error, InsufficientMemory | OutOfMemory | ModelTooLarge):
            phase = "refused" if was_refused(error) else "load"
            self._metrics.count_out_of_memory(phase, error.pattern)

    def _ended(self, operation: str, model_id: ModelId | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Read the exception here too: the caller may have gone, and no failure may go unseen.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AdapterError):
            fields = {"operation": operation, "model_id": model_id}
            log.error("operation.failed", exc_info=error, extra=fields)
