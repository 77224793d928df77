"""What was learned of sizes goes to a file and comes back, whatever else the file holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core import sizing
from adapter.core.memory import HOST, Device
from adapter.core.model import Package
from adapter.core.sizing import Sizes
from tests.cases import rows

ONE, TWO = Device("GPU-1"), Device("GPU-2")
GPUS = {ONE: 0, TWO: 1}


def test_of_too_many_packages_in_a_file_the_last_are_taken(monkeypatch):
    monkeypatch.setattr(sizing, "MAX_REMEMBERED", 100)
    entry = {"bytes": {ONE: 1}, "exact": True}
    entries = [{"key": str(number), **entry} for number in range(102)]
    sizes = Sizes()
    assert sizes.restore({"packages": entries}) == 100
    assert not sizes.is_exact("1")
    assert sizes.is_exact("2")


FIGURES = st.dictionaries(st.sampled_from([ONE, TWO, HOST]), st.integers(-5, 2**40))
LESSONS = st.lists(st.tuples(st.text(max_size=3), FIGURES, st.booleans()))


def packed(key: str) -> Package:
    return Package(f"/{key}", (), 10, None, key)


def taught(lessons) -> Sizes:
    sizes = Sizes()
    for key, figures, exact in lessons:
        sizes.learn(key, figures, exact=exact)
    return sizes


@given(LESSONS)
def test_what_was_learned_comes_back_from_json_as_it_was(lessons):
    sizes, again = taught(lessons), Sizes()
    written = sizes.as_dict()
    assert again.restore(json.loads(json.dumps(written, sort_keys=True))) == len(
        written["packages"]
    )
    assert again.as_dict() == written
    for key, _, _ in lessons:
        assert again.is_exact(key) == sizes.is_exact(key)
        assert again.estimate(packed(key), GPUS) == sizes.estimate(packed(key), GPUS)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "key": JUNK,
        "bytes": JUNK | st.dictionaries(st.text(max_size=3) | st.integers(), SCALARS, max_size=2),
        "exact": JUNK,
    },
)


@given(JUNK | st.fixed_dictionaries({"packages": st.lists(NEARLY | JUNK) | JUNK}), LESSONS)
def test_junk_is_left_out_and_the_entries_beside_it_are_taken(junk, lessons):
    good = taught(lessons).as_dict()["packages"]
    Sizes().restore(junk)
    entries = junk.get("packages") if isinstance(junk, dict) else None
    sizes = Sizes()
    assert sizes.restore({"packages": [*(entries if type(entries) is list else []), *good]}) >= len(
        good
    )
    kept = {entry["key"] for entry in sizes.as_dict()["packages"]}
    assert {entry["key"] for entry in good} <= kept
    # what was taken is of the kind that is written
    assert Sizes().restore(sizes.as_dict()) == len(kept)


@rows(
    "entry",
    [
        {"bytes": {"d": 1}, "exact": True},
        {"key": 1, "bytes": {"d": 1}, "exact": True},
        {"key": "k", "bytes": {"d": 1}},
        {"key": "k", "bytes": {"d": 1}, "exact": 1},
        {"key": "k", "bytes": [1], "exact": True},
        {"key": "k", "bytes": {"d": -1}, "exact": True},
        {"key": "k", "bytes": {"d": 1.5}, "exact": True},
        {"key": "k", "bytes": {"d": True}, "exact": True},
        {"key": "k", "bytes": {1: 1}, "exact": True},
        ["k"],
        None,
    ],
)
def test_an_entry_that_is_not_well_formed_is_left_out(entry):
    sizes = Sizes()
    good = {"key": "good", "bytes": {"d": 1}, "exact": True}
    assert sizes.restore({"packages": [entry, good]}) == 1
    assert sizes.as_dict()["packages"] == [good]


@pytest.mark.parametrize("data", [None, [], {}, {"packages": {}}, {"packages": None}, "x", 3])
def test_what_is_no_table_of_packages_teaches_nothing(data):
    assert Sizes().restore(data) == 0


def test_where_a_package_was_comes_back_too():
    sizes, again = Sizes(), Sizes()
    sizes.learn("k", {ONE: 5}, exact=True)
    sizes.known_at("/a", packed("k"))
    sizes.known_at("/never-measured", packed("other"))
    sizes.known_as("m", packed("k"))
    again.restore(json.loads(json.dumps(sizes.as_dict())))
    assert again.of_url("/a") == 5
    assert again.of_url("/never-measured") is None
    assert (again.of_model("m"), again.of_model("other")) == (5, None)


@pytest.mark.parametrize("places", [None, [], {"/a": 3}, {"/a": []}, {"/a": "unknown"}, "x"])
def test_places_that_are_not_well_formed_are_left_out(places):
    good = {"key": "k", "bytes": {"d": 1}, "exact": True}
    sizes = Sizes()
    sizes.restore({"packages": [good], "places": places, "models": places})
    assert (sizes.as_dict()["places"], sizes.as_dict()["models"]) == ({}, {})


def test_what_is_learned_holds_for_the_version_of_triton_that_it_was_learned_with():
    versions = ["2.51.0"]
    sizes = Sizes(version=lambda: versions[-1])
    sizes.learn("k", {ONE: 5}, exact=True)
    versions.append("2.73.0")
    assert sizes.learned("k") is None
    sizes.learn("k", {ONE: 7}, exact=True)
    later = Sizes(version=lambda: versions[-1])
    later.restore(sizes.as_dict())
    assert later.learned("k") == {ONE: 7}
    versions.append("2.51.0")
    assert later.learned("k") == {ONE: 5}


def test_the_places_of_another_version_are_kept_without_a_size_for_this_one():
    sizes = Sizes(version=lambda: "2.51.0")
    package = Package("/m", (), 1, None, "k")
    sizes.known_at("/m", package)
    sizes.learn("k", {ONE: 5}, exact=True)
    later = Sizes(version=lambda: "2.73.0")
    later.restore(sizes.as_dict())
    assert later.of_url("/m") is None
    later.learn("k", {ONE: 7}, exact=True)
    assert later.of_url("/m") == 7
