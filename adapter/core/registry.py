"""The table of models and their states. `serving()` is the hot path: one dict look-up."""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.state import ModelEvent, ModelState, advance
from adapter.errors import AlreadyLoaded, ModelNotFound, ModelNotReady

_READY = ModelState.READY  # looking up a member of an enumeration is slow in Python 3.11


@dataclass(slots=True, eq=False)
class ModelRecord:
    """One model. Only the registry changes `state`; only control changes the rest.

    `in_flight`: inferences that Triton works on; `abandoned`: those of them that nobody waits for.
    `served` counts the model's inferences, `ended_before` those that had ended at the last tick of
    housekeeping. `used_at` is when the last inference began (time.monotonic), or the load ended.
    `can_load_again`: `source` suffices to load the model again. `declared_bytes` and `disk_bytes`
    are the package's, unknown for a model of an earlier run. `instances`: the model's instances
    that had a python process of their own when the load ended, by their names in Triton.
    """

    id: ModelId
    name: TritonName
    source: ModelSource
    state: ModelState = ModelState.LOADING
    in_flight: int = 0
    abandoned: int = 0
    served: int = 0
    used_at: float = 0.0
    ended_before: int = 0
    placement: Placement = field(default_factory=lambda: Placement(()))
    package_key: str = ""
    can_load_again: bool = True
    declared_bytes: int | None = None
    disk_bytes: int = 0
    instances: frozenset[str] = frozenset()

    @property
    def is_renamed(self) -> bool:
        """Whether the model has another name in Triton than its id."""
        return self.name != self.id  # type: ignore[comparison-overlap]


def not_loaded(model_id: ModelId) -> ModelNotFound:
    return ModelNotFound(f"model {model_id!r} is not loaded", model_id=model_id)


class Registry:
    def __init__(self) -> None:
        self._records: dict[ModelId, ModelRecord] = {}
        # sorted, and counted, so that a page and a scrape cost the same for 10 and 10,000
        self._ready: list[ModelId] = []
        self._counts = dict.fromkeys(ModelState, 0)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {state.value.lower()}" for state, n in self.counts().items())
        return f"<Registry [{counts}]>"

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def get(self, model_id: ModelId) -> ModelRecord | None:
        return self._records.get(model_id)

    def serving(self, model_id: ModelId) -> ModelRecord:
        """Return the record of a model that may be invoked now, or raise why it may not."""
        record = self._records.get(model_id)
        if record is not None and record.state is _READY:
            return record
        if record is None or record.state is ModelState.UNLOADING:
            raise not_loaded(model_id)
        if record.state is ModelState.LOADING:
            raise ModelNotReady(f"model {model_id!r} is being loaded", model_id=model_id)
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

    def idle_seconds(self, now: float) -> float | None:
        """Return the longest time that a ready model has been idle; None without models."""
        ready = (self._records[model_id] for model_id in self._ready)
        return max((0.0 if r.in_flight else now - r.used_at for r in ready), default=None)

    def begin_load(self, model_id: ModelId, name: TritonName, source: ModelSource) -> ModelRecord:
        if (known := self._records.get(model_id)) is not None:
            doing = "being loaded" if known.state is ModelState.LOADING else "loaded already"
            raise AlreadyLoaded(f"model {model_id!r} is {doing}", model_id=model_id)
        advance(None, ModelEvent.LOAD_BEGUN)
        return self._add(ModelRecord(model_id, name, source))

    def adopt(self, model_id: ModelId, name: TritonName, source: ModelSource) -> ModelRecord:
        """Add a model that Triton serves already, loaded by an earlier run."""
        record = self._add(ModelRecord(model_id, name, source))
        self._apply(record, ModelEvent.LOADED)
        return record

    def finish_load(self, record: ModelRecord) -> None:
        self._apply(record, ModelEvent.LOADED)

    def abort_load(self, record: ModelRecord) -> None:
        self._apply(record, ModelEvent.LOAD_FAILED)

    def died(self, record: ModelRecord) -> None:
        """Mark the model as dead. Further reports of the same death are ignored."""
        if self._records.get(record.id) is record and record.state is ModelState.READY:
            self._apply(record, ModelEvent.DIED)

    def begin_unload(self, model_id: ModelId) -> ModelRecord:
        record = self._records.get(model_id)
        if record is None:
            raise not_loaded(model_id)
        self._apply(record, ModelEvent.UNLOAD_BEGUN)
        return record

    def finish_unload(self, record: ModelRecord) -> None:
        self._apply(record, ModelEvent.UNLOADED)

    def unload_failed(self, record: ModelRecord, *, was_dead: bool = False) -> None:
        """Return the model to the state that it had before the unload."""
        event = ModelEvent.DEAD_UNLOAD_FAILED if was_dead else ModelEvent.UNLOAD_FAILED
        self._apply(record, event)

    def vanished(self, record: ModelRecord) -> None:
        self._apply(record, ModelEvent.VANISHED)

    def _add(self, record: ModelRecord) -> ModelRecord:
        self._records[record.id] = record
        self._counts[record.state] += 1
        return record

    def _apply(self, record: ModelRecord, event: ModelEvent) -> None:
        before, after = record.state, advance(record.state, event)
        self._counts[before] -= 1
        if before is ModelState.READY:
            del self._ready[bisect_left(self._ready, record.id)]
        if after is ModelState.READY:
            insort(self._ready, record.id)
        if after is None:
            del self._records[record.id]
        else:
            record.state = after
            self._counts[after] += 1
