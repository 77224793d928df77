"""The rows of the page: which figure of which measure, and what it is held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """`figure` names a spread within the figures of `measure`. `most` or `least` is the target;
    with neither the row has none.
    """

    measure: str
    figure: str
    what: str
    unit: str
    most: float | None = None
    least: float | None = None

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
    """By the worst round and by the best; in between, or of too few rounds, nothing is settled."""
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


# measure: its title on the page, and the code that it measures
_INFERENCE = (
    *("adapter/frontends", "adapter/dataplane", "adapter/http2", "adapter/core", "adapter/app"),
    *("adapter/telemetry/metrics.py", "adapter/telemetry/traffic.py"),
    *("adapter/telemetry/tracing.py", "adapter/cli/serving.py", "adapter/control/lease.py"),
)
_ALL = ("adapter", ":(exclude)adapter/tools")
MEASURES: Mapping[str, tuple[str, Sequence[str]]] = {
    "rest": ("REST invoke, small JSON", (*_INFERENCE, "adapter/tools/bench")),
    "grpc": ("gRPC ModelInfer, small tensor", (*_INFERENCE, "adapter/tools/bench")),
    "sizes": ("Large binary tensors, 4 at once", _INFERENCE),
    "memory": ("32 callers with 25 MiB at once", _INFERENCE),
    "clients": ("Requests that the fast path takes, by client", _INFERENCE),
    "proxies": ("Beside nginx and Envoy", _INFERENCE),
    "endpoint": ("The endpoint", _ALL),
    "cold": ("Cold starts", _ALL),
    "builtin": ("Beside Triton's built-in SageMaker endpoint", _ALL),
    "churn": ("One model while another comes and goes", _ALL),
    "many": ("Many models known", _ALL),
    "delete": ("DELETE of an idle python model", _ALL),
    "start": ("Start of `serve --triton external`", _ALL),
}

SIZES = {"600 KiB": 600 * 256, "4 MiB": 2**20}  # in floats
CALLS = {"list": "a page of the list", "get": "GET of a model", "invoke": "invoke"} | {
    "load": "a load",
    "unload": "an unload",
}
CLIENTS = (
    *("aiohttp", "boto3", "curl", "perf_analyzer", "requests"),
    *("tritonclient-http", "tritonclient-http-aio"),
)
FIRST_ANSWERS = (16, 128, 512)  # MiB
_PLACES = {"hit": "in memory", "disk": "on disk", "miss": "in the bucket"}
CALLERS = ("curl", "boto3")  # of the endpoint
_CACHES = {"endpoint": "a Zipf mix, the endpoint", "lru": "a Zipf mix, the LRU by count"}
_ROUTES = {"adapter": "the adapter", "copying": "the copying proxy", "triton": "Triton alone"}

PROXIES = {"nginx": "nginx", "envoy": "Envoy", "copying": "copying"}
_HEADS = {"same": "", "differ": "; `traceparent` differs"}

# figures without a target that the page shows; all others are in benchmarks.json alone
SUMMARISED = frozenset(
    {
        *(f"{way}.{name}_rate" for way in ("rest", "grpc") for name in ("adapter", "triton")),
        *(f"proxies.adapter_{other}_same" for other in PROXIES),
        "proxies.adapter_nginx_differ",
        *("endpoint.endpoint_hits", "endpoint.lru_hits"),
        *("endpoint.endpoint_p50", "endpoint.lru_p50"),
        *("builtin.memory", "builtin.memory_builtin", "builtin.memory_adapter"),
        *("delete.whole", "start.readyz"),
        *(f"cold.{use}_{size}" for use in ("disk", "miss") for size in (16, 128, 512)),
    }
)
ROWS: Sequence[Row] = (
    Row("rest", "cpu", "8 connections: CPU a request, over copying", "x", most=1.6),
    Row("rest", "cpu_differs", "the same, `traceparent` differs each time", "x", most=2.3),
    Row("rest", "rate", "8 connections: throughput, over copying", "x", least=0.85),
    Row("rest", "p50_added", "1 connection: p50 added, over what copying adds", "x", most=1.6),
    Row("grpc", "cpu", "8 streams: CPU a request, over copying", "x", most=2.2),
    Row("grpc", "rate", "8 streams: throughput, over copying", "x"),
    *(
        Row(measure, f"{name}_{figure}", f"{told}: {words}", unit)
        for measure in ("rest", "grpc")
        for name, told in _ROUTES.items()
        for figure, words, unit in (("us", "CPU a request", "µs"), ("rate", "requests", "/s"))
        if (name, figure) != ("triton", "us")
    ),
    *(
        Row(measure, "generator_us", "the load tester: CPU a request", "µs")
        for measure in ("rest", "grpc")
    ),
    *(
        Row("sizes", f"{way} {size} {figure}", f"{way}, {size}: {words}", unit, most, least)
        for way, costs, rates in (("REST", 1.3, 0.85), ("gRPC", 1.6, 0.8))
        for size in SIZES
        for figure, words, unit, most, least in (
            ("cpu", "CPU a request, over copying", "x", costs, None),
            ("rate", "throughput, over copying", "x", None, rates),
            ("adapter_us", "CPU of the adapter a request", "µs", None, None),
        )
    ),
    Row("memory", "REST", "REST: growth of the adapter's resident memory", "MiB", most=64),
    Row("memory", "gRPC", "gRPC: growth of the adapter's resident memory", "MiB", most=64),
    *(Row("clients", name, name, "%", least=99) for name in CLIENTS),
    *(
        Row("proxies", f"adapter_{other}_{heads}", f"the adapter, over {told}{more}", "x")
        for heads, more in _HEADS.items()
        for other, told in PROXIES.items()
    ),
    *(
        Row("proxies", f"{name}_us_{heads}", f"{name}: CPU a request{more}", "µs")
        for heads, more in _HEADS.items()
        for name in ("adapter", *PROXIES)
    ),
    *(
        Row("cold", f"{use}_{size}", f"a model of {size} MiB {told}", "s")
        for size in FIRST_ANSWERS
        for use, told in _PLACES.items()
    ),
    *(
        Row(
            "endpoint",
            f"added_{name}",
            f"a warm call over `/models/NAME/invoke`: {words}",
            "µs",
            most,
        )
        for name, words, most in (
            ("curl", "curl's headers, which stay the same, at both", 10),
            ("boto3", "boto3's headers, which differ in each call, at both", 10),
            ("in_all", "boto3's headers, over curl's", None),
        )
    ),
    *(
        Row("endpoint", f"{way}_{client}_us", f"{told}, {client}'s headers: CPU a request", "µs")
        for way, told in (("endpoint", "a warm call"), ("invoke", "`/models/NAME/invoke`"))
        for client in CALLERS
    ),
    Row("endpoint", "miss_ratio", "a cold call, over its parts one by one", "x"),
    Row("endpoint", "disk_ratio", "a call whose files are on disk, over its parts one by one", "x"),
    *(
        Row("endpoint", figure, words, "ms")
        for figure, words in (
            ("miss", "a cold call"),
            ("disk", "a call whose files are on disk"),
            ("fetch", "GET of the archive, and `tar`"),
            ("load", "a load"),
            ("infer", "the first inference"),
        )
    ),
    *(
        Row("endpoint", f"{side}_{figure}", f"{told}: {words}", unit)
        for figure, words, unit in (
            ("hits", "calls whose model was loaded", "%"),
            ("p50", "p50", "ms"),
            ("p99", "p99", "s"),
            ("calls", "calls", ""),
        )
        for side, told in _CACHES.items()
    ),
    Row("endpoint", "p99_ratio", "p99 of the endpoint, over the LRU by count", "x"),
    Row("endpoint", "lru_most", "the LRU by count: the most its models took of the room", "%"),
    *(
        Row("builtin", f"rate_{count}", f"{count} connections: {words}", "x", least=0.9)
        for count in (8, 32)
        for words in ("throughput, over copying before the built-in endpoint",)
    ),
    *(
        Row("builtin", f"{name}_{count}", f"{count} connections: {told}", "/s")
        for count in (8, 32)
        for name, told in (_ROUTES | {"builtin": "the built-in endpoint alone"}).items()
        if name != "triton"
    ),
    Row("builtin", "memory", "PSS of the adapter, its Triton and one model", "MiB"),
    Row("builtin", "memory_builtin", "PSS of the built-in endpoint and one model", "MiB"),
    Row("builtin", "memory_adapter", "PSS of the adapter alone", "MiB"),
    Row("builtin", "delete_builtin", "DELETE of an idle model at the built-in endpoint", "s"),
    Row("churn", "ratio", "p99 over gRPC, over that of a Triton driven directly", "x", most=1.2),
    Row("churn", "ratio_copying", "the same, over that of the copying proxy before it", "x"),
    *(
        Row("churn", f"{name}_{figure}", f"{_ROUTES[name]}: {words}", unit)
        for name in ("adapter", "triton")
        for figure, words, unit in (("p99", "p99", "ms"), ("load", "a load", "s"))
    ),
    Row("churn", "copying_p99", f"{_ROUTES['copying']}: p99", "ms"),
    *(
        Row("many", name, f"{words}, over the same with 10 known", "x", most=1.2)
        for name, words in CALLS.items()
    ),
    Row("many", "rss", "resident memory of the adapter", "MiB", most=150),
    Row("many", "rss_few", "the same with 10 known", "MiB"),
    Row("delete", "after_gone", "answered after Triton's index says gone", "ms", most=100),
    Row("delete", "whole", "in all", "s"),
    Row("start", "livez", "until `/livez` answers", "ms", most=1000),
    Row("start", "readyz", "until `/readyz` says ready", "ms"),
)
