"""Who goes when room is needed."""

import pytest

from adapter.core.ledger import UNSEEN
from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId
from adapter.core.residency.policies import Candidate, LeastRecentlyUsed
from adapter.core.residency.victims import choose_victims
from adapter.errors import MemoryFigures

GPU = Device("GPU-1")
LRU = LeastRecentlyUsed()


def models(**held: dict[Device, int]) -> list[Candidate]:
    """Those that were used longest ago are first, and last in this list."""
    found = [Candidate(ModelId(name), at, has) for at, (name, has) in enumerate(held.items())]
    return found[::-1]


def chosen(figures: MemoryFigures, **held: dict[Device, int]) -> str:
    return "".join(each.model_id for each in choose_victims(models(**held), figures, LRU))


@pytest.mark.parametrize(
    ("needed", "free", "who"),
    [(10, 0, "a"), (11, 0, "ab"), (11, 1, "a"), (20, 0, "ab"), (21, 0, "abc"), (99, 0, "abc")],
)
def test_as_many_go_as_are_needed_and_who_was_used_longest_ago_is_first(needed, free, who):
    figures = MemoryFigures(needed, free, 100, HOST)
    assert chosen(figures, a={HOST: 10}, b={HOST: 10}, c={HOST: 10}) == who


@pytest.mark.parametrize(
    ("needed", "who"),
    [(80, "c"), (82, "ac"), (84, "abc"), (99, "cd"), (101, "acd"), (103, "abcd"), (200, "abcd")],
)
def test_small_models_stay_where_a_large_one_that_goes_is_enough(needed, who):
    figures = MemoryFigures(needed, 0, 200, HOST)
    assert chosen(figures, a={HOST: 2}, b={HOST: 2}, c={HOST: 80}, d={HOST: 20}) == who


@pytest.mark.parametrize("figures", [MemoryFigures(), MemoryFigures(5), MemoryFigures(None, 5)])
def test_where_nobody_knows_how_much_is_missing_one_goes_and_that_is_tried(figures):
    assert chosen(figures, a={}, b={HOST: 10}) == "a"


def test_of_another_device_nobody_goes():
    figures = MemoryFigures(10, 0, 100, GPU)
    assert chosen(figures, a={HOST: 10}, b={HOST: 90, GPU: 10}, c={GPU: 10}) == "b"


@pytest.mark.parametrize("device", [None, UNSEEN])
def test_where_no_device_is_told_all_that_a_model_holds_counts(device):
    figures = MemoryFigures(10, 0, 100, device)
    assert chosen(figures, a={HOST: 4, GPU: 6}, b={HOST: 10}) == "a"


def test_a_model_of_which_nothing_is_known_may_go_too():
    figures = MemoryFigures(10, 0, 100, GPU)
    assert chosen(figures, a={}, b={GPU: 10}, c={GPU: 10}) == "ab"


def test_one_that_seems_to_take_nothing_goes_where_no_other_can():
    figures = MemoryFigures(10, 0, 100, GPU)
    assert chosen(figures, a={GPU: 0}) == "a"
    assert chosen(figures, a={GPU: 0}, b={GPU: 4}) == "b"
    assert chosen(figures, a={GPU: 0}, b={HOST: 4}) == "a"


def test_where_nobody_can_go_nobody_does():
    assert choose_victims([], MemoryFigures(10, 0, 100, HOST), LRU) == []
