"""Tasks that must not end before they are told to: what supervises, watches and looks after.

One step that fails costs that step alone: it is logged and the next one follows. A task that ends
all the same is a bug that nothing in this process mends, so `why_ended` is for the liveness probe.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

log = logging.getLogger(__name__)

_begun: set[asyncio.Task[Any]] = set()


def begin(name: str, work: Coroutine[Any, Any, NoReturn]) -> asyncio.Task[NoReturn]:
    """Run `work` in a task until `end`."""
    task = asyncio.create_task(work, name=name)
    _begun.add(task)
    task.add_done_callback(_done)
    return task


def end(task: asyncio.Task[Any]) -> None:
    """Cancel it. Await the task itself to see it gone."""
    _begun.discard(task)
    task.cancel()


async def forever(
    *steps: Callable[[], Awaitable[object]],
    seconds: float,
    expected: type[Exception] | tuple[()] = (),
) -> NoReturn:
    """Await the steps in turn, again and again, with a pause of so many seconds behind the last.

    What is `expected` to fail is not logged.
    """
    told = dict.fromkeys(steps, "")
    while True:
        for step in steps:
            try:
                await step()
            except expected:
                continue
            except Exception as error:
                if repr(error) != told[step]:  # the same thing again and again is one line
                    told[step] = repr(error)
                    log.exception("task.failed", extra={"task": _name()})
            else:
                told[step] = ""
        await asyncio.sleep(seconds)


def why_ended() -> str | None:
    """Of a task that has ended and was not told to; None while all go on."""
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
