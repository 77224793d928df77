"""A memory reader that sees what the fake Triton has loaded."""

from collections.abc import Callable

from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from tests.fakes.steps import Steps


class FakeMemory:
    """Sees nothing at all while `limit_bytes` is None, and `frozen` bytes while that is set.

    `changes` are the times since when it was told that memory changed. `tells_apart`:
    what each model's processes take is told. `gpus` are the bytes of each GPU, by its number, where
    there are several, whose use `used_on` tells.
    """

    def __init__(
        self, steps: Steps, used: Callable[[], int], of_models: Callable[[], dict[str, int]]
    ) -> None:
        self.limit_bytes: int | None = None
        self.device = HOST
        self.lag = 0.0
        self.frozen: int | None = None
        self.is_in_doubt = False
        self.changes: list[float] = []
        self.last: MemoryReading | None = None
        self.tells_apart = False
        self.gpus: dict[int, int] = {}
        self.used_on: Callable[[int], int] = lambda _: 0
        self._of_models = of_models
        self._steps = steps
        self._used = used

    async def read(self) -> MemoryReading | None:
        limit, reading = self.limit_bytes, None
        if limit is not None:
            used = self._used() if self.frozen is None else self.frozen
            seen = DeviceReading(limit, used, None if self.device == HOST else 0)
            of_models = self._of_models() if self.tells_apart else None
            reading = MemoryReading(
                {self.device: seen},
                lag_seconds=self.lag,
                of_models=of_models,
            )
        if self.gpus:
            devices = {
                Device(f"GPU-{number}"): DeviceReading(size, self.used_on(number), number)
                for number, size in self.gpus.items()
            }
            reading = MemoryReading(devices, "nvml")
        await self._steps.take("read")  # others may look meanwhile
        self.last = reading
        return reading

    def changed(self, since: float) -> None:
        self.changes.append(since)
