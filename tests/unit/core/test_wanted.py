"""Checks which models should be loaded, and when each is tried again."""

import pytest

from adapter.core import times
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, ModelSource
from adapter.core.wanted import Wanted, WantedModel, WantedReason, WantedState
from adapter.errors import (
    ArtifactNotFound,
    BackendUnavailable,
    InsufficientMemory,
    InvalidModel,
    LoadFailed,
    ModelTooLarge,
    Overloaded,
)

M = ModelId("m")
SOURCE = ModelSource("/m")
KEY = ArtifactKey("", "m.tar.gz")
LOAD_AT_START, PRELOAD, LOST = WantedReason


def make_wanted(reason: WantedReason = LOAD_AT_START) -> tuple[Wanted, WantedModel]:
    wanted = Wanted()
    return wanted, wanted.want(M, SOURCE, reason)


def test_wanted_model_is_missing_at_first():
    wanted, model = make_wanted()
    assert wanted.get(M) is model
    assert wanted.missing() == wanted.models() == [model]
    assert wanted.get(ModelId("n")) is None


def test_loaded_model_of_a_setting_stays_wanted():
    wanted, model = make_wanted()
    wanted.note_failure(model, InvalidModel("no file"))
    wanted.note_loaded(M)
    assert model.state is WantedState.LOADED
    assert model.failure == ""
    assert model.pause_seconds == times.PAUSE_SECONDS
    assert wanted.models() == [model]
    assert wanted.missing() == []


def test_lost_model_leaves_once_it_is_back():
    """It is as any model of a platform then: one that dies is not loaded again."""
    wanted, _ = make_wanted(LOST)
    wanted.note_loaded(M)
    assert wanted.models() == []


def test_load_of_another_model_changes_nothing():
    wanted, model = make_wanted()
    wanted.note_loaded(ModelId("n"))
    assert wanted.missing() == [model]


def test_unload_ends_the_wish():
    wanted, model = make_wanted()
    assert wanted.remove(M)
    assert not wanted.remove(M)
    assert wanted.models() == []
    assert wanted.note_failure(model, InsufficientMemory("full")) is None


def test_failure_doubles_the_pause():
    wanted, model = make_wanted()
    error = InsufficientMemory("no room")
    pauses = [wanted.note_failure(model, error) for _ in range(7)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert model.failure == "no room"
    assert wanted.missing() == [model]


@pytest.mark.parametrize(
    ("reason", "error", "is_final"),
    [
        (LOAD_AT_START, InvalidModel("x"), False),
        (LOAD_AT_START, LoadFailed("x"), False),
        (PRELOAD, InvalidModel("x"), True),
        (PRELOAD, ArtifactNotFound("x"), True),
        (PRELOAD, InsufficientMemory("x"), False),
        (LOST, LoadFailed("x"), True),
        (LOST, ModelTooLarge("x"), True),
        (LOST, ArtifactNotFound("x"), True),
        (LOST, InsufficientMemory("x"), False),
    ],
)
def test_failure_is_final_by_reason(reason, error, is_final):
    wanted, model = make_wanted(reason)
    assert (wanted.note_failure(model, error) is None) is is_final
    assert model.state is (WantedState.REFUSED if is_final else WantedState.MISSING)
    assert model.failure == "x"


@pytest.mark.parametrize(
    ("error", "pause_seconds"),
    [
        (BackendUnavailable("away", delivered=False), times.POLL_SECONDS),
        (Overloaded("full", delivered=False), times.PAUSE_SECONDS),
    ],
)
def test_triton_away_delays_no_later_try(error, pause_seconds):
    wanted, model = make_wanted()
    assert wanted.note_failure(model, error) == pause_seconds
    is_away = pause_seconds == times.POLL_SECONDS
    assert (model.pause_seconds == times.PAUSE_SECONDS) is is_away


def test_failure_after_a_load_by_others_is_ignored():
    wanted, model = make_wanted()
    wanted.note_loaded(M)
    assert wanted.note_failure(model, InsufficientMemory("full")) is None
    assert model.state is WantedState.LOADED
    assert model.failure == ""


@pytest.mark.parametrize("error", [None, LoadFailed("bad weights")])
def test_exit_gives_another_chance(error):
    wanted, model = make_wanted(PRELOAD)
    if error is None:
        wanted.note_loaded(M)
    else:
        wanted.note_failure(model, InsufficientMemory("full"))
        wanted.note_failure(model, error)
    wanted.note_exit()
    assert wanted.missing() == [model]
    assert model.failure == ""
    assert model.pause_seconds == times.PAUSE_SECONDS


def test_lost_model_keeps_its_setting():
    """It comes back from where callers had it last, which may be another version."""
    wanted, _ = make_wanted()
    model = wanted.want(M, KEY, LOST)
    assert wanted.models() == [model]
    assert (model.reason, model.source) == (LOAD_AT_START, KEY)


def test_setting_takes_over_a_lost_model():
    wanted, _ = make_wanted(LOST)
    assert wanted.want(M, SOURCE, PRELOAD).reason is PRELOAD


def test_old_try_ends_when_model_is_wanted_anew():
    wanted, old = make_wanted()
    new = wanted.want(M, KEY, LOST)
    assert wanted.note_failure(old, InsufficientMemory("full")) is None
    assert old.failure == ""
    assert new.state is WantedState.MISSING
