"""What models are worth, by each policy."""

import pytest

from adapter.core.memory import HOST
from adapter.core.model import ModelId
from adapter.core.residency.policies import POLICIES, Candidate, Cost, LeastRecentlyUsed
from adapter.core.residency.victims import choose_victims
from adapter.errors import MemoryFigures

GIB = 2**30


def model(name="m", used_at=0.0, size=GIB, **known):
    return Candidate(ModelId(name), used_at, {HOST: size}, **known)


def first(policy, *candidates):
    """Who goes first; two models of the same worth by their last call."""
    return choose_victims(candidates, MemoryFigures(), policy)[0].model_id


@pytest.mark.parametrize(
    "low",
    [
        model("low", 1, seconds=1, calls=9),
        model("low", 1, seconds=2, calls=4),
        model("low", 1, seconds=2, calls=9, size=3 * GIB),
    ],
    ids=["comes back sooner", "is called less", "takes more"],
)
def test_by_cost_who_comes_back_sooner_is_called_less_or_takes_more_goes_first(low):
    assert first(Cost(), model("high", 0, seconds=2, calls=9), low) == "low"


def test_by_cost_of_models_that_are_worth_the_same_the_least_recently_used_goes_first():
    assert first(Cost(), model("a", 2, seconds=1), model("b", 1, seconds=1)) == "b"
    assert first(Cost(), model("a", 2, seconds=0.01), model("b", 1, seconds=0.02)) == "b", "chance"


def test_by_cost_what_is_called_no_more_goes_before_what_is_called_since():
    """However often it was called once."""
    policy, old = Cost(), model("old", 0, seconds=1, calls=1_000_000)
    for at in range(1, 100):
        new = model("new", at, seconds=1)
        if first(policy, old, new) == "old":
            return
        policy.evicted(policy.worth(new), at + 0.5)
    pytest.fail("a hundred models have gone for it")


def test_by_cost_worth_counts_from_the_level_at_the_last_call_however_many_levels_there_were():
    policy = Cost()
    for at in range(3000):
        policy.evicted(float(at), at)
    assert len(policy._levels) <= 1000
    worths = [policy.worth(model(used_at=at + 0.5)) for at in (-1, 10, 2000, 2999)]
    assert worths == sorted(worths)
    assert worths[-1] - worths[0] == pytest.approx(2999)


def test_an_eviction_of_less_worth_than_before_leaves_the_level():
    policy = Cost()
    policy.evicted(5.0, 1.0)
    policy.evicted(4.0, 2.0)
    assert policy.worth(model(used_at=3.0, seconds=1)) == pytest.approx(6.0)


def test_by_cost_a_model_of_unknown_size_has_a_worth_as_well():
    assert 0 < Cost().worth(model(size=0, seconds=1)) < float("inf")


def test_by_lru_only_the_last_call_counts():
    policy = LeastRecentlyUsed()
    policy.evicted(10.0, 11.0)
    assert first(policy, model("a", 2, seconds=1), model("b", 1, seconds=60, calls=9)) == "b"


@pytest.mark.parametrize("name", POLICIES)
def test_a_model_that_was_just_loaded_goes_only_if_nothing_else_helps(name):
    policy = POLICIES[name]()
    young = model("young", 1, is_spared=True)
    old = [model("a", 2, seconds=60, calls=9), model("b", 3, seconds=60, calls=9)]

    def gone(needed):
        found = choose_victims([young, *old], MemoryFigures(needed, 0, 99 * GIB, HOST), policy)
        return "".join(each.model_id for each in found)

    assert gone(2 * GIB) == "ab"
    assert gone(3 * GIB) == "abyoung"


@pytest.mark.parametrize("name", POLICIES)
def test_a_caller_s_own_model_goes_before_those_of_others_even_if_it_was_just_loaded(name):
    own = model("own", 9, is_spared=True, seconds=60)
    assert first(POLICIES[name](), own, model("other", 1, is_of_others=True)) == "own"


def test_an_explanation_has_what_the_worth_is_made_of():
    known = model(used_at=1.0, seconds=3.14, calls=12, size=2 * GIB)
    assert Cost().explain(known, 4.5) == "12 calls x 3.1 s / 2.00 GiB, last called 3.5 s ago"
    assert LeastRecentlyUsed().explain(known, 4.5) == "not called for 3.5 s"
