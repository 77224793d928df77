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
from tests.benchmarks.place import (
    FULL,
    QUICK,
    NotMeasuredError,
    Scale,
    describe_machine,
    measure_busy_share,
)
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
    """1 when something could not be measured that can be here, whatever the figures say."""
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
        say(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def measure(names: Sequence[str], scale: Scale, measures: Json, kept: Path | None) -> list[str]:
    """One after the other into `measures`; what is there under other names stays as it is.

    The names of those that failed; they keep no other from being measured.
    """
    failed = []
    for name in names:
        try:
            measures[name] = measured(name, scale)
        except NotMeasuredError as reason:
            say(f"    not measured: {reason}")
        except Exception:  # noqa: BLE001 - of whatever kind
            say(traceback.format_exc())
            failed.append(name)
        else:
            tell(name, measures[name])
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(measures, indent=1) + "\n")
    return failed


def measured(name: str, scale: Scale) -> Json:
    """Figures with all that says what they are of."""
    say(f"{name} ...")
    about = {
        "commit": commit(MEASURES[name][1]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "busy": measure_busy_share(1.0),
        "quick": scale.is_quick,
    }
    begun = time.monotonic()
    figures = BY[name](scale)
    return about | {"seconds": round(time.monotonic() - begun, 1), "figures": figures}


def write_page(out: Path, measures: Json) -> None:
    out.mkdir(parents=True, exist_ok=True)
    notes = tomllib.loads(_NOTES.read_text())
    text = with_benchmarks(_PAGE.read_text(), page(marked(measures), notes))
    (out / _PAGE.name).write_text(text)


def marked(measures: Json) -> Json:
    """With whether the code that was measured is another one now."""
    return {
        name: each | {"is_stale": is_stale(each["commit"], MEASURES[name][1])}
        for name, each in measures.items()
        if name in MEASURES
    }


def commit(paths: Sequence[str]) -> str:
    """What is measured; with a `+` where the tree has changes of it that are not committed."""
    head = _git(("rev-parse", "--short=12", "HEAD")).stdout.strip()
    changed = _git(("status", "--porcelain", "--", *paths)).stdout
    return f"{head}+" if changed else head


def is_stale(measured_at: str, paths: Sequence[str]) -> bool:
    """Whether the code in `paths` is another one now; True when that cannot be told."""
    if measured_at.endswith("+"):
        return True
    return _git(("diff", "--quiet", measured_at, "--", *paths)).returncode != 0


def _git(arguments: Iterable[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
    )


def tell(name: str, measure: Json) -> None:
    say(f"    {measure['seconds']:.0f} s")
    for row in ROWS:
        found = measure["figures"].get(row.figure) if row.measure == name else None
        if found is not None:
            held = f" ({row.target}): {verdict(row, found)}" if row.target else ""
            say(f"    {row.what}: {shown(found, row.unit)}{held}")


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
