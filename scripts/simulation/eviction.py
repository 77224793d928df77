"""Measures evictions for docs/measurements.md: the seconds that callers wait for cold models.

The adapter's own policies decide (adapter/core/victims.py). A call comes
each second on average; a load is over before the next one.
"""

import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from adapter.core.memory import HOST
from adapter.core.model import ModelId, TritonName
from adapter.core.times import TURN_SECONDS
from adapter.core.victims import Candidate, Cost, Policy, choose_victims
from scripts.simulation.traffic import KINDS, Kind, Trace

_DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA = _DOCS / "eviction.json"
PAGE = _DOCS / "measurements.md"
SEEDS = 100
_BEGIN, _END = "<!-- eviction: written by `make simulation` -->\n", "<!-- end of eviction -->\n"


class LeastRecentlyUsed(Policy):
    """Values models by the time of their last call: what the policy is compared with."""

    def worth(self, model: Candidate) -> float:
        return model.used_at

    def explain(self, model: Candidate, now: float) -> str:
        return f"not called for {now - model.used_at:.1f} s"


class Offline(Policy):
    """Knows each model's next call: what is far, quick to load and large is worth least."""

    def __init__(self, calls: Sequence[int], times: Sequence[float]) -> None:
        self._next: dict[float, float] = {}  # of the call at that time
        soonest: dict[int, float] = {}
        for model, at in zip(reversed(calls), reversed(times), strict=True):
            self._next[at] = soonest.get(model, inf)
            soonest[model] = at
        self.now = 0.0

    def worth(self, model: Candidate) -> float:
        wait = self._next[model.used_at] - self.now
        return model.seconds / model.size[HOST] / wait

    def explain(self, model: Candidate, now: float) -> str:
        return f"called again in {self._next[model.used_at] - now:.1f} s"


def cold_seconds(trace: Trace, times: Sequence[float], policy: Policy) -> float:
    """Return for how long callers wait in 1,000 calls."""
    known: dict[ModelId, Candidate] = {}
    since: dict[ModelId, float] = {}
    free, waited = trace.room, 0.0
    names = [ModelId(str(number)) for number in range(len(trace.sizes))]
    for number, (model, now) in enumerate(zip(trace.calls, times, strict=True)):
        name, size = names[model], trace.sizes[model]
        if isinstance(policy, Offline):
            policy.now = now
        resident = known.get(name)
        if resident is None:
            waited += trace.seconds[model] if number >= trace.from_call else 0.0
            if size > free:
                free += _evict(known, since, size - free, policy, now)
            free, since[name] = free - size, now
        known[name] = Candidate(
            TritonName(name),
            now,
            {HOST: size},
            calls=resident.calls + 1 if resident else 1,
            seconds=trace.seconds[model],
        )
    return waited * 1000 / (len(trace.calls) - trace.from_call)


def _evict(
    known: dict[ModelId, Candidate],
    since: dict[ModelId, float],
    missing_bytes: int,
    policy: Policy,
    now: float,
) -> int:
    """Return how many bytes are freed."""
    candidates = [
        replace(each, is_spared=True) if now - since[ModelId(each.name)] < TURN_SECONDS else each
        for each in known.values()
    ]
    chosen = choose_victims(candidates, {HOST: missing_bytes}, policy)
    for each, worth in [(each, policy.worth(each)) for each in chosen]:
        policy.record_eviction(worth, now)
        del known[ModelId(each.name)]
    return sum(each.size[HOST] for each in chosen)


def measure(kind: Kind, seed: int) -> dict[str, float]:
    """Return the cold seconds of each policy."""
    draw = random.Random(f"{kind.name} {seed}")  # noqa: S311 - nothing is secret
    trace, times, now = kind.trace(draw), [], 0.0
    for _ in trace.calls:
        now += draw.expovariate(1.0)
        times.append(now)
    policies: dict[str, Policy] = {
        "cost": Cost(),
        "lru": LeastRecentlyUsed(),
        "offline": Offline(trace.calls, times),
    }
    return {name: cold_seconds(trace, times, policy) for name, policy in policies.items()}


def _row(kind: Kind, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": kind.name, "most": kind.most}
    row["lru_seconds"] = round(fmean(each["lru"] for each in found))
    for name in ("cost", "offline"):
        over = sorted(each[name] / each["lru"] for each in found)
        row[name] = {
            what: round(value, 3) for what, value in (("mean", fmean(over)), ("worst", over[-1]))
        }
    return row


def with_table(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with the table written anew."""
    head = "| calls | LRU: cold seconds in 1,000 calls | `cost`, over LRU | worst seed | aim "
    lines = [f"{head}| knows all calls |\n", "| --- | --- | --- | --- | --- | --- |\n"]
    for row in rows:
        cost, verdict = row["cost"], "met" if row["cost"]["mean"] <= row["most"] else "**missed**"
        lines.append(
            f"| {row['kind']} | {row['lru_seconds']:,} | {cost['mean']:.2f} x "
            f"| {cost['worst']:.2f} x | at most {row['most']:g} x: {verdict} "
            f"| {row['offline']['mean']:.2f} x |\n"
        )
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + "\n" + "".join(lines) + "\n" + _END + rest.partition(_END)[2]


def main() -> None:
    with ProcessPoolExecutor() as pool:
        found = {
            kind: pool.map(partial(measure, kind), range(SEEDS), chunksize=10) for kind in KINDS
        }
        rows = [_row(kind, list(each)) for kind, each in found.items()]
    DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
