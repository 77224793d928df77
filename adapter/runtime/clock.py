"""Reads the time for all other modules, waits for changes, and runs work to its end.

A simulation lets the time jump, so other modules call `clock.monotonic()`. A name that is bound at
import, as by `from`, would go on with the real time; so would a default argument: whatever takes a
function gets `now`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

monotonic = time.monotonic
wall = time.time  # since 1970
sleep = time.sleep  # of a thread


def now() -> float:
    """Return `monotonic()`."""
    return monotonic()


async def run_to_end(
    work: Coroutine[Any, Any, T], on_cancel: Callable[[], object] = lambda: None
) -> T:
    """Await the work to its end, even if the caller is cancelled; then raise the cancellation. Call
    `on_cancel` for each cancellation.
    """
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
            on_cancel()
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # mark the failure as seen: the cancellation is raised in its place
    raise cancellation


class Changes:
    """Wakes whoever waits for memory, requests or Triton to change."""

    def __init__(self) -> None:
        # in order of arrival, which simulations repeat: futures in a set have none
        self._waiters: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        """Wake all that wait now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, limit_seconds: float) -> None:
        """Return at the next change, or after `limit_seconds`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await asyncio.wait({waiter}, timeout=limit_seconds)
        finally:
            del self._waiters[waiter]
