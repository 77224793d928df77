"""Shrinks a failure: leaves entries out, in ever smaller groups, while it stays the same."""

from dataclasses import replace

from tests.simulation.world import Outcome, played

_MOST_RUNS = 300


def shrunk(outcome: Outcome) -> Outcome:
    """Return the run with the fewest entries that violates the same rule."""
    rule, best, runs = outcome.violation.rule, outcome, 0
    size = max(1, len(outcome.plan.entries) // 2)
    while size and runs < _MOST_RUNS:
        entries, found = best.plan.entries, None
        for start in range(0, len(entries), size):
            runs += 1
            kept = entries[:start] + entries[start + size :]
            tried = played(replace(best.plan, entries=kept))
            if tried.violation is not None and tried.violation.rule == rule:
                found = tried
                break
        if found is not None:
            best = found
            size = min(size, max(1, len(best.plan.entries) // 2))
        else:
            size //= 2
    return best
