"""Where broken packages register, for tests/packages/test_zoo.py; and those that are archives."""

import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.packages.models import (
    pack,
    tar_of,
    write_adding,
)

# Makes the package in an empty folder; returns the url where it is another, or a load's fields.
Make = Callable[[Path], object]


@dataclass(frozen=True)
class Animal:
    """`said` is what the message must hold."""

    make: Make
    said: tuple[str, ...]
    status: int

    def __str__(self) -> str:
        return self.make.__name__.strip("_")


ZOO: list[Animal] = []


def refused(*said: str, status: int = 400) -> Callable[[Make], Make]:
    """Register a broken package. What the message must say: file and reason."""

    def add(make: Make) -> Make:
        ZOO.append(Animal(make, said, status))
        return make

    return add


def member(name: str, kind: bytes = tarfile.REGTYPE, to: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


@refused("m.tar.gz", "entry '../evil'", 'holds ".."')
def _archive_escapes(folder: Path) -> object:
    return tar_of(folder / "m.tar.gz", (member("../evil"), b"x"))


@refused("m.tar.gz", "entry '/evil'", "absolute")
def _archive_absolute(folder: Path) -> object:
    return tar_of(folder / "m.tar.gz", (member("/evil"), b"x"))


@refused("m.tar.gz", "entry 'out'", "link to '/etc'")
def _archive_link(folder: Path) -> object:
    return tar_of(folder / "m.tar.gz", (member("out", tarfile.SYMTYPE, "/etc"), b""))


@refused("m.tar.gz", "entry 'dev'", "neither a file, a folder nor a link")
def _archive_device(folder: Path) -> object:
    return tar_of(folder / "m.tar.gz", (member("dev", tarfile.CHRTYPE), b""))


@refused("m.tar.gz", "damaged")
def _archive_truncated(folder: Path) -> object:
    packed = pack(write_adding(folder / "m", 1), folder / "m.tar.gz")
    packed.write_bytes(packed.read_bytes()[:-50])
    return packed


@refused("m.zip", "damaged")
def _archive_zip_truncated(folder: Path) -> object:
    packed = pack(write_adding(folder / "m", 1), folder / "m.zip")
    packed.write_bytes(packed.read_bytes()[:-10])
    return packed


@refused("m.tar.gz", "first bytes are those of no archive, not those of a tar.gz")
def _archive_of_no_kind(folder: Path) -> object:
    (folder / "m.tar.gz").write_text("<html>404</html>")
    return folder / "m.tar.gz"


@refused("m.zip", "first bytes are those of tar.gz, not those of a zip")
def _archive_of_another_kind(folder: Path) -> object:
    return pack(write_adding(folder / "m", 1), folder / "m.tar.gz").rename(folder / "m.zip")


@refused("m.tar.gz", "it is empty")
def _archive_empty(folder: Path) -> object:
    (folder / "m.tar.gz").touch()
    return folder / "m.tar.gz"


@refused("m.tar.gz", "holds no files")
def _archive_of_nothing(folder: Path) -> object:
    return tar_of(folder / "m.tar.gz")


@refused("m.zip", "entry '1/model.py'", "encrypted")
def _archive_encrypted(folder: Path) -> object:
    packed = pack(write_adding(folder / "m", 1), folder / "m.zip")
    raw = bytearray(packed.read_bytes())
    for magic, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = raw.find(b"1/model.py") - (30 if magic == b"PK\3\4" else 0)
        if magic == b"PK\1\2":
            at = raw.rfind(b"1/model.py") - 46
        raw[at + offset] |= 1
    packed.write_bytes(raw)
    return packed


@refused("m.zip", "overlaps another entry")
def _archive_zip_bomb(folder: Path) -> object:
    """Entries that share their bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a", bytes(2**20))
        packed.writestr("b", bytes(2**20))
    raw = bytearray(buffer.getvalue())
    second = raw.rfind(b"PK\1\2")
    raw[second + 42 : second + 46] = struct.pack("<I", 0)
    (folder / "m.zip").write_bytes(raw)
    return folder / "m.zip"


@refused("m.tar", "more than 100000 entries")
def _archive_of_many(folder: Path) -> object:
    """Folders cost an archive nothing: 63 in each path."""
    with tarfile.open(folder / "m.tar", "w") as packed:
        for number in range(1700):
            packed.addfile(member(f"{number}/" + "/".join("d" * 62), tarfile.DIRTYPE))
    return folder / "m.tar"


@refused("m.zip", "config.pbtxt", "is empty")
def _archive_with_a_broken_model(folder: Path) -> object:
    (write_adding(folder / "m", 1) / "config.pbtxt").write_text("")
    return pack(folder / "m", folder / "m.zip")
