"""An event loop whose time jumps to the next timer when nothing is ready, and its randomness.

Each port, timer and thread draws from a stream of its own, so that an operation that is left out
of a run changes little of what becomes of the others.
"""

import asyncio
import signal
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

from adapter.runtime import clock
from adapter.runtime.threads import CACHE, FETCHED, Threads
from tests.simulation.threads import Asked, as_thread

T = TypeVar("T")

BEGIN = 1000.0  # of the monotonic clock
EPOCH = 1_760_000_000.0
_MOST_AT_ONCE = 200_000  # iterations without any time passing
_MOST_CPU_SECONDS = 3.0  # of one turn, which takes milliseconds
_SAME_SECONDS = 1e-6  # timers this close together are due at the same moment


class Draws:
    """One seed's randomness: `of(...)` is the stream that belongs to these words."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[str, Random] = {}

    def of(self, *words: object) -> Random:
        key = " ".join(map(str, words))
        if key not in self._streams:
            self._streams[key] = Random(f"{self._seed} {key}")
        return self._streams[key]


class Standstill(Exception):
    """The day does not go on: nothing is ready and no timer is set, or code spins."""


def _spins(_signal: int, _frame: object) -> None:
    ignore_unawaited()
    raise Standstill(f"a turn of the loop has taken {_MOST_CPU_SECONDS} s of CPU")


def ignore_unawaited() -> None:
    """Let the rest of a day leave coroutines that nobody awaits: it is broken off where it is."""
    warnings.simplefilter("ignore", RuntimeWarning)


class _Jump:
    """Lets time pass where the loop would wait for files."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop
        self._at_once = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Standstill
        self._at_once = 0 if timeout > _SAME_SECONDS else self._at_once + 1
        if self._at_once > _MOST_AT_ONCE:
            self._at_once = 0  # the tasks that end now take turns, too
            raise Standstill(f"{_MOST_AT_ONCE} turns of the loop at {self._loop.time()}")
        self._loop.now += timeout
        self._loop.begin_turn()
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.now = BEGIN
        self._selector = _Jump(self)
        self._order = draws.of("order of timers")

    def begin_turn(self) -> None:
        """Note that a turn begins. A simulated day bounds its CPU."""

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        """Timers for the same moment fire in a drawn order."""
        return super().call_at(when + self._order.random() * _SAME_SECONDS, *args, **kwargs)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class _DayLoop(VirtualLoop):
    """Ends a turn that spins, by a signal whose handler and end are up to `virtual`."""

    def begin_turn(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, _MOST_CPU_SECONDS, 1.0)  # an exit may swallow one


@contextmanager
def virtual(draws: Draws) -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """Give a function that runs a coroutine in virtual time, which the adapter's clock shows."""

    def submit(self: Threads, done: Future[Any], act: Callable[[], Any]) -> None:
        # only work on the disk cache asks the loop for anything
        may_wait = self in {CACHE, FETCHED}
        as_thread(asyncio.get_running_loop(), draws.of("thread"), done, act, may_wait=may_wait)

    real = clock.monotonic, clock.wall, clock.sleep, Threads.submit
    ask = asyncio.run_coroutine_threadsafe
    before = signal.signal(signal.SIGPROF, _spins)
    loop = _DayLoop(draws)
    clock.monotonic = loop.time
    clock.wall = lambda: EPOCH + loop.time()
    clock.sleep = lambda _: None
    Threads.submit = submit
    asyncio.run_coroutine_threadsafe = Asked
    try:
        # a day that is cut ends in virtual time, too: the runner ends its tasks
        with warnings.catch_warnings(), asyncio.Runner(loop_factory=lambda: loop) as runner:
            yield runner.run
    finally:
        clock.monotonic, clock.wall, clock.sleep, Threads.submit = real
        asyncio.run_coroutine_threadsafe = ask
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


async def turns(random: Random) -> None:
    """Take a drawn number of turns of the loop."""
    for _ in range(random.choice((0, 1, 1, 2, 5, 20))):
        await asyncio.sleep(0)
