"""Where broken packages register, for tests/packages/test_zoo.py; and those that are archives."""

import tarfile
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


@refused("m.tar.gz", "damaged")
def _archive_truncated(folder: Path) -> object:
    packed = pack(write_adding(folder / "m", 1), folder / "m.tar.gz")
    packed.write_bytes(packed.read_bytes()[:-50])
    return packed


@refused("m.tar.gz", "first bytes are those of no archive, not those of a tar.gz")
def _archive_of_no_kind(folder: Path) -> object:
    (folder / "m.tar.gz").write_text("<html>404</html>")
    return folder / "m.tar.gz"


@refused("m.tar.gz", "it is empty")
def _archive_empty(folder: Path) -> object:
    (folder / "m.tar.gz").touch()
    return folder / "m.tar.gz"


@refused("m.tar.gz", "holds no files")
def _archive_of_nothing(folder: Path) -> object:
    return tar_of(folder / "m.tar.gz")


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
