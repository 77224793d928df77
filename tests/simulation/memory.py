"""What is really taken of the device, and readers that show it late, coarsely, or not at all."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from tests.simulation.loop import Draws

MIB = 2**20
# as adapter/backend/memory/triton_metrics.py has them
LAG_SECONDS, _GRACE_SECONDS = 3.0, 2.0


def gpu(number: int) -> Device:
    return Device(f"GPU-{number}")


class Truth:
    """Bytes by holder: a model's name in Triton, `baseline`, `strangers`, and what is `late`: given
    back by a model that is gone, but not free yet. `sizes` are the bytes of each device, `gpu_of`
    says on which a holder is; it is the first for those that are not there.
    """

    def __init__(self, device_bytes: int, baseline: int, more: Sequence[int] = ()) -> None:
        self.device_bytes, self.sizes = device_bytes, (device_bytes, *more)
        self.gpu_of: dict[str, int] = {}
        self.held: dict[str, int] = {"baseline": baseline}
        self.watch: Callable[[], None] = lambda: None
        self._history: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=4096)
        self.changed()

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def used_on(self, gpu: int) -> int:
        return sum(n for holder, n in self.held.items() if self.gpu_of.get(holder, 0) == gpu)

    def has_room(self, holder: str, count: int) -> bool:
        """Return whether the device of the holder has so many bytes left."""
        gpu = self.gpu_of.get(holder, 0)
        return self.used_on(gpu) + count <= self.sizes[gpu]

    def set(self, holder: str, count: int) -> None:
        if count:
            self.held[holder] = count
        else:
            self.held.pop(holder, None)
        self.changed()

    def add(self, holder: str, count: int) -> None:
        self.set(holder, self.held.get(holder, 0) + count)

    def changed(self) -> None:
        self._history.append((_now(), tuple(map(self.used_on, range(len(self.sizes))))))
        self.watch()

    def restarted(self) -> None:
        """Forget what was: no metrics are of another Triton."""
        self._history.clear()
        self.changed()

    def used_at(self, moment: float) -> tuple[int, ...]:
        """Return what was used of each device then, or when the history begins."""
        found = [used for at, used in reversed(self._history) if at <= moment][:1]
        return found[0] if found else self._history[0][1]

    def most_since(self, moment: float, gpu: int | None = None) -> int:
        """Return the most that was used of the device since then; None: of all together."""
        seen = [self.used_at(moment), *(used for at, used in self._history if at >= moment)]
        return max(sum(used) if gpu is None else used[gpu] for used in seen)


class Reader:
    """`kind`: host (by process), nvml, triton (late), or off. `unread_until`: it has no reading.
    `models` returns the bytes in processes of one model alone.
    """

    def __init__(
        self, kind: str, truth: Truth, models: Callable[[], dict[str, int]], draws: Draws
    ) -> None:
        self.kind = kind
        self.last: MemoryReading | None = None
        self.unread_until = -math.inf
        self._truth, self._models = truth, models
        self._random = draws.of("memory reader")
        self._shown: tuple[int, ...] | None = None
        self._moved_at, self._doubted_at = -math.inf, None
        self.oom_kills = 0

    async def read(self) -> MemoryReading | None:
        for _ in range(self._random.choice((0, 0, 1, 2))):
            await asyncio.sleep(0)
        if self.kind == "off" or _now() < self.unread_until:
            self.last = None
        elif self.kind == "triton":
            self.last = self._late()
        else:
            self.last = self._at_once()
        return self.last

    def _at_once(self) -> MemoryReading:
        if self.kind == "host":
            return MemoryReading(
                {HOST: DeviceReading(self._truth.device_bytes, self._truth.used)},
                self.kind,
                oom_kills=self.oom_kills,
                of_models=self._models(),
            )
        used = tuple(map(self._truth.used_on, range(len(self._truth.sizes))))
        return MemoryReading(self._gpus(used), self.kind)

    def _gpus(self, used: tuple[int, ...]) -> dict[Device, DeviceReading]:
        return {
            gpu(number): DeviceReading(size, used[number], number)
            for number, size in enumerate(self._truth.sizes)
        }

    def _late(self) -> MemoryReading | None:
        now = _now()
        shown = self._truth.used_at(now - now % 2 - self._random.random())
        if shown != self._shown:
            self._shown, self._moved_at, self._doubted_at = shown, now, None
        elif self._doubted_at and now - self._doubted_at > LAG_SECONDS + _GRACE_SECONDS:
            return None
        return MemoryReading(self._gpus(shown), "triton", LAG_SECONDS)

    @property
    def is_in_doubt(self) -> bool:
        return self._doubted_at is not None

    def changed(self, since: float) -> None:
        if self.kind == "triton" and self._doubted_at is None and self._moved_at < since:
            self._doubted_at = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
