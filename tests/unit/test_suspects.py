"""Which model is found to end Triton, and when the others are cleared."""

from dataclasses import dataclass

import pytest

from adapter.control.suspects import SOON_SECONDS, TRIAL_SECONDS, Suspects, Trials
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import Registry
from adapter.core.state import WaitsFor
from tests.fakes.house import House

A, B, C = map(ModelId, "abc")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def suspects(clock: Clock) -> Suspects:
    return Suspects(clock)


def end(suspects: Suspects, broken_off: set[ModelId], *, is_soon: bool) -> ModelId | None:
    for each in broken_off:
        suspects.broke_off(each)
    return suspects.triton_ended(is_soon=is_soon)


def test_one_end_may_have_any_cause(suspects: Suspects):
    assert end(suspects, {A}, is_soon=False) is None
    assert not suspects.is_on_trial(A)


def test_the_only_suspect_of_two_ends_soon_after_another_is_given_up(suspects: Suspects):
    end(suspects, {A, B}, is_soon=False)
    assert end(suspects, {A}, is_soon=True) is None
    assert end(suspects, {A}, is_soon=True) == A


def test_of_several_suspects_none_is_given_up(suspects: Suspects):
    for _ in range(5):
        assert end(suspects, {A, B}, is_soon=True) is None
    assert suspects.is_on_trial(A)
    assert suspects.is_on_trial(B)


def test_the_suspects_are_those_of_all_ends_in_a_row(suspects: Suspects):
    end(suspects, {A, B}, is_soon=False)
    end(suspects, {B, C}, is_soon=True)
    assert suspects.ids() == [B]


def test_without_a_common_one_the_suspects_are_those_of_the_later_end(suspects: Suspects):
    end(suspects, {A}, is_soon=False)
    end(suspects, {B, C}, is_soon=True)
    assert set(suspects.ids()) == {B, C}


def test_a_model_whose_request_broke_off_is_a_suspect_of_the_end_that_follows(
    suspects: Suspects, clock: Clock
):
    suspects.broke_off(A)
    clock.now += SOON_SECONDS + 1
    suspects.broke_off(B)
    end(suspects, set(), is_soon=False)
    assert suspects.ids() == [B]


def test_a_model_that_was_cleared_is_given_up_only_after_two_more_ends(suspects: Suspects):
    end(suspects, {A}, is_soon=True)
    suspects.clear(A)
    assert end(suspects, {A}, is_soon=True) is None
    assert end(suspects, {A}, is_soon=True) == A


def test_a_model_that_was_given_up_and_loaded_all_the_same_has_one_more_end(suspects: Suspects):
    for _ in range(2):
        end(suspects, {A}, is_soon=True)
    assert end(suspects, {A, B}, is_soon=False) == A


def test_each_end_in_a_row_doubles_the_trial_up_to_a_minute(suspects: Suspects):
    found = []
    for _ in range(6):
        end(suspects, {A, B}, is_soon=True)
        found.append(suspects.trial_seconds)
    assert found == [TRIAL_SECONDS * 2**n for n in range(4)] + [SOON_SECONDS] * 2


def test_a_suspect_is_cleared_by_a_minute_or_by_the_trial_that_it_is_on(suspects: Suspects):
    end(suspects, {A}, is_soon=False)
    assert suspects.cleared_seconds == SOON_SECONDS
    end(suspects, {A, B}, is_soon=True)
    assert suspects.cleared_seconds == TRIAL_SECONDS


def test_the_load_of_a_new_version_makes_the_model_the_suspect():
    registry, status = Registry(), House().control.triton_status
    newer = registry.begin_load(ModelId("a#2"), TritonName("a2"), ModelSource("/a@2"), A)
    newer.waits_for = WaitsFor.TRITON
    trials = Trials(registry, status, lambda: True)
    trials.triton_ended()
    trials.triton_ended()
    assert [*registry.lost] == [A]
