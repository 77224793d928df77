"""Counts what ModelMesh counts, in units of 8 KiB."""

from adapter.core.mesh_books import MESH_UNIT_BYTES, MeshBooks
from adapter.core.model import ModelId

A, B = ModelId("a"), ModelId("b")


def units(count):
    return count * MESH_UNIT_BYTES


def test_modelmesh_evicts_above_its_capacity():
    books = MeshBooks()
    books.count(A, units(10))
    assert not books.is_evicting  # nobody has told it a capacity
    books.start(units(10))
    assert not books.is_evicting
    books.count(A, units(6))
    books.count(B, units(4))
    assert not books.is_evicting
    books.count(B, units(5))
    assert books.is_evicting
    books.drop(A)
    books.drop(A)
    assert not books.is_evicting


def test_new_modelmesh_has_nothing_loaded():
    books = MeshBooks()
    books.start(units(10))
    books.count(A, units(11))
    assert books.is_evicting
    books.start(units(10))
    assert not books.is_evicting


def test_modelmesh_counts_whole_units():
    books = MeshBooks()
    books.start(units(2) + MESH_UNIT_BYTES - 1)  # two units
    books.count(A, 0)  # counts as one unit
    books.count(B, units(2) - 1)  # counts as one unit
    assert not books.is_evicting
    books.count(B, units(2))
    assert books.is_evicting
