"""Archives are unpacked byte for byte, and none of them writes a byte elsewhere."""

import gzip
import io
import os
import random
import shutil
import stat
import struct
import tarfile
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.errors import BackendError, InvalidModel
from adapter.packages.source import archives, unpacking
from adapter.packages.source.archives import is_archive, unpack
from adapter.packages.source.unpacking import Limits

TIME = 1_600_000_000  # even: zips keep two seconds
LIMITS = Limits()


def entry(name, data=b"", *, kind=tarfile.REGTYPE, to="", mode=0o644, **more):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.mtime = kind, to, mode, TIME
    member.size = len(data)
    for key, value in more.items():
        setattr(member, key, value)
    return member, data


def link(name, to):
    return entry(name, kind=tarfile.SYMTYPE, to=to)


def hard(name, to):
    return entry(name, kind=tarfile.LNKTYPE, to=to)


def folder(name, **more):
    return entry(name, kind=tarfile.DIRTYPE, **more)


def tar_bytes(*entries, layout=tarfile.PAX_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=layout) as packed:
        for member, data in entries:
            packed.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def zip_entry(name, data=b"", mode=stat.S_IFREG | 0o644, **more):
    info = zipfile.ZipInfo(name, (2020, 9, 13, 12, 26, 40))
    info.create_system, info.external_attr = 3, mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def zip_bytes(*entries):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for info, data in entries:
            packed.writestr(info, data)
    return buffer.getvalue()


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.fixture
def box(tmp_path):
    """The target is in a folder of its own; `secret` is beside it."""
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "secret").write_bytes(b"secret")
    return tmp_path / "box"


@pytest.fixture
def target(box):
    return box / "target"


@pytest.fixture
def refused(tmp_path, box, target):
    """Unpack what must be refused; the text. Nothing is left, nothing else is touched."""

    def attempt(data, name="m.tar", limits=LIMITS, error=InvalidModel):
        archive = write(tmp_path / name, data)
        with pytest.raises(error) as caught:
            unpack(archive, target, limits)
        assert [path.name for path in box.iterdir()] == ["secret"]
        assert (box / "secret").read_bytes() == b"secret"
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["box", name])
        assert str(archive) in str(caught.value)
        return str(caught.value)

    return attempt


def contents(root):
    return {
        str(path.relative_to(root)): path.readlink().as_posix()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in root.rglob("*")
    }


GOOD = [
    folder("./"),
    folder("top"),
    folder("./top/"),
    entry("top/config.pbtxt", b"config"),
    entry("top/1/model.py", b"weights" * 100_000, mode=0o4777),
    entry("top/ü", b""),
    link("top/latest", "1"),
    link("top/up", "1/../config.pbtxt"),
    link("top/through", "latest/model.py"),
    link("top/1/dangling", "../gone"),
    hard("top/same", "./top/config.pbtxt"),
    folder("./"),
]
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
def test_a_tar_is_unpacked_byte_for_byte_with_its_times(tmp_path, target, layout, name):
    data = tar_bytes(*GOOD, layout=layout)
    packed = gzip.compress(data) if name.lower().endswith("gz") else data
    unpack(write(tmp_path / name, packed), target, LIMITS)
    assert contents(target) == UNPACKED
    assert {(target / path).stat().st_mtime for path in ("top", "top/1/model.py")} == {TIME}
    assert (target / "top/same").stat().st_ino == (target / "top/config.pbtxt").stat().st_ino


def test_a_zip_is_unpacked_byte_for_byte_with_its_times(tmp_path, target):
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


def test_a_link_that_loops_seems_to_lead_nowhere_else(tmp_path, target):
    unpack(write(tmp_path / "m.tar", tar_bytes(link("l", "l//etc"))), target, LIMITS)
    assert os.path.realpath(target / "l") == str(target / "l" / "etc")


def test_modes_are_ours_whatever_the_archive_and_the_umask_say(tmp_path, target):
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


def test_a_long_path_is_kept(tmp_path, target):
    name = "/".join(["x" * 200] * 4)
    unpack(write(tmp_path / "m.tar", tar_bytes(entry(name, b"x"))), target, LIMITS)
    assert (target / name).read_bytes() == b"x"


def test_an_undecodable_name_keeps_its_bytes(tmp_path, target):
    data = tar_bytes(entry("\udcff", b"x"), layout=tarfile.GNU_FORMAT)
    unpack(write(tmp_path / "m.tar", data), target, LIMITS)
    assert [os.fsencode(path.name) for path in target.iterdir()] == [b"\xff"]


@pytest.mark.parametrize("mtime", [-5, 2**40, float("inf"), float("nan")])
def test_an_impossible_time_becomes_1970(tmp_path, target, mtime):
    member, data = entry("a", pax_headers={"mtime": str(mtime)})
    unpack(write(tmp_path / "m.tar", tar_bytes((member, data))), target, LIMITS)
    assert (target / "a").stat().st_mtime == 0


def test_a_zip_without_times_gets_1970(tmp_path, target):
    data = zip_bytes(zip_entry("a")).replace(struct.pack("<H", 40 << 9 | 9 << 5 | 13), b"\0\0")
    unpack(write(tmp_path / "m.zip", data), target, LIMITS)
    assert (target / "a").stat().st_mtime == 0


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
    "link empty": ([link("l", "")], "l", "no path"),
    "link long": ([link("l", "x" * 1025)], "l", "no path"),
    "link at root": ([link(".", "x")], ".", "taken"),
    "through link": ([link("l", ".."), entry("l/secret", b"x")], "l/secret", "below 'l'"),
    "onto link": ([link("l", "../secret"), entry("l", b"x")], "l", "taken"),
    "folder onto link": ([link("l", ".."), folder("l")], "l", "taken"),
    "link onto folder": ([entry("d/a"), link("d", "..")], "d", "taken"),
    "hard up": ([hard("h", "../secret")], "h", '".."'),
    "hard absolute": ([hard("h", "/etc/passwd")], "h", "absolute"),
    "hard to link": ([link("l", "../secret"), hard("h", "l")], "h", "no file"),
    "hard to later": ([hard("h", "a"), entry("a")], "h", "no file"),
    "hard to folder": ([folder("d"), hard("h", "d")], "h", "no file"),
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
def test_an_attack_by_tar_is_refused_by_name_and_leaves_nothing(refused, attack, name):
    entries, culprit, reason = TAR_ATTACKS[attack]
    data = tar_bytes(entry("first", b"fine"), *entries)
    text = refused(gzip.compress(data) if name == "m.tgz" else data, name)
    assert culprit in text
    assert reason in text


def test_a_path_with_a_nul_is_refused(refused):
    data = tar_bytes(entry("a", pax_headers={"path": "bXXb"})).replace(b"XX", b"X\0")
    assert "'bX\\x00b': its path holds a NUL" in refused(data)
    data = tar_bytes(entry("l", kind=tarfile.SYMTYPE, pax_headers={"linkpath": "bXXb"}))
    assert "'l': it is a link to what is no path" in refused(data.replace(b"XX", b"X\0"))


def test_a_sparse_file_is_refused(refused):
    headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "9" * 15, "GNU.sparse.numblocks": "1"}
    assert "'s': sparse" in refused(tar_bytes(entry("s", b"x", pax_headers=headers)))


def test_a_negative_size_ends(refused):
    member, _ = entry("a")
    member.size = -512
    raw = member.tobuf(tarfile.GNU_FORMAT)
    assert "'a': the archive is damaged" in refused(tar_bytes(entry("b", b"b" * 512))[:1024] + raw)


@pytest.mark.parametrize("size", [2**40, -512])
def test_a_header_of_any_length_is_not_taken_into_memory(refused, size):
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


def test_a_damaged_header_is_not_taken_for_the_end(refused):
    data = bytearray(tar_bytes(entry("a"), entry("b"), entry("c")))
    data[512] ^= 1
    assert "'a'" in refused(bytes(data))


@pytest.mark.parametrize("end", [-1, -8, -12, 60])
def test_a_gzip_that_breaks_off_is_refused(refused, end):
    data = gzip.compress(tar_bytes(entry("a", random.Random(1).randbytes(5000))))
    assert "damaged" in refused(data[:end], "m.tar.gz")


@pytest.mark.parametrize("at", [-8, -4, 3000])
def test_a_damaged_gzip_is_refused(refused, at):
    data = bytearray(gzip.compress(tar_bytes(entry("a", random.Random(1).randbytes(5000)))))
    data[at] ^= 1
    assert "damaged" in refused(bytes(data), "m.tar.gz")


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("m.tar.gz", zip_bytes(zip_entry("a")), "zip, not those of a tar.gz"),
        ("m.zip", tar_bytes(entry("a")), "tar, not those of a zip"),
        ("m.tar", gzip.compress(tar_bytes(entry("a")), mtime=0), "tar.gz, not those of a tar"),
        ("m.tgz", b"<html>404", "no archive, not those of a tar.gz"),
        ("m.tar", b"", "no archive"),
        ("m", b"weights", "no archive"),
    ],
)
def test_a_name_that_its_bytes_belie_is_refused(refused, name, data, found):
    assert found in refused(data, name)


def test_a_gzip_of_something_else_is_refused(refused):
    assert "damaged" in refused(gzip.compress(b"weights" * 200), "m.tar.gz")


ZIP_ATTACKS = {
    "absolute": ([zip_entry("/etc/x")], "/etc/x", "absolute"),
    "up": ([zip_entry("../secret", b"x")], "../secret", '".."'),
    "link up": ([zip_entry("l", b"../secret", stat.S_IFLNK)], "l", "../secret"),
    "link absolute": ([zip_entry("l", b"/etc", stat.S_IFLNK)], "l", "/etc"),
    "link long": ([zip_entry("l", b"x" * 2**20, stat.S_IFLNK)], "l", "no path"),
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
}


@pytest.mark.parametrize("attack", ZIP_ATTACKS)
def test_an_attack_by_zip_is_refused_by_name_and_leaves_nothing(refused, attack):
    entries, culprit, reason = ZIP_ATTACKS[attack]
    text = refused(zip_bytes(zip_entry("first", b"fine"), *entries), "m.zip")
    assert repr(culprit) in text
    assert reason in text


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_a_name_twice_is_refused(refused):
    assert "'a': its path is taken" in refused(zip_bytes(zip_entry("a"), zip_entry("a")), "m.zip")


def test_a_zip_with_a_nul_in_a_name_is_refused(refused):
    data = zip_bytes(zip_entry("aXb")).replace(b"aXb", b"a\0b")
    assert "its path holds a NUL" in refused(data, "m.zip")


def test_an_encrypted_zip_is_refused(refused):
    data = bytearray(zip_bytes(zip_entry("a", b"a")))
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    assert "'a': it is encrypted" in refused(bytes(data), "m.zip")


def test_a_zip_whose_entries_share_their_bytes_is_refused(refused):
    data = bytearray(zip_bytes(zip_entry("a", b"a" * 10_000), zip_entry("b", b"a" * 10_000)))
    second = data.rindex(b"PK\1\2")
    data[second + 42 : second + 46] = bytes(4)
    assert "it overlaps another entry" in refused(bytes(data), "m.zip")


@pytest.mark.parametrize("offset", [2**31, 2**62, 2**64 - 2])
def test_a_zip_whose_entry_lies_beyond_its_end_is_refused(refused, offset):
    data = bytearray(zip_bytes(zip_entry("a", extra=struct.pack("<HHQ", 1, 8, offset))))
    directory = data.index(b"PK\1\2")
    data[directory + 42 : directory + 46] = b"\xff" * 4
    assert "'a': the archive is damaged: it ends before" in refused(bytes(data), "m.zip")


@pytest.mark.parametrize("size", [3, 100])
def test_a_zip_that_lies_about_a_size_is_refused(refused, size):
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


def test_the_directory_of_a_zip_is_not_taken_into_memory_at_any_length(refused, monkeypatch):
    monkeypatch.setattr(archives, "_MAX_ZIP_READ_BYTES", 1000)
    many = zip_bytes(*(zip_entry(f"a{number}") for number in range(100)))
    assert "its directory is too long" in refused(many, "m.zip")


PACKERS = {
    "m.tar": lambda names, size: tar_bytes(*(entry(name, bytes(size)) for name in names)),
    "m.tgz": lambda names, size: gzip.compress(PACKERS["m.tar"](names, size)),
    "m.zip": lambda names, size: zip_bytes(*(zip_entry(name, bytes(size)) for name in names)),
}


@pytest.mark.parametrize("name", PACKERS)
def test_no_more_bytes_are_written_than_allowed(refused, name):
    text = refused(PACKERS[name](["a", "b"], 600), name, Limits(max_unpacked_bytes=1000))
    assert "'b': the archive unpacks to more than 1000 bytes" in text


def test_as_many_bytes_as_allowed_are_written(tmp_path, target):
    data = PACKERS["m.zip"](["a", "b"], 500)
    unpack(write(tmp_path / "m.zip", data), target, Limits(max_unpacked_bytes=1000))
    assert len(contents(target)) == 2


def test_what_follows_the_end_of_a_tar_counts_as_well(refused):
    data = gzip.compress(tar_bytes(entry("a")) + bytes(2**22))
    assert "more than 100000 bytes" in refused(data, "m.tgz", Limits(max_unpacked_bytes=100_000))


@pytest.mark.parametrize("name", PACKERS)
def test_entries_are_counted_with_the_folders_that_paths_name(refused, name):
    text = refused(PACKERS[name](["a", "b/c/d", "e"], 0), name, Limits(max_entries=4))
    assert "'e': the archive holds more than 4 entries" in text


@pytest.mark.parametrize("name", ["m.tgz", "m.zip"])
def test_a_bomb_is_refused_by_its_ratio(refused, name, monkeypatch):
    data = PACKERS[name](["a"], 3_000_000)
    monkeypatch.setattr(unpacking, "_RATIO_FLOOR_BYTES", 2_000_000)
    assert "more than 2000000 bytes" in refused(data, name, Limits(max_ratio=10))


def test_below_the_floor_the_ratio_does_not_matter(tmp_path, target):
    data = PACKERS["m.zip"](["a"], 3_000_000)
    unpack(write(tmp_path / "m.zip", data), target, Limits(max_ratio=1))
    assert (target / "a").stat().st_size == 3_000_000


def test_the_last_gib_of_the_disk_is_left_alone(refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=2**30 + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "disk" in refused(PACKERS["m.tar"](["a"], 1001), error=BackendError)


def test_a_target_that_is_there_already_is_left_alone(tmp_path, target):
    target.mkdir()
    (target / "mine").touch()
    archive = write(tmp_path / "m.tar", tar_bytes(entry("a")))
    with pytest.raises(BackendError, match="exists"):
        unpack(archive, target, LIMITS)
    assert contents(target) == {"mine": b""}


@pytest.mark.parametrize("name", ["m.tgz", "m.zip"])
@pytest.mark.slow
def test_memory_does_not_grow_with_a_member(tmp_path, target, name):
    archive = write(tmp_path / name, PACKERS[name](["a"], 64 * 2**20))
    tracemalloc.start()
    try:
        unpack(archive, target, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    finally:
        tracemalloc.stop()


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
def test_an_archive_is_known_by_name_or_by_first_bytes(tmp_path, name, data, expected):
    assert is_archive(write(tmp_path / name, data)) is expected


def test_a_folder_is_no_archive_whatever_its_name(tmp_path):
    (tmp_path / "m.tar.gz").mkdir()
    assert not is_archive(tmp_path / "m.tar.gz")
    assert not is_archive(tmp_path / "gone.zip")


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


@settings(max_examples=300, deadline=None)
@given(st.lists(tar_members(), min_size=1, max_size=6))
@pytest.mark.slow
def test_no_list_of_tar_members_writes_or_leads_outside(members):
    check_nothing_outside(tar_bytes(*members), "m.tar")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@settings(max_examples=150, deadline=None)
@given(st.lists(zip_members(), min_size=1, max_size=6))
@pytest.mark.slow
def test_no_list_of_zip_members_writes_or_leads_outside(members):
    check_nothing_outside(zip_bytes(*members), "m.zip")


SAMPLES = {
    "m.tar": tar_bytes(*GOOD[1:3], entry("x", b"x", pax_headers={"comment": "c"}), link("l", "x")),
    "m.zip": zip_bytes(zip_entry("a", b"a" * 99), zip_entry("l", b"a", stat.S_IFLNK)),
    "m.tgz": gzip.compress(tar_bytes(entry("a", b"a" * 99)), mtime=0),
}


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(SAMPLES)),
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=5),
)
@pytest.mark.slow
def test_a_damaged_archive_is_unpacked_or_refused_and_nothing_else(name, changes):
    data = bytearray(SAMPLES[name])
    for at, value in changes:
        data[at % len(data)] = value
    check_nothing_outside(bytes(data), name)
