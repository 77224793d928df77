"""Steps a coroutine by hand, without a task of asyncio.

The coroutine of a connection waits for bytes far more often than for anything else. To wait it
awaits `wait_for_news`, and whoever has news for the connection calls `Stepper.step`: the coroutine
looks at its connection and goes on, or waits again. A step costs a tenth of what a task takes.

What needs asyncio (a load to wait for, a thread for a conversion) runs as a task beside the
coroutine, by `Stepper.delegate`. A future of asyncio that is awaited by hand would never wake the
coroutine; it is refused with RuntimeError where it is awaited.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_NEWS: Final = object()


@coroutine
def wait_for_news() -> Generator[object, None, None]:
    """Suspend the coroutine until the next step. Await it in a loop that checks a condition."""
    yield _NEWS


class Stepper:
    """Drives one coroutine: each step runs it until it waits again, or ends."""

    __slots__ = ("_coroutine", "_has_news", "_is_running", "_on_error")

    def __init__(
        self,
        coroutine: Coroutine[object, None, None],
        on_error: Callable[[BaseException], None],  # called with what ended the coroutine
    ) -> None:
        self._coroutine: Coroutine[object, None, None] | None = coroutine
        self._on_error = on_error
        self._is_running = False
        self._has_news = False

    def step(self) -> None:
        """Run the coroutine until it waits. Within a step, have it look again before it waits."""
        coroutine = self._coroutine
        if self._is_running or coroutine is None:
            self._has_news = True
            return
        self._is_running = True
        self._has_news = False
        try:
            signal = coroutine.send(None)
            if signal is not _NEWS or self._has_news:
                self._run_on(coroutine, signal)
        except StopIteration:
            self._coroutine = None
        except BaseException as ending:  # noqa: BLE001 - the owner of the coroutine decides
            self._coroutine = None
            self._on_error(ending)
            ending.__traceback__ = None  # whose frames refer to the error
        finally:
            self._is_running = False

    def cancel(self) -> None:
        """Raise CancelledError in the coroutine, which ends with that step.

        The owner is forgotten then, so that it is freed without Python's garbage collector.
        """
        coroutine = self._coroutine
        if self._is_running:
            return
        on_error = self._on_error
        self._on_error = _ignore
        if coroutine is None:
            return
        self._is_running = True
        try:
            self._run_on(coroutine, coroutine.throw(asyncio.CancelledError()))
        except StopIteration:
            pass
        except BaseException as ending:  # noqa: BLE001 - the owner of the coroutine decides
            on_error(ending)
            ending.__traceback__ = None  # whose frames refer to the error
        finally:
            self._is_running = False
            self._coroutine = None
            coroutine.close()

    def _run_on(self, coroutine: Coroutine[object, None, None], signal: object) -> None:
        """Resume the coroutine while it has news, or has awaited what no step can wait for."""
        while signal is not _NEWS or self._has_news:
            self._has_news = False
            signal = coroutine.send(None) if signal is _NEWS else coroutine.throw(_refuse(signal))

    async def delegate(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> T:
        """Run `work` as a task, and return its result; cancel the task if the wait is cancelled."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        task.add_done_callback(lambda _: self.step())
        try:
            while not task.done():
                await wait_for_news()
        except BaseException:
            task.cancel()
            raise
        return task.result()


def _ignore(_: BaseException) -> None:
    """Do nothing about an error of a coroutine whose owner has gone."""


def _refuse(signal: object) -> RuntimeError:
    """Return the error of an awaitable that no step can wait for."""
    if getattr(signal, "_asyncio_future_blocking", False):
        signal._asyncio_future_blocking = False  # type: ignore[attr-defined] # noqa: SLF001
    return RuntimeError(f"awaited by hand, which needs a task: {signal!r}; use delegate")
