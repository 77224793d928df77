"""Arithmetic on rounds."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Json = dict[str, Any]
Rounds = Mapping[str, Sequence[Json]]  # the figures of each side, round by round
Side = TypeVar("Side")


def take_turns(
    sides: Mapping[str, Side], rounds: int, measure: Callable[[Side], Json]
) -> dict[str, list[Json]]:
    """Measure each side once a round; every other round goes through them backwards."""
    figures: dict[str, list[Json]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            figures[name].append(measure(sides[name]))
    return figures


def spread(values: Iterable[float | None], scale: float = 1.0) -> Json | None:
    """Return median, least and greatest; None without values."""
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
    """Return the least value that so large a share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratios(upper: Iterable[float], lower: Iterable[float]) -> Json | None:
    """Divide round by round, so that what else the machine does meets both sides."""
    return spread(a / b for a, b in zip(upper, lower, strict=True) if b > 0)


def summarize(rounds: Rounds, side: str, figure: str, scale: float = 1.0) -> Json | None:
    """Return the spread of one figure of one side."""
    return spread((each[figure] for each in rounds[side]), scale)


def compare(rounds: Rounds, figure: str, one: str, other: str) -> Json | None:
    """Return one figure of a side over the same figure of another side."""
    return ratios(*([each[figure] for each in rounds[side]] for side in (one, other)))
