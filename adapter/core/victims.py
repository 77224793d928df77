"""Choose which models to evict when others need their memory: as few as suffice.

A model may be evicted if calls have loaded it and nothing keeps it (`find_retention_reason`). The
order is

1. models that no other caller has just used,
2. models that were not just loaded,
3. models that the policy values least.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from adapter.core import times
from adapter.core.memory import Bytes, total
from adapter.core.model import TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.states import ModelState

_T = TypeVar("_T")
_Place = TypeVar("_Place")  # a device, or a disk

_GIB = 2**30
# Further calls do not count: a model that was called a million times last month would stay.
_MAX_CALLS = 30
_UNKNOWN_BYTES = 2**28  # a guess at a model of which nothing is known
_MAX_LEVELS = 1000


# -- who may be evicted -------------------------------------------------------------------------


class RetentionReason(Enum):
    """The reasons that keep a model in memory, for now or for good."""

    IN_FLIGHT = "in flight"
    WAITED_FOR = "waited for"  # callers wait for their leases
    CHANGING = "changing"  # an operation works on it, or it is on its way back
    PINNED = "pinned"
    NOT_OURS = "not ours"  # a platform has asked for its load
    STUCK = "stuck"  # Triton does not let it go


# Reasons that pass, so that the model may be evicted later.
FOR_NOW = frozenset(
    {RetentionReason.IN_FLIGHT, RetentionReason.WAITED_FOR, RetentionReason.CHANGING}
)


def find_retention_reason(
    record: ModelRecord, *, is_waited_for: bool, is_pinned: bool
) -> RetentionReason | None:
    """Return why the model may not be evicted; None when it may.

    A model that has lost its process serves nobody, so that neither a pin nor callers who wait for
    it keep it.
    """
    if record.loaded_for is LoadedFor.PLATFORM:
        return RetentionReason.NOT_OURS
    if record.state is ModelState.STUCK:
        return RetentionReason.STUCK
    if record.state is ModelState.DEAD:
        return RetentionReason.IN_FLIGHT if record.usage.in_flight else None
    if is_pinned:
        return RetentionReason.PINNED
    if record.state is not ModelState.READY:
        return RetentionReason.CHANGING
    if record.usage.in_flight:
        return RetentionReason.IN_FLIGHT
    return RetentionReason.WAITED_FOR if is_waited_for else None


# -- what models are worth ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may be evicted."""

    name: TritonName
    used_at: float
    size: Bytes  # its bytes in the ledger; none if nothing is known of them
    is_of_others: bool = False  # callers other than those who need the room have just used it
    is_spared: bool = False  # just loaded, or another version of it is being loaded
    calls: int = 1  # since its load
    seconds: float = 0.0  # duration of its latest fetch and load, as the next would take


def make_candidate(
    record: ModelRecord,
    size: Bytes,
    *,
    now: float,
    callers: Collection[str],  # of the model that needs the room; "" is unknown
    is_updated: bool,  # another version is being loaded beside it
) -> Candidate:
    """Describe a model that may be evicted, for a policy to judge.

    A model that became READY less than `TURN_SECONDS` ago is spared, which means evicted
    later. So is one with an update in progress. A dead model is never spared and counts no
    calls.
    """
    is_ready = record.state is ModelState.READY  # a dead one serves nobody
    is_new = now - record.state_since < times.TURN_SECONDS
    return Candidate(
        record.name,
        record.usage.used_at,
        size,
        is_of_others=is_used_by_others(record.usage.called_at, callers, now),
        is_spared=is_ready and (is_updated or is_new),
        calls=max(1, record.usage.served) if is_ready else 0,
        seconds=record.fetch_seconds + record.load_seconds,
    )


def is_used_by_others(called_at: Mapping[str, float], callers: Collection[str], now: float) -> bool:
    """Return whether a known caller other than `callers` has just used the model.

    Where none of `callers` is known, all models are alike.
    """
    if not any(callers):
        return False
    recent = (caller for caller, at in called_at.items() if now - at < times.RECENT_SECONDS)
    return any(caller not in callers for caller in recent)


class Policy(ABC):
    """Says what models are worth, and learns from each that was evicted for others."""

    @abstractmethod
    def worth(self, model: Candidate) -> float:
        """Return what the model is worth; the lowest worth is evicted first."""

    @abstractmethod
    def explain(self, model: Candidate, now: float) -> str:
        """Return the figures that the worth comes from, for the log."""

    def record_eviction(self, worth: float, now: float) -> None:  # noqa: B027 - most learn nothing
        """Record that a model of this worth was evicted at `now`."""


class Cost(Policy):
    """Values a model by the seconds that its calls would have waited for it, per GiB that it takes.

    This is GreedyDual-Size-Frequency: a model's worth counts from the level at its last call. Each
    eviction raises the level to the worth of the model that was evicted. So models that are no
    longer called fall behind those that are.
    """

    def __init__(self) -> None:
        # each level holds since the time of the same index
        self._since = [-math.inf]
        self._levels = [0.0]

    def worth(self, model: Candidate) -> float:
        """Return the level at the last call, and what bringing the model back would cost."""
        level = self._levels[bisect_right(self._since, model.used_at) - 1]
        calls = min(model.calls, _MAX_CALLS)
        return level + calls * _return_seconds(model) / _size_bytes(model) * _GIB

    def explain(self, model: Candidate, now: float) -> str:
        """Return a text with the factors of the worth, without the level, and the last call."""
        calls = min(model.calls, _MAX_CALLS)
        plural = "" if calls == 1 else "s"
        size_gib = _size_bytes(model) / _GIB
        return (
            f"{calls} call{plural} x {_return_seconds(model):.1f} s / "
            f"{size_gib:.2f} GiB, last called {max(0.0, now - model.used_at):.1f} s ago"
        )

    def record_eviction(self, worth: float, now: float) -> None:
        """Raise the level to the worth of a model that was evicted."""
        if worth <= self._levels[-1]:
            return
        if len(self._levels) >= _MAX_LEVELS:  # models in between count from the level before
            del self._since[1::2]
            del self._levels[1::2]
        self._since.append(now)
        self._levels.append(worth)


def _return_seconds(model: Candidate) -> float:
    """Return what bringing the model back takes. Shorter loads differ by chance alone."""
    return max(model.seconds, times.POLL_SECONDS)


def _size_bytes(model: Candidate) -> int:
    return total(model.size) or _UNKNOWN_BYTES


# -- whom to evict ------------------------------------------------------------------------------


def sort_candidates(candidates: Iterable[Candidate], policy: Policy) -> list[Candidate]:
    """Return the candidates in the order of their eviction, by the rules at the top of this module.

    Models of others come last, before them spared ones, else the least worth first, and of equals
    the one that was used longest ago.
    """

    def order(model: Candidate) -> tuple[bool, bool, float, float]:
        return model.is_of_others, model.is_spared, policy.worth(model), model.used_at

    return sorted(candidates, key=order)


def choose_victims(
    candidates: Iterable[Candidate],
    missing: Bytes,  # by device
    policy: Policy,
) -> list[Candidate]:
    """Return whom to evict together for the missing bytes, in the order of their eviction.

    All that hold bytes of these devices are returned if even they are too few. Others stay.
    """
    useful = [
        (model, model.size)
        for model in sort_candidates(candidates, policy)
        if any(model.size.get(device) for device in missing)
    ]
    return choose_fewest(useful, missing)


def choose_fewest(
    candidates: Iterable[tuple[_T, Mapping[_Place, int]]], missing: Mapping[_Place, int]
) -> list[_T]:
    """Return the first of `candidates` that free the missing bytes together, at least one.

    Each candidate comes with the bytes that it frees, none if nobody knows them. Small ones are
    spared for a large one that has to leave anyway, and so are those of a device that has enough.
    """
    chosen: list[tuple[_T, Mapping[_Place, int]]] = []
    excess = {place: -count for place, count in missing.items()}
    for candidate, sizes in candidates:
        chosen.append((candidate, sizes))
        for place in excess:
            excess[place] += sizes.get(place, 0)
        if all(count >= 0 for count in excess.values()):
            break
    return _drop_needless(chosen, excess)


def _drop_needless(
    chosen: list[tuple[_T, Mapping[_Place, int]]], excess: dict[_Place, int]
) -> list[_T]:
    """Drop candidates whose bytes are covered by the excess, those that are worth most first.

    The last one stays, since the others were too few. One of which nothing is known may free more
    than it seems, and stays as well.
    """
    needed = [candidate for candidate, _ in chosen[-1:]]
    for candidate, sizes in reversed(chosen[:-1]):
        is_known = any(sizes.values())
        if is_known and all(sizes.get(place, 0) <= count for place, count in excess.items()):
            for place in excess:
                excess[place] -= sizes.get(place, 0)
        else:
            needed.insert(0, candidate)
    return needed
