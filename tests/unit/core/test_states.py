"""Checks that each pair of a state and an event is in the table, or raises."""

import itertools

import pytest

from adapter.core.states import (
    AT_REST,
    LOADED,
    TRANSITIONS,
    IllegalTransition,
    ModelEvent,
    ModelState,
    advance,
)
from scripts.gen_docs import arrows_of, states_page
from tests.cases import rows

PREPARING, LOADING, READY, DEAD, UNLOADING, STUCK, LOST = ModelState

# written out once more, so that a slip in the table does not pass as its own expectation
ALLOWED = {
    (None, "load_started"): PREPARING,
    (None, "adopted"): READY,
    (PREPARING, "load_sent"): LOADING,
    (PREPARING, "load_failed"): None,
    (PREPARING, "lost"): LOST,
    (LOADING, "loaded"): READY,
    (LOADING, "load_failed"): UNLOADING,
    (LOADING, "out_of_memory"): PREPARING,
    (LOADING, "triton_exited"): None,
    (LOADING, "lost"): LOST,
    (READY, "unload_started"): UNLOADING,
    (READY, "process_died"): DEAD,
    (READY, "triton_exited"): None,
    (READY, "lost"): LOST,
    (DEAD, "unload_started"): UNLOADING,
    (DEAD, "triton_exited"): None,
    (DEAD, "lost"): LOST,
    (UNLOADING, "unloaded"): None,
    (UNLOADING, "given_up"): STUCK,
    (STUCK, "freed"): None,
    (STUCK, "triton_exited"): None,
    (LOST, "load_started"): PREPARING,
    (LOST, "forgotten"): None,
}


@rows(("state", "event"), itertools.product([None, *ModelState], ModelEvent))
def test_event_moves_or_raises(state, event):
    if (state, event.value) in ALLOWED:
        assert advance(state, event) is ALLOWED[state, event.value]
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            advance(state, event)


def test_error_names_an_absent_model():
    with pytest.raises(IllegalTransition, match=r"^unloaded in state absent$"):
        advance(None, ModelEvent.UNLOADED)


@rows("state", ModelState)
def test_state_is_reached_and_left(state):
    assert state in TRANSITIONS.values()
    assert any(before is state for before, _ in TRANSITIONS)


def test_exit_moves_records_at_rest():
    """A load that is in Triton is moved by its own operation."""
    event = ModelEvent.TRITON_EXITED
    moved = {state for state in ModelState if (state, event) in TRANSITIONS}
    assert moved == AT_REST | {LOADING}


def test_loaded_models_can_be_unloaded():
    event = ModelEvent.UNLOAD_STARTED
    assert {state for state in ModelState if (state, event) in TRANSITIONS} == LOADED


def test_diagram_names_each_state_and_edge():
    arrows = arrows_of(TRANSITIONS)
    assert len(arrows) == len(ALLOWED)
    for (before, event), after in ALLOWED.items():
        names = [state.value if state else "[*]" for state in (before, after)]
        assert f"{names[0]} --> {names[1]}: {event}" in arrows
    for state in ModelState:
        assert any(state.value in arrow for arrow in arrows)


def test_page_has_the_states_in_use():
    page = states_page()
    assert all(arrow in page for arrow in arrows_of(TRANSITIONS))
