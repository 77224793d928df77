"""Hold the records of all models.

`serving` is the hot path: one look-up in a dict. Until it is absent, a record is found by the id
that callers use, and by its names in Triton:

- the record that callers of an id get has the id. There is at most one.
- another version, loaded beside it, has names alone until `switch` gives it the id; from then on
  the old version has names alone.
- a STUCK model has names alone: its id is free for another load.
- a LOST model has the id alone: Triton has forgotten its names.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count

from adapter.core.model import ModelId, Placement, TritonName, numbered_name, triton_name
from adapter.core.record import ModelRecord, OnExit
from adapter.core.states import ModelEvent, ModelState, advance
from adapter.errors import ModelNotFound, ModelNotReady

_READY = ModelState.READY  # looking up a member of an enumeration is slow in Python 3.11
_SOON_READY = {
    ModelState.PREPARING: "being loaded",
    ModelState.LOADING: "being loaded",
    ModelState.LOST: "being loaded again",
}
_WITHOUT_ID = frozenset({None, ModelState.STUCK})
_WITHOUT_NAMES = frozenset({None, ModelState.LOST})
_BEGINNINGS = frozenset({ModelEvent.LOAD_STARTED, ModelEvent.ADOPTED})


@dataclass(frozen=True, slots=True)
class Move:
    """A change of state that has happened."""

    record: ModelRecord
    before: ModelState | None
    event: ModelEvent
    after: ModelState | None


class Registry:
    """Finds records by id and by name in Triton, and moves them from state to state."""

    def __init__(
        self,
        clock: Callable[[], float],  # the monotonic one, but in tests
    ) -> None:
        self._clock = clock
        self._listeners: list[Callable[[Move], None]] = []
        self._records: dict[ModelRecord, None] = {}  # a set in the order of the loads
        self._by_id: dict[ModelId, ModelRecord] = {}
        self._by_name: dict[TritonName, ModelRecord] = {}
        # kept with each change, so that a page and a scrape cost the same for 10 and 10,000 models
        self._ready_ids: list[ModelId] = []  # sorted
        self._counts = Counter[ModelState]()

    def subscribe(self, listener: Callable[[Move], None]) -> None:
        """Call `listener` after each change of state, in the order of subscription."""
        self._listeners.append(listener)

    # -- look-ups ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    def get(self, model_id: ModelId) -> ModelRecord | None:
        """Return the record that callers of this id get, in whatever state; None without one.

        A second version, in its load beside the first, is found only after `switch`.
        """
        return self._by_id.get(model_id)

    def serving(self, model_id: ModelId) -> ModelRecord:
        """Return the record that takes requests. Raises ModelNotReady and ModelNotFound."""
        record = self._by_id.get(model_id)
        if record is not None and record.state is _READY:
            return record
        raise _explain_absence(model_id, record)

    def find_ready(self, model_id: ModelId) -> ModelRecord | None:
        """Return the record that takes requests; None without one."""
        record = self._by_id.get(model_id)
        return record if record is not None and record.state is _READY else None

    def is_serving(self, record: ModelRecord) -> bool:
        """Return whether callers get this record now."""
        return record.state is _READY and self._by_id.get(record.id) is record

    def records(self) -> list[ModelRecord]:
        """Return all records, those without an id included."""
        return list(self._records)

    def records_of(self, model_id: ModelId) -> list[ModelRecord]:
        """Return all records of one model: all versions, and what Triton is stuck with."""
        return [record for record in self._records if record.id == model_id]

    def owner_of(self, name: TritonName) -> ModelRecord | None:
        """Return the record that has this name in Triton, for its entry or another part."""
        return self._by_name.get(name)

    def page(self, after: ModelId | None, limit: int) -> tuple[list[ModelRecord], bool]:
        """Return up to `limit` serving records with ids after `after`, and whether more follow."""
        start = 0 if after is None else bisect_right(self._ready_ids, after)
        ids = self._ready_ids[start : start + limit]
        return [self._by_id[model_id] for model_id in ids], start + limit < len(self._ready_ids)

    def counts(self) -> dict[ModelState, int]:
        """Return how many records are in each state."""
        return {state: self._counts[state] for state in ModelState}

    def longest_idle_seconds(self, now: float) -> float | None:
        """Return the longest time that a serving model has been idle; None without models."""
        ready = (self._by_id[model_id] for model_id in self._ready_ids)
        idle = (0.0 if r.usage.in_flight else now - r.usage.used_at for r in ready)
        return max(idle, default=None)

    def should_reload(self, record: ModelRecord) -> bool:
        """Return whether the adapter loads this model again after an exit of Triton, which then
        makes the record LOST, and not absent.

        Of two versions only the one that callers of the id get is loaded again.
        """
        return record.on_exit is OnExit.RELOAD and self._by_id.get(record.id) is record

    # -- names in Triton --------------------------------------------------------------------

    def is_free(self, name: TritonName) -> bool:
        """Return whether no record has this name in Triton."""
        return name not in self._by_name

    def is_taken(self, name: TritonName, record: ModelRecord) -> bool:
        """Return whether another record than this one has the name in Triton."""
        return self._by_name.get(name, record) is not record

    def free_name(self, model_id: ModelId) -> TritonName:
        """Return a name in Triton that no record has: the model's own, else a numbered one.

        No load of another model takes it either: a version that is to be loaded in the place of
        another is in the table only once that one has gone.
        """
        numbered = (numbered_name(model_id, number) for number in count(1))
        return next(filter(self.is_free, chain([triton_name(model_id)], numbered)))

    def rename(self, record: ModelRecord, name: TritonName) -> None:
        """Give another name in Triton to a model that is PREPARING.

        Its placement is dropped, and with it the names of its parts. Raises ValueError in other
        states, and if another record has the name.
        """
        if record.state is not ModelState.PREPARING or record not in self._records:
            raise ValueError(f"model {record.id!r} is not being prepared")
        self._refuse_owned(name, record)
        self._release_names(record)
        record.name = name
        record.placement = Placement(())
        self._by_name[name] = record

    def place(self, record: ModelRecord, placement: Placement) -> None:
        """Note the names in Triton of all models of a package, until the record leaves Triton."""
        if record not in self._records or record.state in _WITHOUT_NAMES:
            raise ValueError(f"model {record.id!r} has no name in Triton")
        for name in placement.names:
            self._refuse_owned(name, record)
        self._release_names(record)
        record.placement = placement
        self._claim_names(record)

    # -- changes ----------------------------------------------------------------------------

    def add(self, record: ModelRecord, event: ModelEvent = ModelEvent.LOAD_STARTED) -> None:
        """Add the record as the one that callers of its id get.

        A LOST record of this id makes room for it: that one is absent from then on, and the new one
        inherits when the model was used, and the GPU that it was on. Raises ValueError or
        IllegalTransition, and changes nothing, where the id or the name in Triton is taken.
        """
        self._refuse_known(record)
        replaced = self._by_id.get(record.id)
        before = replaced.state if replaced else None
        after = advance(before, event)
        self._refuse_owned(record.name, record)
        if replaced is not None:
            record.usage.used_at = replaced.usage.used_at
            record.gpu = replaced.gpu
            self._set_state(replaced, None)
            del self._records[replaced]
        self._by_id[record.id] = record
        self._insert(record, Move(record, before, event, after))

    def add_beside(self, record: ModelRecord) -> None:
        """Add another version of a model, which no caller gets before `switch`."""
        self._refuse_known(record)
        self._refuse_owned(record.name, record)
        event = ModelEvent.LOAD_STARTED
        self._insert(record, Move(record, None, event, advance(None, event)))

    def switch(self, old: ModelRecord, new: ModelRecord) -> None:
        """Give the READY new version to all callers from now on. The old one keeps its names.

        Calls of the old one count as calls of the new one: it was not idle meanwhile.
        """
        if self._by_id.get(old.id) is not old or old is new:
            raise ValueError(f"callers of model {old.id!r} do not get this version")
        if new.id != old.id or new.state is not _READY:
            raise ValueError(f"there is no other version of model {old.id!r} that is ready")
        new.usage.used_at = max(new.usage.used_at, old.usage.used_at)
        self._by_id[new.id] = new
        self._list_if_ready(new.id)

    def apply(self, record: ModelRecord, event: ModelEvent) -> None:
        """Move the record as the table says, and tell the listeners.

        Raises IllegalTransition for an event that the table lacks in this state. Raises ValueError
        for an event that begins a record, or that makes a version LOST which should not return.
        Nothing changes then.
        """
        before = record.state
        after = advance(before, event)
        if event in _BEGINNINGS:
            raise ValueError(f"{event.value} begins a record: add one for model {record.id!r}")
        if after is ModelState.LOST and self._by_id.get(record.id) is not record:
            raise ValueError(f"callers of model {record.id!r} do not get the version that is lost")
        self._set_state(record, after)
        if after in _WITHOUT_NAMES:
            self._release_names(record)
        if after in _WITHOUT_ID and self._by_id.get(record.id) is record:
            del self._by_id[record.id]
        if after is None:
            del self._records[record]
        self._list_if_ready(record.id)
        self._tell(Move(record, before, event, after))

    # -- inside -----------------------------------------------------------------------------

    def _insert(self, record: ModelRecord, move: Move) -> None:
        """Index a new record by its names, set its first state, and tell the listeners."""
        self._records[record] = None
        self._claim_names(record)
        self._set_state(record, move.after)
        self._list_if_ready(record.id)
        self._tell(move)

    def _set_state(self, record: ModelRecord, state: ModelState | None) -> None:
        """Write a state that the table has given, and when it began.

        The record moves from the count of the old state to that of the new one, and its step and
        blockers are cleared. Indexes and listeners are the caller's.
        """
        if record.state is not None:
            self._counts[record.state] -= 1
        if state is not None:
            self._counts[state] += 1
        record.state = state
        record.state_since = self._clock()
        record.step = None
        record.blockers = ()

    def _list_if_ready(self, model_id: ModelId) -> None:
        """List the id among those that serve, or remove it from them."""
        record = self._by_id.get(model_id)
        is_ready = record is not None and record.state is _READY
        at = bisect_left(self._ready_ids, model_id)
        is_listed = self._ready_ids[at : at + 1] == [model_id]
        if is_ready and not is_listed:
            self._ready_ids.insert(at, model_id)
        elif is_listed and not is_ready:
            del self._ready_ids[at]

    def _tell(self, move: Move) -> None:
        for listener in self._listeners:
            listener(move)

    def _refuse_known(self, record: ModelRecord) -> None:
        if record.state is not None:
            raise ValueError(f"a load of model {record.id!r} needs a record of its own")

    def _refuse_owned(self, name: TritonName, record: ModelRecord) -> None:
        """Raise if another record has this name in Triton."""
        owner = self._by_name.get(name, record)
        if owner is not record:
            raise ValueError(f"model {owner.id!r} has the name {name!r} in Triton")

    def _claim_names(self, record: ModelRecord) -> None:
        """Have the record found by each of its names in Triton."""
        for name in (record.name, *record.placement.names):
            self._by_name[name] = record

    def _release_names(self, record: ModelRecord) -> None:
        for name in {record.name, *record.placement.names}:
            if self._by_name.get(name) is record:
                del self._by_name[name]


def _explain_absence(model_id: ModelId, record: ModelRecord | None) -> Exception:
    """Return the error for callers of a model that takes no requests now."""
    state = record.state if record else None
    if state in _SOON_READY:
        text = f"model {model_id!r} is {_SOON_READY[state]}"
        return ModelNotReady(text, model_id=model_id)
    if state is ModelState.DEAD:
        text = f"model {model_id!r} has lost its process; load it again"
        return ModelNotFound(text, model_id=model_id)
    return ModelNotFound(f"model {model_id!r} is not loaded", model_id=model_id)
