"""Runs background tasks that must not end by themselves: supervision, probes, housekeeping.

A step that fails is logged, and the next one follows. A task that ends all the same is a bug from
which this process cannot recover: `find_ended_task` makes the liveness probe fail.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from adapter.runtime import clock

log = logging.getLogger(__name__)

_LAG_SECONDS = 0.1

_begun: set[asyncio.Task[Any]] = set()


def begin(name: str, work: Coroutine[Any, Any, NoReturn]) -> asyncio.Task[NoReturn]:
    """Run `work` in a task until `end`."""
    task = asyncio.create_task(work, name=name)
    _begun.add(task)
    task.add_done_callback(_done)
    return task


def end(task: asyncio.Task[Any]) -> None:
    """Cancel the task. Await the task itself to know that it has ended."""
    _begun.discard(task)
    task.cancel()


async def forever(
    *steps: Callable[[], Awaitable[object]],
    seconds: float,
    expected: type[Exception] | tuple[()] = (),
) -> NoReturn:
    """Await the steps in turn for ever, with a pause of `seconds` after the last.

    Errors of the type `expected` are not logged.
    """
    logged = dict.fromkeys(steps, "")
    while True:
        for step in steps:
            try:
                await step()
            except expected:
                continue
            except Exception as error:
                if repr(error) != logged[step]:  # a repeated error is logged once
                    logged[step] = repr(error)
                    log.exception("task.failed", extra={"task": _name()})
            else:
                logged[step] = ""
        await asyncio.sleep(seconds)


def find_ended_task() -> str | None:
    """Return why a task has ended without `end`; None while all run."""
    return next((_reason(task) for task in _begun if task.done()), None)


def _done(task: asyncio.Task[Any]) -> None:
    if task in _begun:
        log.critical("task.ended", extra={"task": task.get_name(), "reason": _reason(task)})


def _reason(task: asyncio.Task[Any]) -> str:
    how = "cancelled" if task.cancelled() else repr(task.exception())
    return f"the task {task.get_name()} has ended: {how}"


def _name() -> str:
    task = asyncio.current_task()
    return "" if task is None else task.get_name()


async def measure_lag(observe: Callable[[float], object]) -> NoReturn:
    """Observe ten times a second by how many seconds the event loop comes late to a timer.

    A loop that is short of CPU, or held up by one long callback, shows it nowhere else: the time
    for which a request is not read counts as Triton's or the caller's.
    """
    while True:
        due = clock.monotonic() + _LAG_SECONDS
        await asyncio.sleep(_LAG_SECONDS)
        observe(max(0.0, clock.monotonic() - due))
