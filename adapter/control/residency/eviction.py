"""Evicts models that were loaded on demand: for others that need the room, or as nobody calls."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from adapter.control.residency.entries import Entries, Entry
from adapter.control.unloads import Unloads
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.core.residency.policies import Candidate, Policy
from adapter.core.residency.state import ResidencyEvent, ResidencyState
from adapter.core.residency.victims import (
    FOR_NOW,
    RetentionReason,
    choose_where,
    fewest,
    is_of_others,
    retention_reason,
)
from adapter.core.state import ModelState
from adapter.errors import AdapterError, CapacityError, OutOfMemory
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# What is not told by the end of a request: an unload by somebody else, a caller who gives up.
_LOOK_SECONDS = 0.25


_FOR_GOOD = frozenset({RetentionReason.PINNED, RetentionReason.NOT_OURS})
# states in which a model's files are kept that may leave once it was loaded, used, and is idle
_PASSING = (ResidencyState.ON_DISK, ResidencyState.LOADING, ResidencyState.UNLOADING)


class Eviction:
    """Frees memory and disk, as Evictor and DiskEvictor. `pin`: patterns of models that stay.
    `min_seconds`: for so long after its load a model is evicted for another if nothing else helps.
    """

    def __init__(
        self,
        unloads: Unloads,
        entries: Entries,
        metrics: Metrics,
        pin: Sequence[str],
        *,
        policy: Policy,
        min_seconds: float,
    ) -> None:
        self._unloads = unloads
        self._entries = entries
        self._metrics = metrics
        self._pin = tuple(pin)
        self._policy, self._min_seconds = policy, min_seconds
        self.evictions: Counter[str] = Counter()  # by reason

    async def unload(self, entry: Entry) -> bool:
        """Unload the model, pinned or not, if it is idle, to load another version; its `lock` is
        held. Its files stay.
        """

        def may_go(record: ModelRecord) -> bool:
            kept = retention_reason(record, is_awaited=entry.waiting > 0, is_pinned=False)
            if kept is None:
                entry.apply(ResidencyEvent.UNLOAD_BEGUN)
            return kept is None

        return await self._unloaded(entry, may_go, evicted="changed")

    def is_pinned(self, model_id: ModelId) -> bool:
        return any(fnmatchcase(model_id, pattern) for pattern in self._pin)

    def retention_reason(self, entry: Entry, record: ModelRecord) -> RetentionReason | None:
        is_pinned = self.is_pinned(entry.model_id)
        return retention_reason(record, is_awaited=entry.waiting > 0, is_pinned=is_pinned)

    @property
    def can_evict(self) -> bool:
        return any(True for _ in self._candidates())

    async def evict_for(self, error: CapacityError) -> bool:
        """Evict what `error` needs, at least one model; return False when nothing could go, or
        need go: for more than the device has, for a load that nobody waits for any more, and of
        others' models in use for what is a model's own words alone.
        """
        entry = self._entries.get(ModelId(error.model_id or ""))
        places = [
            each
            for each in (error.figures, *error.elsewhere)
            if (each.needed_bytes or 0) <= (each.limit_bytes or math.inf)
        ]
        candidates = self._candidates(entry)
        if isinstance(error, OutOfMemory):
            if entry is not None and entry.state is ResidencyState.LOADING and not entry.waiting:
                return False
            candidates = [each for each in candidates if not each.is_of_others]
        chosen = choose_where(candidates, places, self._policy)
        asked_for = error.model_id or ""
        return any(await asyncio.gather(*(self._make_room(each, asked_for) for each in chosen)))

    async def _make_room(self, victim: Candidate, asked_for: str) -> bool:
        worth = self._policy.worth(victim)
        told = {
            "evicted_for": asked_for,
            "worth": self._policy.explain(victim, clock.monotonic()),
            "return_seconds": f"{victim.seconds:.1f}",
        }
        is_gone = await self.evict(victim.model_id, "room", **told)
        if is_gone:
            self._policy.evicted(worth, clock.monotonic())
        return is_gone

    async def evict(self, model_id: ModelId, reason: str, **log_fields: str) -> bool:
        """Unload the model if nothing keeps it; return whether it is gone."""
        entry = self._entries.get(model_id)
        if entry is None:
            return True
        is_gone = False
        async with entry.lock:
            if entry.state is not ResidencyState.RESIDENT:
                return True
            with suppress(AdapterError):  # it is in the log, and nothing has gone
                is_gone = await self._unload(entry, evicted=reason, **log_fields)
        self._entries.tidy(entry)
        return is_gone

    async def _unload(self, entry: Entry, **log_fields: str) -> bool:
        def may_go(record: ModelRecord) -> bool:
            if self.retention_reason(entry, record) is not None:
                return False
            entry.apply(ResidencyEvent.UNLOAD_BEGUN)
            return True

        is_gone = await self._unloaded(entry, may_go, **log_fields)
        if is_gone:
            self._entries.release(entry)
        return is_gone

    async def _unloaded(
        self, entry: Entry, may_go: Callable[[ModelRecord], bool], **log_fields: str
    ) -> bool:
        begun = clock.monotonic()
        try:
            is_gone = await self._unloads.evict(entry.model_id, may_go, **log_fields)
        except BaseException:
            if entry.state is ResidencyState.UNLOADING:
                entry.apply(ResidencyEvent.UNLOAD_FAILED)
            raise
        if is_gone:
            entry.apply(ResidencyEvent.UNLOADED)
            reason = log_fields["evicted"]
            self.evictions[reason] += 1
            self._metrics.endpoint_evictions.labels("memory", reason).inc()
            self._metrics.endpoint_unloading_seconds.observe(clock.monotonic() - begun)
        return is_gone

    # -- room on disk -----------------------------------------------------------------------

    async def unload_one(self, missing_bytes: int) -> bool:
        oldest_first = sorted(self._candidates(), key=lambda each: each.used_at)
        names = [each.model_id for each in oldest_first]
        needed = fewest(((name, self._disk_bytes(name)) for name in names), missing_bytes)
        for name in dict.fromkeys([*needed, *names]):
            if await self.evict(name, "disk"):
                return True
        return False

    def _disk_bytes(self, model_id: ModelId) -> int:
        entry = self._entries.get(model_id)
        return 0 if entry is None or entry.artifact is None else entry.artifact.size_bytes

    @property
    def may_unload(self) -> bool:
        kept = {self.retention_reason(entry, record) for entry, record in self.loaded()}
        return bool(kept - _FOR_GOOD) or any(each.state in _PASSING for each in self._entries)

    def bytes_that_stay(self) -> int:
        staying = {
            entry.artifact.folder: entry.artifact.size_bytes
            for entry, record in self.loaded()
            if entry.artifact is not None and self.retention_reason(entry, record) in _FOR_GOOD
        }
        return sum(staying.values())

    # -- who could go -----------------------------------------------------------------------

    def _candidates(self, asked_for: Entry | None = None) -> list[Candidate]:
        """Return who could go; `asked_for`: the model that needs the room."""
        callers, now = asked_for.callers if asked_for else (), clock.monotonic()
        return [
            self._candidate(entry, record, callers, now)
            for entry, record in self.loaded()
            if not entry.lock.locked() and self.retention_reason(entry, record) is None
        ]

    def _candidate(
        self, entry: Entry, record: ModelRecord, callers: Collection[str], now: float
    ) -> Candidate:
        is_served = record.state is ModelState.READY  # one that has died serves nobody
        return Candidate(
            *(entry.model_id, record.used_at, self._unloads.memory.ledger.of(entry.model_id)),
            is_of_others=is_of_others(entry.used, callers, now),
            is_young=is_served and now - record.state_since < self._min_seconds,
            calls=max(1, record.served) if is_served else 0,
            seconds=entry.fetch_seconds + record.load_seconds,
        )

    def count(self) -> int:
        """Return how many models are loaded on demand."""
        return sum(record.is_on_demand for _, record in self.loaded())

    def loaded(self) -> list[tuple[Entry, ModelRecord]]:
        found = ((entry, self._unloads.registry.get(entry.model_id)) for entry in self._entries)
        return [
            (entry, record)
            for entry, record in found
            if entry.state is ResidencyState.RESIDENT and record is not None
        ]

    def may_come(self, entry: Entry) -> bool:
        """Return whether what keeps other models keeps them for now only."""
        kept = {self.retention_reason(each, record) for each, record in self.loaded()}
        if None in kept or not FOR_NOW.isdisjoint(kept):
            return True
        busy = (ResidencyState.LOADING, ResidencyState.UNLOADING)
        return any(each.state in busy for each in self._entries if each is not entry)

    async def changed(self) -> None:
        """Wait until a model has no request any more, or for a moment."""
        idle = self._unloads.leases.became_idle
        idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await idle.wait()
