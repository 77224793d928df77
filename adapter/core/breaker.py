"""Ends the loop of a model that runs out of memory whatever is evicted for it.

Every 507 makes the platform unload others and come again. A model larger than the device, or one
that leaks, would empty the endpoint again and again.
"""

from dataclasses import dataclass
from enum import Enum

_MAX_KEYS = 10_000


class Hopeless(Enum):
    """Why a model that ran out of memory can never fit."""

    ALONE = "ran out of memory again with nothing else loaded"
    OVERSIZED = "asked again for more memory than the device has"


@dataclass(slots=True)
class _Failures:
    alone: int = 0
    oversized: int = 0


class EvictionLoopBreaker:
    """Counts failures by key, one for each package or model, until it succeeds once.

    `budget` is how many times in a row a model may run out of memory with nothing else resident
    before that is the model's own fault. It is tried each time all the same, so an answer of the
    breaker heals by itself. 10,000 keys are kept; the one that failed longest ago is forgotten.
    """

    def __init__(self, budget: int = 3) -> None:
        self._budget = budget
        self._failures: dict[str, _Failures] = {}

    def __repr__(self) -> str:
        return f"<EvictionLoopBreaker [{len(self._failures)} keys]>"

    def out_of_memory(
        self, key: str, *, alone: bool, requested_bytes: int | None, limit_bytes: int | None
    ) -> Hopeless | None:
        """Note the failure; a reason when it must be answered with ModelTooLarge and not with 507.

        That is when the budget is spent, or when the allocator was asked for more than the device
        has and that is not the first time. A failure beside others says nothing about the model:
        it neither counts nor wipes out the count.
        """
        failures = self._failures.pop(key, None) or _Failures()
        self._failures[key] = failures
        if len(self._failures) > _MAX_KEYS:
            del self._failures[next(iter(self._failures))]
        failures.alone += alone
        if requested_bytes is not None and limit_bytes is not None:
            oversized = requested_bytes > limit_bytes
            failures.oversized += oversized
            if oversized and failures.oversized > 1:
                return Hopeless.OVERSIZED
        return Hopeless.ALONE if alone and failures.alone > self._budget else None

    def succeeded(self, key: str) -> None:
        """The model was loaded, or answered: it fits."""
        self._failures.pop(key, None)
