"""Plays each situation of a Triton that exits again and again, with seeds that nobody has seen.

Four standard deviations above the figures of 200 runs are allowed, as the seeds are new ones.
"""

import statistics
import sys
import time

import pytest

from tests.unit.core.blame_situations import (
    KILLER_FOR_TWO_DAYS,
    LARGE_SITUATIONS,
    OPERATOR_FOR_TWO_DAYS,
    SITUATIONS,
    count_exits,
    count_wrong,
    find_excess,
)
from tests.unit.core.blame_world import Outcome, play

RUNS = 200
DAYS_RUNS = 20
DEVIATIONS = 4.0
ALL = {**SITUATIONS, **LARGE_SITUATIONS}


@pytest.mark.parametrize("name", ALL)
def test_blame_is_right_in(name: str, seconds: float, seed: int):
    """Play 200 runs at least, and more for a share of the seconds."""
    situation = ALL[name]
    end = time.monotonic() + seconds / len(ALL)
    outcomes: list[Outcome] = []
    while len(outcomes) < RUNS or time.monotonic() < end:
        outcomes.append(play(situation.setting, seed + len(outcomes)))
    waits = sorted(wait for outcome in outcomes for wait in outcome.seconds_held)
    late = waits[int(0.95 * len(waits))] if waits else 0.0
    exits = count_exits(situation.setting, outcomes)
    wrong_percent = 100 * count_wrong(situation.setting, outcomes) / len(outcomes)
    sys.stdout.write(
        f"{name:48} {len(outcomes):6} runs  exits {exits}  wrong {wrong_percent:.1f} %"
        f"  held back {late:.0f} s in 95 %, at most {max(waits, default=0):.0f} s\n"
    )
    assert find_excess(situation, outcomes, deviations=DEVIATIONS) == []


def test_killer_is_found_within_two_days(seed: int):
    setting = KILLER_FOR_TWO_DAYS
    outcomes = [play(setting, seed + number) for number in range(DAYS_RUNS)]
    sys.stdout.write(describe_days("a killer each 11 min", outcomes))
    found_after = [outcome.count_exits_until_found(setting.killers) for outcome in outcomes]
    assert all(count is not None and count <= 20 for count in found_after), found_after
    assert count_wrong(setting, outcomes) <= 1


def test_operator_costs_few_models_in_two_days(seed: int):
    """Exits each eleven minutes gave up a healthy model in one of sixty runs."""
    outcomes = [play(OPERATOR_FOR_TWO_DAYS, seed + number) for number in range(DAYS_RUNS)]
    sys.stdout.write(describe_days("an operator each 11 min", outcomes))
    assert count_wrong(OPERATOR_FOR_TWO_DAYS, outcomes) <= DAYS_RUNS / 4


def describe_days(cause: str, outcomes: list[Outcome]) -> str:
    """Return how many exits two days had, and how many hours each model was away."""
    exits = statistics.median(len(outcome.exits) for outcome in outcomes)
    hours = {
        model_id: statistics.mean(outcome.seconds_away[model_id] for outcome in outcomes) / 3600
        for model_id in outcomes[0].seconds_away
    }
    away = ", ".join(f"{model_id} {count:.2f}" for model_id, count in hours.items())
    return f"{cause}: {exits:.0f} exits in two days; hours away: {away}\n"
