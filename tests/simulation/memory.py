"""Keep what is really in use of a device; read it late, coarsely, or not at all."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from tests.simulation.loop import Draws

MIB = 2**20
LAG_SECONDS = 3.0  # as adapter/triton/memory/metrics_page.py has it


def gpu(number: int) -> Device:
    return Device(f"GPU-{number}")


class Truth:
    """Counts bytes by holder.

    A holder is a process of a model, `baseline`, `strangers`, or what a model that is gone has
    given back late.
    """

    def __init__(self, device_bytes: int, baseline: int, more: Sequence[int] = ()) -> None:
        self.device_bytes = device_bytes
        self.sizes = (device_bytes, *more)
        self.gpu_of: dict[str, int] = {}  # of each holder; the first for all others
        self.held: dict[str, int] = {"baseline": baseline}
        self.changed_at: dict[str, float] = {}  # last, by holder
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
        self.changed_at[holder] = _now()
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
    """Reads memory as one of the adapter's sources does."""

    def __init__(
        self,
        kind: str,  # host (by process), nvml, triton (late), or off
        truth: Truth,
        draws: Draws,
    ) -> None:
        self.kind = kind
        self.last: MemoryReading | None = None
        self.unread_until = -math.inf
        self._truth = truth
        self._shown_at = -math.inf  # Triton's metrics never go back in time
        self._random = draws.of("memory reader")
        self.oom_kills = 0

    @property
    def can_be_read(self) -> bool:
        """Return whether a reading of memory would succeed now."""
        return self.kind != "off" and _now() >= self.unread_until

    async def read(self) -> MemoryReading | None:
        for _ in range(self._random.choice((0, 0, 1, 2))):
            await asyncio.sleep(0)
        if not self.can_be_read:
            self.last = None
        elif self.kind == "triton":
            self.last = self._late()
        else:
            self.last = self._read_now()
        return self.last

    def _read_now(self) -> MemoryReading:
        if self.kind == "host":
            return MemoryReading(
                {HOST: DeviceReading(self._truth.device_bytes, self._truth.used)},
                self.kind,
                oom_kills=self.oom_kills,
            )
        used = tuple(map(self._truth.used_on, range(len(self._truth.sizes))))
        return MemoryReading(self._gpus(used), self.kind)

    def _gpus(self, used: tuple[int, ...]) -> dict[Device, DeviceReading]:
        return {
            gpu(number): DeviceReading(size, used[number], number)
            for number, size in enumerate(self._truth.sizes)
        }

    def _late(self) -> MemoryReading:
        now = _now()
        self._shown_at = max(self._shown_at, now - now % 2 - self._random.random())
        shown = self._truth.used_at(self._shown_at)
        return MemoryReading(self._gpus(shown), "triton", LAG_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
