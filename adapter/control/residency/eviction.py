"""Evicts models that were loaded on demand: for others that need the room, or as nobody calls."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import NoReturn

from adapter.control.residency.waits import Waits
from adapter.control.unloads import Unloads
from adapter.core.artifacts import StoreFiles
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.core.residency.policies import Candidate, Policy
from adapter.core.residency.victims import (
    FOR_NOW,
    RetentionReason,
    choose_where,
    fewest,
    is_of_others,
    may_suffice,
    retention_reason,
)
from adapter.core.state import LOADED, ModelState
from adapter.errors import AdapterError, CapacityError, MemoryFigures, OutOfMemory
from adapter.runtime import background, clock
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# What is not told by the end of a request: an unload by somebody else, a caller who gives up.
_LOOK_SECONDS = 0.25
_SECONDS = 0.5
# A model without a request in flight at some time of these is expected to be idle again.
_IDLE_AGAIN_SECONDS = 10.0

_FOR_GOOD = frozenset({RetentionReason.PINNED, RetentionReason.NOT_OURS})
_BUSY = (ModelState.LOADING, ModelState.UNLOADING)
# states in which a model's files are kept that may leave once it was loaded, used, and is idle
_PASSING = (ModelState.ON_DISK, *_BUSY)


class Eviction:
    """Frees memory and disk, as Evictor and DiskEvictor. `pin`: patterns of models that stay.
    `min_seconds`: for so long after its load a model is evicted for another if nothing else helps.
    `idle_seconds`: after how long without a call a model is unloaded; 0 for never.
    """

    def __init__(
        self,
        unloads: Unloads,
        waits: Waits,
        metrics: Metrics,
        pin: Sequence[str],
        *,
        policy: Policy,
        min_seconds: float,
        idle_seconds: float,
    ) -> None:
        self._unloads = unloads
        self._registry = unloads.registry
        self._waits = waits
        self._metrics = metrics
        self._pin = tuple(pin)
        self._policy, self._min_seconds, self._idle_seconds = policy, min_seconds, idle_seconds
        self.evictions: Counter[str] = Counter()  # by reason

    async def unload(self, record: ModelRecord) -> bool:
        """Unload the model, pinned or not, if it is idle, to load another version."""

        def may_go(known: ModelRecord) -> bool:
            return self.retention_reason(known, keeps_pinned=False) is None

        return await self._unload(record, may_go, evicted="changed")

    def is_pinned(self, model_id: ModelId) -> bool:
        return any(fnmatchcase(model_id, pattern) for pattern in self._pin)

    def retention_reason(
        self, record: ModelRecord, *, keeps_pinned: bool = True
    ) -> RetentionReason | None:
        is_pinned = keeps_pinned and self.is_pinned(record.id)
        is_awaited = self._waits.is_awaited(record.id)
        return retention_reason(record, is_awaited=is_awaited, is_pinned=is_pinned)

    @property
    def can_evict(self) -> bool:
        return any(True for _ in self._candidates())

    async def evict_for(self, error: CapacityError) -> bool:
        """Evict what `error` needs, at least one model; return False when nothing could go, or
        need go: for more than the device has, for a load that nobody waits for any more, for one
        that waits and will not fit, and of others' models in use for what is a model's own words
        alone.
        """
        model_id = ModelId(error.model_id or "")
        places = [
            each
            for each in (error.figures, *error.elsewhere)
            if (each.needed_bytes or 0) <= (each.limit_bytes or math.inf)
        ]
        wait, known = self._waits.get(model_id), self._registry.find(model_id)
        if wait is not None and error.is_known and not self._may_suffice(places):
            return False
        candidates = self._candidates(wait.callers if wait else ())
        if isinstance(error, OutOfMemory):
            comes = known is not None and known.files is not None and known.state not in LOADED
            if comes and not self._waits.is_awaited(model_id):
                return False
            candidates = [each for each in candidates if not each.is_of_others]
        chosen = choose_where(candidates, places, self._policy)
        return any(await asyncio.gather(*(self._make_room(each, model_id) for each in chosen)))

    def _may_suffice(self, places: Sequence[MemoryFigures]) -> bool:
        """Return whether enough would go if each model went that stays for now only. What is in use
        all the time never does: then others would go for nothing, come back, and go again.
        """
        since = clock.monotonic() - _IDLE_AGAIN_SECONDS
        held = [
            self._unloads.memory.ledger.of(record.name)
            for record in self.loaded()
            if self.retention_reason(record) not in _FOR_GOOD
            and (not record.usage.in_flight or record.usage.busy_since > since)
        ]
        return may_suffice(held, places)

    async def _make_room(self, victim: Candidate, asked_for: str) -> bool:
        worth = self._policy.worth(victim)
        is_gone = await self.evict(
            victim.model_id,
            "room",
            evicted_for=asked_for,
            worth=self._policy.explain(victim, clock.monotonic()),
            return_seconds=f"{victim.seconds:.1f}",
        )
        if is_gone:
            self._policy.evicted(worth, clock.monotonic())
        return is_gone

    async def evict(
        self, model_id: ModelId, reason: str, *, unused_since: float = math.inf, **log_fields: str
    ) -> bool:
        """Unload the model if nothing keeps it, and no call has used it after `unused_since`
        (time.monotonic); return whether it is gone.
        """

        def may_go(known: ModelRecord) -> bool:
            return known.usage.used_at <= unused_since and self.retention_reason(known) is None

        record = self._registry.get(model_id)
        if record is None:
            return True
        with suppress(AdapterError):  # it is in the log, and nothing has gone
            await self._unload(record, may_go, evicted=reason, **log_fields)
        return self._registry.get(model_id) is not record

    async def _unload(
        self, record: ModelRecord, may_go: Callable[[ModelRecord], bool], **log_fields: str
    ) -> bool:
        begun, is_it = clock.monotonic(), lambda known: known is record and may_go(known)
        is_gone = await self._unloads.evict(record.id, is_it, **log_fields)
        if is_gone:
            reason = log_fields["evicted"]
            self.evictions[reason] += 1
            self._metrics.endpoint_evictions.labels("memory", reason).inc()
            self._metrics.endpoint_unloading_seconds.observe(clock.monotonic() - begun)
        return is_gone

    # -- what is dead, and what nobody calls ------------------------------------------------

    async def run(self) -> NoReturn:
        steps = (self.unload_left, self.unload_idle)
        await background.forever(*steps, seconds=_SECONDS, expected=AdapterError)

    async def unload_left(self) -> None:
        """Unload the models that have lost their process, and old versions whose unload failed."""
        for record in self._registry.records():
            if _is_left(record):
                await self._unloads.evict(record.id, _is_left, evicted="died")

    async def unload_idle(self) -> None:
        if not self._idle_seconds:
            return
        before = clock.monotonic() - self._idle_seconds
        idle = [
            record.id
            for record in self.loaded()
            if record.usage.used_at <= before and self.retention_reason(record) is None
        ]
        for each in idle:  # one by one: Triton 2.51 has aborted with two at once beside a load
            await self.evict(each, "idle", unused_since=before)

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
        record = self._registry.get(model_id)
        artifact = record.files.artifact if record and record.files else None
        return artifact.size_bytes if artifact else 0

    @property
    def can_unload(self) -> bool:
        kept = {self.retention_reason(record) for record in self.loaded()}
        states = {record.state for record in self._registry.of_stores()}
        return bool(kept - _FOR_GOOD) or not states.isdisjoint(_PASSING)

    def bytes_that_stay(self) -> int:
        staying = {
            artifact.folder: artifact.size_bytes
            for record in self.loaded()
            if record.files is not None
            and (artifact := record.files.artifact) is not None
            and self.retention_reason(record) in _FOR_GOOD
        }
        return sum(staying.values())

    # -- who could go -----------------------------------------------------------------------

    def _candidates(self, callers: Collection[str] = ()) -> list[Candidate]:
        """Return who could go; `callers`: of the model that needs the room."""
        now = clock.monotonic()
        loads = (each for each in self._registry.of_stores() if each.state is ModelState.LOADING)
        renewed = {each.asked_for for each in loads}
        return [
            self._candidate(record, record.files, callers, now, is_renewed=record.id in renewed)
            for record in self.loaded()
            if record.files is not None and self.retention_reason(record) is None
        ]

    def _candidate(
        self,
        record: ModelRecord,
        files: StoreFiles,
        callers: Collection[str],
        now: float,
        *,
        is_renewed: bool,  # another version is being loaded beside it, for nothing once it is gone
    ) -> Candidate:
        is_served = record.state is ModelState.READY  # one that has died serves nobody
        return Candidate(
            *(record.id, record.usage.used_at, self._unloads.memory.ledger.of(record.name)),
            is_of_others=is_of_others(files.used, callers, now),
            is_spared=is_served and (is_renewed or now - record.state_since < self._min_seconds),
            calls=max(1, record.usage.served) if is_served else 0,
            seconds=files.fetch_seconds + record.load_seconds,
        )

    def count(self) -> int:
        """Return how many models are loaded on demand."""
        return sum(record.is_on_demand for record in self.loaded())

    def loaded(self) -> list[ModelRecord]:
        """Return the models of stores that are loaded."""
        return [each for each in self._registry.of_stores() if each.state in LOADED]

    def may_come(self, model_id: ModelId) -> bool:
        """Return whether what keeps other models keeps them for now only."""
        kept = {self.retention_reason(each) for each in self.loaded()}
        if None in kept or not FOR_NOW.isdisjoint(kept):
            return True
        return any(r.state in _BUSY for r in self._registry.of_stores() if r.id != model_id)

    async def became_idle(self) -> bool:
        """Wait until a model has no request any more; return False if none has for a moment."""
        idle = self._unloads.leases.became_idle
        idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await idle.wait()
        return idle.is_set()


def _is_left(record: ModelRecord) -> bool:
    if not record.is_on_demand:
        return False
    is_old = record.id != record.asked_for and record.state is ModelState.READY
    return is_old or record.state is ModelState.DEAD
