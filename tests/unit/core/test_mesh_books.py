"""What ModelMesh counts, and when that makes it evict."""

import pytest

from adapter.core.admission import MeshBooks
from adapter.core.model import ModelId

MIB = 2**20
M, N = ModelId("m"), ModelId("n")


@pytest.fixture
def books():
    made = MeshBooks()
    made.start(100 * MIB)
    return made


def test_models_that_fit_the_capacity_to_the_last_unit_evict_nothing(books):
    books.count(M, 60 * MIB)
    books.count(N, 40 * MIB + 8191)  # ModelMesh rounds down to 8 KiB
    assert not books.is_evicting


def test_a_size_above_the_prediction_makes_it_evict_until_a_model_is_dropped(books):
    books.count(M, 60 * MIB)
    books.count(N, 30 * MIB)
    assert not books.is_evicting
    books.count(N, 50 * MIB)
    assert books.is_evicting
    books.drop(M)
    assert not books.is_evicting


def test_it_evicts_for_a_model_only_if_there_are_others(books):
    books.count(M, 60 * MIB)
    assert not books.evicts_for(M, 200 * MIB)
    assert not books.evicts_for(N, 40 * MIB)
    assert books.evicts_for(N, 41 * MIB)


def test_nothing_is_evicted_before_a_capacity_was_told():
    books = MeshBooks()
    books.count(M, 2**60)
    books.count(N, 2**60)
    assert not books.is_evicting
    assert not books.evicts_for(M, 2**60)


def test_a_new_start_counts_from_nothing(books):
    books.count(M, 200 * MIB)
    books.start(100 * MIB)
    assert not books.is_evicting
