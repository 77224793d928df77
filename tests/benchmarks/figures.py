"""Arithmetic on rounds."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
Rounds = Mapping[str, Sequence[Json]]  # what was measured of each side, round by round

_HALF = 0.50


def spread(values: Iterable[float | None], scale: float = 1.0) -> Json | None:
    """Median, least and greatest; None without values."""
    known = [value * scale for value in values if value is not None]
    if not known:
        return None
    return {
        "median": statistics.median(known),
        "min": min(known),
        "max": max(known),
        "rounds": len(known),
    }


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that so large a share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def p50(values: Iterable[float]) -> float:
    return quantile(values, _HALF)


def ratios(upper: Iterable[float], lower: Iterable[float]) -> Json | None:
    """Round by round, so that what else the machine does meets both."""
    return spread(a / b for a, b in zip(upper, lower, strict=True) if b > 0)


def of(rounds: Rounds, side: str, figure: str, scale: float = 1.0) -> Json | None:
    return spread((each[figure] for each in rounds[side]), scale)


def over(rounds: Rounds, figure: str, one: str, other: str) -> Json | None:
    return ratios(*([each[figure] for each in rounds[side]] for side in (one, other)))


def added(rounds: Rounds, one: str, other: str, base: str) -> Json | None:
    """What one adds to the p50 of `base`, over what the other adds. A round in which the other
    adds nothing says nothing.
    """
    p50s = [[each["p50"] for each in rounds[side]] for side in (one, other, base)]
    return ratios(*([a - b for a, b in zip(side, p50s[2], strict=True)] for side in p50s[:2]))


def difference(
    rounds: Rounds, figure: str, one: str, other: str, scale: float = 1.0, *, pairs: int = 1
) -> Json | None:
    """Round by round as well: of two figures that both move, only pairs tell it. What counts is the
    median of so many pairs, one behind the other.
    """
    both = zip(rounds[one], rounds[other], strict=True)
    found = [a[figure] - b[figure] for a, b in both]
    groups = (found[begin : begin + pairs] for begin in range(0, len(found), pairs))
    return spread((statistics.median(group) for group in groups), scale)
