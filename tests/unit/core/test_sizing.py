"""Sizes as people write them, and what is believed of a model's size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core import sizing
from adapter.core.ledger import UNSEEN
from adapter.core.memory import HOST, Device
from adapter.core.model import Package
from adapter.core.sizing import (
    Basis,
    Estimate,
    Sizes,
    exact_size,
    format_size,
    parse_size,
)
from tests.cases import rows

ONE, TWO = Device("GPU-1"), Device("GPU-2")
GPUS = {ONE: 0, TWO: 1}
MIB = 2**20


def package(
    key: str = "k",
    declared: int | None = None,
    size_bytes: int = 10,
    gpus: frozenset[int] | None = None,
) -> Package:
    return Package(f"/{key}", (), size_bytes, declared, key, gpus=gpus)


@rows(
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
        ("3 GB", 3 * 10**9),
        ("1.5tb", 15 * 10**11),
        ("20kb", 20_000),
        ("512Mi", 512 * 2**20),
        ("9007199254740993", 9007199254740993),  # more digits than a float holds
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text, count):
    assert parse_size(text) == count


@rows("text", ["", "GiB", "8 G", "-1", "1,5GiB", "1.GiB", "1e9", "8 GiB x"])
def test_what_is_no_size_is_refused_with_the_accepted_forms(text):
    with pytest.raises(ValueError, match="write bytes or a number with KiB, MiB, GiB, TiB, KB"):
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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (1000, "1000"),
        (2**30, "1GiB"),
        (1536 * 2**20, "1536MiB"),
        (10**10, "10GB"),
        (5 * 10**6, "5MB"),
        (2**31 - 1, "2147483647 (2.0 GiB)"),
    ],
)
def test_an_exact_size_has_its_unit_where_that_loses_nothing(count, text):
    assert exact_size(count) == text
    assert parse_size(text.partition(" ")[0]) == count


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_shown_can_be_read_back_to_within_rounding(count):
    assert parse_size(format_size(count).replace(" bytes", "")) == pytest.approx(count, rel=0.06)


def test_of_a_silent_package_the_default_is_expected():
    assert Sizes().estimate(package(), GPUS) == Estimate({ONE: 0, TWO: 0}, Basis.DEFAULT)
    sizes = Sizes(default_bytes=7)
    assert sizes.estimate(package(), {HOST: None}) == Estimate({HOST: 7}, Basis.DEFAULT)


def test_learned_is_believed_before_declared_before_disk():
    sizes = Sizes(default_bytes=7)
    files = package(size_bytes=4 * MIB)
    declared = package(size_bytes=4 * MIB, declared=5)
    assert sizes.estimate(files, {HOST: None}) == Estimate({HOST: 5 * MIB}, Basis.DISK)
    assert sizes.estimate(declared, {HOST: None}) == Estimate({HOST: 5}, Basis.DECLARED)
    sizes.learn("k", {HOST: 9}, exact=False)
    assert sizes.estimate(declared, {HOST: None}) == Estimate({HOST: 9}, Basis.LEARNED)


def test_a_declared_size_of_zero_is_a_declaration():
    estimate = Sizes(default_bytes=7).estimate(package(declared=0), {HOST: None})
    assert estimate == Estimate({HOST: 0}, Basis.DECLARED)


@pytest.mark.parametrize(("size_bytes", "basis"), [(MIB - 1, Basis.DEFAULT), (MIB, Basis.DISK)])
def test_files_below_a_mebibyte_say_nothing(size_bytes, basis):
    estimate = Sizes(size_factor=2).estimate(package(size_bytes=size_bytes), {HOST: None})
    assert estimate.basis is basis
    assert estimate.needs == {HOST: 2 * MIB if basis is Basis.DISK else 0}


@rows(
    ("gpus", "devices", "counted"),
    [
        (None, GPUS, {ONE, TWO}),
        (frozenset({1}), GPUS, {TWO}),
        (frozenset({0, 1, 7}), GPUS, {ONE, TWO}),
        (frozenset(), GPUS, set()),
        (frozenset(), {ONE: None}, set()),
        (frozenset({1}), {ONE: None, TWO: 0}, {ONE}),  # nobody says which one ONE is
        (frozenset({1}), {HOST: None}, {HOST}),
        (frozenset(), {UNSEEN: None}, {UNSEEN}),
        (None, {}, set()),
    ],
)
def test_a_size_counts_on_every_device_that_the_package_may_use(gpus, devices, counted):
    estimate = Sizes().estimate(package(declared=5, gpus=gpus), devices)
    assert estimate.needs == dict.fromkeys(counted, 5)
    assert estimate.size_bytes == 5 * len(counted)


def test_learned_figures_are_for_the_devices_they_were_measured_on():
    sizes = Sizes()
    sizes.learn("k", {ONE: 5, TWO: 0}, exact=True)
    assert sizes.estimate(package(), GPUS) == Estimate({ONE: 5}, Basis.LEARNED)


def test_a_package_seen_to_take_nothing_is_known_to_take_nothing():
    sizes = Sizes(default_bytes=7)
    sizes.learn("k", {ONE: 0}, exact=True)
    assert sizes.estimate(package(), {TWO: 1}) == Estimate({}, Basis.LEARNED)
    assert sizes.is_exact("k")


def test_the_largest_figure_counts_everywhere_when_a_device_is_gone():
    sizes = Sizes()
    sizes.learn("k", {ONE: 5, Device("GPU-gone"): 9}, exact=True)
    assert sizes.estimate(package(), GPUS).needs == {ONE: 9, TWO: 9}
    assert sizes.estimate(package(gpus=frozenset({1})), GPUS).needs == {TWO: 9}


def test_the_largest_exact_measurement_of_each_device_counts():
    sizes = Sizes()
    for measured in ({ONE: 5, TWO: 1}, {ONE: 9}, {ONE: 3, TWO: 4}):
        sizes.learn("k", measured, exact=True)
    assert sizes.estimate(package(), GPUS).needs == {ONE: 9, TWO: 4}
    assert sizes.estimate(package("other"), GPUS).basis is Basis.DEFAULT


def test_of_shares_the_latest_counts():
    sizes = Sizes()
    sizes.learn("k", {ONE: 9, TWO: 9}, exact=False)
    sizes.learn("k", {ONE: 3}, exact=False)
    assert sizes.estimate(package(), GPUS).needs == {ONE: 3}
    assert not sizes.is_exact("k")


@rows(
    ("share", "exact", "needs", "basis"),
    [
        ({ONE: 3}, False, {ONE: 5}, Basis.LEARNED),
        ({ONE: 9}, False, {ONE: 9}, Basis.LEARNED),
        ({ONE: 0}, False, {ONE: 5, TWO: 5}, Basis.DECLARED),
        ({ONE: 3}, True, {ONE: 3}, Basis.LEARNED),
    ],
)
def test_a_share_is_not_below_what_is_declared(share, exact, needs, basis):
    """Others that declare too much have the rest of it."""
    sizes, declared = Sizes(), package(declared=5)
    sizes.known_as("m", declared)
    sizes.learn("k", share, exact=exact)
    assert sizes.estimate(declared, GPUS) == Estimate(needs, basis)
    assert sizes.of_model("m") == (None if basis is Basis.DECLARED else sum(needs.values()))


def test_an_exact_figure_replaces_a_share_and_never_the_other_way():
    sizes = Sizes()
    sizes.learn("k", {ONE: 9}, exact=False)
    sizes.learn("k", {ONE: 3}, exact=True)
    sizes.learn("k", {ONE: 8}, exact=False)
    assert sizes.estimate(package(), GPUS).needs == {ONE: 3}
    assert sizes.is_exact("k")


def test_nothing_is_learned_of_a_package_never_seen():
    assert Sizes().learned("k") is None
    assert not Sizes().is_exact("k")


def test_what_was_learned_of_a_package_can_be_asked_for():
    sizes = Sizes()
    sizes.learn("k", {ONE: 9}, exact=True)
    sizes.learn("k", {ONE: 3, TWO: 4}, exact=True)
    assert sizes.learned("k") == {ONE: 9, TWO: 4}


def test_the_size_at_a_url_is_that_of_the_files_last_seen_there():
    sizes = Sizes()
    sizes.learn("old", {ONE: 1}, exact=True)
    sizes.learn("new", {ONE: 2, TWO: 3}, exact=False)
    sizes.known_at("/m", package("old"))
    assert sizes.of_url("/m") == 1
    sizes.known_at("/m", package("new"))
    assert sizes.of_url("/m") == 5


@pytest.mark.parametrize(("learned", "asked"), [("/m", "/m/"), ("/m/", "/m"), ("/", "/")])
def test_last_slash_of_url_names_the_same_model(learned, asked):
    sizes, restored = Sizes(), Sizes()
    sizes.learn("k", {ONE: 7}, exact=True)
    sizes.known_at(learned, package("k"))
    assert sizes.of_url(asked) == 7
    saved = sizes.as_dict() | {"places": {learned: "k"}}
    restored.restore(saved)
    assert restored.of_url(asked) == 7


def test_the_size_at_a_url_is_unknown_until_seen_and_learned():
    sizes = Sizes()
    sizes.learn("", {ONE: 1}, exact=True)
    assert sizes.of_url("/m") is None
    sizes.known_at("/m", package("never"))
    assert sizes.of_url("/m") is None


def test_the_urls_not_seen_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(sizing, "MAX_REMEMBERED", 100)
    sizes = Sizes()
    sizes.learn("k", {ONE: 1}, exact=True)
    sizes.known_at("first", package())
    sizes.known_at("second", package())
    sizes.known_at("first", package())
    for number in range(99):
        sizes.known_at(str(number), package())
    assert (sizes.of_url("first"), sizes.of_url("second")) == (1, None)


def test_the_packages_not_learned_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(sizing, "MAX_REMEMBERED", 100)
    sizes = Sizes()
    sizes.learn("first", {ONE: 1}, exact=True)
    sizes.learn("second", {ONE: 1}, exact=True)
    sizes.learn("first", {ONE: 2}, exact=True)
    for number in range(99):
        sizes.learn(str(number), {ONE: 1}, exact=False)
    assert (sizes.is_exact("first"), sizes.is_exact("second")) == (True, False)
    assert len(sizes.as_dict()["packages"]) == 100
