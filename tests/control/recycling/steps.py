"""A Triton that loses memory, and is another one a second after it was ended."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.model import ModelId
from adapter.errors import LoadFailed
from tests.fakes.house import House

MIB = 2**20
SECONDS = TimeLimits(load=100, unload=100, stall=50, recovery=1, alone=5, drain=18, call=55)
AWAY_SECONDS = 1.0


def restartable(house: House, back: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have the fake Triton end when it is restarted, and `back` begin then."""

    async def restart(reason: str) -> None:
        house.server.restarts.append(reason)
        house.triton.end()
        house.triton.live = False
        house.begin(back())

    house.server.restart = restart  # type: ignore[method-assign]


async def come_back(house: House) -> None:
    await asyncio.sleep(AWAY_SECONDS)
    house.triton.live, house.triton.lives = True, house.triton.lives + 1
    house.server.pid = house.triton.lives
    await house.control.triton_restarted()


class Leaking(House):
    """1000 MiB; `lost` bytes are nobody's, and go with Triton unless it `keeps` them."""

    def __init__(self, share: float | None = 0.2, **more: Any) -> None:
        super().__init__(1000 * MIB, SECONDS, recycle_share=share, **more)
        self.lost, self.keeps = 0, False
        self.ended_at: list[float] = []
        self._seen_before = 0  # steps, when Triton last came back
        restartable(self, self._come_back)

    def _used(self) -> int:
        return super()._used() + self.lost

    async def leak(self, mib: int) -> None:
        """By a load that fails."""
        self.lost += mib * MIB
        self.steps.fail("load leaky", LoadFailed("bad"))
        try:
            await self.load("leaky")
        except LoadFailed:
            return
        raise AssertionError("it was loaded")

    async def _come_back(self) -> None:
        self.ended_at.append(asyncio.get_running_loop().time())
        self.lost, self._seen_before = self.lost if self.keeps else 0, len(self.steps.seen)
        await come_back(self)

    @property
    def back(self) -> list[str]:
        """The models, as they were loaded again."""
        seen = self.steps.seen[self._seen_before :]
        return [each.removeprefix("load ") for each in seen if each.startswith("load ")]

    async def watched(self) -> "Leaking":
        await self.open()
        self.begin(self.control.run_housekeeping())
        return self

    async def seconds(self, count: float) -> None:
        await asyncio.sleep(count)

    async def call(self, name: str) -> float:
        """One inference; return how long it has waited."""
        begun = asyncio.get_running_loop().time()
        lease = await self.control.serving(ModelId(name), 5)
        with lease:
            await asyncio.sleep(0)
            assert name in self.triton.models
        return asyncio.get_running_loop().time() - begun

    def unaccounted(self) -> int:
        return (self.control.memory.ledger.snapshot().devices[HOST].unaccounted_bytes or 0) // MIB
