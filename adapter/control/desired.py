"""Loads the desired models that are not loaded, by one loop for each model and any reason.

- load_at_start, preload: from the start on, until a caller asks for the unload; after each restart
  of Triton again. A load that failed is tried again, after 2 s and up to a minute.
- return: Triton has lost it (RETURNING), in a restart or by a "not found". The most recently used
  comes first. Its own failure is final.
- call: its callers wait (residency/on_demand.py). They get its failure; it waits for room.

An explicit load needs no loop: it is tried once, and its caller decides (models.py). What is loaded
already is found by the reconciler, at the start and every two seconds.

Before each try a suspect of ending Triton waits for its turn (suspects.py), and any model until
Triton is up. Then the loop takes one of the slots of its reason. The reasons, as data, are in
core/desired.py.

What happens to a model whose Triton dies while it is

- fetched: the fetch goes on. Then the model waits ON_DISK for the next Triton, for up to 10 s, and
  is loaded there. Its callers only wait longer. If Triton stays away they get 503, and the files
  stay in the disk cache.
- LOADING for a call: it is put back ON_DISK, and loaded once more by the next Triton. If that one
  ends too, its callers get the error that Triton ended.
- LOADING for a caller of its own: the load fails, and is not sent again.
- LOADING to come back, or at the start: each next Triton loads it, until it is loaded or given up
  as the cause of Triton's ends.
- READY: where the adapter loads lost models again (on_triton_restart) it is RETURNING, and loaded
  by the next Triton; one that was loaded on demand is loaded by its next call.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from adapter.control.suspects import Trials
from adapter.control.triton_status import MODELS_LOOKED_FOR, Incarnation, TritonStatus
from adapter.core.artifacts import ArtifactKey
from adapter.core.desired import (
    PRELOAD,
    SETTLED,
    START,
    TRANSITIONS,
    Reason,
    Want,
    WantEvent,
)
from adapter.core.model import ModelId, ModelSource
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelEvent, ModelState
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    CapacityError,
    ModelNotFound,
    ModelNotReady,
)
from adapter.runtime import clock
from adapter.runtime.fair_slots import FairSlots

log = logging.getLogger(__name__)

_MOST_PAUSE_SECONDS = 60.0
_SHOWN = 3

Bring = Callable[[ModelId, ArtifactKey], Awaitable[object]]


@dataclass(slots=True, eq=False)
class DesiredModel:
    """`load` loads the model, or waits for a load under way; None for one that only comes back.
    `url`: the path of its files, or its key in a store. `why`: the error of the last load. `key`:
    the artifact that `callers` wait for, who are counted by caller; "" is an unknown one.
    `wait_for_room` is awaited with the error if memory is short, and raises once waiting is of no
    use; `lack` is that error meanwhile. `ends`: how many ends of Triton have broken off its load.
    `coming` is the load that brings it back. `life`: of the Triton that `coming` or `lack` is
    about. `task` loads it, for all who wait.
    """

    model_id: ModelId
    reason: Reason
    load: Callable[[], Awaitable[Any]] | None = None
    url: str = ""
    key: ArtifactKey | None = None
    callers: Counter[str] = field(default_factory=Counter)
    wait_for_room: Callable[[CapacityError], Awaitable[None]] | None = None
    state: Want = Want.WAITING
    why: str = ""
    ends: int = 0
    pause_seconds: float = 0.0
    life: Incarnation | None = None
    coming: asyncio.Task[ModelRecord] | None = None
    task: asyncio.Task[Any] | None = None
    lack: CapacityError | None = None

    def __str__(self) -> str:
        return f"{self.model_id!r} ({self.why or self.state.value})"

    def apply(self, event: WantEvent, why: str = "") -> bool:
        """Return whether the event meant anything to this model."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            return False
        self.state, self.why = after, why
        return True

    @property
    def is_settled(self) -> bool:
        return self.state in SETTLED


class DesiredModels:
    """Holds the desired models by id, but those that only calls want.

    `bring_back` begins a load in place of a record; `hangs`: does the load of this model hang?
    """

    def __init__(
        self,
        registry: Registry,
        triton_status: TritonStatus,
        load_threads: int,
        *,
        load: Callable[[ModelId, ModelSource], Awaitable[object]],
        bring_back: Callable[[ModelRecord], asyncio.Task[ModelRecord]],
        hangs: Callable[[str], bool],
    ) -> None:
        self._registry = registry
        self._status = triton_status
        self._load, self._bring_back, self._hangs = load, bring_back, hangs
        self._return = Reason("return", load_threads)
        self._slots: dict[Reason, FairSlots] = {}
        self._models: dict[ModelId, DesiredModel] = {}  # while it is missing it has no record
        self.trials = Trials(registry, triton_status, self._is_any_coming)

    # -- what is desired --------------------------------------------------------------------

    def want(self, sources: Mapping[ModelId, ModelSource]) -> None:
        """Have these models loaded from now on."""
        for model_id, source in sources.items():
            load = partial(self._load, model_id, source)
            self._add(DesiredModel(model_id, START, load, source.url))

    def preload(self, keys: Mapping[ModelId, ArtifactKey], bring: Bring) -> None:
        """Have these models of the stores loaded from now on."""
        for model_id, key in keys.items():
            load = partial(bring, model_id, key)
            self._add(DesiredModel(model_id, PRELOAD, load, str(key)))

    def _add(self, model: DesiredModel) -> None:
        self._models[model.model_id] = model
        self._begin(model)

    def wanted(self) -> list[DesiredModel]:
        """Return the models that are wanted from the start on, or were until their unload."""
        return [each for each in self._models.values() if each.load is not None]

    def count(self) -> dict[str, int]:
        """Return how many of them are loaded, missing, and unloaded by a caller."""
        found = Counter[str]()
        for each in self.wanted():
            record = self._registry.get(each.model_id)
            is_ready = record is not None and record.state is ModelState.READY
            is_unloaded = each.state is Want.UNLOADED
            found["unloaded" if is_unloaded else "loaded" if is_ready else "missing"] += 1
        return {state: found[state] for state in ("loaded", "missing", "unloaded")}

    def why_missing(self) -> str | None:
        """Return which of them have yet to be loaded; None when none."""
        wanted = [each for each in self.wanted() if each.state is not Want.UNLOADED]
        missing = [each for each in wanted if not each.is_settled]
        if not missing:
            return MODELS_LOOKED_FOR if wanted and not self._status.is_up else None
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        named = ", ".join(map(str, missing[:_SHOWN]))
        return f"{len(missing)} of {len(wanted)} models are to be loaded: {named}{more}"

    def refused(self) -> list[str]:
        """Return which of them are not loaded, and not tried again, and why."""
        return [str(each) for each in self.wanted() if each.state is Want.REFUSED]

    def loaded(self, model_id: ModelId, source: ModelSource) -> None:
        """Note that a model was loaded, whoever asked for it. One from elsewhere is another model,
        which the caller who brought it has to bring again.
        """
        model = self._models.get(model_id)
        if model is not None and (source.is_cached or _path(source.url) == _path(model.url)):
            model.apply(WantEvent.LOADED)

    @contextmanager
    def no_more(self, model_id: ModelId) -> Iterator[Callable[[], bool]]:
        """Note that an unload is asked for, and tell a caller who hears that the model is not
        loaded. To be called again when the unload has its turn: a load that was under way has made
        the model wanted again.
        """
        was_wanted = self._unload_asked(model_id)
        try:
            yield partial(self._unload_asked, model_id)
        except ModelNotFound as error:
            if was_wanted:
                error.args = (f"{error}; its unload ends the adapter's own attempts to load it",)
            raise

    def _unload_asked(self, model_id: ModelId) -> bool:
        model = self._models.get(model_id)
        if model is None or model.load is None or not model.apply(WantEvent.UNLOAD_ASKED):
            return False
        log.info("adapter.wanted_no_more", extra={"model_id": model_id})
        return True

    # -- when Triton is another -------------------------------------------------------------

    def doubt(self) -> None:
        """Take none for loaded: Triton was restarted."""
        for each in self._models.values():
            each.apply(WantEvent.TRITON_RESTARTED)

    def begin(self) -> None:
        """Begin to load what is missing, of what Triton has lost the most recently used first. To
        be called whenever Triton may be up again.
        """
        if not self._status.is_up:
            return
        if self._registry.counts()[ModelState.LOST]:
            lost = [r for r in self._registry.records() if r.state is ModelState.LOST]
            for record in sorted(lost, key=lambda each: -each.usage.used_at):
                made = DesiredModel(record.id, self._return)
                self._begin(self._models.setdefault(record.id, made))
        for each in self.wanted():
            self._begin(each)

    def stop(self) -> None:
        """Begin no more loads."""
        for each in self._models.values():
            task, each.task = each.task, None
            if task is not None:
                task.cancel()

    def _is_any_coming(self) -> bool:
        return any(each.coming is not None for each in self._models.values())

    def after(self, model_id: ModelId, error: BaseException | None) -> ModelEvent:
        """Return what the failure of a load means for a model that was to come back: that it is
        loaded again if Triton has ended, unless it was given up.
        """
        is_unavailable = isinstance(error, BackendUnavailable)
        if not is_unavailable and self._status.now() == self._models[model_id].life:
            return ModelEvent.LOAD_FAILED  # the model's own failure
        known = self._registry.lost.get(model_id)
        if known is not None and known.is_given_up:
            return ModelEvent.LOAD_FAILED
        self.trials.is_broken_off = True
        log.warning("model.return_broken_off", extra={"model_id": model_id})
        return ModelEvent.BROKEN_OFF

    # -- the loop ---------------------------------------------------------------------------

    def _begin(self, model: DesiredModel) -> None:
        """Begin the model's loop, unless it goes on or there is nothing to do."""
        if model.task is None and self._status.is_open and self._is_missing(model):
            model.task = asyncio.create_task(self.until_loaded(model))
            model.task.add_done_callback(partial(self._ended, model))

    def _is_missing(self, model: DesiredModel) -> bool:
        is_lost = self._registry.returning(model.model_id) is not None
        return is_lost or (model.load is not None and not model.is_settled)

    def _ended(self, model: DesiredModel, task: asyncio.Task[Any]) -> None:
        if model.task is not task:  # it was stopped
            return
        model.task, error = None, None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AdapterError):
            log.error("task.failed", exc_info=error, extra={"task": "desired"})
        if self._registry.returning(model.model_id) is None:
            self._begin(model)  # Triton may have been restarted meanwhile
        self._tidy(model)
        wanted = [each for each in self.wanted() if each.state is not Want.UNLOADED]
        if model in wanted and all(each.state is Want.LOADED for each in wanted):
            log.info("adapter.models_loaded", extra={"models": len(wanted)})

    def _tidy(self, model: DesiredModel) -> None:
        if model.load is None and model.task is None and model.coming is None:
            self._models.pop(model.model_id, None)

    async def until_loaded(self, model: DesiredModel) -> Any:
        """Load the model, and again as its reason says. Return what its load does, None if it need
        not be loaded any more. Raises the failure after which it is not tried again.
        """
        while True:
            try:
                return await self._try(model)
            except Exception as error:  # a bug too, which its operation has logged
                if not await self._is_tried_again(model, error):
                    raise

    async def _try(self, model: DesiredModel) -> Any:
        """Load the model once, when it has its turn, Triton is up, and a slot is free."""
        model_id, reason = model.model_id, model.reason
        if self._registry.returning(model_id) is not None:
            if not reason.keeps:
                return await self._load_now(model, None)  # its callers get ModelNotReady
            reason = self._return
        await self.trials.turn(model_id, reason)
        await self._status.wait_until_up(clock.monotonic() + reason.turn_seconds)
        slots = self._slots.setdefault(reason, FairSlots(reason.at_once, self._hangs))
        async with slots.slot(model_id, model.callers):
            await self._status.wait_until_up(clock.monotonic() + reason.turn_seconds)
            lost = self._registry.returning(model_id) if reason.keeps else None
            if lost is None and (model.load is None or (reason.keeps and model.is_settled)):
                return None
            if self.trials.has_turn(model_id):
                return await self._load_now(model, lost)
        return await self._try(model)

    async def _load_now(self, model: DesiredModel, lost: ModelRecord | None) -> Any:
        if lost is not None:
            return await self._come_back(model, lost)
        assert model.load is not None  # noqa: S101 - else it could only come back
        result = await model.load()
        # what was asked to be unloaded amid the load is unloaded after it
        if model.reason.keeps and model.state is not Want.UNLOADED:
            model.apply(WantEvent.LOADED)
        return result

    async def _come_back(self, model: DesiredModel, lost: ModelRecord) -> ModelRecord:
        model.life = self._status.now()
        model.coming = self._bring_back(lost)
        model.coming.add_done_callback(partial(self._came_back, model))
        return await asyncio.shield(model.coming)

    def _came_back(self, model: DesiredModel, _: asyncio.Task[ModelRecord]) -> None:
        model.coming = None
        if self._registry.returning(model.model_id) is None:
            self.trials.came_back()
        self._tidy(model)

    async def _is_tried_again(self, model: DesiredModel, error: Exception) -> bool:
        """Return whether to try again after this failure, once that may be."""
        if not model.reason.keeps:
            return await self._is_called_again(model, error)
        if self._registry.returning(model.model_id) is not None:
            # its return was broken off: in the same life it waits until Triton was looked at again
            return self._status.now() != model.life
        if model.load is None:
            return False
        self._note(model, error)
        if model.is_settled:
            return False
        pause = model.pause_seconds or model.reason.pause_seconds
        model.pause_seconds = min(2 * pause, _MOST_PAUSE_SECONDS)
        await asyncio.sleep(pause)
        return True

    def _note(self, model: DesiredModel, error: Exception) -> None:
        """Note how a try has failed, unless somebody else has loaded or unloaded the model."""
        event, why = WantEvent.FAILED, str(error)
        if not isinstance(error, AdapterError):
            why = repr(error)
        elif isinstance(error, model.reason.refused_by):
            event = WantEvent.REFUSED
        elif isinstance(error, ModelNotReady):  # it is to come back: look again soon
            event, model.pause_seconds = WantEvent.DELAYED, 0.0
        if model.apply(event, why) and event is WantEvent.REFUSED:
            log.error("adapter.preload_refused", extra={"model_id": model.model_id, "reason": why})

    async def _is_called_again(self, model: DesiredModel, error: Exception) -> bool:
        if isinstance(error, CapacityError) and model.wait_for_room is not None:
            await model.wait_for_room(error)
            return True
        if isinstance(error, BackendUnavailable) and model.ends:  # it may be what ends Triton
            raise BackendUnavailable(str(error), delivered=True) from error
        is_ended = isinstance(error, BackendUnavailable) and bool(error.delivered)
        model.ends += is_ended  # Triton is started again
        return is_ended


def _path(url: str) -> str:
    return url.removeprefix("file://").rstrip("/")
