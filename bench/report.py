"""Formats the result as tables of text."""

from collections.abc import Iterator, Sequence
from typing import Any

from adapter.core.sizing import format_size
from bench.results import PERCENTILES

_BUSY = 0.85  # of one core: beyond it the load generator is the bottleneck
_HEAD = (
    "target",
    "answered",
    "errors",
    "rate/s",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "p99.9 ms",
    "max ms",
)

Json = dict[str, Any]


def lines(result: Json) -> Iterator[str]:
    targets = result["targets"]
    if result["interrupted"]:
        yield "stopped early; this is what there is"
    yield how(result)
    yield from _table([_HEAD, *(_row(target) for target in targets)])
    for part in (_rate_line, _errors, _processes, _churn, _warning):
        for target in targets:
            yield from part(result, target)
    if result["ratios"]:
        yield from _ratio_lines(result)


def how(result: Json) -> str:
    """Return how the load was made, on one line."""
    given = result["options"]
    names, models = given["model_names"], given["models"]
    low, high = (format_size(count) for count in given["payload_bytes"])
    parts = [
        names[0] if models == 1 else plural(models, "model"),
        _loop(given),
        plural(given["connections"], "connection"),
        *([f"{given['streams']} calls in flight on each"] if given["streams"] > 1 else []),
        *([plural(given["count"], "request")] if given["count"] else []),
        *([f"{given['seconds']:g} s"] if given["seconds"] else []),
        f"requests of {low if low == high else f'{low} to {high}'} as JSON",
    ]
    return ", ".join(parts)


def _loop(given: Json) -> str:
    if given["rate"] is None:
        return "closed loop"
    arrivals = "Poisson" if given["poisson"] else "constant"
    return f"open loop of {given['rate']:,g}/s ({arrivals})"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for first, *others in rows:
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()


def _label(target: Json) -> str:
    return f"{target['url']} {target['protocol']}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _row(target: Json) -> tuple[str, ...]:
    latency = target["latency"]
    return (
        _label(target),
        f"{target['answered']:,}",
        f"{target['errors']:,}",
        f"{target['rate']:,.1f}",
        *(_milliseconds(latency[name]) for name in (*PERCENTILES, "max")),
    )


def _rate_line(result: Json, target: Json) -> Iterator[str]:
    rate = result["options"]["rate"]
    if rate is not None:
        yield f"{_label(target)}: {rate:,.1f}/s asked for; latency counts from when one was due"


def _errors(_result: Json, target: Json) -> Iterator[str]:
    for error in target["errors_by_code"]:
        example = " ".join(error["example"].split())
        yield f"{_label(target)}: {error['count']:,} x {error['code']}: {example}"


def _processes(_result: Json, target: Json) -> Iterator[str]:
    for process in target["processes"]:
        name = f"{_label(target)}: process {process['pid']} {process['name']}"
        each = process["cpu_seconds_per_request"]
        if each is None:
            yield f"{name}: ended, or there was no request"
            continue
        before, after = process["rss_before_bytes"], process["rss_after_bytes"]
        yield (
            f"{name}: {each * 1e6:.1f} us of CPU a request, {process['cpu_seconds']:.2f} s in all,"
            f" memory {format_size(before)} before, {format_size(after)} after"
        )


def _churn(_result: Json, target: Json) -> Iterator[str]:
    for operation in ("load", "unload"):
        changes = [each for each in target["churn"] if each["operation"] == operation]
        good = sorted(each["seconds"] for each in changes if not each["error"])
        if good:
            middle = good[len(good) // 2]
            yield (
                f"{_label(target)}: {plural(len(good), operation)},"
                f" median {middle:.3f} s, longest {good[-1]:.3f} s"
            )
        for change in changes:
            if change["error"]:
                yield f"{_label(target)}: {operation} failed: {change['error']}"


def _warning(_result: Json, target: Json) -> Iterator[str]:
    share = target["generator_cpu_share"]
    if share > _BUSY:
        yield (
            f"{_label(target)}: the load generator itself took {share:.0%} of a core;"
            " the target may be able to do more"
        )


def _ratio_lines(result: Json) -> Iterator[str]:
    one, other = result["targets"]
    yield f"ratios, {_label(one)} over {_label(other)}, by slice"
    rows: list[Sequence[str]] = [("", "median", "min", "max", "slices")]
    for name, spread in result["ratios"].items():
        if spread is not None:
            figures = [f"{spread[key]:.3f}" for key in ("median", "min", "max")]
            rows.append((f"  {name}", *figures, str(spread["slices"])))
    yield from _table(rows)
