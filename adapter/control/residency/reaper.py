"""The periodic work of residency: notices what was lost, and unloads what nobody calls."""

from typing import NoReturn

from adapter.control.models import ModelControl
from adapter.control.residency.entries import Entries, Entry
from adapter.control.residency.eviction import Eviction
from adapter.core.registry import ModelRecord
from adapter.core.residency.state import ResidencyEvent
from adapter.core.state import ModelState
from adapter.errors import AdapterError
from adapter.runtime import background, clock

_SECONDS = 0.5
_LOADED = (ModelState.READY, ModelState.DEAD)


class Reaper:
    """`idle_seconds`: after how long without a call a model is unloaded; 0 for never."""

    def __init__(
        self, control: ModelControl, entries: Entries, eviction: Eviction, idle_seconds: float
    ) -> None:
        self._control = control
        self._entries = entries
        self._eviction = eviction
        self._idle_seconds = idle_seconds

    async def run(self) -> NoReturn:
        steps = (self.notice_losses, self.unload_idle)
        await background.forever(*steps, seconds=_SECONDS, expected=AdapterError)

    async def notice_losses(self) -> None:
        """Release the files of models that somebody else has unloaded, or Triton has lost; unload
        those that have lost their process, and those that nobody knows of: their loads have failed
        for their callers, and ended well.
        """
        for entry in self._entries:
            await self.notice_loss(entry)
        for record in self._control.registry.records():
            if self._is_left(record):
                await self._control.unloads.evict(record.id, self._is_left, evicted="died")

    async def notice_loss(self, entry: Entry) -> None:
        """Release the files of one model, if it is lost: its name is free for another key."""
        if self._entries.loses(entry) and not entry.lock.locked():
            async with entry.lock:
                self._forget(entry)
            self._entries.tidy(entry)

    def _forget(self, entry: Entry) -> None:
        if self._entries.loses(entry):
            entry.apply(ResidencyEvent.LOST)
            self._entries.release(entry)

    def _is_left(self, record: ModelRecord) -> bool:
        if not record.is_on_demand or record.state not in _LOADED:
            return False
        entry = self._entries.get(record.id)
        return entry is None or not (entry.lock.locked() or entry.record is record)

    async def unload_idle(self) -> None:
        if not self._idle_seconds:
            return
        before = clock.monotonic() - self._idle_seconds
        idle = [
            entry.model_id
            for entry, record in self._eviction.loaded()
            if record.used_at <= before
            and not entry.lock.locked()
            and self._eviction.retention_reason(entry, record) is None
        ]
        for each in idle:  # one by one: Triton 2.51 has aborted with two at once beside a load
            await self._eviction.evict(each, "idle")
