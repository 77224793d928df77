"""Plots latency by percentile, and percentiles and rate over time."""

from pathlib import Path
from typing import Any

from bench.extra import needed

_COLOURS = ("tab:blue", "tab:orange")
_CHURN = {"load": "tab:green", "unload": "tab:red"}
_TICKS = (0, 50, 90, 99, 99.9, 99.99)
_SHORTEST = 0.2  # of an interval: the rate of a shorter one is noise

Json = dict[str, Any]


def draw(result: Json, path: Path) -> None:
    """OSError when the file cannot be written. The ending of the name chooses the format."""
    figure = needed("matplotlib.figure").Figure(figsize=(11, 10), layout="constrained")
    curve, latency, rate = figure.subplots(3, 1, gridspec_kw={"height_ratios": (3, 3, 2)})
    interval = result["options"]["interval_seconds"]
    for colour, target in zip(_COLOURS, result["targets"], strict=False):
        label = f"{target['url']} {target['protocol']}"
        _curve(curve, target, colour, label)
        _timeline(latency, rate, target, colour, interval * _SHORTEST)
        _churn(latency, target)
    curve.set(title="latency by percentile", xlabel="percent", ylabel="ms", yscale="log")
    curve.set_xscale("log")
    curve.set_xticks([_place(each) for each in _TICKS], [f"{each:g}" for each in _TICKS])
    curve.set_xticks([], minor=True)
    latency.set(title="latency over time (p50 dotted, p99 solid)", ylabel="ms", yscale="log")
    rate.set(title="answered a second", xlabel="seconds", ylim=(0, None))
    for axes in (curve, latency, rate):
        axes.grid(alpha=0.3)
    if curve.get_legend_handles_labels()[0]:
        curve.legend()
    figure.savefig(path, dpi=110)


def _place(percent: float) -> float:
    """Return the position of a percentage, with nines at equal distances."""
    return 1 / (1 - min(percent, 99.9999) / 100)


def _curve(axes: Any, target: Json, colour: str, label: str) -> None:
    pairs = [(percent, value) for percent, value in target["curve"] if percent < 100]  # noqa: PLR2004 - no place for all nines
    if pairs:
        xs = [_place(percent) for percent, _ in pairs]
        axes.plot(xs, [value * 1e3 for _, value in pairs], color=colour, label=label, marker=".")


def _timeline(latency: Any, rate: Any, target: Json, colour: str, shortest: float) -> None:
    whole = [each for each in target["timeline"] if each["seconds"] >= shortest]
    middles = [each["at"] + each["seconds"] / 2 for each in whole]
    for name, style in (("p50", ":"), ("p99", "-")):
        values = [each[name] * 1e3 if each[name] is not None else None for each in whole]
        values = [float("nan") if value is None else value for value in values]
        latency.plot(middles, values, style, color=colour, marker=".")
    rate.plot(middles, [each["rate"] for each in whole], color=colour, marker=".")


def _churn(axes: Any, target: Json) -> None:
    for change in target["churn"]:
        end = change["at"] + max(change["seconds"], 0.01)
        axes.axvspan(change["at"], end, color=_CHURN[change["operation"]], alpha=0.2)
