"""The table of models and their states. `serving()` is the hot path: one dict look-up."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count

from adapter.core.artifacts import ArtifactKey, StoreFiles
from adapter.core.model import (
    ModelId,
    ModelSource,
    Placement,
    TritonName,
    replacement_name,
    triton_name,
)
from adapter.core.residency.usage import Usage
from adapter.core.sizing import Basis
from adapter.core.state import ModelEvent, ModelState, WaitsFor, advance
from adapter.core.triton_input import Unclassified
from adapter.errors import AlreadyLoaded, ModelNotFound, ModelNotReady
from adapter.protocols.tensors import ContentTypes

_READY = ModelState.READY  # looking up a member of an enumeration is slow in Python 3.11
_ON_THE_WAY = {ModelState.LOADING: "being loaded", ModelState.LOST: "being loaded again"}
_AS_ITS_ID = ModelId("")
_NO_NAME = TritonName("")
_COMING = (ModelState.FETCHING, ModelState.ON_DISK)
_REPLACED = (*_COMING, ModelState.LOST)  # by the record of a load
_MOST_LOST = 1000


@dataclass(slots=True, eq=False)
class ModelRecord:
    """One model. The registry sets `id`, `state`, `state_since` and, of a model in it, `placement`,
    and clears `waits_for` and `awaits` with each change of `state`; control sets the rest.

    `ended_before`: inferences that had ended at the last tick of housekeeping; `was_active`: it had
    requests since the tick before that.
    `can_load_again`: `source` suffices to load the model again. `declared_bytes` and `disk_bytes`
    are the package's, unknown for a model of an earlier run. `instances`: the model's instances
    that had a python process of their own when the load ended, by their names in Triton.
    `state_since`: when it came into `state`, by the registry's clock. `waits_for` is None unless
    the model is being loaded or unloaded; `awaits` are the models that it waits for. `basis` is
    that of its reservation, None for a model of an earlier run. `begun_at` is when its load began
    (time.time), 0 for such a model, and `load_seconds` what it took in Triton.
    `is_on_demand`: it was loaded since a call asked for it, and
    may be evicted. `asked_for` is the name that answers carry: another than `id` only for one of
    two versions that are there at once. `can_be_doubled`: another version of it may be loaded
    beside it. `gpu`: the number of the GPU that it was put on, None where Triton or its package
    decides. `content_types`: those that it opted into, None without any. `is_decoupled`: a
    request may have any number of answers; None until a stream has asked Triton. `warnings`: what
    is odd but no fault. `outputs`: their names, none where only Triton knows them. `files`: those
    of a store that a call has had fetched, and None for a model from elsewhere. `is_renamed`: the
    model has another name in Triton than for its callers. `was_ended`: the processes of its load
    were killed.
    """

    id: ModelId
    name: TritonName
    source: ModelSource
    state: ModelState = ModelState.LOADING
    state_since: float = 0.0
    waits_for: WaitsFor | None = None
    awaits: tuple[ModelId, ...] = ()
    ended_before: int = 0
    was_active: bool = False
    placement: Placement = field(default_factory=lambda: Placement(()))
    gpu: int | None = None
    package_key: str = ""
    can_load_again: bool = True
    declared_bytes: int | None = None
    disk_bytes: int = 0
    basis: Basis | None = None
    begun_at: float = 0.0
    load_seconds: float = 0.0
    is_on_demand: bool = False
    asked_for: ModelId = _AS_ITS_ID
    can_be_doubled: bool = False
    instances: frozenset[str] = frozenset()
    content_types: ContentTypes | None = None
    is_decoupled: bool | None = None
    warnings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    files: StoreFiles | None = None
    unclassified: Unclassified | None = None
    was_ended: bool = False
    is_renamed: bool = field(init=False)
    usage: Usage = field(init=False, default_factory=Usage)

    def __post_init__(self) -> None:
        self.asked_for = self.asked_for or self.id
        self.is_renamed = self.name != self.asked_for  # type: ignore[comparison-overlap]

    # -- as the door has it -----------------------------------------------------------------

    @property
    def step(self) -> WaitsFor | None:
        """Return what the load or the unload spends its time on."""
        return self.waits_for

    @property
    def blockers(self) -> tuple[ModelId, ...]:
        """Return the models that it waits for."""
        return self.awaits

    @property
    def is_source_complete(self) -> bool:
        """Return whether `source` suffices to load the model again."""
        return self.can_load_again


@dataclass(frozen=True, slots=True)
class LostModel:
    """A model that went with Triton and is not coming back. `at` is time.time(). `is_given_up`: the
    adapter does not load it by itself.
    """

    at: float
    reason: str
    is_given_up: bool = False


def not_loaded(model_id: ModelId) -> ModelNotFound:
    return ModelNotFound(f"model {model_id!r} is not loaded", model_id=model_id)


def lost_with_triton(model_id: ModelId) -> ModelNotFound:
    """Return the error for a model that went with an exit of Triton."""
    return ModelNotFound(f"Triton ended, and model {model_id!r} with it", model_id=model_id)


class Registry:
    """All models by id: those that Triton has, loads, or is to load again; `coming`, whose files
    are fetched or on disk; and `stuck`, those that are STUCK, by name: their ids are free again.
    `release` is called with the files of each model that leaves.
    `lost`: those that Triton has lost, until they are loaded or their unload is asked for.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        """`clock` is time.monotonic, but in tests."""
        self._clock = clock
        self.coming: dict[ModelId, ModelRecord] = {}
        self.stuck: dict[TritonName, ModelRecord] = {}
        self.release: Callable[[StoreFiles], object] = StoreFiles.taken
        self.lost: dict[ModelId, LostModel] = {}
        self._records: dict[ModelId, ModelRecord] = {}
        # sorted, and counted, so that a page and a scrape cost the same for 10 and 10,000
        self._ready: list[ModelId] = []
        self._counts = dict.fromkeys(ModelState, 0)
        self._names: dict[TritonName, ModelRecord] = {}  # of each record; stuck ones are apart
        self._owners: dict[TritonName, ModelRecord] = {}  # of each name of a package in Triton
        self._watches: list[set[TritonName]] = []

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, model_id: ModelId) -> ModelRecord | None:
        return self._records.get(model_id)

    def find(self, model_id: ModelId) -> ModelRecord | None:
        """Return the model, also one whose files are fetched or on disk."""
        return self._records.get(model_id) or self.coming.get(model_id)

    def of_stores(self) -> list[ModelRecord]:
        """Return the models that calls have had fetched from stores."""
        loaded = (record for record in self._records.values() if record.files is not None)
        return [*self.coming.values(), *loaded]

    def serving(self, model_id: ModelId) -> ModelRecord:
        """Return the record of a model that may be invoked now, or raise why it may not."""
        record = self._records.get(model_id)
        if record is not None and record.state is _READY:
            return record
        if record is None or record.state is ModelState.UNLOADING:
            raise not_loaded(model_id)
        if record.state in _ON_THE_WAY:
            raise ModelNotReady(
                f"model {model_id!r} is {_ON_THE_WAY[record.state]}", model_id=model_id
            )
        raise ModelNotFound(
            f"model {model_id!r} has lost its process; load it again", model_id=model_id
        )

    def page(self, after: ModelId | None, limit: int) -> tuple[list[ModelRecord], bool]:
        """Return up to `limit` ready models with ids after `after`, and whether more follow."""
        start = 0 if after is None else bisect_right(self._ready, after)
        ids = self._ready[start : start + limit]
        return [self._records[i] for i in ids], start + limit < len(self._ready)

    def records(self) -> list[ModelRecord]:
        return list(self._records.values())

    def counts(self) -> dict[ModelState, int]:
        return dict(self._counts)

    def longest_idle_seconds(self, now: float) -> float | None:
        """Return the longest time that a ready model has been idle; None without models."""
        ready = (self._records[model_id] for model_id in self._ready)
        return max(
            (0.0 if r.usage.in_flight else now - r.usage.used_at for r in ready), default=None
        )

    def free_name(self, *ids: ModelId, replaced: ModelRecord | None = None) -> TritonName:
        """Return the name in Triton of the first of the ids whose name is free, or another. None is
        free that a model has which is being loaded, unloaded or undone, or that Triton is stuck
        with. `replaced`: the record whose place the model takes, and whose name it may have.
        """
        others = (replacement_name(ids[0], number) for number in count(1))
        names = chain(map(triton_name, ids), others)
        return next(name for name in names if not self._is_taken(name, replaced))

    def _is_taken(self, name: TritonName, replaced: ModelRecord | None) -> bool:
        owner = self._owners.get(name)
        if owner is not None and owner.name != name:  # a part of a package: the load is refused
            owner = None
        owners = (self._names.get(name), owner, self.stuck.get(name))
        return any(owner not in {None, replaced} for owner in owners)

    def begin_load(
        self,
        model_id: ModelId,
        name: TritonName,
        source: ModelSource,
        asked_for: ModelId = _AS_ITS_ID,
    ) -> ModelRecord:
        """Add a record of a load; it takes the place of that of a model that is RETURNING, or that
        is fetched or on disk. It takes over the files if it is loaded from them.
        """
        known = self.find(model_id)
        if known is not None and known.state not in _REPLACED:
            doing = _ON_THE_WAY.get(known.state, "loaded already")
            raise AlreadyLoaded(f"model {model_id!r} is {doing}", model_id=model_id)
        record = ModelRecord(model_id, name, source, asked_for=asked_for)
        if known is not None:
            record.usage.used_at = known.usage.used_at
            if known.state is ModelState.LOST:
                record.gpu = known.gpu
            artifact = known.files.artifact if known.files else None
            if artifact is not None and artifact.folder == source.url:
                record.files = known.files
        self.apply(record, ModelEvent.LOAD_BEGUN, replaced=known)
        return record

    def rename(self, record: ModelRecord, name: TritonName) -> None:
        """Give the model, whose load has not reached Triton yet, another name there."""
        del self._names[record.name]
        record.name = name
        record.is_renamed = True
        self._names[name] = record

    def adopt(self, model_id: ModelId, name: TritonName, source: ModelSource) -> ModelRecord:
        """Add a model that Triton serves already, loaded by an earlier run."""
        record = ModelRecord(model_id, name, source)
        self.apply(record, ModelEvent.ADOPTED, replaced=self.coming.get(model_id))
        return record

    def begin_fetch(self, model_id: ModelId, key: ArtifactKey) -> ModelRecord:
        """Add a model whose files are fetched."""
        record = ModelRecord(model_id, _NO_NAME, ModelSource(""), files=StoreFiles(key))
        self.apply(record, ModelEvent.FETCH_BEGUN)
        return record

    def put_on_disk(self, model_id: ModelId, files: StoreFiles) -> None:
        """Add a model whose files were fetched while another version of it was loaded."""
        record = ModelRecord(model_id, _NO_NAME, ModelSource(""), files=files)
        self.apply(record, ModelEvent.FETCHED)

    def give_up(self, model_id: ModelId, files: StoreFiles) -> None:
        """Let the files go of a model that is not loaded, now or once its load has failed."""
        files.is_tried_again = False
        found = self.coming.get(model_id)
        if found is not None and found.files is files:
            self.apply(found, ModelEvent.RELEASED)

    def place(self, record: ModelRecord, placement: Placement) -> None:
        """Note the names in Triton that are the model's until it is gone, and those that its
        package could not have.
        """
        record.placement = placement
        record.warnings = (*record.warnings, *placement.warnings)
        self._owners |= dict.fromkeys(placement.names, record)

    def is_owned(self, name: TritonName) -> bool:
        """Return whether a model in the table has that name in Triton. Stuck ones are not in it."""
        return name in self._owners

    def owner_of(self, name: TritonName) -> ModelRecord | None:
        """Return the record that has this name in Triton, for its entry or another part."""
        return self._owners.get(name)

    @contextmanager
    def disowned(self) -> Iterator[set[TritonName]]:
        """Collect the names in Triton whose models leave the table meanwhile."""
        names = set[TritonName]()
        self._watches.append(names)
        try:
            yield names
        finally:
            self._watches = [each for each in self._watches if each is not names]

    def is_serving(self, record: ModelRecord) -> bool:
        """Return whether the model is ready, under the name that callers ask for."""
        return self._records.get(record.asked_for) is record and record.state is _READY

    def refuse_unless_served(self, record: ModelRecord) -> None:
        """Raise unless the model is ready, under the name that callers ask for."""
        if not self.is_serving(record):
            why = f"model {record.asked_for!r} was unloaded meanwhile"
            raise ModelNotFound(why, model_id=record.asked_for)

    def refuse_unless_evictable(self, record: ModelRecord) -> None:
        """Raise unless the model is served, and was loaded for calls alone."""
        if not self.is_serving(record) or not record.is_on_demand:
            why = f"model {record.asked_for!r} was unloaded meanwhile, or is a platform's now"
            raise ModelNotFound(why, model_id=record.asked_for)

    def exchange(self, record: ModelRecord, other: ModelRecord) -> None:
        """Give each of two ready models the id of the other."""
        if {record.state, other.state} != {ModelState.READY}:
            raise ValueError(f"{record.id!r} and {other.id!r} are not both ready")
        record.id, other.id = other.id, record.id
        self._records |= {record.id: record, other.id: other}

    def died(self, record: ModelRecord) -> None:
        """Mark the model as dead. Further reports of the same death are ignored."""
        if self._state_of(record) is ModelState.READY:
            self.apply(record, ModelEvent.DIED)

    def lose(self, model_id: ModelId, lost: LostModel) -> None:
        """Note that Triton has lost a model, and that it is not coming back."""
        while len(self.lost) >= _MOST_LOST:
            del self.lost[next(iter(self.lost))]
        self.lost[model_id] = lost

    def returning(self, model_id: ModelId | None) -> ModelRecord | None:
        """Return the record of a model that is RETURNING, None for any other."""
        record = self._records.get(model_id) if model_id is not None else None
        return record if record is not None and record.state is ModelState.LOST else None

    def begin_unload(self, model_id: ModelId) -> ModelRecord:
        record = self._records.get(model_id)
        if record is None or record.state is ModelState.LOST:
            raise not_loaded(model_id)
        self.apply(record, ModelEvent.UNLOAD_BEGUN)
        return record

    def _state_of(self, record: ModelRecord) -> ModelState | None:
        """Return None for a record that is no longer in the table, or not yet."""
        is_here = record in (self.find(record.id), self.stuck.get(record.name))
        return record.state if is_here else None

    def apply(
        self, record: ModelRecord, event: ModelEvent, *, replaced: ModelRecord | None = None
    ) -> None:
        """Move the model to the state that the table has for the event, or raise and change
        nothing. `replaced`: the record whose place this one takes.
        """
        old = replaced or record
        before = self._state_of(old)
        after = advance(before, event)
        if before is not None:
            self._remove(old, before)
            is_gone = after in {None, ModelState.STUCK}
            if old is not record or is_gone or after in _COMING:
                self._disown(old)
            if old.files is not None and (is_gone or old.files is not record.files):
                self.release(old.files)
        if after is None:
            return
        record.state, record.state_since = after, self._clock()
        record.waits_for, record.awaits = None, ()
        self._counts[after] += 1
        if after is ModelState.STUCK:
            self.stuck[record.name] = record
            return
        if after in _COMING:
            self.coming[record.id] = record
            return
        self._records[record.id] = self._names[record.name] = record
        if after is ModelState.READY:
            insort(self._ready, record.id)
            self.lost.pop(record.id, None)

    def _disown(self, record: ModelRecord) -> None:
        for name in record.placement.names:
            if self._owners.get(name) is record:
                del self._owners[name]
                for names in self._watches:
                    names.add(name)

    def _remove(self, record: ModelRecord, state: ModelState) -> None:
        self._counts[state] -= 1
        if state is ModelState.STUCK:
            del self.stuck[record.name]
            return
        if state in _COMING:
            del self.coming[record.id]
            return
        del self._records[record.id]
        del self._names[record.name]
        if state is ModelState.READY:
            del self._ready[bisect_left(self._ready, record.id)]
