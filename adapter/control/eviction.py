"""Evict models that calls have loaded: for others that need the room, or because nobody calls."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import NoReturn

from adapter.control.leases import Leases
from adapter.control.memory import Memory
from adapter.control.operations import Kind, Operations
from adapter.control.ports import Evictor, StoreSettings
from adapter.control.unloader import Unloader
from adapter.core import times
from adapter.core.admission import Evictable
from adapter.core.model import ModelId, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.registry import Registry
from adapter.core.states import LOADED, ModelState
from adapter.core.victims import (
    FOR_NOW,
    Candidate,
    Policy,
    RetentionReason,
    choose_fewest,
    choose_victims,
    find_retention_reason,
    make_candidate,
    sort_candidates,
)
from adapter.errors import AdapterError, CapacityError, MemoryFigures, UnloadedMeanwhile
from adapter.runtime import background, clock

log = logging.getLogger(__name__)

_DISK = "disk"
_NEVER_EVICTED = frozenset({RetentionReason.PINNED, RetentionReason.NOT_OURS})


@dataclass(slots=True, eq=False)
class Eviction:
    """Frees memory and disk for loads. `core/admission.py` has decided before that it suffices."""

    registry: Registry
    operations: Operations
    leases: Leases
    memory: Memory
    unloader: Unloader
    policy: Policy
    settings: StoreSettings

    def is_pinned(self, model_id: ModelId) -> bool:
        """Return whether the model is never evicted."""
        return any(fnmatchcase(model_id, pattern) for pattern in self.settings.pin)

    def find_retention_reason(self, record: ModelRecord) -> RetentionReason | None:
        """Return why the model may not be evicted; None when it may."""
        return find_retention_reason(
            record,
            is_waited_for=bool(self.leases.callers_of(record.id)),
            is_pinned=self.is_pinned(record.id),
        )

    # -- room in memory ---------------------------------------------------------------------

    def candidates(self, record: ModelRecord) -> tuple[Evictable, ...]:
        """Return the models that may be evicted for the load of `record`, now or once they are
        idle, in the order of core/victims.py.
        """
        now = clock.monotonic()
        callers = list(self.leases.callers_of(record.id))
        idle: list[Candidate] = []
        busy: list[Evictable] = []
        for model in self._list_loaded():
            reason = self.find_retention_reason(model)
            if reason is None:
                idle.append(self._describe(model, callers, now))
            elif reason in FOR_NOW:
                busy.append(Evictable(model.name, is_busy=True))
        ordered = sort_candidates(idle, self.policy)
        return (*(Evictable(candidate.name) for candidate in ordered), *busy)

    async def make_room(self, victims: Collection[TritonName], record: ModelRecord) -> bool:
        """Evict these idle models for the load of `record`; return whether any was evicted."""
        evictions = [
            self._evict_for(victim, record.id)
            for victim in self._list_loaded()
            if victim.name in victims and victim.id != record.id
        ]
        results = await asyncio.gather(*evictions)
        return any(results)

    async def make_room_for_inference(self, error: CapacityError) -> bool:
        """Evict idle models for an inference that ran out of memory; return whether any was
        evicted.

        The text of the error alone evicts nothing where memory is measured: the inference must have
        asked for more than its device has left, or nothing must be free there, and evictions must
        be enough. Models that other callers have just used are not evicted for it.
        """
        model_id = ModelId(error.model_id or "")
        now = clock.monotonic()
        record = self.registry.get(model_id)
        callers = list(record.usage.called_at) if record else []
        idle = {
            other.name: other
            for other in self._list_loaded()
            if other.id != model_id and self.find_retention_reason(other) is None
        }
        candidates = [self._describe(other, callers, now) for other in idle.values()]
        unshared = [candidate for candidate in candidates if not candidate.is_of_others]
        chosen = self._choose_for_inference(error.figures, unshared)
        victims = [idle[candidate.name] for candidate in chosen]
        evictions = [self._evict_for(victim, model_id) for victim in victims]
        results = await asyncio.gather(*evictions)
        return any(results)

    def _choose_for_inference(
        self, figures: MemoryFigures, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Return which of the candidates to evict for an inference that ran out of memory."""
        ledger = self.memory.ledger
        device = next((device for device in ledger.devices if device == figures.device), None)
        if device is None:
            is_measured = figures.device is not None or self.memory.readings.has_devices
            if is_measured:
                return ()
            # evict one model: the next try shows whether that was enough
            return sort_candidates(candidates, self.policy)[:1]
        book = ledger.devices[device]
        if figures.needed_bytes is None:
            missing_bytes = 1 - ledger.free(device)  # evict one, if nothing is free
        else:
            # the reserve is there for inferences
            missing_bytes = figures.needed_bytes - ledger.free(device) - book.headroom_bytes
        evictable_bytes = sum(candidate.size.get(device, 0) for candidate in candidates)
        if missing_bytes <= 0 or evictable_bytes < missing_bytes:
            return ()
        return choose_victims(candidates, {device: missing_bytes}, self.policy)

    async def _evict_for(self, record: ModelRecord, model_id: ModelId) -> bool:
        """Evict a model for the one with this id, and tell the policy what the evicted model was
        worth. Return whether it was evicted.
        """
        now = clock.monotonic()
        candidate = self._describe(record, (), now)
        worth = self.policy.worth(candidate)
        fields = {
            "evicted": "room",
            "evicted_for": str(model_id),
            "worth": self.policy.explain(candidate, now),
            "return_seconds": f"{candidate.seconds:.1f}",
        }
        is_evicted = await self.evict(record, fields)
        if is_evicted:
            self.policy.record_eviction(worth, clock.monotonic())
        return is_evicted

    async def evict(self, record: ModelRecord, log_fields: Mapping[str, str]) -> bool:
        """Unload the model if nothing keeps it; return whether it was unloaded. An update of the
        model is ended, as the next call loads the newest version anyway.
        """
        if not self._is_evictable(record):
            return False
        text = f"model {record.id!r} was evicted during its update"
        reason = UnloadedMeanwhile(text, model_id=record.id)
        self.operations.end_loads(record.id, reason)
        work = partial(self._unload_if_idle, record, log_fields)
        try:
            return await self.operations.start(record.id, Kind.UNLOAD, work).outcome()
        except AdapterError:  # Triton is stuck with the model, or the adapter stops
            return False

    async def _unload_if_idle(self, record: ModelRecord, log_fields: Mapping[str, str]) -> bool:
        """Unload the model under its lock, unless a call has come since it was chosen. Return
        whether it was unloaded.
        """
        if not self._is_evictable(record):
            return False
        await self.unloader.unload(record, log_fields)
        return True

    def _is_evictable(self, record: ModelRecord) -> bool:
        """Return whether the model is loaded, and may be evicted now."""
        return record.state in LOADED and self.find_retention_reason(record) is None

    # -- what is dead, and what nobody calls ------------------------------------------------

    async def run(self) -> NoReturn:
        """Unload what is dead or idle, for ever."""
        await background.forever(
            self.unload_dead,
            self.unload_idle,
            seconds=times.PAUSE_SECONDS / 4,
            expected=AdapterError,
        )

    async def unload_dead(self) -> None:
        """Unload the models of calls that have lost their process. An update replaces its own."""
        for record in self._list_loaded():
            is_for_calls = record.loaded_for is LoadedFor.CALLS
            is_dead = record.state is ModelState.DEAD and not record.usage.in_flight
            if is_for_calls and is_dead and not self.operations.is_busy(record.id):
                await self.evict(record, {"evicted": "died"})

    async def unload_idle(self) -> None:
        """Unload the models that nobody has called for long, one by one: Triton 2.51 has aborted
        with two unloads at once beside a load.
        """
        if not self.settings.idle_unload_seconds:
            return
        idle_since = clock.monotonic() - self.settings.idle_unload_seconds
        for record in self._list_loaded():
            is_idle = record.usage.used_at <= idle_since and self._is_evictable(record)
            if is_idle and not self.operations.is_busy(record.id):
                await self.evict(record, {"evicted": "idle"})

    # -- room on disk -----------------------------------------------------------------------

    async def unload_one(self, missing_bytes: int) -> bool:
        """Unload one model, so that its files may be deleted; return False when no model may be
        unloaded now. Of the models that have to be unloaded for `missing_bytes` on disk the least
        recently used comes first.
        """
        idle = [
            record for record in self._list_loaded() if self.find_retention_reason(record) is None
        ]
        oldest_first = sorted(idle, key=lambda record: record.usage.used_at)
        sizes = [(record, _list_disk_bytes(record)) for record in oldest_first]
        needed = choose_fewest(sizes, {_DISK: missing_bytes})
        for record in dict.fromkeys([*needed, *oldest_first]):
            if record.files is not None and await self.evict(record, {"evicted": "disk"}):
                return True
        return False

    @property
    def can_unload_later(self) -> bool:
        """Return whether any model may be unloaded, now or once what keeps it is over."""
        reasons = {self.find_retention_reason(record) for record in self.registry.records()}
        return bool(reasons - _NEVER_EVICTED - {RetentionReason.STUCK})

    def unevictable_bytes(self) -> int:
        """Return the bytes on disk of loaded models that are never unloaded for others."""
        sizes = {
            record.files.folder: record.files.size_bytes
            for record in self._list_loaded()
            if record.files is not None and self.find_retention_reason(record) in _NEVER_EVICTED
        }
        return sum(sizes.values())

    # -- inside -----------------------------------------------------------------------------

    def count_loaded_for_calls(self) -> int:
        """Return how many models are loaded for calls."""
        return sum(record.loaded_for is LoadedFor.CALLS for record in self._list_loaded())

    def _list_loaded(self) -> list[ModelRecord]:
        return [record for record in self.registry.records() if record.state in LOADED]

    def _describe(self, record: ModelRecord, callers: Collection[str], now: float) -> Candidate:
        return make_candidate(
            record,
            self.memory.held(record),
            now=now,
            callers=callers,
            is_updated=self.operations.load_of(record.id) is not None,
        )


@dataclass(slots=True, eq=False)
class OldVersionFirst:
    """Makes room for a new version of a model: the old one goes first, though it is in use."""

    old: ModelRecord
    unloader: Unloader
    other_models: Evictor
    log_fields: Mapping[str, str]

    def candidates(self, record: ModelRecord) -> tuple[Evictable, ...]:
        """Return the old version, then those that may be evicted for any load."""
        candidates = [Evictable(self.old.name)] if self.old.state in LOADED else []
        old_name = self.old.name
        evictable = self.other_models.candidates(record)
        candidates += [candidate for candidate in evictable if candidate.name != old_name]
        return tuple(candidates)

    async def make_room(self, victims: Collection[TritonName], record: ModelRecord) -> bool:
        """Unload the old version if it is among the victims, else evict the others."""
        if self.old.state in LOADED and self.old.name in victims:
            await self.unloader.unload(self.old, self.log_fields)
            return True
        return await self.other_models.make_room(victims, record)


def _list_disk_bytes(record: ModelRecord) -> Mapping[str, int]:
    return {_DISK: record.files.size_bytes} if record.files else {}
