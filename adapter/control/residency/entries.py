"""What is known of each model that is loaded on demand."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from adapter.control.ports import Artifacts
from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, FetchProgress
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord, Registry
from adapter.core.residency.state import ResidencyEvent, ResidencyState, advance
from adapter.core.residency.waiting import WaitLimits
from adapter.core.state import ModelState
from adapter.errors import AdapterError, CapacityError, InvalidModel, LoadFailed, ModelTooLarge
from adapter.runtime import clock

# Errors of the archive itself, which the next try would meet as well; and for how long it is not
# tried.
_DEFINITE = (InvalidModel, LoadFailed, ModelTooLarge)
_REFUSED_SECONDS = 5.0
_MOST_REFUSED = 1024


@dataclass(slots=True, eq=False)
class Entry:
    """One model. Whoever changes its state holds `lock`.

    `callers`: who waits for a lease, and how often; "": nobody knows who. `used`: when each known
    caller was last given one (time.monotonic). `task` makes it resident, for all of them. `lack`:
    why it was not loaded at the last try, while it waits for room. `fetch_seconds`: what its latest
    fetch took, from a store or from the disk, without the wait for others to end. `record` is that
    of its latest load, `checked_at` when the store was last seen to have the version of `artifact`
    (time.monotonic), `is_outdated`: the store has another version, and `newer` is that, once it was
    fetched.
    """

    model_id: ModelId
    key: ArtifactKey
    state: ResidencyState = ResidencyState.ABSENT
    callers: Counter[str] = field(default_factory=Counter)
    used: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[CacheUse] | None = None
    progress: FetchProgress = field(default_factory=FetchProgress)
    artifact: Artifact | None = None
    lack: CapacityError | None = None
    fetch_seconds: float = 0.0
    record: ModelRecord | None = None
    newer: Artifact | None = None
    checked_at: float = 0.0
    is_outdated: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def waiting(self) -> int:
        """How many callers have no lease yet."""
        return self.callers.total()

    def apply(self, event: ResidencyEvent) -> None:
        self.state = advance(self.state, event)


class Entries:
    """All entries by the model's id, and the failures that are answered without another try."""

    def __init__(self, registry: Registry, artifacts: Artifacts, limits: WaitLimits) -> None:
        self.callers: Counter[str] = Counter()  # of all entries
        self._registry = registry
        self._artifacts = artifacts
        self._limits = limits
        self._entries: dict[ModelId, Entry] = {}
        self._refused: dict[ModelId, tuple[AdapterError, float]] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter([*self._entries.values()])

    def get(self, model_id: ModelId) -> Entry | None:
        return self._entries.get(model_id)

    @property
    def waiting(self) -> int:
        """How many callers have no lease yet."""
        return self.callers.total()

    def awaited(
        self, model_id: ModelId, key: ArtifactKey, caller: str = "", *, is_excused: bool = False
    ) -> Entry:
        """Return the entry for one more wait of `caller`, who is to call `left`. `is_excused`: it
        is none too many.
        """
        if not is_excused:
            self.refuse_one_more(model_id, caller)
        entry = self._entries.get(model_id)
        if entry is None:
            entry = self._entries[model_id] = Entry(model_id, key)
        for callers in (entry.callers, self.callers):
            callers[caller] += 1
        return entry

    def refuse_one_more(self, model_id: ModelId, caller: str = "") -> None:
        """Raise TooManyWaiting if as many calls wait as may."""
        entry, own = self._entries.get(model_id), self.callers[caller] if caller else 0
        for_one = entry.waiting if entry else 0
        self._limits.refuse_one_more(model_id, self.waiting, for_one, own)

    def left(self, entry: Entry, caller: str = "") -> None:
        """Remove one waiting call of `caller`, and drop the entry if nothing else needs it."""
        for callers in (entry.callers, self.callers):
            callers[caller] -= 1
            if not callers[caller]:
                del callers[caller]
        self.tidy(entry)

    def tidy(self, entry: Entry) -> None:
        """Forget an entry that says nothing. A renewal may have one whose place another has."""
        is_used = entry.waiting or entry.task is not None or entry.lock.locked()
        is_known = self._entries.get(entry.model_id) is entry
        if is_known and entry.state is ResidencyState.ABSENT and not is_used:
            del self._entries[entry.model_id]

    def loses(self, entry: Entry) -> bool:
        """Return whether the model is not served any more though nobody here has unloaded it."""
        if entry.state is not ResidencyState.RESIDENT:
            return False
        known, record = self._registry.get(entry.model_id), entry.record
        return known is not record or known is None or known.state is ModelState.DEAD

    def release(self, entry: Entry) -> None:
        """Let the files of a model that is not loaded leave the disk."""
        entry.apply(ResidencyEvent.RELEASED)
        for artifact in (entry.artifact, entry.newer):
            if artifact is not None:
                self._artifacts.release(artifact)
        entry.artifact = entry.newer = entry.record = None
        entry.is_outdated = False

    def refuse_known(self, model_id: ModelId) -> None:
        """Raise a failure that was met a moment ago."""
        error, until = self._refused.get(model_id, (None, 0.0))
        if error is None:
            return
        if clock.monotonic() < until:
            raise error.with_traceback(None)
        del self._refused[model_id]

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Remember an error that the next try would meet as well."""
        if isinstance(error, _DEFINITE):
            while len(self._refused) >= _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._refused[entry.model_id] = (error, clock.monotonic() + _REFUSED_SECONDS)
