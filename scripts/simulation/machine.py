"""A machine of a fleet: what it has in memory and on disk, and how long a call takes there.

Who leaves the memory is decided by the adapter's own adapter/core/residency/victims.py with
`eviction: lru`, who leaves the disk by its adapter/store/disk.py. Time is simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from adapter.core.artifacts import CacheUse
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.residency.policies import Candidate, LeastRecentlyUsed
from adapter.core.residency.victims import choose_victims, retention_reason
from adapter.core.state import ModelState
from adapter.errors import MemoryFigures, NoRoom
from adapter.packages.unpacking import Free
from adapter.store.cache_folder import CacheFolder, Note
from adapter.store.disk import Cached, Disk, Evicted, Reservation
from scripts.simulation.clock import Clock, Slots
from scripts.simulation.maglev import hash_of

# How long a load waits for room while all models are in use, as in core/residency/waiting.py.
_ROOM_SECONDS = 10.0

# What a call found; None: no room, and another machine may be asked.
Answered = Callable[[CacheUse | None], object]


@dataclass(frozen=True, slots=True)
class Model:
    """`size_bytes`: in memory, and as many on disk. `key`: Envoy's hash of the name."""

    id: ModelId
    size_bytes: int = 1
    key: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", hash_of(self.id))


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take, in seconds; `_per_byte` comes on top."""

    call: float
    load: float
    load_per_byte: float = 0.0
    unload: float = 0.0
    fetch: float = 0.0
    fetch_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Size:
    """What a machine has: bytes, and how many calls, loads and fetches go on at a time. The last
    two are the adapter's defaults.
    """

    memory_bytes: int
    disk_bytes: int
    calls: int = 1024
    loads: int = 2
    fetches: int = 4


class _NoFolder(CacheFolder):
    """The disk cache's folder, of which the index alone is simulated."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))

    def remove(self, id_: str) -> None:
        """There is nothing to remove."""


def _note(model: Model) -> Note:
    return Note("", model.id, "1", model.id, model.size_bytes, {})


def _never(_: Evicted) -> None:
    """Nobody counts what leaves the disk."""


@dataclass(slots=True)
class _Resident:
    model: Model
    record: ModelRecord
    kept: Cached


@dataclass(slots=True, eq=False)
class _Coming:
    """A model that is fetched and loaded for those who wait for it."""

    model: Model
    waiting: list[Answered]
    use: CacheUse = CacheUse.DISK
    kept: Cached | None = None
    until: float = 0.0


class Machine:
    """`in_flight`: the calls that Envoy has sent there and that are not answered."""

    def __init__(self, name: str, size: Size, times: Times, clock: Clock) -> None:
        self.name = name
        self.in_flight = 0
        self.fetched_bytes = 0
        self._size = size
        self._times = times
        self._clock = clock
        self.disk = Disk(_NoFolder(), size.disk_bytes, _never, free=lambda: Free(2**62, None))
        self._residents: dict[ModelId, _Resident] = {}
        self._coming: dict[ModelId, _Coming] = {}
        self._held = 0
        self._policy = LeastRecentlyUsed()
        self._for_room: list[Callable[[], object]] = []
        self._calls = Slots(self._size.calls)
        self._loads = Slots(self._size.loads)
        self._fetches = Slots(self._size.fetches)

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._residents

    def fill(self, model: Model) -> bool:
        """Put the model into memory, if it has room there, and on disk."""
        note = _note(model)
        reservation = Reservation(model.id, self.disk)
        if self.disk.used_bytes + model.size_bytes > self.disk.limit_bytes:
            return False
        self.disk.take(reservation, model.size_bytes)
        kept = self.disk.add(note, reservation)
        if self._held + model.size_bytes > self._size.memory_bytes:
            self.disk.release(note.id)
        else:
            self._held += model.size_bytes
            self._residents[model.id] = _Resident(model, self._record(model), kept)
        return True

    def call(self, model: Model, answered: Answered) -> None:
        if (resident := self._residents.get(model.id)) is not None:
            self._serve(resident.record, CacheUse.HIT, answered)
        elif (coming := self._coming.get(model.id)) is not None:
            coming.waiting.append(answered)
        else:
            coming = self._coming[model.id] = _Coming(model, [answered])
            self._fetch(coming)

    def _serve(self, record: ModelRecord, use: CacheUse, answered: Answered) -> None:
        record.usage.in_flight += 1
        record.usage.used_at = self._clock.now

        def end() -> None:
            record.usage.in_flight -= 1
            self._calls.give()
            answered(use)
            if not record.usage.in_flight:
                self._became_idle()

        self._calls.take(lambda: self._clock.after(self._times.call, end))

    def _became_idle(self) -> None:
        waiting, self._for_room = self._for_room, []
        for then in waiting:
            then()

    # -- from the store to the disk ---------------------------------------------------------

    def _fetch(self, coming: _Coming) -> None:
        coming.kept = self.disk.hold("", coming.model.id, "1")
        if coming.kept is not None:
            self._loads.take(partial(self._load, coming))
        else:
            coming.use = CacheUse.MISS
            self._fetches.take(partial(self._fetch_begun, coming))

    def _fetch_begun(self, coming: _Coming) -> None:
        size = coming.model.size_bytes
        reservation = Reservation(coming.model.id, self.disk)
        try:
            while True:
                try:
                    self.disk.take(reservation, size)
                    break
                except NoRoom:
                    if not self._evict(MemoryFigures()):
                        raise
        except NoRoom:
            self._fetches.give()
            self._refuse(coming)
            return
        seconds = self._times.fetch + size * self._times.fetch_per_byte
        self._clock.after(seconds, partial(self._fetched, coming, reservation))

    def _fetched(self, coming: _Coming, reservation: Reservation) -> None:
        self.fetched_bytes += coming.model.size_bytes
        coming.kept = self.disk.add(_note(coming.model), reservation)
        self._fetches.give()
        self._loads.take(partial(self._load, coming))

    # -- from the disk to the memory --------------------------------------------------------

    def _load(self, coming: _Coming) -> None:
        """It has a slot, and gives it back where it must wait."""
        size, evicted = coming.model.size_bytes, 0
        coming.until = coming.until or self._clock.now + _ROOM_SECONDS
        if size > self._free_bytes:
            needs = MemoryFigures(needed_bytes=size, free_bytes=self._free_bytes)
            evicted = self._evict(needs)
        if size <= self._free_bytes:
            self._held += size
            seconds = self._times.load + size * self._times.load_per_byte
            seconds += evicted * self._times.unload
            self._clock.after(seconds, partial(self._loaded, coming))
            return
        self._loads.give()
        if size > self._size.memory_bytes or self._clock.now >= coming.until:
            self._refuse(coming)
        else:
            self._for_room.append(lambda: self._loads.take(partial(self._load, coming)))

    @property
    def _free_bytes(self) -> int:
        return self._size.memory_bytes - self._held

    def _loaded(self, coming: _Coming) -> None:
        model = coming.model
        record = self._record(model)
        if coming.kept is None:
            raise AssertionError("it was fetched")
        self._residents[model.id] = _Resident(model, record, coming.kept)
        del self._coming[model.id]
        self._loads.give()
        for answered in coming.waiting:
            self._serve(record, coming.use, answered)

    def _record(self, model: Model) -> ModelRecord:
        record = ModelRecord(model.id, TritonName(model.id), ModelSource(""), ModelState.READY)
        record.is_on_demand = True
        record.usage.used_at = self._clock.now
        return record

    def _refuse(self, coming: _Coming) -> None:
        del self._coming[coming.model.id]
        if coming.kept is not None:
            self.disk.release(coming.kept.note.id)
        for answered in coming.waiting:
            answered(None)

    def _evict(self, figures: MemoryFigures) -> int:
        """Return how many models have gone."""
        chosen = choose_victims(self._candidates(), figures, self._policy)
        for each in chosen:
            resident = self._residents.pop(each.model_id)
            self._held -= resident.model.size_bytes
            self.disk.release(resident.kept.note.id)
        return len(chosen)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(model_id, each.record.usage.used_at, {HOST: each.model.size_bytes})
            for model_id, each in self._residents.items()
            if retention_reason(each.record, is_awaited=False, is_pinned=False) is None
        ]
