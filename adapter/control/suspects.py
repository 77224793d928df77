"""Finds the model that ends Triton again and again, and says when a suspect of that may be loaded.

The suspects of an end are the models that Triton was loading, whose requests it broke off, or that
it had served for less than a minute. One end may have any cause: an operator, or the kernel short
of memory. After it all models are loaded again at once.

If Triton ends again soon, only the suspects of both ends remain; those of the later end, if there
are none. They are loaded after all other models, one at a time: the next when the last has served
for its trial of 5 s, which clears it. Each further end doubles the trial, up to a minute, so that a
model is found as well that ends Triton later. A model that was the only suspect of two ends is
given up.

Without a trial a suspect is cleared when it has served for a minute: a model that serves for longer
before it ends Triton leaves the others most of the time, and cannot be told from bad luck.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Collection

from adapter.control.triton_status import TritonStatus
from adapter.core.desired import Reason
from adapter.core.model import ModelId
from adapter.core.registry import LostModel, ModelRecord, Registry
from adapter.core.state import ModelState, WaitsFor
from adapter.errors import BackendUnavailable, GivenUp, ModelNotReady
from adapter.runtime import clock

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_GIVEN_UP = "Triton has ended again and again, and this model alone was loaded or used each time"
_SEE_ENDS = "see docs/operations.md#after-a-restart-of-triton"
_ON_TRIAL = {ModelState.LOADING, ModelState.READY}
_IN_TRITON = {WaitsFor.TRITON, WaitsFor.UNDOING}
SOON_SECONDS = 60.0
TRIAL_SECONDS = 5.0
_MOST_ENDS = 2


class Suspects:
    """`clock` is time.monotonic, but in tests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: dict[ModelId, int] = {}  # of each suspect: those that only it can have caused
        self._trial_seconds = 0.0
        self._broken_off: dict[ModelId, float] = {}  # when; the records are gone by then

    def broke_off(self, model_id: ModelId) -> None:
        """Note a model that was being loaded, had a request, or was loaded lately, when Triton has
        broken off.
        """
        self._broken_off[model_id] = self._clock()

    def triton_ended(self, *, is_soon: bool) -> ModelId | None:
        """Note an end of Triton; return the model to give up, if any. `is_soon`: it ended when the
        models of the last end were being loaded again, or shortly after.
        """
        since = self._clock() - SOON_SECONDS
        found = {each for each, at in self._broken_off.items() if at > since}
        self._broken_off.clear()
        if not found:
            return None
        common = found & self._ends.keys()
        if not common and not is_soon:
            self._ends, self._trial_seconds = dict.fromkeys(found, 0), 0.0
            return None
        self._trial_seconds = min(2 * self._trial_seconds, SOON_SECONDS) or TRIAL_SECONDS
        self._ends = {each: self._ends.get(each, 0) for each in common or found}
        if len(self._ends) != 1:
            return None
        [only] = self._ends
        self._ends[only] += 1
        if self._ends[only] < _MOST_ENDS:
            return None
        self._ends[only] -= 1  # if it is loaded all the same, one more end is enough
        return only

    @property
    def trial_seconds(self) -> float:
        """0 while no suspect is on trial."""
        return self._trial_seconds if self._ends else 0.0

    @property
    def cleared_seconds(self) -> float:
        """Return for how long a suspect has to serve to be cleared."""
        return self._trial_seconds or SOON_SECONDS

    def ids(self) -> list[ModelId]:
        return [*self._ends]

    def is_on_trial(self, model_id: ModelId) -> bool:
        return self._trial_seconds > 0 and model_id in self._ends

    def ends(self, model_id: ModelId) -> int:
        return self._ends.get(model_id, 0)

    def clear(self, model_id: ModelId) -> None:
        self._ends.pop(model_id, None)


class Trials:
    """Lets a suspect be loaded in its turn, when nothing else can be blamed for an end of Triton.

    `is_returning`: whether models that Triton has lost are being loaded again.
    """

    def __init__(
        self, registry: Registry, triton_status: TritonStatus, is_returning: Callable[[], bool]
    ) -> None:
        self._registry = registry
        self._status = triton_status
        self._is_returning = is_returning
        self._suspects = Suspects(clock.now)
        self._back_at = -math.inf  # when the last model came back
        self._turn: tuple[ModelId | None, float] = (None, -math.inf)  # the latest, and its begin
        self.is_broken_off = False  # a return, since the last end

    async def turn(self, model_id: ModelId, reason: Reason) -> None:
        """Wait until the adapter may load this model by itself. Raises GivenUp, and ModelNotReady
        once that has taken as long as `reason` allows.
        """
        deadline = clock.monotonic() + reason.turn_seconds
        while True:
            self._refuse_given_up(model_id, reason.given_up_seconds)
            self.clear_served()
            if not self._suspects.is_on_trial(model_id) or self._takes_turn(model_id):
                return
            if clock.monotonic() > deadline:
                why = f"model {model_id!r} waits for its turn: it may have crashed Triton"
                raise ModelNotReady(why, model_id=model_id)
            await asyncio.sleep(_LOOK_SECONDS)

    def has_turn(self, model_id: ModelId) -> bool:
        """Return whether the model may be loaded, after `turn`: Triton may have ended since."""
        return self._turn[0] == model_id or not self._suspects.is_on_trial(model_id)

    def _takes_turn(self, model_id: ModelId) -> bool:
        """Have the suspect loaded now, if nothing else can be blamed for an end of Triton soon."""
        trial, now = self._suspects.trial_seconds, clock.monotonic()
        before, begun_at = self._turn
        is_busy = self._is_returning() or not self._status.is_up
        if is_busy or now - self._back_at < trial or self._next_to_return() not in {None, model_id}:
            return False
        if before != model_id and now - begun_at < trial:
            return False
        others = (self._registry.get(each) for each in self._suspects.ids() if each != model_id)
        if any(each is not None and each.state in _ON_TRIAL for each in others):
            return False
        self._turn = model_id, now
        return True

    def _next_to_return(self) -> ModelId | None:
        """Return the lost model that comes first: any that is no suspect, then what was loaded
        last. Those before it had been tried, or it would not be a suspect.
        """
        if not self._registry.counts()[ModelState.LOST]:
            return None
        waiting = [r for r in self._registry.records() if r.state is ModelState.LOST]

        def order(each: ModelRecord) -> tuple[bool, int, float]:
            is_free = not self._suspects.is_on_trial(each.id)
            return is_free, self._suspects.ends(each.id), each.begun_at

        return max(waiting, key=order).id

    def clear_served(self) -> None:
        """Clear the suspects that have served for long enough."""
        if not self._status.is_up:
            return
        since = clock.monotonic() - self._suspects.cleared_seconds
        for model_id in self._suspects.ids():
            known = self._registry.get(model_id)
            if known and known.state is ModelState.READY and known.state_since <= since:
                self._suspects.clear(model_id)

    def _refuse_given_up(self, model_id: ModelId, seconds: float) -> None:
        known = self._registry.lost.get(model_id)
        if known is None or not known.is_given_up or clock.wall() > known.at + seconds:
            return
        why = f"model {model_id!r} was given up: {known.reason}; load it to try again; {_SEE_ENDS}"
        raise GivenUp(why, model_id=model_id)

    def came_back(self) -> None:
        """Note the end of a return, whose model is loaded or has failed."""
        self._back_at = clock.monotonic()

    # -- ends of Triton ---------------------------------------------------------------------

    def call_failed(self, model_id: ModelId, error: BaseException | None) -> None:
        """Note the failure of a load or an inference that Triton was working on."""
        if isinstance(error, BackendUnavailable) and error.delivered:
            self._suspects.broke_off(model_id)

    def lost(self, gone: Collection[ModelRecord]) -> None:
        """Note models that Triton has lost, before it may be known that it has ended."""
        since = clock.monotonic() - SOON_SECONDS
        for record in gone:
            if record.state_since > since:
                self._suspects.broke_off(record.asked_for)

    def triton_ended(self) -> ModelId | None:
        """Note an end of Triton; return the model to give up, if any."""
        for record in self._registry.records():
            if record.state is ModelState.LOADING and record.waits_for in _IN_TRITON:
                self._suspects.broke_off(record.asked_for)
        back_lately = self._back_at > clock.monotonic() - SOON_SECONDS
        is_soon = back_lately or self.is_broken_off or self._is_returning()
        self.is_broken_off = False
        # what was loaded before this end cannot be blamed for the next one
        self._back_at, self._turn = -math.inf, (None, -math.inf)
        given_up = self._suspects.triton_ended(is_soon=is_soon)
        if given_up is not None:
            self._registry.lose(given_up, LostModel(clock.wall(), _GIVEN_UP, is_given_up=True))
            log.error("model.return_given_up", extra={"model_id": given_up, "reason": _GIVEN_UP})
        return given_up
