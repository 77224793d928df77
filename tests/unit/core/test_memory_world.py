"""The decisions on memory in a played world, beside an oracle that knows all true sizes.

Three worlds of each kind; tests/nightly/test_memory_world.py plays twenty, and then others.
"""

from dataclasses import replace

import pytest

from tests.unit.core.memory_world import LIMIT, VARIANTS, Books, Oracle, play

pytestmark = pytest.mark.slow

SEEDS = range(3)
# The hits over the oracle's of twenty worlds. Three worlds differ from them by some hundredths. The
# oracle spares no small model for a large one: what is above 1.0 counts as 1.0.
SHARES = {
    "all declared": 1.0,
    "guesses from 0.5 to 2": 1.0,
    "guesses from 0.1 to 4": 0.98,
    "libraries stay": 1.0,
    "allocators keep 30 %": 0.98,
    "a neighbour of 20 %": 0.99,
    "models grow": 1.0,
    "readings lag by 3": 1.0,
    "no readings, declared": 1.0,
    "a limit of the adapter's own": 0.98,
    "thirty first calls at once": 1.0,
    "explicit caller, 0.5 to 2": 0.99,
    "explicit caller, 0.1 to 4": 0.98,
    "ModelMesh": 1.0,
    "ModelMesh, 0.1 to 4": 1.0,
    "all at once": 0.83,
    "host memory": 1.0,
}
BY_NAME = {variant.name: variant for variant in VARIANTS}


class NoEnds(Books):
    """Lets loads grow beyond a limit, and undoes them at their end."""

    def find_overrun(self):
        """End no load while it grows."""


@pytest.mark.parametrize("name", BY_NAME)
def test_memory_is_used_nearly_as_by_an_oracle(name):
    best = play(BY_NAME[name], Oracle, SEEDS)
    score = play(BY_NAME[name], Books, SEEDS)
    assert score.calls == best.calls
    assert score.hits >= (SHARES[name] - 0.025) * best.hits
    assert score.wrong <= 0.01 * score.calls
    if BY_NAME[name].is_declared:
        assert (score.wrong, score.oom, score.kills) == (0, 0, 0)


def test_kernel_ends_nothing_where_the_machine_is_known():
    """Rule 4's exception: on an empty device a load is tried only within what the machine has."""
    host = BY_NAME["host memory"]
    assert play(host, Books, SEEDS).kills == 0
    assert play(replace(host, knows_machine=False), Books, SEEDS).kills > 0


def test_growing_load_is_ended_before_it_takes_much():
    """The sum of what was used beyond the limit in each second is a tenth of what it was."""
    variant = BY_NAME["a limit of the adapter's own"]
    assert variant.device > LIMIT
    ended = play(variant, Books, SEEDS)
    undone = play(variant, NoEnds, SEEDS)
    assert ended.beyond < 0.1 * undone.beyond
