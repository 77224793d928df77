"""Threads for what may take long, apart by what they may wait for: never one pool for all.

An archive of somebody's may keep its thread for minutes, and a disk over the network for ever; so
whoever only wants to be refused, measured or unloaded has threads that do no such work.
"""

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from adapter.errors import BackendUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """At most `most` threads, begun when there is work. What is more waits its turn.

    They do not keep the process from ending, whatever they wait for: a ThreadPoolExecutor does.
    `nice`: by how much they yield the CPU to the event loop where both want it.
    """

    def __init__(self, name: str, most: int, *, nice: int = 0) -> None:
        self._name = name
        self._most = most
        self._nice = nice
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._count = self._free = 0
        self._lock = threading.Lock()

    async def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Its result or error. Who is cancelled meanwhile does not stop it once it has begun.

        BackendUnavailable when not even one thread is to be had.
        """
        done: Future[T] = Future()
        context = contextvars.copy_context()
        self._provide()
        self._work.put((done, partial(context.run, act, *args, **kwargs)))
        return await asyncio.wrap_future(done)

    def _provide(self) -> None:
        with self._lock:
            if self._free > self._work.qsize() or self._count == self._most:
                return
            name = f"{self._name}-{self._count}"
            try:
                threading.Thread(target=self._serve, name=name, daemon=True).start()
            except RuntimeError as error:
                if not self._count:
                    raise BackendUnavailable(
                        f"no thread is to be had: {error}", delivered=False
                    ) from error
                return  # those that there are will do it
            self._count += 1

    def _serve(self) -> None:
        if self._nice:
            os.nice(self._nice)  # of this thread alone, on Linux
        while True:
            with self._lock:
                self._free += 1
            done, act = self._work.get()
            with self._lock:
                self._free -= 1
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(act())
                except BaseException as error:  # noqa: BLE001 - it is for who asked
                    done.set_exception(error)
            del done, act  # and what they hold, until the next


LOOKUPS = Threads("lookups", 8)  # a path in the model roots, which may be anywhere
WALKS = Threads("walks", 4, nice=10)  # all of a package
UNPACKS = Threads("unpacks", 4, nice=10)  # all of its bytes
REPOSITORY = Threads("repository", 8)  # Triton's repository, our own notes
PROCESSES = Threads("processes", 4)  # /proc
