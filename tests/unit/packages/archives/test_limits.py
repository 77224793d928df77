"""Limits on what comes out of an archive."""

import gzip
import tracemalloc

import pytest

from adapter.errors import BackendError
from adapter.packages import unpack
from adapter.packages.archive import unpack as unpack_archive
from adapter.packages.unpack import RESERVE_INODES, Free, Limits
from tests.unit.packages.archives.making import (
    LIMITS,
    contents,
    entry,
    folder,
    tar_bytes,
    write,
    zip_bytes,
    zip_entry,
)

PACKERS = {
    "m.tar": lambda names, size: tar_bytes(*(entry(name, bytes(size)) for name in names)),
    "m.tgz": lambda names, size: gzip.compress(PACKERS["m.tar"](names, size)),
    "m.zip": lambda names, size: zip_bytes(*(zip_entry(name, bytes(size)) for name in names)),
}


@pytest.mark.parametrize("name", PACKERS)
def test_no_more_bytes_are_written_than_allowed(refused, name):
    text = refused(PACKERS[name](["a", "b"], 600), name, Limits(max_unpacked_bytes=1000))
    assert "'b': the archive unpacks to more than 1000 bytes; the limit is that of" in text


def test_what_follows_end_of_tar_counts_as_well(refused):
    data = gzip.compress(tar_bytes(entry("a")) + bytes(2**22))
    assert "more than 100000 bytes" in refused(data, "m.tgz", Limits(max_unpacked_bytes=100_000))


@pytest.mark.parametrize("name", PACKERS)
def test_entries_are_counted_with_folders_that_paths_name(refused, name):
    text = refused(PACKERS[name](["a", "b/c/d", "e"], 0), name, Limits(max_entries=4))
    assert "'e': the archive holds more than 4 entries" in text


@pytest.mark.parametrize("name", ["./", "a/"])
def test_folder_that_comes_again_counts_again(refused, name):
    """A million of them pack to a few kilobytes, and each has to be read."""
    data = gzip.compress(tar_bytes(*[folder(name)] * 5))
    text = refused(data, "m.tgz", Limits(max_entries=4))
    assert "the archive holds more than 4 entries" in text


def test_zip_of_too_many_entries_is_refused(refused):
    data = PACKERS["m.zip"]([f"a{number}" for number in range(5)], 10_000)
    limits = Limits(max_entries=4, max_unpacked_bytes=10)  # nothing of it is unpacked
    text = refused(data, "m.zip", limits)
    assert text.endswith("m.zip: the archive holds more than 4 entries")


@pytest.mark.parametrize("name", ["m.tgz", "m.zip"])
def test_a_bomb_is_refused_by_its_ratio(refused, name, monkeypatch):
    data = PACKERS[name](["a"], 3_000_000)
    monkeypatch.setattr(unpack, "_RATIO_FLOOR_BYTES", 2_000_000)
    text = refused(data, name, Limits(max_ratio=10))
    assert "unpacks to more than 2000000 bytes; the limit is 1 GiB, or 10 times its own" in text


def test_last_gib_of_disk_is_left_alone(refused, monkeypatch):
    monkeypatch.setattr(unpack, "free_at", lambda _: Free(2**30 + 4096, None))
    said = refused(PACKERS["m.tar"](["a"], 4097), error=BackendError)
    assert "has no more than 4096 bytes for it" in said


def test_last_gib_is_left_alone_beside_others(refused, monkeypatch):
    free = iter([2**40, 2**40])  # at the start, and for the folder entry
    monkeypatch.setattr(unpack, "free_at", lambda _: Free(next(free, 2**30 + 4095), None))
    said = refused(PACKERS["m.tar"](["a"], 4097), error=BackendError)
    assert "has no more than" in said


@pytest.mark.parametrize("name", PACKERS)
def test_last_inodes_of_disk_are_left_alone(refused, monkeypatch, name):
    monkeypatch.setattr(unpack, "free_at", lambda _: Free(2**40, RESERVE_INODES + 3))
    said = refused(PACKERS[name](["a/b", "c", "d"], 0), name, error=BackendError)
    assert "4 files and folders or more are in it" in said
    assert "has 4099 inodes free, of which 4096 are kept" in said
    assert said.endswith("name another disk by the setting repository")


def test_empty_files_take_room_on_disk(refused, monkeypatch):
    monkeypatch.setattr(unpack, "free_at", lambda _: Free(2**30 + 40_000, None))
    data = PACKERS["m.tar"]([str(number) for number in range(10)], 0)
    assert "no more than 40000 bytes" in refused(data, error=BackendError)


def test_target_that_is_there_already_is_left_alone(tmp_path, target):
    target.mkdir()
    (target / "mine").touch()
    archive = write(tmp_path / "m.tar", tar_bytes(entry("a")))
    with pytest.raises(BackendError, match="exists"):
        unpack_archive(archive, target, LIMITS)
    assert contents(target) == {"mine": b""}


@pytest.mark.parametrize("name", ["m.tgz", "m.zip"])
@pytest.mark.slow
def test_memory_does_not_grow_with_a_member(tmp_path, target, name):
    archive = write(tmp_path / name, PACKERS[name](["a"], 64 * 2**20))
    tracemalloc.start()
    try:
        unpack_archive(archive, target, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_headers(tmp_path, target):
    headers = {"comment": "x" * 10_000}
    data = tar_bytes(*[folder("a", pax_headers=headers)] * 2000)
    archive = write(tmp_path / "m.tar", data)
    tracemalloc.start()
    try:
        unpack_archive(archive, target, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    finally:
        tracemalloc.stop()
