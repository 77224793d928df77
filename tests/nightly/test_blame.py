"""Plays each situation of a Triton that exits again and again, with seeds that nobody has seen.

Four standard deviations above the figures of 200 runs are allowed, as the seeds are new ones.
"""

import time

import pytest

from tests.unit.core.blame_situations import (
    KILLER_FOR_TWO_DAYS,
    LARGE_SITUATIONS,
    OPERATOR_FOR_TWO_DAYS,
    SITUATIONS,
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
    assert find_excess(situation, outcomes, deviations=DEVIATIONS) == []


def test_killer_is_found_within_two_days(seed: int):
    setting = KILLER_FOR_TWO_DAYS
    outcomes = [play(setting, seed + number) for number in range(DAYS_RUNS)]
    found_after = [outcome.count_exits_until_found(setting.killers) for outcome in outcomes]
    assert all(count is not None and count <= 20 for count in found_after), found_after
    assert count_wrong(setting, outcomes) <= 1


def test_operator_costs_few_models_in_two_days(seed: int):
    """Exits each eleven minutes gave up a healthy model in one of sixty runs."""
    outcomes = [play(OPERATOR_FOR_TWO_DAYS, seed + number) for number in range(DAYS_RUNS)]
    assert count_wrong(OPERATOR_FOR_TWO_DAYS, outcomes) <= DAYS_RUNS / 4
