"""The time limit of loads, and their end when the adapter stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from adapter.core.model import ModelId
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable

T = TypeVar("T")

_UNDO_SECONDS = 1.0  # so long a caller waits for the undo


class LoadLimit:
    """Cancels loads that take longer than `seconds`, and all of them when the adapter stops."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._running: set[asyncio.Timeout] = set()
        self._callers: set[asyncio.Future[None]] = set()
        self._is_stopped = False

    @asynccontextmanager
    async def of(self, model_id: ModelId, begun: float) -> AsyncIterator[None]:
        """Cancel what is done within at the limit of a load that has begun then, by loop.time().

        Raises BackendTimeout then, and BackendUnavailable at the stop of the adapter.
        """
        limit = asyncio.timeout_at(0 if self._is_stopped else begun + self._seconds)
        try:
            async with limit:
                self._running.add(limit)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._error(model_id) from None
        finally:
            self._running.discard(limit)

    async def outcome(self, model_id: ModelId, task: asyncio.Task[T]) -> T:
        """Return the outcome of a load that runs within `of`. Raises the errors of `of` a second
        after the limit, and at once when the adapter stops: callers do not wait for the undo.
        """
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers.add(stopped)
        try:
            first, seconds = asyncio.FIRST_COMPLETED, self._seconds + _UNDO_SECONDS
            either: set[asyncio.Future[T] | asyncio.Future[None]] = {task, stopped}
            await asyncio.wait(either, timeout=seconds, return_when=first)
        finally:
            self._callers.discard(stopped)
        if not task.done():
            raise self._error(model_id)
        return task.result()

    def stop(self) -> None:
        """End all loads, whose callers are answered at once."""
        self._is_stopped = True
        for stopped in self._callers:
            stopped.set_result(None)
        self._callers.clear()
        for limit in self._running:
            with suppress(RuntimeError):  # it is past its limit already
                limit.reschedule(0)

    def _error(self, model_id: ModelId) -> AdapterError:
        undone = "what there is of it is being taken down"
        if self._is_stopped:
            return BackendUnavailable(
                f"model {model_id!r} was not loaded before the adapter stopped; {undone}",
                model_id=model_id,
                delivered=False,
            )
        return BackendTimeout(
            f"model {model_id!r} did not load within {self._seconds:g} s; {undone}",
            model_id=model_id,
        )
