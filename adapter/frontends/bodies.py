"""Bodies that coroutines read, as the budget of callers' bytes knows them."""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from adapter.errors import AdapterError
from adapter.runtime.byte_budget import ByteBudget


class HeldBody:
    """A body that counts until `end`. `turn` is set while it may be read. `fail` tells who reads
    it that it was cut.
    """

    def __init__(
        self,
        budget: ByteBudget,
        announced: int | None,
        senders: Iterable[str] = (),
        *,
        fail: Callable[[AdapterError], None] = lambda _: None,
        is_reading: Callable[[], bool] = lambda: True,
    ) -> None:
        self.turn = asyncio.Event()
        self.turn.set()
        self.is_reading = is_reading
        self._fail = fail
        self._error: AdapterError | None = None
        self._holding = budget.hold(self, announced, senders)
        self.arrived, self.verify = self._holding.arrived, self._holding.verify

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        self._holding.end()
        self.turn.set()

    async def take(self, size: int) -> None:
        """Count `size` bytes that have arrived, and wait until more may come. Raises what the body
        was cut for.
        """
        if not self._holding.take(size):
            self.turn.clear()
            await self.turn.wait()
        if self._error is not None:
            raise self._error

    # -- for the budget ---------------------------------------------------------------------

    def resume(self) -> None:
        self.turn.set()

    def cut(self, error: AdapterError) -> None:
        self._error = error
        self.turn.set()
        self._fail(error)
