"""Random lists of members, and random damage."""

import gzip
import os
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.errors import InvalidModel
from adapter.packages.archive import unpack
from tests.unit.packages.archives.making import (
    GOOD,
    LIMITS,
    entry,
    link,
    tar_bytes,
    write,
    zip_bytes,
    zip_entry,
)

PATHS = st.lists(st.sampled_from(["a", "b", "c", ".", "..", "", "d"]), min_size=1, max_size=5)
NAMES = PATHS.map("/".join)
KINDS = [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE]


@st.composite
def tar_members(draw):
    kind = draw(st.sampled_from(KINDS))
    data = b"x" if kind == tarfile.REGTYPE else b""
    return entry(draw(NAMES), data, kind=kind, to=draw(NAMES))


@st.composite
def zip_members(draw):
    mode = draw(st.sampled_from([stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR]))
    data = draw(NAMES).encode() if mode == stat.S_IFLNK else b"x"
    return zip_entry("./" + draw(NAMES), data, mode | 0o644)


def snapshot(outside):
    return {
        (str(path), path.lstat().st_mtime_ns, path.lstat().st_nlink)
        for path in outside.rglob("*")
        if "target" not in path.relative_to(outside).parts and path.name != "box"
    }


def check_nothing_outside(data, name):
    with tempfile.TemporaryDirectory() as made:
        root = Path(made).resolve()
        (root / "box" / "a").mkdir(parents=True)
        (root / "b").mkdir()
        (root / "box" / "b").touch()
        archive, target = write(root / name, data), root / "box" / "target"
        before = snapshot(root)
        try:
            unpack(archive, target, LIMITS)
        except InvalidModel:
            assert not target.exists()
        assert snapshot(root) == before
        assert (
            sorted(path.name for path in (root / "box").iterdir())
            == ["a", "b"] + ["target"] * target.exists()
        )
        for path in target.rglob("*"):
            assert Path(os.path.realpath(path)).is_relative_to(target)


@settings(max_examples=3 * settings().max_examples)
@given(st.lists(tar_members(), min_size=1, max_size=6))
@pytest.mark.slow
def test_no_tar_members_lead_outside(members):
    check_nothing_outside(tar_bytes(*members), "m.tar")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@settings(max_examples=2 * settings().max_examples)
@given(st.lists(zip_members(), min_size=1, max_size=6))
@pytest.mark.slow
def test_no_zip_members_lead_outside(members):
    check_nothing_outside(zip_bytes(*members), "m.zip")


SAMPLES = {
    "m.tar": tar_bytes(*GOOD[1:3], entry("x", b"x", pax_headers={"comment": "c"}), link("l", "x")),
    "m.zip": zip_bytes(zip_entry("a", b"a" * 99), zip_entry("l", b"a", stat.S_IFLNK)),
    "m.tgz": gzip.compress(tar_bytes(entry("a", b"a" * 99)), mtime=0),
}


@given(
    st.sampled_from(sorted(SAMPLES)),
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=5),
)
@pytest.mark.slow
def test_damaged_archive_is_unpacked_or_refused_alone(name, changes):
    data = bytearray(SAMPLES[name])
    for at, value in changes:
        data[at % len(data)] = value
    check_nothing_outside(bytes(data), name)
