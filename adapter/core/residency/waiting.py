"""How many callers may wait for models that are fetched and loaded for them, and how long those
wait for room.
"""

from dataclasses import dataclass

from adapter.core.model import ModelId
from adapter.errors import TooManyWaiting

_RETRY_AFTER_MS = 1000
_MOST_ROOM_SECONDS = 10.0


def room_seconds(wait_seconds: float) -> float:
    """Return how long a fetch waits for room on disk, and a load for room in memory (and for a
    Triton that is away), when callers wait `wait_seconds`.
    """
    return min(_MOST_ROOM_SECONDS, wait_seconds / 2)


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
