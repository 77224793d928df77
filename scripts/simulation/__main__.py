"""Simulates a fleet for docs/measurements.md: its tables, docs/fleet-simulation.json and the plots.

`--page` writes the tables and plots anew from the JSON that is there.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.simulation import page, plot, study
from scripts.simulation.predict import predict

_DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA, PAGE = _DOCS / "fleet-simulation.json", _DOCS / "measurements.md"
# 100 models on three machines, as tests/fleet plays them.
_NAMES = [f"m{number}.tar.gz" for number in range(100)]
_MACHINES = [f"machine-{number}" for number in range(3)]


def predictions() -> list[study.Json]:
    return [
        {
            "room": room,
            "factor": factor,
            "callers": callers,
            **asdict(predict(_NAMES, _MACHINES, room=room, callers=callers, balance_factor=factor)),
        }
        for room in (40, 20)
        for factor in (0, 125, 150, 200)
        for callers in (2, 16, 64)
    ]


def rounded(value: Any) -> Any:
    """Four digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def simulate() -> study.Json:
    found: study.Json = {}
    for name, parts in (
        ("predictions", predictions),
        ("balance", study.balance),
        ("disks", study.disks),
        ("changes", study.changes),
        ("moved", study.moved),
        ("tables", study.tables),
        ("shares", study.shares),
    ):
        print(f"{name} ...", flush=True)
        found[name] = rounded(list(parts()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.simulation", description=__doc__)
    parser.add_argument("--page", action="store_true", help="simulate nothing")
    if not parser.parse_args().page:
        DATA.write_text(json.dumps(simulate(), indent=1) + "\n", encoding="utf-8")
    found = json.loads(DATA.read_text(encoding="utf-8"))
    plot.draw(found, _DOCS / "images")
    PAGE.write_text(page.with_tables(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
