"""Measures the adapter against its targets: `python -m tests.benchmarks`, or `make bench`."""

import argparse
import json
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks.churn import measure_churn
from tests.benchmarks.cold import measure_cold
from tests.benchmarks.page import page, shown, with_benchmarks
from tests.benchmarks.place import FULL, QUICK, NotMeasuredError, Scale, describe_machine
from tests.benchmarks.rest import measure_rest
from tests.benchmarks.rows import MEASURES, ROWS, Json, verdict
from tests.benchmarks.unary import measure_grpc

_ROOT = Path(__file__).resolve().parent.parent.parent
_NOTES = Path(__file__).with_name("notes.toml")
_PAGE = _ROOT / "docs" / "measurements.md"

BY: Mapping[str, Callable[[Scale], Json]] = {
    "rest": measure_rest,
    "grpc": measure_grpc,
    "churn": measure_churn,
    "cold": measure_cold,
}


def main() -> int:
    """Return 1 if a measure failed, whatever the figures of the others say."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BY))
    parser.add_argument("--quick", action="store_true", help="coarse; writes nothing without --out")
    parser.add_argument("--out", type=Path, help="where page and JSON go (default: docs)")
    parser.add_argument("--page", action="store_true", help="write the page anew, measure nothing")
    args = parser.parse_args()
    if unknown := set(args.names) - BY.keys():
        parser.error(f"no such measure: {', '.join(sorted(unknown))}")
    out = args.out or (None if args.quick else _ROOT / "docs")
    kept = out and out / "benchmarks.json"
    measures = json.loads(kept.read_text()) if kept and kept.exists() else {}
    scale = QUICK if args.quick else FULL
    failed = [] if args.page else measure(args.names or list(BY), scale, measures, kept)
    if out is not None:
        write_page(out, measures)
    if failed:
        print_line(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def measure(names: Sequence[str], scale: Scale, measures: Json, kept: Path | None) -> list[str]:
    """Measure these, put their results into `measures`, and return the names of those that failed.

    A failure does not keep the others from being measured. Results under other names stay.
    """
    failed = []
    for name in names:
        try:
            measures[name] = run_measure(name, scale)
        except NotMeasuredError as reason:
            print_line(f"    not measured: {reason}")
        except Exception:  # noqa: BLE001 - of whatever kind
            print_line(traceback.format_exc())
            failed.append(name)
        else:
            print_figures(name, measures[name])
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(measures, indent=1) + "\n")
    return failed


def run_measure(name: str, scale: Scale) -> Json:
    """Return the figures of a measure with the commit, the date and the machine they are of."""
    print_line(f"{name} ...")
    about = {
        "commit": find_commit(MEASURES[name][1]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "quick": scale.is_quick,
    }
    started_at = time.monotonic()
    figures = BY[name](scale)
    return about | {"seconds": round(time.monotonic() - started_at, 1), "figures": figures}


def write_page(out: Path, measures: Json) -> None:
    out.mkdir(parents=True, exist_ok=True)
    notes = tomllib.loads(_NOTES.read_text())
    text = with_benchmarks(_PAGE.read_text(), page(mark_stale(measures), notes))
    (out / _PAGE.name).write_text(text)


def mark_stale(measures: Json) -> Json:
    """Return the results with a mark on those whose code has changed since."""
    return {
        name: each | {"is_stale": is_stale(each["commit"], MEASURES[name][1])}
        for name, each in measures.items()
        if name in MEASURES
    }


def find_commit(paths: Sequence[str]) -> str:
    """Return the commit that is checked out, with a `+` if `paths` differ from it."""
    head = _git(("rev-parse", "--short=12", "HEAD")).stdout.strip()
    changed = _git(("status", "--porcelain", "--", *paths)).stdout
    return f"{head}+" if changed else head


def is_stale(measured_at: str, paths: Sequence[str]) -> bool:
    """Return whether `paths` have changed since; True if git does not know the commit."""
    if measured_at.endswith("+"):
        return True
    return _git(("diff", "--quiet", measured_at, "--", *paths)).returncode != 0


def _git(arguments: Iterable[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
    )


def print_figures(name: str, measure: Json) -> None:
    print_line(f"    {measure['seconds']:.0f} s")
    for row in ROWS:
        found = measure["figures"].get(row.figure) if row.measure == name else None
        if found is not None:
            held = f" ({row.target}): {verdict(row, found)}" if row.target else ""
            print_line(f"    {row.what}: {shown(found, row.unit)}{held}")


def print_line(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
