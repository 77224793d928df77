"""Runs operations: each in a task of its own, one at a time per model, one log line each."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
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
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_OPERATIONS = 1000


class Operations:
    def __init__(self, metrics: Metrics, size_of: Callable[[ModelId], int]) -> None:
        self._metrics = metrics
        self._size_of = size_of
        self._tasks: set[asyncio.Task[Any]] = set()
        self._locks: WeakValueDictionary[ModelId, asyncio.Lock] = WeakValueDictionary()

    def lock(self, model_id: ModelId) -> asyncio.Lock:
        """Return the FIFO lock of this model; an unused lock is garbage collected."""
        return self._locks.setdefault(model_id, asyncio.Lock())

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
        log_fields: dict[str, str],
    ) -> T:
        """Await `work`, then write its log line and update the metrics."""
        begun = time.monotonic()
        outcome, level, event = "ok", logging.INFO, f"model.{operation}ed"
        fields: dict[str, Any] = dict(log_fields)
        try:
            with self._metrics.operations_in_flight.labels(operation).track_inprogress():
                return await work
        except AdapterError as error:
            outcome = type(error).__name__
            refused = was_refused(error)
            event = f"model.{operation}_{'refused' if refused else 'failed'}"
            level = logging.INFO if refused else logging.WARNING
            fields["reason"] = str(error)
            self._count_out_of_memory(error)
            raise
        except BaseException:
            outcome, event = "bug", f"model.{operation}_failed"
            raise
        finally:
            seconds = time.monotonic() - begun
            self._metrics.operations.labels(operation, outcome).inc()
            self._metrics.operation_seconds.labels(operation).observe(seconds)
            fields |= {"model_id": model_id, "seconds": round(seconds, 3)}
            fields["bytes"] = size = self._size_of(model_id)
            if event == "model.loaded":
                self._metrics.loaded_bytes.observe(size)
            log.log(level, event, extra=fields)

    def _count_out_of_memory(self, error: AdapterError) -> None:
        if isinstance(error, InsufficientMemory):
            self._metrics.out_of_memory.labels("refused", "").inc()
        elif isinstance(error, OutOfMemory | ModelTooLarge):
            self._metrics.out_of_memory.labels("load", error.pattern or "").inc()

    def _ended(self, operation: str, model_id: ModelId | None, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Read the exception here too: the caller may have gone, and no failure may go unseen.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AdapterError):
            fields = {"operation": operation, "model_id": model_id}
            log.error("operation.failed", exc_info=error, extra=fields)
