"""The targets: which figure of which measure is held against what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """`path` leads to a spread within the measure. `scale` makes `unit` of what lies there.

    `at_most` says which side of `bound` is good. `what` is the row's text.
    """

    key: str
    what: str
    measure: str
    path: tuple[str, ...]
    bound: float
    unit: str = ""
    scale: float = 1.0
    at_most: bool = True

    @property
    def text(self) -> str:
        side = "at most" if self.at_most else "at least"
        return f"{side} {number(self.bound, self.unit)}"


def number(value: float, unit: str) -> str:
    """Three digits, two below 1, and the unit."""
    size = abs(value)
    if size >= 100:
        text = f"{value:,.0f}"
    elif size >= 1:
        text = f"{value:.3g}"
    else:
        text = f"{value:.2g}" if size >= 1e-4 else f"{value:.0f}"
    return f"{text} {unit}".strip()


_CPU = ("adapter", "cpu_seconds_per_request")
_4_MIB = str(4 * 2**20)

TARGETS: Sequence[Target] = (
    Target(
        "rest-cpu",
        "REST invoke, small JSON, 8 connections: CPU of the adapter for a request",
        "rest_small",
        ("8", *_CPU),
        40,
        "µs",
        1e6,
    ),
    Target(
        "rest-rate",
        "the same: throughput over Triton's own",
        "rest_small",
        ("8", "rate_ratio"),
        0.85,
        at_most=False,
    ),
    Target(
        "rest-p50",
        "the same on 1 connection: p50 added to Triton's own",
        "rest_small",
        ("1", "p50_added"),
        60,
        "µs",
        1e6,
    ),
    Target(
        "grpc-cpu",
        "gRPC lane, small tensor, 8 streams: CPU of the adapter for a request",
        "grpc_small",
        ("8", *_CPU),
        45,
        "µs",
        1e6,
    ),
    Target(
        "grpc-rate",
        "the same: throughput over Triton's own",
        "grpc_small",
        ("8", "rate_ratio"),
        0.70,
        at_most=False,
    ),
    Target(
        "rest-4mib",
        "REST, binary tensors of 4 MiB: throughput over Triton's own",
        "payloads",
        ("rest", _4_MIB, "rate_ratio"),
        0.90,
        at_most=False,
    ),
    Target(
        "grpc-4mib",
        "gRPC lane, tensors of 4 MiB: throughput over Triton's own",
        "payloads",
        ("grpc", _4_MIB, "rate_ratio"),
        0.90,
        at_most=False,
    ),
    Target(
        "rest-memory",
        "REST, 32 callers with 25 MiB at once: most memory of the adapter over idle",
        "memory_of_big_bodies",
        ("rest", "growth_mib"),
        64,
        "MiB",
    ),
    Target(
        "grpc-memory",
        "gRPC lane, 32 callers with 25 MiB at once: most memory of the adapter over idle",
        "memory_of_big_bodies",
        ("grpc", "growth_mib"),
        64,
        "MiB",
    ),
    Target(
        "churn",
        "p99 of one model while another comes and goes, over its quiet p99",
        "churn",
        ("adapter", "ratio"),
        3,
        "x",
    ),
    Target(
        "churn-builtin",
        "the same p99 over that of the built-in endpoint",
        "churn",
        ("over_builtin",),
        0.02,
    ),
    Target(
        "delete",
        "DELETE of an idle python model: answered after Triton's index says gone",
        "delete_idle",
        ("after_gone",),
        100,
        "ms",
        1e3,
    ),
    *(
        Target(
            f"many-{name}",
            f"many models known: {words}, over the same with 10 known",
            "many_models",
            ("calls", name, "ratio"),
            1.2,
            "x",
        )
        for name, words in {
            "list": "a page of the list",
            "get": "GET of a model",
            "invoke": "invoke",
            "load": "a load",
            "unload": "an unload",
        }.items()
    ),
    Target(
        "many-memory",
        "many models known: resident memory of the adapter",
        "many_models",
        ("rss_mib",),
        150,
        "MiB",
    ),
    Target(
        "start",
        "start of `serve --triton external` until `/livez` answers",
        "start",
        ("livez",),
        1000,
        "ms",
        1e3,
    ),
)


def spread_of(target: Target, results: Json) -> Json | None:
    """None where it was not measured."""
    found: Any = results.get(target.measure, {}).get("figures", {})
    for step in target.path:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def is_met(target: Target, spread: Json) -> bool:
    """By the median. A bound itself is good."""
    value = spread["median"] * target.scale
    return value <= target.bound if target.at_most else value >= target.bound
