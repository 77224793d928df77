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


@dataclass(frozen=True, slots=True)
class ColdModel:
    """Describes a model for cold calls, and their targets."""

    name: str  # begins those of its figures
    what: str
    size_mib: int
    suffix: str = ".tar.gz"  # of its archive; a folder has none
    packs_well: bool = False
    rate: str = "0"  # of each connection to the store, as nginx writes it; 0: no limit
    most_ratio: float | None = None  # the target, over the same steps by hand
    most_seconds: float | None = None  # the target

    @property
    def is_folder(self) -> bool:
        return not self.suffix


COLD_MODELS: Sequence[ColdModel] = (
    ColdModel("gz_128", "128 MiB, tar.gz", 128, most_ratio=1.10),
    ColdModel("gz_512", "512 MiB, tar.gz", 512, most_ratio=1.15),
    ColdModel("tar_512", "512 MiB, tar", 512, suffix=".tar", most_ratio=1.15),
    ColdModel("gz_2048", "2 GiB that packs well, tar.gz", 2048, packs_well=True, most_ratio=1.15),
    ColdModel("folder_512", "512 MiB, folder", 512, suffix="", most_ratio=1.10),
    ColdModel("slow_512", "512 MiB, tar.gz, 90 MB/s a connection", 512, rate="90m", most_seconds=4),
)


def _list_cold_rows(model: ColdModel) -> Sequence[Row]:
    return (
        Row("cold", f"{model.name}_call", model.what, "s", model.most_seconds),
        Row("cold", f"{model.name}_ratio", "over by hand", "x", model.most_ratio),
    )


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
    *(row for model in COLD_MODELS for row in _list_cold_rows(model)),
)
