"""Compares the new choice of victims with the one in use; to be removed with the latter."""

from adapter.core.residency import policies as old_policies
from adapter.core.residency import victims as old_victims
from hypothesis import given
from hypothesis import strategies as st

from adapter.core import victims
from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.registry import ModelRecord as OldRecord
from adapter.core.sizes import UNSEEN
from adapter.core.states import ModelState
from adapter.core.states import ModelState as OldState
from adapter.errors import MemoryFigures

DEVICES = [HOST, Device("GPU-1"), Device("GPU-2")]
TIMES = st.integers(0, 20).map(float)
SIZES = st.integers(0, 5) | st.integers(0, 2**31)

CANDIDATES = st.lists(
    st.fixed_dictionaries(
        {
            "used_at": TIMES,
            "size": st.dictionaries(st.sampled_from(DEVICES), SIZES, max_size=2),
            "is_of_others": st.booleans(),
            "is_spared": st.booleans(),
            "calls": st.integers(0, 40),
            "seconds": st.sampled_from([0.0, 0.05, 0.1, 1.0, 7.5, 60.0]),
        }
    ),
    max_size=8,
)
EVICTIONS = st.lists(st.tuples(st.integers(0, 50).map(float), TIMES), max_size=6)


@given(
    CANDIDATES,
    EVICTIONS,
    st.sampled_from(["cost", "lru"]),
    st.integers(-3, 30) | SIZES,
    st.sampled_from([*DEVICES, UNSEEN]),
)
def test_victims_are_those_of_today(figures, evictions, name, missing_bytes, device):
    policy = victims.POLICIES[name]()
    old_policy = old_policies.POLICIES[name]()
    for worth, at in sorted(evictions, key=lambda eviction: eviction[1]):
        policy.record_eviction(worth, at)
        old_policy.evicted(worth, at)
    ids = [ModelId(str(number)) for number in range(len(figures))]
    new = [victims.Candidate(TritonName(i), **one) for i, one in zip(ids, figures, strict=True)]
    old_figures = [
        {"held" if key == "size" else key: figure for key, figure in one.items()} for one in figures
    ]
    old = [old_policies.Candidate(i, **one) for i, one in zip(ids, old_figures, strict=True)]
    for candidate, old_candidate in zip(new, old, strict=True):
        assert policy.worth(candidate) == old_policy.worth(old_candidate)
        assert policy.explain(candidate, 30.0) == old_policy.explain(old_candidate, 30.0)
    found = victims.choose_victims(new, {device: missing_bytes}, policy)
    lack = MemoryFigures(missing_bytes, 0, 2**40, device)
    expected = old_victims.choose_victims(old, lack, old_policy)
    assert [one.name for one in found] == [one.model_id for one in expected]


@given(st.lists(st.integers(0, 12), max_size=10), st.integers(-2, 60))
def test_fewest_are_those_of_today(sizes, missing_bytes):
    expected = old_victims.fewest(list(enumerate(sizes)), missing_bytes)
    candidates = [(at, {HOST: size}) for at, size in enumerate(sizes)]
    assert victims.choose_fewest(candidates, {HOST: missing_bytes}) == expected


@given(
    st.dictionaries(st.sampled_from("abc"), TIMES.map(lambda at: at * 3)),
    st.lists(st.sampled_from(["a", "b", "", "d"]), max_size=3),
)
def test_owners_are_those_of_today(called_at, callers):
    expected = old_victims.is_of_others(called_at, callers, 60.0)
    assert victims.is_used_by_others(called_at, callers, 60.0) == expected


NAMES = {
    ModelState.PREPARING: OldState.ON_DISK,
    ModelState.LOADING: OldState.LOADING,
    ModelState.READY: OldState.READY,
    ModelState.DEAD: OldState.DEAD,
    ModelState.UNLOADING: OldState.UNLOADING,
    ModelState.LOST: OldState.LOST,
}


@given(st.sampled_from([*NAMES]), *[st.booleans()] * 4)
def test_retention_is_that_of_today(state, is_on_demand, is_busy, is_waited_for, is_pinned):
    source = ModelSource("/m")
    old = OldRecord(ModelId("m"), TritonName("m"), source, is_on_demand=is_on_demand)
    loaded_for = LoadedFor.CALLS if is_on_demand else LoadedFor.PLATFORM
    new = ModelRecord(ModelId("m"), TritonName("m"), source, loaded_for)
    old.state = NAMES[state]
    new.state = state
    for usage in (old.usage, new.usage):
        usage.in_flight = int(is_busy)
    expected = old_victims.retention_reason(old, is_awaited=is_waited_for, is_pinned=is_pinned)
    found = victims.find_retention_reason(new, is_waited_for=is_waited_for, is_pinned=is_pinned)
    assert (found and found.name) == (expected and expected.name.replace("AWAITED", "WAITED_FOR"))
    assert (found in victims.FOR_NOW) is (expected in old_victims.FOR_NOW)
