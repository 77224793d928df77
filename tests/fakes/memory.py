"""A memory reader that sees what the fake Triton has loaded."""

from collections.abc import Callable

from adapter.core.memory import HOST, DeviceReading, MemoryReading
from tests.fakes.calls import Calls


class FakeMemory:
    """Sees nothing at all while `limit_bytes` is None."""

    def __init__(self, calls: Calls, used: Callable[[], int]) -> None:
        self.limit_bytes: int | None = None
        self.device = HOST
        self.lag = 0.0
        self._calls = calls
        self._used = used

    async def read(self) -> MemoryReading | None:
        limit, reading = self.limit_bytes, None
        if limit is not None:
            seen = DeviceReading(limit, self._used(), None if self.device == HOST else 0)
            reading = MemoryReading({self.device: seen}, lag_seconds=self.lag)
        await self._calls.take("read")  # others may look meanwhile
        return reading
