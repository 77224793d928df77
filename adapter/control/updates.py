"""Ask stores for other versions of the models of calls, and replace those that are outdated."""

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from adapter.control.models import Models
from adapter.control.ports import Artifacts
from adapter.core import times
from adapter.core.artifacts import Artifact
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.registry import Registry
from adapter.errors import AdapterError
from adapter.runtime import background, clock

log = logging.getLogger(__name__)

_AT_ONCE = 4


@dataclass(slots=True, eq=False)
class Updates:
    """Replaces models of stores when the store has another version."""

    registry: Registry
    models: Models
    artifacts: Artifacts
    interval_seconds: float  # 0 disables the check
    _checked_at: dict[ModelRecord, float] = field(default_factory=dict)
    _tasks: dict[ModelRecord, asyncio.Task[None]] = field(default_factory=dict)
    _logged_reasons: dict[ModelRecord, str] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def run(self) -> NoReturn:
        """Check the models for ever, each when its time has come."""
        await background.forever(
            self.check,
            seconds=times.PAUSE_SECONDS / 4,
            expected=AdapterError,
        )

    async def check(self) -> None:
        """Start a task for each model that was last checked an interval ago: it asks the store, and
        updates the model if the store has another version.
        """
        if not self.interval_seconds:
            return
        updatable = [record for record in self.registry.records() if self._is_updatable(record)]
        self._checked_at = {
            record: self._checked_at.get(record, record.state_since) for record in updatable
        }
        self._logged_reasons = {
            record: reason
            for record, reason in self._logged_reasons.items()
            if record in self._checked_at
        }
        due_at = clock.monotonic() - self.interval_seconds
        for record, checked_at in self._checked_at.items():
            is_due = checked_at <= due_at and record not in self._tasks
            if is_due and record.files is not None:
                task = asyncio.create_task(self._update(record, record.files))
                self._tasks[record] = task
                task.add_done_callback(partial(self._forget, record))

    def close(self) -> None:
        """Check no more models, and cancel the checks in progress."""
        self.interval_seconds = 0
        for task in self._tasks.values():
            task.cancel()

    def _is_updatable(self, record: ModelRecord) -> bool:
        """Return whether the model serves, was fetched from a store, and was loaded for calls: a
        platform updates its own models itself.
        """
        is_for_calls = record.loaded_for is LoadedFor.CALLS
        return is_for_calls and record.key is not None and self.registry.is_serving(record)

    def _forget(self, record: ModelRecord, task: asyncio.Task[None]) -> None:
        del self._tasks[record]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task.failed", exc_info=error, extra={"task": "update"})

    async def _update(self, record: ModelRecord, artifact: Artifact) -> None:
        """Replace the model if the store has another version of it."""
        async with self._slots:
            self._checked_at[record] = clock.monotonic()
            try:
                is_current = await self.artifacts.is_current(artifact)
                if record.failed_update is not None and not is_current:
                    # a version that failed once is not tried again: calls would wait for it in vain
                    is_current = await self.artifacts.is_current(record.failed_update)
            except AdapterError as error:
                self._log_failure(record, str(error))
                return
            self._logged_reasons.pop(record, None)
            is_updatable = self._is_updatable(record)
            if is_current or not is_updatable or record.key is None:
                return
            try:
                await self.models.update(record, record.key, evicted="changed")
            except AdapterError as error:
                fields = {"model_id": record.id, "reason": str(error)}
                log.warning("model.not_renewed", extra=fields)

    def _log_failure(self, record: ModelRecord, reason: str) -> None:
        """Log why the store could not be asked, unless that was logged and has not changed."""
        if self._logged_reasons.get(record) == reason:
            return
        self._logged_reasons[record] = reason
        log.warning("model.not_revalidated", extra={"model_id": record.id, "reason": reason})
