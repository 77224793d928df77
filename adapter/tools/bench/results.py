"""Makes plain values of a run, for --json and the plot, and formats them as tables of text.

docs/bench.md describes every member. Times are in seconds, sizes in bytes.
"""

import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from adapter.tools.bench.plan import Plan
from adapter.tools.bench.record import Errors, Histogram, Interval, merged, name_of
from adapter.tools.bench.session import Outcome, Slice

SCHEMA = 1
_MOST_NAMES = 10
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}
# percentages of the plot
_CURVE = (0, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)

Json = dict[str, Any]


def results(plan: Plan, outcome: Outcome) -> Json:
    slices = outcome.slices
    return {
        "schema": SCHEMA,
        "started_at": datetime.fromtimestamp(outcome.started_at, UTC).isoformat(),
        "machine": platform.node(),
        "version": version("triton-adapter"),
        "interrupted": outcome.is_interrupted,
        "options": _options(plan, outcome),
        "targets": [
            _target(plan, number, [each for each in slices if each.target == number])
            for number in range(len(plan.targets))
        ],
        "ratios": _ratios(plan, slices) if len(plan.targets) > 1 else None,
    }


def _options(plan: Plan, outcome: Outcome) -> Json:
    return asdict(plan.pace) | {
        "slices": plan.slices,
        "models": len(outcome.models),
        "model_names": list(outcome.models[:_MOST_NAMES]),
        "payload_bytes": list(outcome.payload_bytes),
        "zipf": plan.zipf,
        "churn": asdict(plan.churn) if plan.churn else None,
    }


def _target(plan: Plan, number: int, slices: Sequence[Slice]) -> Json:
    target = plan.targets[number]
    errors = _by_code(each.recorder.errors for each in slices)
    intervals = [interval for each in slices for interval in each.recorder.intervals]
    return {
        "url": target.url,
        "protocol": target.protocol.value,
        **_figures(slices),
        "errors": sum(each["count"] for each in errors),
        "errors_by_code": errors,
        "curve": _curve(merged(each.recorder.latencies for each in slices)),
        "generator_cpu_share": _share(sum(each.own_cpu_seconds for each in slices), slices),
        "processes": [_process(plan, place, slices) for place in range(len(plan.pids))],
        "slices": [_slice(plan, each) for each in slices],
        "timeline": [_interval(each) for each in intervals],
        "churn": [asdict(change) for each in slices for change in each.changes],
    }


def _figures(slices: Sequence[Slice]) -> Json:
    latencies = merged(each.recorder.latencies for each in slices)
    seconds = sum(each.seconds for each in slices)
    values = dict(zip(PERCENTILES, latencies.percentiles(PERCENTILES.values()), strict=True))
    count = latencies.count
    return {
        "answered": count,
        "seconds": seconds,
        "rate": count / seconds if seconds else 0.0,
        "latency": values
        | {
            "max": latencies.largest if count else None,
            "mean": latencies.total / count if count else None,
        },
    }


def _slice(plan: Plan, part: Slice) -> Json:
    processes = [_process(plan, place, [part]) for place in range(len(plan.pids))]
    figures = _figures([part])
    return {"at": part.at, **figures, "errors": part.recorder.errors.total, "processes": processes}


def _curve(latencies: Histogram) -> list[list[float]]:
    """Return pairs of percent and seconds, up to the last percentage with enough values."""
    wanted = [each for each in _CURVE if each < 100 - 100 / (latencies.count + 1)]
    found = zip(wanted, latencies.percentiles(wanted), strict=True)
    pairs = [[percent, value] for percent, value in found if value is not None]
    return [*pairs, [100.0, latencies.largest]] if pairs else []


def _by_code(parts: Iterable[Errors]) -> list[Json]:
    whole = Errors()
    for part in parts:
        for code, count in part.counts.items():
            whole.counts[code] = whole.counts.get(code, 0) + count
            whole.examples.setdefault(code, part.examples[code])
    return [
        {"code": code, "count": count, "example": whole.examples[code]}
        for code, count in sorted(whole.counts.items(), key=lambda pair: -pair[1])
    ]


def _interval(interval: Interval) -> Json:
    values = asdict(interval)
    return values | {"rate": interval.answered / interval.seconds if interval.seconds else 0.0}


def _share(cpu_seconds: float, slices: Sequence[Slice]) -> float:
    seconds = sum(each.seconds for each in slices)
    return cpu_seconds / seconds if seconds else 0.0


def _process(plan: Plan, place: int, slices: Sequence[Slice]) -> Json:
    """Return what a process took; `cpu_seconds` is None if it ended meanwhile."""
    usages = [each.processes[place] for each in slices]
    spent = [after.cpu_seconds - before.cpu_seconds for before, after in usages if before and after]
    cpu = sum(spent) if len(spent) == len(usages) and usages else None
    requests = sum(each.recorder.latencies.count + each.recorder.errors.total for each in slices)
    first = usages[0][0] if usages else None
    last = usages[-1][1] if usages else None
    return {
        "pid": plan.pids[place],
        "name": name_of(plan.pids[place]),
        "cpu_seconds": cpu,
        "cpu_seconds_per_request": cpu / requests if cpu is not None and requests else None,
        "rss_before_bytes": first.rss_bytes if first else None,
        "rss_after_bytes": last.rss_bytes if last else None,
    }


def _ratios(plan: Plan, slices: Sequence[Slice]) -> Json:
    """Divide the first target by the second, slice by slice, where both have a slice."""
    pairs = [
        (_slice(plan, one), _slice(plan, other))
        for one, other in zip(slices[0::2], slices[1::2], strict=False)
    ]
    measures = {"rate": _of("rate")}
    measures |= {name: _of("latency", name) for name in PERCENTILES}
    cpu = "cpu_seconds_per_request"
    measures |= {f"{cpu}_{pid}": _of("processes", at, cpu) for at, pid in enumerate(plan.pids)}
    return {name: _spread(of, pairs) for name, of in measures.items()}


def _of(*path: str | int) -> Callable[[Json], float | None]:
    def found(part: Any) -> float | None:
        for step in path:
            part = part[step]
        return None if part is None else float(part)

    return found


def _spread(of: Callable[[Json], float | None], pairs: Sequence[tuple[Json, Json]]) -> Json | None:
    quotients = [a / b for a, b in ((of(one), of(other)) for one, other in pairs) if a and b]
    if not quotients:
        return None
    return {
        "median": statistics.median(quotients),
        "min": min(quotients),
        "max": max(quotients),
        "slices": len(quotients),
    }


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


def lines(result: Json) -> Iterator[str]:
    targets = result["targets"]
    if result["interrupted"]:
        yield "stopped early; these are the results so far"
    yield how(result)
    yield from _table([_HEAD, *(_row(target) for target in targets)])
    for part in (_rate_line, _error_lines, _processes, _churn, _warning):
        for target in targets:
            yield from part(result, target)
    if result["ratios"]:
        yield from _ratio_lines(result)


def how(result: Json) -> str:
    """Return how the load was made, on one line."""
    given = result["options"]
    names, models = given["model_names"], given["models"]
    low, high = (_size(count) for count in given["payload_bytes"])
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


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:  # noqa: PLR2004 - the step of the units
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


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


def _error_lines(_result: Json, target: Json) -> Iterator[str]:
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
            f" memory {_size(before)} before, {_size(after)} after"
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
