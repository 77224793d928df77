"""The played worlds of tests/unit/core at length: the twenty of the table, and then others."""

import itertools
import sys
import time

from tests.unit.core.memory_world import VARIANTS, Books, Oracle, play
from tests.unit.core.test_memory_world import SHARES

TWENTY = range(20)
ROUNDING = 0.005  # the shares have two digits
# Wrong refusals of the 9,649 calls of twenty worlds, where there are any.
WRONG = {
    "guesses from 0.1 to 4": 4,
    "a neighbour of 20 %": 1,
    "readings lag by 3": 1,
    "a limit of the adapter's own": 6,
    "thirty first calls at once": 18,
    "explicit caller, 0.5 to 2": 4,
    "explicit caller, 0.1 to 4": 25,
    "ModelMesh": 7,
    "ModelMesh, 0.1 to 4": 7,
    "all at once": 13,
}


def test_twenty_worlds_have_the_known_shares():
    for variant in VARIANTS:
        best = play(variant, Oracle, TWENTY)
        score = play(variant, Books, TWENTY)
        share = score.hits / best.hits
        sys.stdout.write(f"{variant.name}: {share:.3f}, wrong {score.wrong}, oom {score.oom}\n")
        assert share >= SHARES[variant.name] - ROUNDING, variant.name
        assert score.wrong <= WRONG.get(variant.name, 0), variant.name


def test_other_worlds_have_nearly_the_known_shares(seconds, seed):
    end = time.monotonic() + seconds
    for number in itertools.count(seed):
        worlds = range(100 * number, 100 * number + 10)
        for variant in VARIANTS:
            best = play(variant, Oracle, worlds)
            score = play(variant, Books, worlds)
            assert score.hits >= (SHARES[variant.name] - 0.07) * best.hits, (variant.name, worlds)
            assert score.wrong <= 0.01 * score.calls, (variant.name, worlds)
            if variant.is_declared:
                assert (score.oom, score.kills) == (0, 0), (variant.name, worlds)
            if time.monotonic() >= end:
                sys.stdout.write(f"seeds {seed} to {number}\n")
                return
