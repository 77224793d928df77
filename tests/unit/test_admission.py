"""A refusal needs three things: a known size, no room for it, and something that could go."""

import pytest

from adapter.core.admission import admit
from adapter.core.ledger import LedgerSnapshot
from adapter.core.model import ModelId
from adapter.core.sizing import Basis, Estimate
from adapter.errors import InsufficientMemory, MemoryFigures

M = ModelId("m")
MIB = 2**20


def book(*, limit: int | None = 1000 * MIB, models: int = 1, held: int = 600 * MIB):
    return LedgerSnapshot(limit, 100 * MIB, 0, 0, held, models)


@pytest.mark.parametrize("basis", [Basis.LEARNED, Basis.DECLARED])
def test_a_known_size_that_does_not_fit_beside_others_is_refused_with_the_figures(basis):
    with pytest.raises(InsufficientMemory) as caught:
        admit(M, Estimate(301 * MIB, basis), book(), None)
    assert str(caught.value) == (
        f"model 'm' needs 301.0 MiB ({basis.value}); 300.0 MiB of 1000.0 MiB are free"
    )
    assert caught.value.model_id == "m"
    assert caught.value.figures == MemoryFigures(301 * MIB, 300 * MIB, 1000 * MIB)
    assert caught.value.matched is None


def test_what_just_fits_is_admitted():
    admit(M, Estimate(300 * MIB, Basis.LEARNED), book(), None)


def test_an_observation_that_leaves_less_room_counts():
    with pytest.raises(InsufficientMemory):
        admit(M, Estimate(300 * MIB, Basis.LEARNED), book(), 601 * MIB)


def test_a_size_nobody_knows_is_tried():
    admit(M, Estimate(10**12, Basis.UNKNOWN), book(), None)


def test_with_nothing_else_loaded_it_is_tried_however_large():
    """A refusal asks the platform to evict; with nothing to evict it would ask for ever."""
    admit(M, Estimate(10**12, Basis.LEARNED), book(models=0, held=0), None)


def test_without_a_limit_everything_is_tried():
    admit(M, Estimate(10**12, Basis.LEARNED), book(limit=None), 10**12)


def test_a_refusal_turns_into_an_attempt_once_the_others_are_gone():
    estimate = Estimate(400 * MIB, Basis.LEARNED)
    with pytest.raises(InsufficientMemory):
        admit(M, estimate, book(), None)
    admit(M, estimate, book(models=1, held=100 * MIB), None)
