"""Which models leave memory, and which files the disk, when room is needed: of those that nothing
keeps the ones that are worth least (policies.py), and of files the least recently used. A caller's
own go before those that others have just used.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from adapter.core.memory import UNSEEN, Bytes, Device, total
from adapter.core.registry import ModelRecord
from adapter.core.residency.policies import Candidate, Policy
from adapter.core.state import ModelState
from adapter.errors import MemoryFigures

_T = TypeVar("_T")

# So long a model that a caller has used stays for it, while those who need room have others.
_RECENT_SECONDS = 30.0


class RetentionReason(Enum):
    """The reasons that keep a model in memory, for now or for good."""

    IN_FLIGHT = "in flight"
    AWAITED = "awaited"  # its callers have not got their leases yet
    CHANGING = "changing"  # it is being loaded or unloaded
    PINNED = "pinned"
    NOT_OURS = "not ours"  # a platform has loaded it, or it was loaded by name


FOR_NOW = frozenset({RetentionReason.IN_FLIGHT, RetentionReason.AWAITED, RetentionReason.CHANGING})


def is_of_others(used: Mapping[str, float], callers: Collection[str], now: float) -> bool:
    """Return whether a caller that is none of `callers` has used the model just now. Where none of
    them is known, all are alike.
    """
    recent = (caller for caller, at in used.items() if now - at < _RECENT_SECONDS)
    return any(callers) and any(caller not in callers for caller in recent)


def retention_reason(
    record: ModelRecord, *, is_awaited: bool, is_pinned: bool
) -> RetentionReason | None:
    """Return why the model may not be evicted; None when it may.

    A model that has lost its process may go at once.
    """
    if not record.is_on_demand:
        return RetentionReason.NOT_OURS
    if record.state is ModelState.DEAD:
        return RetentionReason.IN_FLIGHT if record.usage.in_flight else None
    if is_pinned:
        return RetentionReason.PINNED
    if record.state is not ModelState.READY:
        return RetentionReason.CHANGING
    if record.usage.in_flight:
        return RetentionReason.IN_FLIGHT
    return RetentionReason.AWAITED if is_awaited else None


def may_suffice(held: Sequence[Bytes], places: Iterable[MemoryFigures]) -> bool:
    """Return whether models that hold so much would free enough in one of the places together. One
    of which nothing is known may.
    """
    return not all(held) or any(
        sum(_on(each, figures.device) for each in held) >= _missing(figures) for figures in places
    )


def choose_where(
    candidates: Sequence[Candidate], places: Iterable[MemoryFigures], policy: Policy
) -> list[Candidate]:
    """Return whom to evict for a model that may be put in several places: in the first where enough
    can go, else in the first where any can.
    """
    found = [(choose_victims(candidates, figures, policy), figures) for figures in places]
    for chosen, figures in found:
        if chosen and sum(_on(e.held, figures.device) for e in chosen) >= _missing(figures):
            return chosen
    return next((chosen for chosen, _ in found if chosen), [])


def choose_victims(
    candidates: Sequence[Candidate], figures: MemoryFigures, policy: Policy
) -> list[Candidate]:
    """Return whom to evict together: at least one, while there is one, and as many as are needed
    by the figures. What the figures do not say is found out by the next try.
    """

    def order(each: Candidate) -> tuple[bool, bool, float, float]:
        return each.is_of_others, each.is_spared, policy.worth(each), each.used_at

    device = figures.device
    freed = [(each, _on(each.held, device)) for each in sorted(candidates, key=order)]
    # what has bytes, but none on that device, stays
    might_free = [(each, size) for each, size in freed if size or device is None or not each.held]
    # one that was measured to take nothing may have been measured beside others
    seem_empty = [(each, size) for each, size in freed if not total(each.held)]
    return fewest(might_free or seem_empty, _missing(figures))


def fewest(candidates: Iterable[tuple[_T, int]], missing: int) -> list[_T]:
    """Return the first of `candidates` that free `missing` bytes together, at least one; each
    comes with what it frees, 0 if unknown.

    Small ones are spared for a large one that has to go anyway.
    """
    chosen: list[tuple[_T, int]] = []
    for each, freed in candidates:
        chosen.append((each, freed))
        missing -= freed
        if missing <= 0:
            break
    return _without_needless(chosen, -missing)


def _without_needless(chosen: list[tuple[_T, int]], excess: int) -> list[_T]:
    """Drop whose bytes are covered by `excess`, those that are worth most first. The last one
    stays, since the others were too little. One of which nothing is known may free more than it
    seems, and stays as well.
    """
    needed = [each for each, _ in chosen[-1:]]
    for each, freed in reversed(chosen[:-1]):
        if 0 < freed <= excess:
            excess -= freed
        else:
            needed.insert(0, each)
    return needed


def _missing(figures: MemoryFigures) -> int:
    """0: one model goes, and that is tried."""
    if figures.needed_bytes is None or figures.free_bytes is None:
        return 0
    return figures.needed_bytes - figures.free_bytes


def _on(held: Bytes, device: str | None) -> int:
    if device is None or device == UNSEEN:
        return total(held)
    return held.get(Device(device), 0)
