"""What is unpacked, and how an archive is known."""

import gzip
import os
import stat
import tarfile
import zipfile

import pytest

from adapter.packages.archive import unpack
from adapter.packages.archive_kinds import is_archive
from tests.unit.packages.archives.making import (
    GOOD,
    LIMITS,
    TIME,
    contents,
    entry,
    folder,
    link,
    tar_bytes,
    write,
    zip_bytes,
    zip_entry,
)

UNPACKED = {
    "top": None,
    "top/config.pbtxt": b"config",
    "top/1": None,
    "top/1/model.py": b"weights" * 100_000,
    "top/ü": b"",
    "top/latest": "1",
    "top/up": "1/../config.pbtxt",
    "top/through": "latest/model.py",
    "top/1/dangling": "../gone",
    "top/same": b"config",
}


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["m.tar", "m.tar.gz", "M.TGZ", "model"])
def test_tar_is_unpacked_with_times(tmp_path, target, layout, name):
    data = tar_bytes(*GOOD, layout=layout)
    packed = gzip.compress(data) if name.lower().endswith("gz") else data
    unpack(write(tmp_path / name, packed), target, LIMITS)
    assert contents(target) == UNPACKED
    assert {(target / path).stat().st_mtime for path in ("top", "top/1/model.py")} == {TIME}
    assert (target / "top/same").stat().st_ino == (target / "top/config.pbtxt").stat().st_ino


@pytest.mark.parametrize("name", ["env.tar.gz", "env.tgz", "env.tar"])
def test_packed_environment_has_time_of_its_contents_alone(tmp_path, name):
    """By its path and time Triton knows one that it has unpacked."""

    def time(number: int, contents: bytes) -> float:
        target = tmp_path / f"target-{number}"
        archive = tmp_path / f"{number}.zip"
        unpack(write(archive, zip_bytes(zip_entry(f"m/{name}", contents))), target, LIMITS)
        return (target / "m" / name).stat().st_mtime

    assert time(1, b"one") == time(2, b"one") != time(3, b"two")


def test_zip_is_unpacked_with_times(tmp_path, target):
    data = zip_bytes(
        zip_entry("top/", mode=stat.S_IFDIR | 0o700),
        zip_entry("top/folder", mode=stat.S_IFDIR | 0o700),
        zip_entry("top/a", b"a" * 3_000_000, mode=stat.S_IFREG | 0o6755),
        zip_entry("top/ü", b"b", mode=0, compress_type=zipfile.ZIP_STORED),
        zip_entry("top/link", b"a", mode=stat.S_IFLNK | 0o777),
    )
    unpack(write(tmp_path / "m.ZIP", data), target, LIMITS)
    assert contents(target) == {
        "top": None,
        "top/folder": None,
        "top/a": b"a" * 3_000_000,
        "top/ü": b"b",
        "top/link": "a",
    }
    assert {(target / path).stat().st_mtime for path in ("top", "top/a", "top/ü")} == {TIME}


def test_zip_of_windows_has_folders(tmp_path, target):
    """Some archivers of Windows part names by backslashes alone."""
    data = zip_bytes(
        zip_entry("m\\"), zip_entry("m\\config.pbtxt", b"c"), zip_entry("m\\1\\a", b"a")
    )
    unpack(write(tmp_path / "m.zip", data), target, LIMITS)
    assert contents(target) == {"m": None, "m/config.pbtxt": b"c", "m/1": None, "m/1/a": b"a"}


def test_backslash_stays_when_a_name_has_a_slash(tmp_path, target):
    data = zip_bytes(zip_entry("m/a\\b", b"x"))
    unpack(write(tmp_path / "m.zip", data), target, LIMITS)
    assert contents(target) == {"m": None, "m/a\\b": b"x"}


def test_link_that_loops_seems_to_lead_nowhere_else(tmp_path, target):
    unpack(write(tmp_path / "m.tar", tar_bytes(link("l", "l//etc"))), target, LIMITS)
    assert os.path.realpath(target / "l") == str(target / "l" / "etc")


def test_modes_are_ours_whatever_archive_and_umask_say(tmp_path, target):
    data = tar_bytes(
        folder("d", mode=0o1000), entry("d/x", mode=0o6711), entry("d/f", mode=0), entry("e/f")
    )
    before = os.umask(0o077)
    try:
        unpack(write(tmp_path / "m.tar", data), target, LIMITS)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE((target / path).stat().st_mode) for path in contents(target)}
    assert modes == {"d": 0o755, "d/x": 0o755, "d/f": 0o644, "e": 0o755, "e/f": 0o644}
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_an_undecodable_name_keeps_its_bytes(tmp_path, target):
    data = tar_bytes(entry("\udcff", b"x"), layout=tarfile.GNU_FORMAT)
    unpack(write(tmp_path / "m.tar", data), target, LIMITS)
    assert [os.fsencode(path.name) for path in target.iterdir()] == [b"\xff"]


@pytest.mark.parametrize("mtime", [-5, 2**40, float("inf"), float("nan")])
def test_an_impossible_time_becomes_1970(tmp_path, target, mtime):
    member, data = entry("a", pax_headers={"mtime": str(mtime)})
    unpack(write(tmp_path / "m.tar", tar_bytes((member, data))), target, LIMITS)
    assert (target / "a").stat().st_mtime == 0


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("m.tar", b"", True),
        ("m.TAR.GZ", b"", True),
        ("m.tgz", b"", True),
        ("m.zip", b"", True),
        ("model", tar_bytes(entry("a")), True),
        ("model", gzip.compress(b"", mtime=0), True),
        ("model.pt", zip_bytes(zip_entry("a")), False),
        ("model.onnx", b"weights", False),
        ("zip", b"", False),
        ("tar", b"", False),
    ],
)
def test_archive_is_known_by_name_or_bytes(tmp_path, name, data, expected):
    assert is_archive(write(tmp_path / name, data)) is expected
