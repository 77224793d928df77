"""Archives that are refused: attacks and damage."""

import bz2
import gzip
import itertools
import lzma
import random
import stat
import struct
import tarfile
import zipfile

import pytest

from adapter.packages import archive
from tests.unit.packages.archives.making import (
    entry,
    folder,
    hard,
    link,
    tar_bytes,
    zip_bytes,
    zip_entry,
)

DEEP = "/".join(["d"] * 65)
TAR_ATTACKS = {
    "absolute": ([entry("/etc/x")], "/etc/x", "absolute"),
    "up": ([entry("../secret", b"x")], "../secret", '".."'),
    "up inside": ([entry("a/../../secret", b"x")], "a/../../secret", '".."'),
    "up and back": ([entry("../target/x")], "../target/x", '".."'),
    "folder up": ([folder("../x")], "../x", '".."'),
    "link absolute": ([link("l", "/etc/passwd")], "l", "/etc/passwd"),
    "link up": ([link("a/l", "../../secret")], "a/l", "../../secret"),
    "link up and back": ([link("l", "../target")], "l", "../target"),
    "link up behind": ([link("a/b/d", "../.."), link("a/b/x", "d/../../x")], "a/b/x", "d/.."),
    "link empty": ([link("l", "")], "l", "not a path"),
    "link long": ([link("l", "x" * 1025)], "l", "not a path"),
    "link at root": ([link(".", "x")], ".", "taken"),
    "through link": ([link("l", ".."), entry("l/secret", b"x")], "l/secret", "below 'l'"),
    "onto link": ([link("l", "../secret"), entry("l", b"x")], "l", "taken"),
    "folder onto link": ([link("l", ".."), folder("l")], "l", "taken"),
    "link onto folder": ([entry("d/a"), link("d", "..")], "d", "taken"),
    "hard up": ([hard("h", "../secret")], "h", '".."'),
    "hard absolute": ([hard("h", "/etc/passwd")], "h", "absolute"),
    "hard to link": ([link("l", "../secret"), hard("h", "l")], "h", "not a file"),
    "hard to later": ([hard("h", "a"), entry("a")], "h", "not a file"),
    "hard to folder": ([folder("d"), hard("h", "d")], "h", "not a file"),
    "hard onto itself": ([entry("a"), hard("a", "a")], "a", "taken"),
    "fifo": ([entry("p", kind=tarfile.FIFOTYPE)], "p", "neither"),
    "character device": ([entry("c", kind=tarfile.CHRTYPE)], "c", "neither"),
    "block device": ([entry("b", kind=tarfile.BLKTYPE)], "b", "neither"),
    "unknown type": ([entry("u", b"u", kind=b"Z")], "u", "neither"),
    "twice": ([entry("a", b"1"), entry("a", b"2")], "a", "taken"),
    "twice otherwise written": ([entry("a/b"), entry("./a//b")], "./a//b", "taken"),
    "file at root": ([entry(".")], ".", "taken"),
    "below file": ([entry("a"), entry("a/b")], "a/b", "below 'a'"),
    "file onto folder": ([entry("a/b"), entry("a")], "a", "taken"),
    "deep": ([folder(DEEP)], DEEP, "deep"),
    "long part": ([entry("ü" * 128)], "ü" * 128, "long"),
    "long path": ([entry("/".join(["x" * 200] * 6))], "x" * 200, "long"),
}


@pytest.mark.parametrize("attack", TAR_ATTACKS)
@pytest.mark.parametrize("name", ["m.tar", "m.tgz"])
def test_tar_attack_is_refused_without_trace(refused, attack, name):
    entries, culprit, reason = TAR_ATTACKS[attack]
    data = tar_bytes(entry("first", b"fine"), *entries)
    text = refused(gzip.compress(data) if name == "m.tgz" else data, name)
    assert culprit in text
    assert reason in text


def test_a_path_with_a_nul_is_refused(refused):
    data = tar_bytes(entry("a", pax_headers={"path": "bXXb"})).replace(b"XX", b"X\0")
    assert "'bX\\x00b': its path holds a NUL" in refused(data)
    data = tar_bytes(entry("l", kind=tarfile.SYMTYPE, pax_headers={"linkpath": "bXXb"}))
    assert "'l': it is a link to something that is not a path" in refused(
        data.replace(b"XX", b"X\0")
    )


def test_a_sparse_file_is_refused(refused):
    headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "9" * 15, "GNU.sparse.numblocks": "1"}
    assert "'s': sparse" in refused(tar_bytes(entry("s", b"x", pax_headers=headers)))


def test_a_negative_size_ends(refused):
    member, _ = entry("a")
    member.size = -512
    raw = member.tobuf(tarfile.GNU_FORMAT)
    assert "'a': the archive is damaged" in refused(tar_bytes(entry("b", b"b" * 512))[:1024] + raw)


@pytest.mark.parametrize("size", [2**40, -512])
def test_long_header_is_not_taken_into_memory(refused, size):
    member, _ = entry("././@LongLink", kind=tarfile.GNUTYPE_LONGNAME)
    member.size = size
    text = refused(tar_bytes(entry("a"))[:512] + member.tobuf(tarfile.GNU_FORMAT) + bytes(2**20))
    assert "'a': the archive is damaged: the next header is too long" in text


def test_many_headers_for_one_entry_are_refused(refused):
    member, _ = entry("././@LongLink", b"x", kind=tarfile.GNUTYPE_LONGNAME)
    data = member.tobuf(tarfile.GNU_FORMAT) + b"x" + bytes(511)
    assert "the next header is too long" in refused(data * 2000)


@pytest.mark.parametrize("end", [600, 700, 1024, 1100, 1600, 2000])
def test_a_tar_that_breaks_off_is_refused(refused, end):
    data = tar_bytes(entry("a", b"a" * 500), entry("b", b"b" * 600))
    assert ("'b'" if end > 1536 else "'a'") in refused(data[:end])


def test_a_tar_without_its_end_is_refused(refused):
    data = tar_bytes(entry("a", b"a" * 512))
    assert "'a': the archive is damaged: after this entry it breaks off" in refused(data[:1024])


def test_damaged_header_is_not_taken_for_end(refused):
    data = bytearray(tar_bytes(entry("a"), entry("b"), entry("c")))
    data[512] ^= 1
    assert "'a'" in refused(bytes(data))


@pytest.mark.parametrize("end", [-1, -8, -12, 60])
def test_a_gzip_that_breaks_off_is_refused(refused, end):
    data = gzip.compress(tar_bytes(entry("a", random.Random(1).randbytes(5000))))
    assert "damaged" in refused(data[:end], "m.tar.gz")


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("m.tar.gz", zip_bytes(zip_entry("a")), "zip, not those of a tar.gz"),
        ("m.zip", tar_bytes(entry("a")), "tar, not those of a zip"),
        ("m.tar", gzip.compress(tar_bytes(entry("a")), mtime=0), "tar.gz, not those of a tar"),
        ("m.tgz", b"<html>404", "no archive, not those of a tar.gz"),
        (
            "m.tar.gz",
            lzma.compress(tar_bytes(entry("a"))),
            "pack it as tar.gz; its first bytes are those of xz",
        ),
        ("m.tgz", bz2.compress(tar_bytes(entry("a"))), "bzip2, which is not unpacked"),
        ("m.tar", b"\x28\xb5\x2f\xfd", "zstd, which is not unpacked"),
        ("m.zip", b"7z\xbc\xaf\x27\x1c", "7z, which is not unpacked"),
        ("m.tar", b"", "it is empty"),
        ("m", b"weights", "no archive"),
    ],
    ids=itertools.count(),
)
def test_a_name_that_its_bytes_belie_is_refused(refused, name, data, found):
    assert found in refused(data, name)


ZIP_ATTACKS = {
    "absolute": ([zip_entry("/etc/x")], "/etc/x", "absolute"),
    "up": ([zip_entry("../secret", b"x")], "../secret", '".."'),
    "link up": ([zip_entry("l", b"../secret", stat.S_IFLNK)], "l", "../secret"),
    "link absolute": ([zip_entry("l", b"/etc", stat.S_IFLNK)], "l", "/etc"),
    "link long": ([zip_entry("l", b"x" * 2**20, stat.S_IFLNK)], "l", "not a path"),
    "through link": (
        [zip_entry("l", b"..", stat.S_IFLNK), zip_entry("l/secret", b"x")],
        "l/secret",
        "below 'l'",
    ),
    "fifo": ([zip_entry("p", mode=stat.S_IFIFO)], "p", "neither"),
    "device": ([zip_entry("c", mode=stat.S_IFCHR)], "c", "neither"),
    "other method": ([zip_entry("z", b"z", compress_type=zipfile.ZIP_LZMA)], "z", "method"),
    "deep": ([zip_entry(DEEP)], DEEP, "deep"),
    "up at the end": ([zip_entry("x/..")], "x/..", '".."'),
    "up by backslashes": ([zip_entry("..\\secret", b"x")], "../secret", '".."'),
    "absolute by a backslash": ([zip_entry("\\etc\\x")], "/etc/x", "absolute"),
}


@pytest.mark.parametrize("attack", ZIP_ATTACKS)
def test_zip_attack_is_refused_without_trace(refused, attack):
    entries, culprit, reason = ZIP_ATTACKS[attack]
    text = refused(zip_bytes(zip_entry("first", b"fine"), *entries), "m.zip")
    assert repr(culprit) in text
    assert reason in text


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_a_name_twice_is_refused(refused):
    assert "'a': its path is taken" in refused(zip_bytes(zip_entry("a"), zip_entry("a")), "m.zip")


def test_zip_with_nul_in_name_is_refused(refused):
    data = zip_bytes(zip_entry("aXb")).replace(b"aXb", b"a\0b")
    assert "its path holds a NUL" in refused(data, "m.zip")


def test_an_encrypted_zip_is_refused(refused):
    data = bytearray(zip_bytes(zip_entry("a", b"a")))
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    assert "'a': it is encrypted" in refused(bytes(data), "m.zip")


def test_zip_whose_entry_lies_within_another_is_refused(refused):
    """Each layer of such a zip unpacks the same packed bytes once more."""
    inner = zip_bytes(zip_entry("b", b"b" * 10_000))
    stored = zip_entry("a", inner[: inner.index(b"PK\1\2")], compress_type=zipfile.ZIP_STORED)
    data = bytearray(zip_bytes(stored, zip_entry("b", b"b" * 10_000)))
    offset = len(data[: data.index(b"PK\3\4", 1)])
    second = data.rindex(b"PK\1\2")
    data[second + 42 : second + 46] = offset.to_bytes(4, "little")
    assert "'b': it overlaps another entry" in refused(bytes(data), "m.zip")


def test_zip_that_ends_before_its_entry_is_refused(refused):
    data = bytearray(zip_bytes(zip_entry("a", b"a" * 10_000)))
    size = data.rindex(b"PK\1\2") + 20
    data[size : size + 4] = (2**20).to_bytes(4, "little")
    assert "'a': the archive is damaged: it ends before this" in refused(bytes(data), "m.zip")


def test_zip_whose_entries_share_their_bytes_is_refused(refused):
    data = bytearray(zip_bytes(zip_entry("a", b"a" * 10_000), zip_entry("b", b"a" * 10_000)))
    second = data.rindex(b"PK\1\2")
    data[second + 42 : second + 46] = bytes(4)
    assert "it overlaps another entry" in refused(bytes(data), "m.zip")


@pytest.mark.parametrize("offset", [2**31, 2**62, 2**64 - 2])
def test_zip_entry_beyond_its_end_is_refused(refused, offset):
    data = bytearray(zip_bytes(zip_entry("a", extra=struct.pack("<HHQ", 1, 8, offset))))
    directory = data.index(b"PK\1\2")
    data[directory + 42 : directory + 46] = b"\xff" * 4
    assert "'a': the archive is damaged: it ends before" in refused(bytes(data), "m.zip")


@pytest.mark.parametrize("size", [3, 100])
def test_zip_that_lies_about_size_is_refused(refused, size):
    data = bytearray(zip_bytes(zip_entry("a", b"a" * 50)))
    directory = data.index(b"PK\1\2")
    data[directory + 24 : directory + 28] = struct.pack("<I", size)
    assert "'a': the archive is damaged" in refused(bytes(data), "m.zip")


def test_a_zip_with_a_wrong_checksum_is_refused(refused):
    data = zip_bytes(zip_entry("a", b"weights", compress_type=zipfile.ZIP_STORED))
    assert "'a': the archive is damaged: Bad CRC" in refused(
        data.replace(b"weights", b"weighty"), "m.zip"
    )


def test_a_zip_that_breaks_off_is_refused(refused):
    data = zip_bytes(zip_entry("a", b"a" * 1000))
    assert "damaged" in refused(data[:-30], "m.zip")


def test_zips_directory_in_memory_is_bounded(refused, monkeypatch):
    monkeypatch.setattr(archive, "_MAX_ZIP_READ_BYTES", 1000)
    many = zip_bytes(*(zip_entry(f"a{number}") for number in range(100)))
    assert "its directory is too long" in refused(many, "m.zip")
