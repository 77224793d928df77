import pytest

from adapter.core.residency.state import (
    TRANSITIONS,
    IllegalResidency,
    ResidencyEvent,
    ResidencyState,
    advance,
)


def test_an_event_that_the_table_does_not_know_raises():
    with pytest.raises(IllegalResidency, match="loaded in state absent"):
        advance(ResidencyState.ABSENT, ResidencyEvent.LOADED)


def test_every_state_is_reached_and_left():
    assert {before for before, _ in TRANSITIONS} == set(ResidencyState)
    assert set(TRANSITIONS.values()) == set(ResidencyState)


def test_a_model_is_never_released_from_disk_while_triton_may_have_it():
    assert {state for state, event in TRANSITIONS if event is ResidencyEvent.RELEASED} == {
        ResidencyState.ON_DISK
    }
