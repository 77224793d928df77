"""How many callers may wait for models that are fetched and loaded for them, how long they wait
for room, and what they get where there is none.
"""

from dataclasses import dataclass

from adapter.core import times
from adapter.core.model import ModelId
from adapter.errors import AdapterError, CapacityError, NoRoom, OutOfMemory, TooManyWaiting

_RETRY_AFTER_MS = 1000
# Models that are pinned or loaded explicitly stay until somebody unloads them.
_RETRY_AFTER_LONG_MS = 60_000
_SEE_ROOM = "see docs/endpoint.md#which-models-are-in-memory"


def room_seconds(wait_seconds: float) -> float:
    """Return how long a fetch waits for room on disk, and a load for room in memory (and for a
    Triton that is away), when callers wait `wait_seconds`.
    """
    return min(times.PATIENCE_SECONDS, wait_seconds / 2)


def explain_no_room(
    model_id: ModelId,
    error: CapacityError,
    *,
    has_others: bool,  # other models are loaded
    may_come: bool,  # some of them stay for now only
) -> AdapterError:
    """Return the error for the calls of a model that does not fit while nothing can be evicted.

    A model that runs out of memory with no other model loaded fails by itself: its callers get that
    failure, and are not asked to try again.
    """
    if has_others:
        text = f"{error}; all other models are in use, pinned or loaded explicitly; {_SEE_ROOM}"
        retry_after_ms = _RETRY_AFTER_MS if may_come else _RETRY_AFTER_LONG_MS
        return NoRoom(text, model_id=model_id, retry_after_ms=retry_after_ms)
    text = f"{error}; no other model is loaded"
    if isinstance(error, OutOfMemory):
        error.args = (text,)
        return error
    return NoRoom(f"{text}; {_SEE_ROOM}", model_id=model_id)


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Limits how many calls may wait in all, and for one model. A known caller may have half of
    all.
    """

    in_all: int = 256
    for_one: int = 32

    def refuse_one_more(self, model_id: ModelId, in_all: int, for_one: int, own: int = 0) -> None:
        """Raise TooManyWaiting if so many wait already, `own` of them of the same known caller."""
        if for_one >= self.for_one:
            why = f"{for_one} callers wait for model {model_id!r} already"
        elif in_all >= self.in_all:
            why = f"{in_all} callers wait for models already"
        elif own >= max(1, self.in_all // 2):
            why = f"{own} calls of this caller wait for models already"
        else:
            return
        raise TooManyWaiting(why, model_id=model_id, retry_after_ms=_RETRY_AFTER_MS)
