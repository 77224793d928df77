"""The pictures of docs/benchmarks.md."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Json = dict[str, Any]


def draw(results: Json, folder: Path) -> list[tuple[str, str]]:
    """Title and path beside the page of each that there are figures for."""
    folder.mkdir(exist_ok=True)
    measures = results["measures"]
    drawn = []
    for name, title, axis in (
        ("rest_small", "REST by connections", "connections"),
        ("grpc_small", "gRPC lane by streams", "streams"),
    ):
        if name in measures:
            _by_count(measures[name]["figures"], title, axis, folder / f"{name}.png")
            drawn.append((title, f"{folder.name}/{name}.png"))
    return drawn


def _by_count(figures: Json, title: str, axis: str, path: Path) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    rate, latency, cpu = figure.subplots(1, 3)
    counts = [int(each) for each in figures]
    for side, label in (("adapter", "adapter"), ("other", "Triton alone")):
        for axes, name, scale in ((rate, "rate", 1), (latency, "p99", 1e3)):
            spreads = [each[side][name] for each in figures.values()]
            middles = [spread["median"] * scale for spread in spreads]
            low = [m - s["min"] * scale for m, s in zip(middles, spreads, strict=True)]
            high = [s["max"] * scale - m for m, s in zip(middles, spreads, strict=True)]
            axes.errorbar(counts, middles, (low, high), marker=".", capsize=3, label=label)
    spent = [each["adapter"]["cpu_seconds_per_request"]["median"] for each in figures.values()]
    cpu.plot(counts, [each * 1e6 for each in spent], marker=".")
    rate.set(title=title, ylabel="requests a second", ylim=(0, None))
    latency.set(title="p99", ylabel="ms", ylim=(0, None))
    cpu.set(title="CPU of the adapter", ylabel="µs a request", ylim=(0, None))
    for axes in (rate, latency, cpu):
        axes.set(xscale="log", xlabel=axis)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    rate.legend()
    figure.savefig(path, dpi=80)
