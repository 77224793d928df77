"""The disk cache on a real folder, of a disk whose room is simulated."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from adapter.packages.unpack import RESERVE_BYTES, RESERVE_INODES, Free, disk_bytes
from adapter.runtime import clock
from adapter.store.cache_folder import CacheFolder, Note
from tests.simulation.store import read_back

CACHE_FAULTS = {"publish": ("full", "broken")}
_ERRNO = {"full": errno.ENOSPC, "broken": errno.EIO}
_INODES = 40


class Room:
    """Counts the room on a disk beside its reserve. The folders of the cache itself are free."""

    def __init__(self, all_bytes: int) -> None:
        self.all_bytes = all_bytes
        self.strangers = 0

    def free(self, folder: Path) -> Free:
        taken, count = used(folder / "artifacts"), 0
        for name in ("work", "artifacts"):
            count += sum(len(folders) + len(files) for _, folders, files in os.walk(folder / name))
        left = self.all_bytes - self.strangers - taken - used(folder / "work")
        return Free(RESERVE_BYTES + left, RESERVE_INODES + max(0, _INODES * 8 - count))


def used(folder: Path) -> int:
    """Return what the regular files below a folder take."""
    found = 0
    for place, _, names in os.walk(folder):
        found += sum(disk_bytes(os.lstat(os.path.join(place, name)).st_size) for name in names)  # noqa: PTH118
    return found


class SimFolder(CacheFolder):
    """The real folder with the room that is simulated; `fault(verb, key)` as for SimTriton."""

    def __init__(self, path: Path, room: Room, fault: Callable[[str, str], str | None]) -> None:
        super().__init__(path, lock_seconds=0.0)
        self._room = room
        self._fault = fault
        self.kept: Callable[[Path], object] = lambda _: None  # a package, from now on

    def free(self) -> Free:
        return self._room.free(self.path)

    def publish(self, work: Path, note: Note) -> None:
        if (fault := self._fault("publish", note.path)) is not None:
            raise OSError(_ERRNO[fault], os.strerror(_ERRNO[fault]))
        super().publish(work, note)
        # without this the note has the real time until its next use
        self.touch(note.id, clock.wall())
        [package] = (self.path / "artifacts" / note.id / "files").iterdir()
        self.kept(package)


def files_at(package: Path) -> dict[str, bytes]:
    """Return the content of each file of a package, by its path in there; a lone file has none."""
    if package.is_file():
        return {"": package.read_bytes()}
    found = (Path(place, name) for place, _, names in os.walk(package) for name in sorted(names))
    return {str(path.relative_to(package)): path.read_bytes() for path in sorted(found)}


def labels_of(files: dict[str, bytes]) -> dict[str, tuple[str, int]]:
    """Return what each file says that it is of, and its length."""
    return {path: (read_back(content)[0], len(content)) for path, content in files.items()}
