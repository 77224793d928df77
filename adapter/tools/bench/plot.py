"""Plots latency by percentile, and latency, rate and failures over time."""

import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from adapter.tools.bench.errors import needed
from adapter.tools.bench.results import how, plural

_COLOURS = ("tab:blue", "tab:orange")
_CHURN = {"load": "tab:green", "unload": "tab:purple"}
_FAILED = "tab:red"
_TICKS = (0, 50, 90, 99, 99.9, 99.99)
_NAMED = {"p50": "p50", "p90": "p90", "p99": "p99", "p99_9": "p99.9"}
_MIDDLE, _LEAST_BEYOND = 50, 10  # a percentile of fewer slower answers is chance
_SHORTEST = 0.2  # of an interval: the rate of a shorter one is noise
_KINDS = 3  # of errors that the heading names
_WIDTH = 130  # of the heading, in characters

Json = dict[str, Any]


def draw(result: Json, path: Path) -> None:
    """Write the plot; the ending of the name chooses the format. Raises OSError."""
    figure_of(result).savefig(path, dpi=110)


def figure_of(result: Json) -> Any:
    """Draw a result as docs/bench.md describes it, in a figure of matplotlib."""
    figure = needed("matplotlib.figure").Figure(figsize=(11, 11), layout="constrained")
    curve, latency, rate = figure.subplots(3, 1, gridspec_kw={"height_ratios": (3, 3, 2)})
    text = "\n".join(_heading(result))
    shortest = result["options"]["interval_seconds"] * _SHORTEST
    figure.suptitle(text, x=0.01, horizontalalignment="left", fontsize="medium")
    for colour, name, target in _named(result):
        _curve(curve, target, colour, name)
        _over_time(latency, rate, target, shortest=shortest, colour=colour, name=name)
    _churn(latency, result)
    _asked_for(rate, result)
    _percentile_axes(curve, result)
    _time_axes(latency, rate, result)
    for axes, title in (
        (curve, "Latency by percentile"),
        (latency, "Latency over time"),
        (rate, "Requests over time"),
    ):
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.3)
        _legend(axes)
    return figure


def _named(result: Json) -> Iterator[tuple[str, str, Json]]:
    """Each target with its colour, and with the letter that names it where there are two."""
    targets = result["targets"]
    names = ("A ", "B ") if len(targets) > 1 else ("",)
    yield from zip(_COLOURS, names, targets, strict=False)


def _heading(result: Json) -> Iterator[str]:
    for _, name, target in _named(result):
        figures = [f"{target['answered']:,} answered", f"{target['rate']:,.1f} per second"]
        if target["errors"]:
            figures.append(f"{target['errors']:,} failed: {_kinds(target['errors_by_code'])}")
        text = f"{name}{target['url']} {target['protocol']}: {', '.join(figures)}"
        yield from textwrap.wrap(text, _WIDTH)
    yield from textwrap.wrap(how(result), _WIDTH)
    day, _, time = result["started_at"].partition("T")
    ended = ", stopped early" if result["interrupted"] else ""
    version = f"triton-adapter bench {result['version']}"
    yield f"{day} {time[:8]} UTC, {version}, on {result['machine']}{ended}"


def _kinds(errors: list[Json]) -> str:
    named = [f"{each['count']:,} x {each['code']}" for each in errors[:_KINDS]]
    others = len(errors) - len(named)
    return ", ".join([*named, *([plural(others, "other kind")] if others else [])])


def _place(percent: float) -> float:
    """Return the position of a percentage, with nines at equal distances."""
    return 1 / (1 - min(percent, 99.9999) / 100)


def _is_known(percent: float, answered: int) -> bool:
    return percent <= _MIDDLE or answered * (100 - percent) / 100 >= _LEAST_BEYOND


def _curve(axes: Any, target: Json, colour: str, name: str) -> None:
    answered = target["answered"]
    pairs = [pair for pair in target["curve"] if _is_known(pair[0], answered)]
    if not pairs:
        return
    figures = [
        f"{shown} {_plain(target['latency'][key] * 1e3)}"
        for key, shown in _NAMED.items()
        if _is_known(float(shown[1:]), answered)
    ]
    label = f"{name}{', '.join(figures)} ms"
    xs, ys = [_place(percent) for percent, _ in pairs], [value * 1e3 for _, value in pairs]
    axes.plot(xs, ys, color=colour, label=label, marker=".")


def _number(value: float) -> str:
    """Write 0.00005 and 1,000,000 as they are: no powers of ten."""
    return f"{value:,.9f}".rstrip("0").rstrip(".")


def _plain(value: float) -> str:
    """Write the first three digits, as 0.388, 4.53 or 1,230."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, digits):,.{min(max(digits, 0), 4)}f}"


def _over_time(
    latency: Any, rate: Any, target: Json, *, shortest: float, colour: str, name: str
) -> None:
    intervals = target["timeline"]
    long_ones = [each for each in intervals if each["seconds"] >= shortest]
    whole = list(_with_gaps(long_ones or intervals, shortest))
    middles = [each["at"] + each["seconds"] / 2 for each in whole]
    for key, style in (("p50", ":"), ("p99", "-")):
        values = [math.nan if each[key] is None else each[key] * 1e3 for each in whole]
        if not all(map(math.isnan, values)):
            latency.plot(middles, values, style, color=colour, marker=".", label=f"{name}{key}")
    answered = [each["rate"] for each in whole]
    rate.plot(middles, answered, color=colour, marker=".", label=f"{name}answered")
    if target["errors"]:
        failed = [each["failed"] / (each["seconds"] or math.nan) for each in whole]
        style = "--" if name.startswith("B") else "-"
        rate.plot(middles, failed, style, color=_FAILED, marker="x", label=f"{name}failed")


def _with_gaps(intervals: list[Json], shortest: float) -> Iterator[Json]:
    """Put an interval without figures where the other target was measured meanwhile: lines end."""
    end = None
    for each in intervals:
        if end is not None and each["at"] - end > shortest:
            yield {
                "at": end,
                "seconds": 0.0,
                "failed": 0,
                "p50": None,
                "p99": None,
                "rate": math.nan,
            }
        end = each["at"] + each["seconds"]
        yield each


def _churn(axes: Any, result: Json) -> None:
    named = set()
    for change in (change for target in result["targets"] for change in target["churn"]):
        operation = change["operation"]
        label = None if operation in named else operation
        named.add(operation)
        end = change["at"] + max(change["seconds"], 0.01)
        axes.axvspan(change["at"], end, color=_CHURN[operation], alpha=0.15, lw=0, label=label)


def _asked_for(axes: Any, result: Json) -> None:
    rate = result["options"]["rate"]
    if rate is not None:
        axes.axhline(
            rate, color="gray", linestyle="--", linewidth=1, label=f"{_number(rate)}/s due"
        )


def _percentile_axes(axes: Any, result: Json) -> None:
    values = _drawn(axes)
    axes.set(xlabel="percentile of the requests answered", ylabel="latency (ms)", xscale="log")
    most = max((target["answered"] for target in result["targets"]), default=0)
    known = [each for each in _TICKS if _is_known(each, most)]
    shown = _TICKS[: len(known) + 1]
    axes.set_xticks(
        [_place(each) for each in shown], ["min", *(f"p{each:g}" for each in shown[1:])]
    )
    axes.set_xticks([], minor=True)
    axes.set_xlim(_place(0) * 0.9, _place(shown[-1]) * 1.1)
    _log_scale(axes, values)


def _time_axes(latency: Any, rate: Any, result: Json) -> None:
    ticker = needed("matplotlib.ticker")
    ends = [e["at"] + e["seconds"] for t in result["targets"] for e in t["timeline"] + t["churn"]]
    for axes in (latency, rate):
        axes.set(xlabel="time since the start (s)", xlim=(0, max(ends, default=0) or 1))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _number(value)))
    latency.set_ylabel("latency (ms)")
    _log_scale(latency, _drawn(latency))
    highest = max([*_drawn(rate), result["options"]["rate"] or 0], default=0)
    rate.set(ylabel="requests per second", ylim=(0, highest * 1.15 or 1))
    rate.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _number(value)))


def _drawn(axes: Any) -> list[float]:
    values = (float(value) for line in axes.get_lines() for value in line.get_ydata())
    return [value for value in values if not math.isnan(value)]


def _log_scale(axes: Any, values: Iterable[float]) -> None:
    """From one of 1, 2, 5, 10 ... to another, with all that are between as ticks, and no others."""
    values = list(values)
    if not values:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no request was answered", transform=axes.transAxes, ha="center")
        return
    low, high = max(min(values), 1e-6) / 1.1, max(values) * 1.2
    steps = [digit * 10.0**power for power in range(-7, 9) for digit in (1, 2, 5)]
    first = max(at for at, step in enumerate(steps) if step <= low)
    last = min(at for at, step in enumerate(steps) if step >= high)
    axes.set(yscale="log", ylim=(steps[first], steps[last]))
    axes.set_yticks(steps[first : last + 1], [_number(each) for each in steps[first : last + 1]])
    axes.set_yticks([], minor=True)


def _legend(axes: Any) -> None:
    """Place the legend above the frame, at the right: no line is behind it."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
        axes.legend(**place, ncols=len(handles), frameon=False, fontsize="small")
