"""Checks that each pair of a state and an event is in the table, or raises."""

import itertools

import pytest

from adapter.core.states import (
    IllegalTransition,
    ModelEvent,
    ModelState,
    advance,
)
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
