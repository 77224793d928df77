"""Measures the adapter against its targets: `python -m tests.benchmarks`, or `make bench`."""

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks import beside, control, lanes
from tests.benchmarks.page import page
from tests.benchmarks.place import (
    FULL,
    QUICK,
    NotMeasuredError,
    Scale,
    busy_share,
    environment,
    has_own_network,
)
from tests.benchmarks.plots import draw
from tests.benchmarks.targets import TARGETS, Json, is_met, number, spread_of

_ROOT = Path(__file__).resolve().parent.parent.parent
_NOTES = Path(__file__).with_name("notes.toml")

MEASURES: Mapping[str, Callable[[Scale], Json]] = {
    "generator": lanes.generator,
    "start": control.start,
    "rest_small": lanes.rest_small,
    "grpc_small": lanes.grpc_small,
    "copying_proxy": lanes.copying_proxy,
    "payloads": lanes.payloads,
    "memory_of_big_bodies": lanes.memory_of_big_bodies,
    "delete_idle": control.delete_idle,
    "churn": beside.churn,
    "many_models": control.many_models,
    "storms": control.storms,
    "log_storm": beside.log_storm,
    "beside_builtin": beside.beside_builtin,
}


def main() -> int:
    """0 whatever the figures say: a page that says `missed` is a result."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASURES))
    parser.add_argument("--quick", action="store_true", help="minutes, and coarse")
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "docs", help="where page, JSON and plots go"
    )
    parser.add_argument("--page", action="store_true", help="write the page anew, measure nothing")
    args = parser.parse_args()
    if unknown := set(args.names) - MEASURES.keys():
        parser.error(f"no such measure: {', '.join(sorted(unknown))}")
    path = args.out / "benchmarks.json"
    results = json.loads(path.read_text()) if path.exists() else {"measures": {}}
    if not args.page:
        for _ in measured(results, args.names or list(MEASURES), QUICK if args.quick else FULL):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    for each in results["measures"].values():
        each["is_stale"] = has_changed_since(each.get("commit"))
    notes = tomllib.loads(_NOTES.read_text())
    plots = draw(results, args.out / "benchmarks")
    (args.out / "benchmarks.md").write_text(page(results, notes, plots))
    return 0


def measured(results: Json, names: list[str], scale: Scale) -> Iterator[None]:
    """One after the other into `results`; what was measured before under other names stays."""
    has_own_network()
    results["environment"] = environment() | {"busy_before": busy_share(2.0)}
    results["date"] = datetime.now(UTC).date().isoformat()
    for number_, name in enumerate(names, 1):
        say(f"[{number_}/{len(names)}] {name} ...")
        begun = time.monotonic()
        try:
            figures = MEASURES[name](scale)
        except NotMeasuredError as reason:
            say(f"    not measured: {reason}")
            continue
        seconds = time.monotonic() - begun
        results["measures"][name] = {
            "date": results["date"],
            "commit": commit(),
            "quick": scale.is_quick,
            "seconds": round(seconds, 1),
            "figures": figures,
        }
        tell(name, seconds, results["measures"])
        yield


def commit() -> str:
    """What is measured; with a `+` where the tree has changes that are not committed."""
    found = _git("describe", "--always", "--abbrev=12", "--dirty=+")
    return found.stdout.strip()


def has_changed_since(measured_at: str | None) -> bool:
    """Whether the adapter's code is another one now; True when that cannot be told."""
    if measured_at is None or measured_at.endswith("+"):
        return True
    return _git("diff", "--quiet", measured_at, "--", "adapter").returncode != 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )


def tell(name: str, seconds: float, measures: Json) -> None:
    say(f"    {seconds:.0f} s")
    for target in TARGETS:
        spread = spread_of(target, measures) if target.measure == name else None
        if spread is not None:
            verdict = "met" if is_met(target, spread) else "MISSED"
            said = number(spread["median"] * target.scale, target.unit)
            say(f"    {target.what}: {said} ({target.text}): {verdict}")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
