"""Draws what study.py has found, as SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from scripts.simulation.study import LOADS, Json

_MARKERS = ("o", "s", "^")
_PANELS = {
    "hits": ("found their model in memory (%)", 100),
    "fetched_mib_per_call": ("fetched from the store (MiB a call)", 1),
    "p50_seconds": ("half of the calls took at most (s)", 1),
    "p99_seconds": ("99 % of the calls took at most (s)", 1),
}


def draw(found: Json, folder: Path) -> None:
    """Write the plots of the page into the folder."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fleet", "font.size": 9}):
        _save(_balance(found["balance"]), folder / "fleet-balance.svg")
        _save(_disks(found["disks"]), folder / "fleet-disk.svg")
        _save(_changes(found["changes"]), folder / "fleet-changes.svg")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


def _shown(factor: int) -> str:
    return str(factor) if factor else "none"


def _balance(rows: Sequence[Json]) -> Figure:
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, (key, (title, scale)) in zip(panels, _PANELS.items(), strict=True):
        for load, marker in zip(LOADS, _MARKERS, strict=True):
            of_load = [row for row in rows if row["load"] == load.name]
            factors = [_shown(row["factor"]) for row in of_load]
            values = [row[key] * scale for row in of_load]
            axes.plot(factors, values, marker=marker, label=load.name)
        _label(axes, title, "hash_balance_factor")
        if key != "hits":
            axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _disks(rows: Sequence[Json]) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = list(_PANELS.items())[:2]
    for axes, (key, (title, scale)) in zip(figure.subplots(1, 2), panels, strict=True):
        for factor in dict.fromkeys(row["factor"] for row in rows):
            of_factor = [row for row in rows if row["factor"] == factor]
            sizes = [row["disk_gib"] for row in of_factor]
            values = [row[key] * scale for row in of_factor]
            axes.plot(sizes, values, marker="o", label=f"balance factor {_shown(factor)}")
        _label(axes, title, "disk of each machine for the cache (GiB)")
        if key != "hits":
            axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _changes(rows: Sequence[Json]) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    panels = list(_PANELS.items())[:2]
    step = rows[1]["calls"] - rows[0]["calls"]
    for axes, (key, (title, scale)) in zip(figure.subplots(2, 1), panels, strict=True):
        middles = [(row["calls"] + step / 2) / 1000 for row in rows]
        axes.plot(middles, [row[key] * scale for row in rows], marker=".")
        for row in rows:
            if row["what"]:
                axes.axvline(row["calls"] / 1000, color="gray", linestyle="--", linewidth=1)
                if key == "hits":
                    where = (row["calls"] / 1000, 1.02)
                    axes.text(*where, row["what"], transform=axes.get_xaxis_transform())
        _label(axes, "", "thousands of calls")
        axes.set_ylabel(title)
        if key != "hits":
            axes.set_ylim(bottom=0)
    return figure


def _label(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(below)
    axes.grid(alpha=0.3)


def _legend(figure: Figure) -> None:
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
