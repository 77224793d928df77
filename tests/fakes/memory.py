"""A memory reader that sees what the fake Triton has loaded."""

from collections.abc import Callable

from adapter.core.ledger import MemoryReading
from tests.fakes.steps import Steps


class FakeMemory:
    """Sees nothing at all while `limit_bytes` is None."""

    def __init__(self, steps: Steps, used: Callable[[], int]) -> None:
        self.limit_bytes: int | None = None
        self.last: MemoryReading | None = None
        self._steps = steps
        self._used = used

    async def read(self) -> MemoryReading | None:
        limit = self.limit_bytes
        self.last = None if limit is None else MemoryReading(limit, self._used())
        await self._steps.take("read")
        return self.last
