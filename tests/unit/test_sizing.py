"""Sizes as people write them, and what is believed of a model's size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core.model import Package
from adapter.core.sizing import Basis, Estimate, Sizes, format_size, parse_size


def package(key: str = "k", declared: int | None = None) -> Package:
    return Package(f"/{key}", "", 10, declared, key)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("512", 512),
        ("512b", 512),
        ("1KiB", 1024),
        ("512 MiB", 512 * 2**20),
        (" 8GiB ", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("9007199254740993", 9007199254740993),  # more digits than a float holds
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_binary_unit(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "8GB", "8 G", "-1", "1,5GiB", "1.GiB", "1e9", "8 GiB x"]
)
def test_what_is_no_size_is_refused_with_the_accepted_forms(text):
    with pytest.raises(ValueError, match="write bytes or a number with KiB, MiB, GiB or TiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (-2048, "-2.0 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(count, text):
    assert format_size(count) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_shown_can_be_read_back_to_within_rounding(count):
    assert parse_size(format_size(count).replace(" bytes", "")) == pytest.approx(count, rel=0.06)


def test_nothing_is_known_of_a_silent_package():
    assert Sizes().estimate(package()) == Estimate(0, Basis.UNKNOWN)


def test_a_declared_size_is_believed_until_one_is_learned():
    sizes = Sizes()
    assert sizes.estimate(package(declared=5)) == Estimate(5, Basis.DECLARED)
    sizes.learn(package(declared=5), 7)
    assert sizes.estimate(package(declared=5)) == Estimate(7, Basis.LEARNED)


def test_a_declared_size_of_zero_is_a_declaration():
    assert Sizes().estimate(package(declared=0)) == Estimate(0, Basis.DECLARED)


def test_the_largest_measurement_of_the_same_files_counts():
    sizes = Sizes()
    for measured in (5, 9, 3):
        sizes.learn(package("same"), measured)
    assert sizes.estimate(package("same")) == Estimate(9, Basis.LEARNED)
    assert sizes.estimate(package("other")) == Estimate(0, Basis.UNKNOWN)
