"""The periodic work of residency: unloads what is dead, and what nobody calls."""

from typing import NoReturn

from adapter.control.models import ModelControl
from adapter.control.residency.eviction import Eviction
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AdapterError
from adapter.runtime import background, clock

_SECONDS = 0.5


class Reaper:
    """`idle_seconds`: after how long without a call a model is unloaded; 0 for never."""

    def __init__(self, control: ModelControl, eviction: Eviction, idle_seconds: float) -> None:
        self._control = control
        self._eviction = eviction
        self._idle_seconds = idle_seconds

    async def run(self) -> NoReturn:
        steps = (self.unload_left, self.unload_idle)
        await background.forever(*steps, seconds=_SECONDS, expected=AdapterError)

    async def unload_left(self) -> None:
        """Unload the models that have lost their process, and old versions whose unload failed."""
        for record in self._control.registry.records():
            if _is_left(record):
                await self._control.unloads.evict(record.id, _is_left, evicted="died")

    async def unload_idle(self) -> None:
        if not self._idle_seconds:
            return
        before = clock.monotonic() - self._idle_seconds
        idle = [
            record.id
            for record in self._eviction.loaded()
            if record.used_at <= before and self._eviction.retention_reason(record) is None
        ]
        for each in idle:  # one by one: Triton 2.51 has aborted with two at once beside a load
            await self._eviction.evict(each, "idle", unused_since=before)


def _is_left(record: ModelRecord) -> bool:
    if not record.is_on_demand:
        return False
    is_old = record.id != record.asked_for and record.state is ModelState.READY
    return is_old or record.state is ModelState.DEAD
