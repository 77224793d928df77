"""The rows of the page: which figure of which measure, and what it is held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """Describes a figure of a measure, and its target if it has one."""

    measure: str
    figure: str  # names a spread in the figures of the measure
    what: str
    unit: str
    most: float | None = None  # the target

    @property
    def key(self) -> str:
        return f"{self.measure}.{self.figure}"

    @property
    def target(self) -> str:
        return "" if self.most is None else f"at most {number(self.most, self.unit)}"


def verdict(row: Row, spread: Json) -> str:
    """Judge by the worst and the best round. With too few rounds nothing is settled."""
    if row.most is None:
        return ""
    if spread["rounds"] < FEWEST_ROUNDS or spread["min"] <= row.most < spread["max"]:
        return "not settled"
    return "met" if spread["max"] <= row.most else "missed"


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


# the code that each request runs through
_INFERENCE = (
    "adapter/frontends",
    "adapter/triton",
    "adapter/relay",
    "adapter/core",
    "adapter/app",
    "adapter/telemetry/metrics.py",
    "adapter/telemetry/traffic.py",
    "adapter/telemetry/tracing.py",
    "adapter/cli/serve.py",
    "adapter/control/leases.py",
)
_ALL = ("adapter",)
# of each measure its title on the page, and the paths of the code that it measures
MEASURES: Mapping[str, tuple[str, Sequence[str]]] = {
    "rest": ("REST, beside nginx and Envoy", _INFERENCE),
    "grpc": ("gRPC ModelInfer, small tensor", _INFERENCE),
    "churn": ("One model while another comes and goes", _ALL),
    "cold": ("Cold starts", _ALL),
}

PROXIES = {"nginx": "nginx", "envoy": "Envoy", "copying": "copying"}
MODEL_SIZES_MIB = (16, 128, 512)
_PLACES = {"disk": "on disk", "miss": "in the bucket"}

ROWS: Sequence[Row] = (
    Row("rest", "adapter_nginx_same", "CPU a request, over nginx", "x"),
    Row("rest", "adapter_envoy_same", "CPU a request, over Envoy", "x"),
    Row("rest", "adapter_copying_same", "CPU a request, over copying", "x", most=1.6),
    Row("rest", "adapter_nginx_differ", "CPU a request, over nginx; `traceparent` differs", "x"),
    Row(
        "rest",
        "adapter_copying_differ",
        "CPU a request, over copying; `traceparent` differs",
        "x",
        most=2.3,
    ),
    Row("rest", "adapter_us_same", "the adapter: CPU a request", "µs"),
    Row("rest", "adapter_rate_same", "the adapter: requests on one core", "/s"),
    Row("grpc", "cpu", "CPU a call, over copying", "x", most=2.2),
    Row("grpc", "adapter_rate", "the adapter: calls", "/s"),
    Row("grpc", "triton_rate", "Triton alone: calls", "/s"),
    Row("churn", "ratio", "p99 over gRPC, over that of a Triton driven directly", "x", most=1.2),
    *(
        Row("cold", f"{use}_{size}", f"a model of {size} MiB {place}", "s")
        for size in MODEL_SIZES_MIB
        for use, place in _PLACES.items()
    ),
)
