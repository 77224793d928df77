"""Brings back the models that Triton has lost: loads them again, once more if Triton ends again."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from adapter.control.presence import Life, Presence
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelEvent, ModelState
from adapter.errors import BackendUnavailable

log = logging.getLogger(__name__)

# One end may have had another cause: an operator, or the kernel short of memory.
_MOST_ENDS = 2


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that brings a model back. `number`: how many loads had begun with it."""

    number: int
    life: Life
    was_first: bool


class Returns:
    """Loads the models in state RETURNING: `most` at a time, as the time limit of a load begins
    with it. Once Triton has ended meanwhile: one after the other, so that the model whose load
    ends Triton is found and given up.

    `begin_load` loads in place of the record, and does not wait for the load.
    """

    def __init__(
        self,
        registry: Registry,
        presence: Presence,
        *,
        begin_load: Callable[[ModelRecord], asyncio.Task[ModelRecord]],
        is_open: Callable[[], bool],
        loads_in_flight: Callable[[], int],
        most: int,
    ) -> None:
        self._registry = registry
        self._presence = presence
        self._begin_load = begin_load
        self._is_open = is_open
        self._loads_in_flight = loads_in_flight
        self._most = most
        self._begun = 0
        self._loading: dict[ModelId, _Load] = {}
        # how often Triton ended while the model alone was being loaded; empty until Triton ends
        # during a load that brings a model back, and again when all are back
        self._ends: dict[ModelId, int] = {}

    def go_on(self) -> None:
        """Begin the loads that are due, if Triton is up. To be called whenever that may be so."""
        waiting = self._waiting()
        if not waiting and not self._loading:
            self._ends.clear()
        if not waiting or not self._presence.is_up or not self._is_open():
            return
        if self._ends:
            if self._loading:
                return
            # a suspect first: while there is least in Triton that it could end
            waiting = [max(waiting, key=lambda record: self._ends.get(record.id, 0))]
        for record in waiting[: self._most - len(self._loading)]:
            self._begin(record)

    def _waiting(self) -> list[ModelRecord]:
        if not self._registry.counts()[ModelState.RETURNING]:
            return []
        return [
            record
            for record in self._registry.records()
            if record.state is ModelState.RETURNING and record.id not in self._loading
        ]

    def _begin(self, record: ModelRecord) -> None:
        is_first = not self._loads_in_flight()
        task = self._begin_load(record)
        self._loading[record.id] = _Load(self._begun, self._presence.now(), is_first)
        task.add_done_callback(partial(self._ended, record.id))

    def _ended(self, model_id: ModelId, _: asyncio.Task[ModelRecord]) -> None:
        life = self._loading.pop(model_id).life
        record = self._registry.get(model_id)
        # one that was broken off waits until Triton was looked at again, which may have been done
        # while the load was undone
        is_back = record is None or record.state is not ModelState.RETURNING
        if is_back or self._presence.now() != life:
            self.go_on()

    def load_begun(self) -> None:
        """Note that any load has begun."""
        self._begun += 1

    def after(self, model_id: ModelId, error: BaseException | None) -> ModelEvent:
        """Return what the failure of a load means for a model that was to come back: that it is
        tried again, if Triton has ended, and was not ended by this model twice.
        """
        load = self._loading[model_id]
        is_unavailable = isinstance(error, BackendUnavailable)
        if not is_unavailable and self._presence.now() == load.life:
            return ModelEvent.LOAD_FAILED  # the model's own failure
        was_sent = not isinstance(error, BackendUnavailable) or error.delivered
        was_alone = load.was_first and self._begun == load.number
        ends = self._ends.get(model_id, 0) + (was_sent and was_alone)
        self._ends[model_id] = ends
        if ends < _MOST_ENDS:
            log.warning("model.return_broken_off", extra={"model_id": model_id, "ends": ends})
            return ModelEvent.BROKEN_OFF
        reason = f"Triton ended {ends} times while this model alone was being loaded"
        log.error("model.return_given_up", extra={"model_id": model_id, "reason": reason})
        return ModelEvent.LOAD_FAILED
