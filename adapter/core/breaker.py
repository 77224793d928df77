"""Breaks the eviction loop of a model that runs out of memory whatever is evicted for it.

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
    """Counts failures by key, one for each package or model, until its next success.

    `budget`: how many times in a row a model may run out of memory with nothing else loaded before
    it counts as hopeless. It is still tried each time, so the breaker closes by itself. 10,000
    keys are kept; the one that failed longest ago is forgotten.
    """

    def __init__(self, budget: int = 3) -> None:
        self._budget = budget
        self._failures: dict[str, _Failures] = {}

    def __repr__(self) -> str:
        return f"<EvictionLoopBreaker [{len(self._failures)} keys]>"

    def out_of_memory(
        self, key: str, *, alone: bool, requested_bytes: int | None, limit_bytes: int | None
    ) -> Hopeless | None:
        """Note the failure; return a reason if it must be answered with ModelTooLarge, not 507.

        That is when the budget is spent, or when the allocator was asked for more than the device
        has, for the second time. A failure while other models are loaded says nothing about the
        model: it neither counts nor resets the count.
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
