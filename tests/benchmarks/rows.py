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
    most: float | None = None  # the target, if that is an upper bound
    least: float | None = None  # the target, if that is a lower bound

    @property
    def key(self) -> str:
        return f"{self.measure}.{self.figure}"

    @property
    def target(self) -> str:
        if self.most is not None:
            return f"at most {number(self.most, self.unit)}"
        return "" if self.least is None else f"at least {number(self.least, self.unit)}"

    @property
    def is_on_page(self) -> bool:
        """Rows with a target, and the figures that the summary of the page names."""
        return bool(self.target) or self.key in SUMMARISED

    def meets(self, value: float) -> bool:
        """A bound itself is good."""
        return value <= self.most if self.most is not None else value >= (self.least or 0.0)


def verdict(row: Row, spread: Json) -> str:
    """Judge by the worst and the best round. With too few rounds nothing is settled."""
    if row.most is None and row.least is None:
        return ""
    if spread["rounds"] < FEWEST_ROUNDS:
        return "not settled"
    good = [row.meets(spread[end]) for end in ("min", "max")]
    return "met" if all(good) else "not settled" if any(good) else "missed"


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
    "adapter/dataplane",
    "adapter/http2",
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
# cold calls beside the same steps by hand: the archive, and the rate of each connection
HAND_ROWS: Mapping[str, tuple[str, str]] = {
    "hard_128": ("hard-128-m.tar.gz", "0"),
    "hard_512": ("hard-512-m.tar.gz", "0"),
    "tar_512": ("hard-512-m.tar", "0"),
    "soft_2048": ("soft-2048-m.tar.gz", "0"),
    "slow_512": ("hard-512-m.tar.gz", "90m"),
}
_HAND_TARGETS = {"hard_128": 1.10, "hard_512": 1.15, "tar_512": 1.15, "soft_2048": 1.15}
_HAND_WORDS = {
    "hard_128": "128 MiB, tar.gz",
    "hard_512": "512 MiB, tar.gz",
    "tar_512": "512 MiB, tar",
    "soft_2048": "2 GiB that packs well, tar.gz",
    "slow_512": "512 MiB, tar.gz, 90 MB/s a connection",
}
_PLACES = {"hit": "in memory", "disk": "on disk", "miss": "in the bucket"}
_SIDES = {"adapter": "the adapter", "copying": "the copying proxy", "triton": "Triton alone"}
_HEADERS = {"same": "", "differ": "; `traceparent` differs"}
_REST_OVER_COPYING = {"same": 1.6, "differ": 2.3}

# the figures without a target that the page shows; all others are in benchmarks.json alone
SUMMARISED = frozenset(
    {
        *(f"rest.adapter_{other}_same" for other in PROXIES),
        "rest.adapter_nginx_differ",
        "rest.adapter_us_same",
        "rest.adapter_rate_same",
        "grpc.adapter_rate",
        "grpc.triton_rate",
        *(f"cold.{use}_{size}" for size in MODEL_SIZES_MIB for use in ("disk", "miss")),
        "cold.slow_512_ratio",
        *(f"cold.{name}_{side}" for name in HAND_ROWS for side in ("adapter", "hand")),
    }
)

ROWS: Sequence[Row] = (
    *(
        Row(
            "rest",
            f"adapter_{other}_{heads}",
            f"CPU a request, over {name}{words}",
            "x",
            most=_REST_OVER_COPYING[heads] if other == "copying" else None,
        )
        for heads, words in _HEADERS.items()
        for other, name in PROXIES.items()
    ),
    *(
        Row("rest", f"{side}_{figure}_{heads}", f"{name}: {what}{words}", unit)
        for heads, words in _HEADERS.items()
        for side, name in {"adapter": "the adapter", **PROXIES}.items()
        for figure, what, unit in (
            ("us", "CPU a request", "µs"),
            ("rate", "requests on one core", "/s"),
        )
    ),
    Row("grpc", "cpu", "CPU a call, over copying", "x", most=2.2),
    Row("grpc", "rate", "throughput, over copying", "x"),
    *(
        Row("grpc", f"{side}_{figure}", f"{name}: {what}", unit)
        for side, name in _SIDES.items()
        for figure, what, unit in (("us", "CPU a call", "µs"), ("rate", "calls", "/s"))
        if (side, figure) != ("triton", "us")
    ),
    Row("churn", "ratio", "p99 over gRPC, over that of a Triton driven directly", "x", most=1.2),
    Row("churn", "ratio_copying", "the same, over that of the copying proxy before it", "x"),
    *(Row("churn", f"{side}_p99", f"{name}: p99", "ms") for side, name in _SIDES.items()),
    *(
        Row("churn", f"{side}_load", f"{_SIDES[side]}: a load", "s")
        for side in ("adapter", "triton")
    ),
    *(
        Row("cold", f"{use}_{size}", f"a model of {size} MiB {place}", "s")
        for size in MODEL_SIZES_MIB
        for use, place in _PLACES.items()
    ),
    *(
        Row("cold", f"{name}_ratio", f"{what}: over by hand", "x", most=_HAND_TARGETS.get(name))
        for name, what in _HAND_WORDS.items()
    ),
    *(
        Row("cold", f"{name}_{side}", f"{what}: {words}", "s")
        for name, what in _HAND_WORDS.items()
        for side, words in (("adapter", "the adapter"), ("hand", "by hand"))
    ),
)
