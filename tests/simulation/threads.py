"""Threads in virtual time: each runs while the loop stands still, so that a seed repeats a run."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from random import Random
from typing import Any

from tests.simulation.kills import ADAPTER, Killed, refuse_dead

_idle: "list[_Thread]" = []
_here = threading.local()


class _Thread:
    """A real thread. It and the loop take turns: only one of them ever runs."""

    def __init__(self) -> None:
        self._its_turn = threading.Lock()
        self._loops_turn = threading.Lock()
        self._its_turn.acquire()
        self._loops_turn.acquire()
        self._act: Callable[[], Any] | None = None
        threading.Thread(target=self._serve, name="simulated", daemon=True).start()

    def do(
        self, loop: asyncio.AbstractEventLoop, act: Callable[[], Any], ended: Callable[..., Any]
    ) -> None:
        """Run `act` until it ends or waits for the loop. At its end `ended` is called, with what
        settles a future.
        """
        self._loop = loop
        self._act = act
        self._ended = ended
        self.go_on()

    def go_on(self) -> None:
        self._its_turn.release()
        self._loops_turn.acquire()
        if self._act is None:
            _idle.append(self)
            self._ended(self._settles)

    def wait(self) -> None:
        """Let the loop go on until `go_on`; called in the thread."""
        self._loops_turn.release()
        self._its_turn.acquire()

    def _serve(self) -> None:
        _here.thread = self
        while True:
            self._its_turn.acquire()
            asyncio._set_running_loop(self._loop)  # which stands still
            self._settles = _outcome(self._act)
            self._act = None
            self._loops_turn.release()


class Asked:
    """Holds what a thread has asked of the loop, as asyncio.run_coroutine_threadsafe does."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._thread: _Thread = _here.thread
        self._task = loop.create_task(work)

    def result(self) -> Any:
        self._task.add_done_callback(lambda _: self._thread.go_on())
        self._thread.wait()
        refuse_dead()
        return self._task.result()


def as_thread(
    loop: asyncio.AbstractEventLoop,
    random: Random,
    done: Future[Any],
    act: Callable[[], Any],
    *,
    may_wait: bool,
) -> None:
    """Do the work of a thread at a drawn moment, and tell of it at a later one. `may_wait`: it asks
    the loop for something meanwhile.
    """
    adapter = ADAPTER.get()

    def begin() -> None:
        if done.set_running_or_notify_cancel():
            loop.call_later(_latency(random), work)

    def work() -> None:
        if adapter is not None and not adapter.is_running:
            done.set_exception(Killed())
            return
        if may_wait:
            thread = _idle.pop() if _idle else _Thread()
            thread.do(loop, act, ended)
        else:
            ended(_outcome(act))

    def ended(outcome: Callable[..., Any]) -> None:
        loop.call_later(_latency(random), outcome, done)

    loop.call_later(_latency(random), begin)


def _outcome(act: Callable[[], Any]) -> Callable[[Future[Any]], None]:
    """Return what settles a future as the act has ended."""
    try:
        result = act()
    except BaseException as error:  # noqa: BLE001 - as a thread passes it on
        return partial(Future.set_exception, exception=error)
    return partial(Future.set_result, result=result)


def _latency(random: Random) -> float:
    return random.choice((0.0, 0.0, 0.0, 0.001, 0.01, 0.1))
