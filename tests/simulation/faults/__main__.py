"""Finds each fault, and prints a table: `python -m tests.simulation.faults [--seconds=60]`."""

import argparse
import gc
import sys
import time

from tests.simulation.faults import FAULTS
from tests.simulation.faults.fault import Fault
from tests.simulation.models import Violated
from tests.simulation.plan import drawn
from tests.simulation.world import played


def found(fault: Fault, seconds: float, first: int = 0) -> tuple[Violated | None, int, float]:
    """Play days until one violates a rule; return that, how many, and the seconds of CPU."""
    started_at = time.process_time()
    count = 0
    while (took := time.process_time() - started_at) < seconds:
        violation = played(drawn(first + count), fault.build).violation
        count += 1
        if violation is not None:
            return violation, count, time.process_time() - started_at
    return None, count, took


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.faults")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    missed = 0
    gc.freeze()
    print("| fault | seconds of CPU | days | the oracle says |\n| --- | --- | --- | --- |")
    for name in args.names or FAULTS:
        violation, days, seconds = found(FAULTS[name], args.seconds)
        missed += violation is None
        said = "not found" if violation is None else str(violation)[:100]
        print(f"| {name} | {seconds:.1f} | {days} | {said} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
