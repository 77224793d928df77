"""Runs slow work in thread pools, one for each resource that the work may wait for.

An archive may keep its thread for minutes, and a network disk for ever; so refusals, measurements
and unloads have threads that never do such work.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from adapter.errors import BackendUnavailable
from adapter.runtime.clock import run_to_end

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A pool of at most `most` threads, started on demand; further work is queued.

    Unlike those of a ThreadPoolExecutor, the threads never keep the process from ending.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._count = 0  # of threads
        self._unfinished = 0  # pieces of work, queued and under way
        self._lock = threading.Lock()

    async def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in a thread and return its result. Cancellation does not stop an `act` that has
        begun.

        Raises BackendUnavailable if not even one thread can be started.
        """
        return await self._result(Future(), partial(act, *args, **kwargs))

    async def run_to_end(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` as `run` does, but end a cancelled call only when `act` has ended; an `act`
        that has not begun never runs.

        For what writes: whoever cancels it removes what was written.
        """
        done: Future[T] = Future()
        work = self._result(done, partial(act, *args, **kwargs))
        return await run_to_end(work, on_cancel=done.cancel)

    async def _result(self, done: Future[T], act: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        self.submit(done, partial(context.run, act))
        return await asyncio.wrap_future(done)

    def submit(self, done: Future[T], act: Callable[[], T]) -> None:
        """Have a thread run `act`, and settle `done` with its outcome."""
        self._provide()
        self._work.put((done, act))

    def _provide(self) -> None:
        """Start a thread for one more piece of work if all threads are busy."""
        with self._lock:
            self._unfinished += 1
            if self._unfinished <= self._count or self._count == self._most:
                return
            name = f"{self._name}-{self._count}"
            try:
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            except RuntimeError as error:
                if not self._count:
                    self._unfinished -= 1
                    raise BackendUnavailable(
                        f"no thread can be started: {error}", delivered=False
                    ) from error
                return  # the existing threads will do the work
            self._count += 1

    def _serve(self) -> None:
        while True:
            done, act = self._work.get()
            settle: Callable[[], None] | None = None
            if done.set_running_or_notify_cancel():
                try:
                    settle = partial(done.set_result, act())
                except BaseException as error:  # noqa: BLE001 - passed to the caller
                    settle = partial(done.set_exception, error)
            with self._lock:  # first, so that whoever asks again at once finds this thread free
                self._unfinished -= 1
            if settle is not None:
                settle()
            del done, act, settle  # release what they refer to while waiting


LOOKUPS = Threads("lookups", 8)  # paths in the model roots, on any kind of disk
WALKS = Threads("walks", 4)  # each lists all entries of a package
UNPACKS = Threads("unpacks", 4)  # each reads all bytes of a package
REPOSITORY = Threads("repository", 8)  # Triton's repository and its ownership notes
PROCESSES = Threads("processes", 4)  # /proc
HASHES = Threads("hashes", 2)  # bodies of signed requests
# Bodies between text and a tensor's bytes. Two threads would convert no more of them, as Python's
# lock lets one compute, and the event loop would wait for it 30 ms (p90) in place of 0.3 ms.
CONVERSIONS = Threads("conversions", 1)
CACHE = Threads("cache", 8)  # files of the cache of artifacts, one at a time
# An archive is unpacked while it arrives: it has a thread of each for as long as that takes.
MAX_UNPACKED_AT_ONCE = 16
FETCHED = Threads("fetched", MAX_UNPACKED_AT_ONCE)  # each waits for a process that unpacks
PIPES = Threads("pipes", MAX_UNPACKED_AT_ONCE)  # each writes to such a process
