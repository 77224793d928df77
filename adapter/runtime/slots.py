"""Shares slots for work among callers: each has its turn, whatever others request."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf

# How often those who wait are checked when no work reports its end.
_TICK_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class _Waiter:
    name: str
    callers: Collection[str]
    turn: asyncio.Future[None]


class FairSlots:
    """Shares slots fairly among callers.

    A free slot goes to the caller whose last one is longest ago; of that caller's work, to what
    came first. Work that no caller waits for any more comes last.
    """

    def __init__(
        self,
        count: int,
        hangs: Callable[[str], bool] = lambda _: False,  # the work of this name takes no slot
    ) -> None:
        self._count = count
        self._hangs = hangs
        self._held: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []
        self._given = 0
        self._last: dict[str, int] = {}  # of each caller: which slot of all was its last
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(self, name: str, callers: Collection[str]) -> AsyncIterator[None]:
        """Wait for a slot, and hold it. `callers`: who waits for the work, at any time."""
        await self.acquire(name, callers)
        try:
            yield
        finally:
            self.release(name)

    async def acquire(
        self,
        name: str,
        callers: Collection[str],  # read anew at each choice
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for a slot as `slot` does, and hold it until `release`.

        Call `on_wait` first if none is free.
        """
        waiter = _Waiter(name, callers, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._give()
        try:
            if not waiter.turn.done():
                on_wait()
            await waiter.turn
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.release(name)
            raise

    def release(self, name: str) -> None:
        """Free the slot that the work holds."""
        self._held[name] -= 1
        self._give()

    def _give(self) -> None:
        while (waiting := self._patient()) and self._is_free():
            waiter = min(waiting, key=self._turn)
            self._waiting.remove(waiter)
            self._held[waiter.name] += 1
            self._given += 1
            if waiter.callers:
                self._last[min(waiter.callers, key=self._last_of)] = self._given
            waiter.turn.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _patient(self) -> list[_Waiter]:
        """Return those that still wait: not those that are cancelled, and about to leave."""
        return [each for each in self._waiting if not each.turn.done()]

    def _tick(self) -> None:
        self._timer = None
        self._give()

    def _is_free(self) -> bool:
        self._held = +self._held
        return sum(n for name, n in self._held.items() if not self._hangs(name)) < self._count

    def _turn(self, waiter: _Waiter) -> float:
        return min(map(self._last_of, waiter.callers), default=inf)

    def _last_of(self, caller: str) -> float:
        return self._last.get(caller, 0)
