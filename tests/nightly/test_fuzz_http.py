"""The test of tests/lanes/test_http_lane_fuzz.py, with other examples each time."""

from tests.lanes import test_http_lane_fuzz as fuzz
from tests.nightly.again import play_until


def test_anything_sent_to_the_http_lane(seconds, seed):
    test = fuzz.test_whatever_comes_is_answered_or_closed_and_nothing_of_it_stays
    play_until(seconds, seed, (test,))
