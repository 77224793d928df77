"""The figures of a fleet: collected by tests/fleet/test_hundred_models.py, written to
docs/fleet.json, and shown in docs/measurements.md. `make fleet` does all of it.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.page import replace_between, table

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs" / "fleet.json", ROOT / "docs" / "measurements.md"
BEGIN, END = "<!-- figures: written by `make fleet` -->\n", "<!-- end of figures -->\n"


@dataclass(frozen=True)
class Ratio:
    """The share of calls that found their model in memory."""

    room: int  # models that fit on each machine
    traffic: str
    callers: int
    balance: int  # the factor in percent; 0 is no bound
    calls: int
    hits: float


@dataclass(frozen=True)
class Figure:
    what: str
    target: str
    measured: str
    is_met: bool


@dataclass
class Figures:
    ratios: list[Ratio] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def add(self, what: str, target: str, measured: str, *, is_met: bool) -> None:
        """Note a figure, and print it."""
        self.figures.append(Figure(what, target, measured, is_met))
        verdict = "met" if is_met else "MISSED"
        sys.stdout.write(f"\n{what}: {measured} ({target}: {verdict})\n")

    def add_ratio(self, ratio: Ratio) -> None:
        self.ratios.append(ratio)
        sys.stdout.write(f"\n{ratio}\n")

    def write(self) -> None:
        """Write the data and the page. Nothing older stays: all figures are of one run."""
        data = {
            "adapter": _said("git", "log", "-1", "--format=%h", "--", "adapter"),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "ratios": [asdict(each) for each in self.ratios],
            "figures": [asdict(each) for each in self.figures],
        }
        DATA.write_text(json.dumps(data, indent=2) + "\n")
        PAGE.write_text(with_figures(PAGE.read_text(), data))


def _said(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()


def with_figures(page: str, data: dict[str, Any]) -> str:
    """Return the page with these figures in the place of those that it has."""
    return replace_between(page, BEGIN, END, rendered(data))


def rendered(data: dict[str, Any]) -> str:
    figures = [
        [each["what"], each["target"], each["measured"], "met" if each["is_met"] else "**missed**"]
        for each in data["figures"]
    ]
    when = f"{data['date']}, {data['cores']} cores"
    head = f"Measured with the adapter at {data['adapter']} ({when}).\n"
    ratios = "Hit ratios by callers and `--balance` are in [fleet.json](fleet.json).\n"
    parts = [head, table(["what", "target", "measured", ""], figures), ratios]
    return "\n" + "\n".join(parts) + "\n"
