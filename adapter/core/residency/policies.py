"""Rates models in memory: the model that is worth least is evicted first."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adapter.core.memory import Bytes, total
from adapter.core.model import ModelId

_GIB = 2**30
# Calls beyond them count no more: a model that was called a million times last month would stay.
_MOST_CALLS = 30
_LEAST_SECONDS = 0.1  # quicker loads differ by chance
_UNKNOWN_BYTES = 2**28
_MOST_LEVELS = 1000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that could go. `used_at` is its record's, `held` are its bytes in the ledger.
    `is_of_others`: it goes after those that are not; `is_spared`, it was loaded a moment ago or is
    being renewed, after those that are not either. `calls`: since its load; `seconds`: what its
    latest fetch and load took, and what bringing it back is expected to take.
    """

    model_id: ModelId
    used_at: float
    held: Bytes
    is_of_others: bool = False
    is_spared: bool = False
    calls: int = 1
    seconds: float = 0.0


class Policy(ABC):
    """Says what models are worth, and learns from each that was evicted to make room."""

    @abstractmethod
    def worth(self, model: Candidate) -> float: ...

    @abstractmethod
    def explain(self, model: Candidate, now: float) -> str: ...

    def evicted(self, worth: float, now: float) -> None:  # noqa: B027 - most learn nothing
        """Take note that a model of this worth was evicted at `now`."""


class LeastRecentlyUsed(Policy):
    """Values models by the time of their last call."""

    def worth(self, model: Candidate) -> float:
        return model.used_at

    def explain(self, model: Candidate, now: float) -> str:
        return f"not called for {max(0.0, now - model.used_at):.1f} s"


class Cost(Policy):
    """A model is worth the seconds that its calls would have waited for it, per GiB that it takes.

    This is GreedyDual-Size-Frequency: a model's worth counts from the level at its last call, and
    each eviction raises the level to the worth of the model that went. So models that are no longer
    called fall behind those that are.
    """

    def __init__(self) -> None:
        self._since, self._levels = [-math.inf], [0.0]

    def worth(self, model: Candidate) -> float:
        level = self._levels[bisect_right(self._since, model.used_at) - 1]
        seconds = max(model.seconds, _LEAST_SECONDS)
        return level + min(model.calls, _MOST_CALLS) * seconds / _size(model) * _GIB

    def explain(self, model: Candidate, now: float) -> str:
        calls, size = min(model.calls, _MOST_CALLS), _size(model) / _GIB
        return (
            f"{calls} call{'s' * (calls != 1)} x {max(model.seconds, _LEAST_SECONDS):.1f} s / "
            f"{size:.2f} GiB, last called {max(0.0, now - model.used_at):.1f} s ago"
        )

    def evicted(self, worth: float, now: float) -> None:
        if worth <= self._levels[-1]:
            return
        if len(self._levels) >= _MOST_LEVELS:  # models in between count from the level before
            del self._since[1::2], self._levels[1::2]
        self._since.append(now)
        self._levels.append(worth)


def _size(model: Candidate) -> int:
    return total(model.held) or _UNKNOWN_BYTES


# By the setting `eviction`.
POLICIES: Mapping[str, Callable[[], Policy]] = {"cost": Cost, "lru": LeastRecentlyUsed}
