"""Arithmetic on what the load tester writes (`docs/bench.md`, the JSON result)."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Json = dict[str, Any]

_HALF = 0.50


def spread(values: Iterable[float | None]) -> Json | None:
    """Median, least and greatest; None without values."""
    known = [value for value in values if value is not None]
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
    return spread(a / b for a, b in zip(upper, lower, strict=True) if b)


def side(target: Json, pid_at: int | None = None) -> Json:
    """One target of a run, each figure as a spread over its slices; seconds."""
    slices = target["slices"]
    found = {
        "requests": target["answered"],
        "errors": target["errors"],
        "rate": spread(each["rate"] for each in slices),
        "generator_cpu_share": target["generator_cpu_share"],
    }
    for name in ("p50", "p99", "p99_9"):
        found[name] = spread(each["latency"][name] for each in slices)
    if pid_at is not None:
        found["cpu_seconds_per_request"] = spread(
            each["processes"][pid_at]["cpu_seconds_per_request"] for each in slices
        )
    return found


def compared(result: Json) -> Json:
    """A run with --compare and one --cpu-pid, that of the first target."""
    one, other = (target["slices"] for target in result["targets"])
    return {
        "adapter": side(result["targets"][0], 0),
        "other": side(result["targets"][1]),
        "rate_ratio": _by_pair(one, other, lambda a, b: a["rate"] / b["rate"]),
        "p50_added": _by_pair(one, other, lambda a, b: _p50(a) - _p50(b)),
        "p99_ratio": _by_pair(one, other, lambda a, b: a["latency"]["p99"] / b["latency"]["p99"]),
    }


def _p50(part: Json) -> float:
    return float(part["latency"]["p50"])


def _by_pair(
    one: Sequence[Json], other: Sequence[Json], of: Callable[[Json, Json], float]
) -> Json | None:
    """A slice in which nothing was answered has no latency and is left out."""
    pairs = zip(one, other, strict=False)
    return spread(of(a, b) for a, b in pairs if a["answered"] and b["answered"])
