"""Runs simulated days: `python -m tests.simulation --seconds=60`, or one: `--seed=7`."""

import argparse
import gc
import random
import sys
import time
from collections import Counter

from tests.simulation.plan import drawn
from tests.simulation.shrink import shrunk
from tests.simulation.world import Outcome, played


def main() -> int:
    gc.freeze()  # of the modules nothing is ever garbage: a fifth of a day's time
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="play this one alone, to its end")
    parser.add_argument("--first", type=int, help="the first of the seeds; drawn if not given")
    parser.add_argument("--whole", action="store_true", help="do not shrink a failure")
    args = parser.parse_args()
    if args.seed is not None:
        outcome = played(drawn(args.seed))
        if outcome.violation is None:
            _figures([outcome], time.process_time())
            print("SHA-256 of the events:", outcome.story.digest)
            return 0
        return _failed(outcome, whole=args.whole)
    first = args.first if args.first is not None else random.SystemRandom().randrange(10**9)
    print(f"seeds from {first} on")
    begun, outcomes = time.process_time(), []
    while time.process_time() - begun < args.seconds:
        outcome = played(drawn(first + len(outcomes)))
        if outcome.violation is not None:
            return _failed(outcome, whole=args.whole)
        outcomes.append(outcome)
    _figures(outcomes, time.process_time() - begun)
    return 0


def _failed(outcome: Outcome, *, whole: bool) -> int:
    seed, violation = outcome.plan.seed, outcome.violation
    found = outcome if whole else shrunk(outcome)
    print(f"seed {seed}: {violation}")
    print("the story:")
    for line in found.story.lines:
        print(" ", line)
    print(f"{len(outcome.plan.entries)} entries, of which these are needed:")
    for entry in found.plan.entries:
        print("  shift", entry.shift, entry)
    print(f"again: make simulate SEED={seed}")
    return 1


def _figures(outcomes: list[Outcome], seconds: float) -> None:
    faults = Counter[str]()
    for each in outcomes:
        faults.update(each.faults)
    operations = sum(each.operations for each in outcomes)
    print(f"{len(outcomes)} runs, {operations} operations, {faults.total()} faults")
    if seconds:
        per = [len(outcomes) / seconds, operations / seconds, faults.total() / seconds]
        print("a second of CPU: {:.1f} runs, {:.0f} operations, {:.0f} faults".format(*per))
    for kind, count in sorted(faults.items()):
        print(f"  {count:6} {kind}")


if __name__ == "__main__":
    sys.exit(main())
