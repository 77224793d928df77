"""Checks which models are evicted when others need their memory."""

import itertools

import pytest

from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.states import ModelState
from adapter.core.victims import (
    Candidate,
    Cost,
    RetentionReason,
    choose_victims,
    find_retention_reason,
    is_used_by_others,
    make_candidate,
)
from scripts.simulation.eviction import LeastRecentlyUsed

GPU = Device("GPU-1")
GIB = 2**30
LRU = LeastRecentlyUsed()
IN_FLIGHT, WAITED_FOR, CHANGING, PINNED, NOT_OURS, STUCK = RetentionReason


def make_record(
    state: ModelState = ModelState.READY, loaded_for: LoadedFor = LoadedFor.CALLS
) -> ModelRecord:
    record = ModelRecord(ModelId("m"), TritonName("m"), ModelSource("/m"), loaded_for)
    record.state = state
    return record


def make_candidates(**held: dict[Device, int]) -> list[Candidate]:
    """Return candidates; the first was used longest ago, and is last in the list."""
    models = [Candidate(TritonName(name), at, has) for at, (name, has) in enumerate(held.items())]
    return models[::-1]


def choose(missing_bytes: int, device: Device = HOST, **held: dict[Device, int]) -> str:
    victims = choose_victims(make_candidates(**held), {device: missing_bytes}, LRU)
    return "".join(victim.name for victim in victims)


# -- who may be evicted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (ModelState.PREPARING, CHANGING),
        (ModelState.LOADING, CHANGING),
        (ModelState.READY, None),
        (ModelState.DEAD, None),
        (ModelState.UNLOADING, CHANGING),
        (ModelState.STUCK, STUCK),
        (ModelState.LOST, CHANGING),
    ],
)
def test_state_keeps_a_model(state, reason):
    record = make_record(state)
    assert find_retention_reason(record, is_waited_for=False, is_pinned=False) is reason


@pytest.mark.parametrize(
    ("in_flight", "is_waited_for", "is_pinned", "reason"),
    [
        (1, True, True, PINNED),
        (1, True, False, IN_FLIGHT),
        (0, True, False, WAITED_FOR),
        (0, False, True, PINNED),
    ],
)
def test_ready_model_is_kept(in_flight, is_waited_for, is_pinned, reason):
    record = make_record()
    record.usage.in_flight = in_flight
    found = find_retention_reason(record, is_waited_for=is_waited_for, is_pinned=is_pinned)
    assert found is reason


def test_dead_model_is_kept_by_requests_alone():
    record = make_record(ModelState.DEAD)
    assert find_retention_reason(record, is_waited_for=True, is_pinned=True) is None
    record.usage.in_flight = 1
    assert find_retention_reason(record, is_waited_for=False, is_pinned=False) is IN_FLIGHT


@pytest.mark.parametrize("state", ModelState)
def test_model_of_a_platform_stays(state):
    record = make_record(state, LoadedFor.PLATFORM)
    assert find_retention_reason(record, is_waited_for=False, is_pinned=False) is NOT_OURS


# -- what is known of a candidate ---------------------------------------------------------------


def test_candidate_has_the_figures_of_its_record():
    record = make_record()
    record.state_since = 10.0
    record.fetch_seconds = 3.0
    record.load_seconds = 4.0
    record.usage.used_at = 20.0
    record.usage.served = 5
    record.usage.called_at["bob"] = 20.0
    candidate = make_candidate(
        record,
        {HOST: 7},
        now=30.0,
        callers=["alice"],
        is_updated=False,
    )
    assert candidate == Candidate(
        TritonName("m"), 20.0, {HOST: 7}, is_of_others=True, calls=5, seconds=7.0
    )


@pytest.mark.parametrize(
    ("state", "now", "is_updated", "is_spared", "calls"),
    [
        (ModelState.READY, 10.9, False, True, 1),
        (ModelState.READY, 11.0, False, False, 1),
        (ModelState.READY, 99.0, True, True, 1),
        (ModelState.DEAD, 10.0, True, False, 0),
    ],
)
def test_new_and_updated_models_are_spared(state, now, is_updated, is_spared, calls):
    """A dead model serves nobody, however new it is."""
    record = make_record(state)
    record.state_since = 10.0
    candidate = make_candidate(record, {}, now=now, callers=(), is_updated=is_updated)
    assert candidate.is_spared is is_spared
    assert candidate.calls == calls


@pytest.mark.parametrize(
    ("called_at", "callers", "is_of_others"),
    [
        ({"alice": 0.0}, ["bob"], True),
        ({"alice": 0.0}, ["alice"], False),
        ({"alice": 0.0, "bob": 0.0}, ["alice"], True),
        ({"alice": -30.0}, ["bob"], False),
        ({"alice": -29.9}, ["bob"], True),
        ({"alice": 0.0}, [""], False),
        ({"alice": 0.0}, [], False),
        ({}, ["bob"], False),
    ],
)
def test_recent_callers_own_a_model(called_at, callers, is_of_others):
    assert is_used_by_others(called_at, callers, 0.0) is is_of_others


# -- what models are worth ----------------------------------------------------------------------


def test_cost_is_seconds_of_calls_per_gib():
    model = Candidate(TritonName("m"), 5.0, {HOST: 2 * GIB}, calls=3, seconds=4.0)
    assert Cost().worth(model) == 6.0
    assert Cost().explain(model, 7.0) == "3 calls x 4.0 s / 2.00 GiB, last called 2.0 s ago"


def test_cost_bounds_its_factors():
    model = Candidate(TritonName("m"), 5.0, {}, calls=1000, seconds=0.0)
    assert Cost().worth(model) == pytest.approx(30 * 0.1 * 4)
    model = Candidate(TritonName("m"), 5.0, {}, calls=1, seconds=0.0)
    assert Cost().explain(model, 5.0) == "1 call x 0.1 s / 0.25 GiB, last called 0.0 s ago"


def test_eviction_devalues_models_called_before():
    policy = Cost()
    policy.record_eviction(8.0, 10.0)
    policy.record_eviction(7.0, 11.0)  # a lower worth than the level changes nothing
    before, after = (Candidate(TritonName("m"), at, {HOST: GIB}, seconds=1.0) for at in (9.9, 11.5))
    assert policy.worth(before) == 1.0
    assert policy.worth(after) == 9.0


def test_levels_are_bounded():
    policy = Cost()
    for number in range(5000):
        policy.record_eviction(float(number), float(number))
    model = Candidate(TritonName("m"), 1e9, {HOST: GIB}, seconds=1.0)
    assert policy.worth(model) == 5000.0
    assert len(policy._levels) <= 1000


# -- whom to evict ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing_bytes", "victims"),
    [(80, "c"), (82, "ac"), (84, "abc"), (99, "cd"), (101, "acd"), (103, "abcd"), (200, "abcd")],
)
def test_large_victim_spares_small_ones(missing_bytes, victims):
    held = {"a": {HOST: 2}, "b": {HOST: 2}, "c": {HOST: 80}, "d": {HOST: 20}}
    assert choose(missing_bytes, **held) == victims


def test_model_of_other_devices_stays():
    assert choose(10, GPU, a={}, b={HOST: 5}, c={GPU: 10}) == "c"
    assert choose(10, GPU, a={HOST: 5}, b={GPU: 0}) == ""


def test_order_is_others_spared_worth_then_use():
    models = {
        f"{int(is_of_others)}{int(is_spared)}{calls}{used_at:g}": Candidate(
            TritonName(f"{int(is_of_others)}{int(is_spared)}{calls}{used_at:g}"),
            used_at,
            {HOST: 1},
            is_of_others=is_of_others,
            is_spared=is_spared,
            calls=calls,
            seconds=1.0,
        )
        for is_of_others, is_spared, calls, used_at in itertools.product(
            (True, False), (True, False), (2, 1), (2.0, 1.0)
        )
    }
    victims = choose_victims(models.values(), {HOST: 99}, Cost())
    assert [victim.name for victim in victims] == sorted(models)


@pytest.mark.parametrize(
    ("missing", "victims"),
    [
        ({HOST: 5, GPU: 5}, "ab"),
        ({HOST: 5, GPU: 9}, "ac"),  # b is spared for c, which has to leave anyway
        ({HOST: 6, GPU: 5}, "abd"),
        ({HOST: 5, GPU: 0}, "a"),
        ({GPU: 5}, "b"),
        ({HOST: 5, GPU: 15}, "bcd"),  # d frees both, so that a is spared
        ({HOST: 99, GPU: 99}, "abcd"),
    ],
)
def test_several_devices_are_freed_together(missing, victims):
    held = {"a": {HOST: 5}, "b": {GPU: 5}, "c": {GPU: 9}, "d": {HOST: 5, GPU: 1}}
    chosen = choose_victims(make_candidates(**held), missing, LRU)
    assert "".join(victim.name for victim in chosen) == victims
