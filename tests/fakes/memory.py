"""A memory reader that sees what the fake Triton has loaded."""

from collections.abc import Callable

from adapter.core.memory import HOST, DeviceReading, MemoryReading
from tests.fakes.steps import Steps


class FakeMemory:
    """Sees nothing at all while `limit_bytes` is None."""

    def __init__(self, steps: Steps, used: Callable[[], int]) -> None:
        self.limit_bytes: int | None = None
        self.device = HOST
        self.lag = 0.0
        self._steps = steps
        self._used = used

    async def read(self) -> MemoryReading | None:
        limit, reading = self.limit_bytes, None
        if limit is not None:
            seen = DeviceReading(limit, self._used(), None if self.device == HOST else 0)
            reading = MemoryReading({self.device: seen}, lag_seconds=self.lag)
        await self._steps.take("read")  # others may look meanwhile
        return reading
