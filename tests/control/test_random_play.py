"""Plays some random days against control; `random_play.py` plays more from the command line."""

import pytest

from tests.control.random_play import play


@pytest.mark.parametrize("seed", range(8))
def test_random_play_satisfies_the_oracle(seed):
    """All calls end, nothing is lost, and everything that was taken is given back."""
    outcomes = play(seed)
    assert outcomes["call ok"] > 0
