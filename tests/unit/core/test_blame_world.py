"""Checks what judges the plays of `Blame`, which tests/nightly/test_blame.py plays."""

import pytest

from adapter.core.model import ModelId
from tests.unit.core.blame_situations import (
    SITUATIONS,
    Exits,
    allow_noise,
    count_exits,
    count_wrong,
    find_excess,
)
from tests.unit.core.blame_world import Outcome

# -- the judge ----------------------------------------------------------------------------------

KILLER = ModelId("killer")
FOUND_AT_TWO = Outcome(exits=[1.0, 2.0, 3.0], given_up=[(2.0, KILLER), (3.0, KILLER)])
NOT_FOUND = Outcome(exits=[1.0, 2.0, 3.0])
WRONG = Outcome(exits=[1.0, 2.0, 3.0], given_up=[(2.0, KILLER), (3.0, ModelId("healthy0"))])
ALONE = SITUATIONS["each inference kills, alone"]


def test_outcome_counts_exits_until_found():
    assert FOUND_AT_TWO.count_exits_until_found({KILLER}) == 2
    assert NOT_FOUND.count_exits_until_found({KILLER}) is None


def test_all_killers_have_to_be_found():
    assert FOUND_AT_TWO.count_exits_until_found({KILLER, ModelId("other")}) is None


def test_outcome_names_healthy_models_given_up():
    assert WRONG.find_wrongly_given_up({KILLER}) == {"healthy0"}
    assert count_wrong(ALONE.setting, [WRONG, FOUND_AT_TWO]) == 1


def test_exits_are_counted_over_all_runs():
    outcomes = [FOUND_AT_TWO, FOUND_AT_TWO, WRONG, NOT_FOUND]
    assert count_exits(ALONE.setting, outcomes) == Exits(2, 2, 2, found_percent=75)


@pytest.mark.parametrize(("share", "deviations", "allowed"), [(0, 2, 1), (0.5, 2, 60), (0, 4, 3)])
def test_noise_of_a_hundred_runs(share: float, deviations: float, allowed: int):
    """Half a percent is what the 200 runs of the figures may have missed."""
    assert allow_noise(100, share, deviations) == allowed


def test_excess_names_the_figures():
    outcomes = [*[FOUND_AT_TWO] * 96, *[WRONG] * 2, *[NOT_FOUND] * 2]
    assert find_excess(ALONE, outcomes, deviations=2) == [
        "a healthy model is given up: in 2 of 100 runs",
        "a killer is not given up: in 2 of 100 runs",
    ]


def test_late_finds_are_an_excess():
    late = Outcome(exits=[1.0, 2.0, 3.0, 4.0, 5.0], given_up=[(5.0, KILLER)])
    outcomes = [*[FOUND_AT_TWO] * 98, *[late] * 2]
    assert find_excess(ALONE, outcomes, deviations=2) == [
        "it takes more than 4 exits: in 2 of 100 runs"
    ]
