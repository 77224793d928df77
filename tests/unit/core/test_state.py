"""Every (state, event) pair: in the table, or it raises and nothing changes."""

import itertools
from functools import partial

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import TRANSITIONS, IllegalTransition, ModelEvent, ModelState, advance

LOADING, READY, DEAD, UNLOADING = ModelState

# written out once more, so that a slip in the table does not pass as its own expectation
ALLOWED = {
    (None, "load_begun"): LOADING,
    (LOADING, "loaded"): READY,
    (LOADING, "load_failed"): None,
    (READY, "died"): DEAD,
    (READY, "unload_begun"): UNLOADING,
    (READY, "vanished"): None,
    (DEAD, "unload_begun"): UNLOADING,
    (DEAD, "vanished"): None,
    (UNLOADING, "unloaded"): None,
    (UNLOADING, "unload_failed"): READY,
    (UNLOADING, "dead_unload_failed"): DEAD,
}
PAIRS = list(itertools.product([None, *ModelState], ModelEvent))
REFUSED = [pair for pair in PAIRS if (pair[0], pair[1].value) not in ALLOWED]


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in REFUSED])
def test_an_event_of_the_table_leads_to_its_state(state, event):
    assert advance(state, event) is ALLOWED[state, event.value]


@pytest.mark.parametrize(("state", "event"), REFUSED)
def test_an_event_out_of_place_raises_and_names_both(state, event):
    with pytest.raises(IllegalTransition, match=f"{event.value} in state") as caught:
        advance(state, event)
    assert (state.value if state else "absent") in str(caught.value)


def test_the_table_holds_nothing_else():
    assert len(TRANSITIONS) == len(ALLOWED)


def _at(state: ModelState) -> tuple[Registry, ModelRecord]:
    registry = Registry()
    record = registry.begin_load(ModelId("m"), TritonName("m"), ModelSource("/m"))
    if state is not LOADING:
        registry.finish_load(record)
    if state is DEAD:
        registry.died(record)
    if state is UNLOADING:
        registry.begin_unload(record.id)
    return registry, record


# DIED is left out: the registry ignores it where it is out of place (test_registry.py)
_CALLS = {
    ModelEvent.LOADED: Registry.finish_load,
    ModelEvent.LOAD_FAILED: Registry.abort_load,
    ModelEvent.UNLOAD_BEGUN: lambda registry, record: registry.begin_unload(record.id),
    ModelEvent.UNLOADED: Registry.finish_unload,
    ModelEvent.UNLOAD_FAILED: Registry.unload_failed,
    ModelEvent.DEAD_UNLOAD_FAILED: partial(Registry.unload_failed, was_dead=True),
    ModelEvent.VANISHED: Registry.vanished,
}


@pytest.mark.parametrize(
    ("state", "event"), [(s, e) for s, e in REFUSED if s is not None and e in _CALLS]
)
def test_an_event_out_of_place_changes_nothing_in_the_registry(state, event):
    registry, record = _at(state)
    page = registry.page(None, 10)
    with pytest.raises(IllegalTransition):
        _CALLS[event](registry, record)
    assert record.state is state
    assert registry.get(record.id) is record
    assert registry.page(None, 10) == page
