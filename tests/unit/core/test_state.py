"""Every (state, event) pair: in the table, or it raises and nothing changes."""

import itertools

import pytest

from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import TRANSITIONS, IllegalTransition, ModelEvent, ModelState, advance
from tests.cases import rows

FETCHING, ON_DISK, LOADING, READY, DEAD, UNLOADING, RETURNING, STUCK = ModelState

# written out once more, so that a slip in the table does not pass as its own expectation
ALLOWED = {
    (None, "fetch_begun"): FETCHING,
    (FETCHING, "fetched"): ON_DISK,
    (FETCHING, "fetch_failed"): None,
    (FETCHING, "load_begun"): LOADING,
    (FETCHING, "adopted"): READY,
    (None, "fetched"): ON_DISK,
    (ON_DISK, "load_begun"): LOADING,
    (ON_DISK, "released"): None,
    (ON_DISK, "adopted"): READY,
    (LOADING, "put_back"): ON_DISK,
    (None, "load_begun"): LOADING,
    (LOADING, "loaded"): READY,
    (None, "adopted"): READY,
    (None, "given_up"): STUCK,
    (LOADING, "load_failed"): None,
    (LOADING, "given_up"): STUCK,
    (STUCK, "load_failed"): STUCK,
    (STUCK, "freed"): None,
    (READY, "died"): DEAD,
    (READY, "unload_begun"): UNLOADING,
    (READY, "vanished"): None,
    (DEAD, "unload_begun"): UNLOADING,
    (DEAD, "vanished"): None,
    (READY, "lost"): RETURNING,
    (DEAD, "lost"): RETURNING,
    (RETURNING, "load_begun"): LOADING,
    (LOADING, "broken_off"): RETURNING,
    (RETURNING, "vanished"): None,
    (UNLOADING, "unloaded"): None,
    (UNLOADING, "unload_failed"): READY,
    (UNLOADING, "dead_unload_failed"): DEAD,
    (UNLOADING, "given_up"): STUCK,
}
PAIRS = list(itertools.product([None, *ModelState], ModelEvent))
REFUSED = [pair for pair in PAIRS if (pair[0], pair[1].value) not in ALLOWED]


@rows(("state", "event"), [pair for pair in PAIRS if pair not in REFUSED])
def test_an_event_of_the_table_leads_to_its_state(state, event):
    assert advance(state, event) is ALLOWED[state, event.value]


@rows(("state", "event"), REFUSED)
def test_an_event_out_of_place_raises_and_names_both(state, event):
    with pytest.raises(IllegalTransition, match=f"{event.value} in state") as caught:
        advance(state, event)
    assert (state.value if state else "absent") in str(caught.value)


def test_the_table_holds_nothing_else():
    assert len(TRANSITIONS) == len(ALLOWED)


def _at(state: ModelState) -> tuple[Registry, ModelRecord]:
    registry = Registry()
    if state in {FETCHING, ON_DISK}:
        record = registry.begin_fetch(ModelId("m"), ArtifactKey("", "m"))
        if state is ON_DISK:
            registry.apply(record, ModelEvent.FETCHED)
        return registry, record
    record = registry.begin_load(ModelId("m"), TritonName("m"), ModelSource("/m"))
    if state is STUCK:
        registry.apply(record, ModelEvent.GIVEN_UP)
        return registry, record
    if state is not LOADING:
        registry.apply(record, ModelEvent.LOADED)
    if state is RETURNING:
        registry.apply(record, ModelEvent.LOST)
    if state is DEAD:
        registry.died(record)
    if state is UNLOADING:
        registry.begin_unload(record.id)
    return registry, record


@rows(("state", "event"), [(s, e) for s, e in REFUSED if s is not None])
def test_an_event_out_of_place_changes_nothing_in_the_registry(state, event):
    registry, record = _at(state)
    page = registry.page(None, 10)
    with pytest.raises(IllegalTransition):
        registry.apply(record, event)
    assert record.state is state
    assert record is (registry.stuck["m"] if state is STUCK else registry.find(record.id))
    assert registry.page(None, 10) == page
