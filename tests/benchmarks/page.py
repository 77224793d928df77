"""Writes docs/benchmarks.md from the results and the words of notes.toml."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.benchmarks.targets import TARGETS, Json, Target, is_met, number, spread_of

_HEAD = """\
# Benchmarks

<!-- written by `make bench`: words are in tests/benchmarks/notes.toml -->

`make bench` measures all of this anew on the machine it runs on and writes this page and
[benchmarks.json](benchmarks.json). Absolute figures are of this one machine; the ratios are of two
servers that were measured in turn, so that what else the machine does meets both. Each figure is
the median of its rounds, with the least and the greatest round in brackets. The load tester
([bench.md](bench.md)) is a process of its own and shares the cores with adapter, Triton and the
model's python process. The model is `examples/models/identity` on Triton's python backend, the
only backend that this Triton has.
"""

_BETWEEN = {"rest_small": "connections", "grpc_small": "streams"}


def page(results: Json, notes: Mapping[str, str], plots: Sequence[tuple[str, str]]) -> str:
    """`results` is what benchmarks.json holds. A plot is a title and a path beside the page."""
    parts = [
        _HEAD,
        _machine(results),
        "## Targets\n\n" + _targets(results, notes),
        _misses(results, notes),
        *(section(results, notes) for section in _SECTIONS),
        *(f"![{title}]({path})\n" for title, path in plots),
    ]
    return "\n".join(part for part in parts if part)


def _machine(results: Json) -> str:
    about = results["environment"]
    versions = ", ".join(each for each in about["versions"] if each)
    rows = [
        ["date", results["date"]],
        ["processor", f"{about['cpu']}, {about['cores']} cores"],
        ["memory", number(about["memory_bytes"] / 2**30, "GiB")],
        ["kernel", about["kernel"]],
        ["versions", versions],
        ["cores busy with other work before it began", f"{about['busy_before']:.0%}"],
    ]
    quick = [name for name, each in results["measures"].items() if each.get("quick")]
    text = table(["", ""], rows)
    if stale := sorted(name for name, each in results["measures"].items() if each.get("is_stale")):
        text += (
            f"\nMeasured before `adapter/` was last changed, so they say nothing of this code:"
            f" {', '.join(stale)}. The commit of each is in [benchmarks.json](benchmarks.json).\n"
        )
    if quick:
        text += f"\nOf a quick run, hence coarse: {', '.join(sorted(quick))}.\n"
    return text


def _targets(results: Json, notes: Mapping[str, str]) -> str:
    rows = []
    for target in TARGETS:
        spread = spread_of(target, results["measures"])
        if spread is None:
            said, verdict = "not measured", "-"
        else:
            said = shown(spread, target.unit, target.scale)
            verdict = _verdict(target, spread, results["measures"][target.measure])
        if verdict == "missed" and target.key in notes:
            verdict = "missed (see below)"
        rows.append([target.what, target.text, said, verdict])
    return table(["what", "target", "measured", ""], rows)


def _verdict(target: Target, spread: Json, measure: Json) -> str:
    if measure.get("is_stale"):
        return "of older code"
    return "met" if is_met(target, spread) else "missed"


def _misses(results: Json, notes: Mapping[str, str]) -> str:
    found = []
    for target in TARGETS:
        spread = spread_of(target, results["measures"])
        if spread is not None and not is_met(target, spread) and target.key in notes:
            found.append(f"- **{target.what}**: {notes[target.key].strip()}\n")
    return "### What was missed, and why\n\n" + "".join(found) if found else ""


def shown(spread: Json | None, unit: str = "", scale: float = 1.0) -> str:
    """`12.3 ms (11 to 14)`: the median, and the rounds around it."""
    if spread is None:
        return "-"
    value, low, high = (number(spread[each] * scale, "") for each in ("median", "min", "max"))
    text = f"{value} {unit}".strip()
    return text if spread["rounds"] == 1 else f"{text} ({low} to {high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _figures(results: Json, measure: str) -> Json:
    return results["measures"].get(measure, {}).get("figures", {})


def _section(title: str, notes: Mapping[str, str], key: str, body: str) -> str:
    words = notes.get(key, "").strip()
    return f"## {title}\n\n" + (f"{words}\n\n" if words else "") + body if body else ""


def _lanes(results: Json, notes: Mapping[str, str]) -> str:
    rows = []
    for measure, lane in (("rest_small", "REST"), ("grpc_small", "gRPC lane")):
        for count, each in _figures(results, measure).items():
            rows.append([f"{lane}, {count} {_BETWEEN[measure]}", *_compared(each)])
    return _section("By connections", notes, "by-connections", rows and table(_COMPARED, rows))


def _copying(results: Json, notes: Mapping[str, str]) -> str:
    names = {"rest": "HTTP, 8 connections", "grpc": "HTTP/2, 8 streams"}
    rows = [
        [names[lane], *_compared(each)] for lane, each in _figures(results, "copying_proxy").items()
    ]
    head = ("", "CPU of the proxy a request", *_COMPARED[2:])
    return _section("A proxy that only copies bytes", notes, "copying", rows and table(head, rows))


def _sizes(results: Json, notes: Mapping[str, str]) -> str:
    rows = []
    for lane, by_size in _figures(results, "payloads").items():
        for size, each in by_size.items():
            rows.append([f"{lane}, {number(int(size) / 1024, 'KiB')}", *_compared(each)])
    return _section("By size of the tensor", notes, "by-size", rows and table(_COMPARED, rows))


_COMPARED = (
    "",
    "CPU of the adapter a request",
    "requests a second",
    "Triton alone",
    "ratio",
    "p50",
    "Triton alone",
    "p99",
    "Triton alone",
    "errors",
)


def _compared(each: Json) -> list[str]:
    adapter, other = each["adapter"], each["other"]
    return [
        shown(adapter["cpu_seconds_per_request"], "µs", 1e6),
        shown(adapter["rate"]),
        shown(other["rate"]),
        shown(each["rate_ratio"]),
        shown(adapter["p50"], "ms", 1e3),
        shown(other["p50"], "ms", 1e3),
        shown(adapter["p99"], "ms", 1e3),
        shown(other["p99"], "ms", 1e3),
        str(adapter["errors"] + other["errors"]),
    ]


def _builtin(results: Json, notes: Mapping[str, str]) -> str:
    figures = _figures(results, "beside_builtin")
    rows = [
        [
            f"{count} connections",
            shown(each["adapter"]["rate"]),
            shown(each["other"]["rate"]),
            shown(each["rate_ratio"]),
            shown(each["adapter"]["p50"], "ms", 1e3),
            shown(each["other"]["p50"], "ms", 1e3),
            shown(each["adapter"]["p99"], "ms", 1e3),
            shown(each["other"]["p99"], "ms", 1e3),
        ]
        for count, each in figures.get("by_connections", {}).items()
    ]
    head = ("", "requests a second", "built-in", "ratio", "p50", "built-in", "p99", "built-in")
    if not rows:
        return ""
    memory = figures["memory_mib"]
    whole = [
        [name, number(memory[key]["idle"], "MiB"), number(memory[key]["after_load"], "MiB")]
        for key, name in (
            ("adapter", "adapter, its Triton and the model's process"),
            ("builtin", "built-in endpoint and the model's process"),
        )
    ]
    whole.append(["the adapter alone", "", number(figures["adapter_alone_mib"], "MiB")])
    body = table(head, rows) + "\n"
    body += table(["memory (PSS)", "idle, one model", "after the load"], whole)
    seconds = shown(figures["delete"], "s")
    body += f"\nDELETE of an idle python model at the built-in endpoint: {seconds}.\n"
    return _section("Beside Triton's built-in SageMaker endpoint", notes, "builtin", body)


def _churn(results: Json, notes: Mapping[str, str]) -> str:
    names = {"adapter": "adapter", "triton": "its Triton, past it", "builtin": "built-in endpoint"}
    rows = [
        [
            names[key],
            shown(each["quiet_p99"], "ms", 1e3),
            shown(each["churn_p99"], "ms", 1e3),
            shown(each["ratio"], "x"),
            shown(each["load_seconds"], "s"),
            shown(each["unload_seconds"], "s"),
        ]
        for key, each in _figures(results, "churn").items()
        if key in names and "quiet_p99" in each
    ]
    head = ("p99 of one model at", "quiet", "with churn", "ratio", "a load", "an unload")
    return _section(
        "While another model comes and goes", notes, "churn-table", rows and table(head, rows)
    )


def _many(results: Json, notes: Mapping[str, str]) -> str:
    figures = _figures(results, "many_models")
    if not figures:
        return ""
    rows = [
        [name, shown(each["few"], "ms", 1e3), shown(each["many"], "ms", 1e3), shown(each["ratio"])]
        for name, each in figures["calls"].items()
    ]
    few, many = shown(figures["rss_few_mib"], "MiB"), shown(figures["rss_mib"], "MiB")
    rows.append(["resident memory of the adapter", few, many, ""])
    body = table(["", "10 known", f"{figures['models']:,} known", "ratio"], rows)
    body += f"\nThe models were loaded at {figures['loads_per_second']:.0f} a second.\n"
    return _section("Many models known", notes, "many", body)


def _storms(results: Json, notes: Mapping[str, str]) -> str:
    figures = _figures(results, "storms")
    if not figures:
        return ""
    rows = [["nothing", "", shown(figures["quiet_p99"], "ms", 1e3), ""]]
    rows += [
        [name, shown(each["calls_per_second"]), shown(each["p99"], "ms", 1e3), shown(each["ratio"])]
        for name, each in figures["storms"].items()
    ]
    body = table(["meanwhile", "calls a second", "p99 of inference", "over quiet"], rows)
    return _section(
        f"Inference during control calls, {figures['models']:,} models known", notes, "storms", body
    )


def _log_storm(results: Json, notes: Mapping[str, str]) -> str:
    figures = _figures(results, "log_storm")
    if not figures:
        return ""
    rows = [
        [
            name,
            shown(figures[key]["quiet_p99"], "ms", 1e3),
            shown(figures[key]["storm_p99"], "ms", 1e3),
            shown(figures[key]["ratio"], "x"),
        ]
        for key, name in (("adapter", "adapter"), ("triton", "its Triton, past it"))
    ]
    body = table(["p99 of one model at", "quiet", "talkative", "ratio"], rows)
    body += f"\nThe adapter logged {figures['lines_per_second']:,.0f} lines a second of Triton's.\n"
    return _section("While Triton logs each step of each request", notes, "log-storm", body)


def _generator(results: Json, notes: Mapping[str, str]) -> str:
    rows = [
        [f"{count} connections", shown(each["rate"]), f"{each['generator_cpu_share']:.2f}"]
        for count, each in _figures(results, "generator").items()
    ]
    head = ("", "requests a second", "of a core")
    return _section("The load tester's own ceiling", notes, "generator", rows and table(head, rows))


_SECTIONS: Sequence[Callable[[Json, Mapping[str, str]], str]] = (
    _lanes,
    _copying,
    _sizes,
    _builtin,
    _churn,
    _many,
    _storms,
    _log_storm,
    _generator,
)
