"""Fills a folder from an archive, and checks each path, link, size and time. Also what files take
of a disk, and how much of it is left to others.
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from adapter.errors import BackendError, InvalidModel
from adapter.packages.contents import MAX_ENTRIES
from adapter.packages.messages import invalid_model, shown

# Not what statvfs says: network file systems say the 1 MiB that they transfer at a time.
BLOCK_BYTES = 4096
# The rest of the disk is not for packages: other programs, and Triton, write to it as well.
RESERVE_BYTES = 2**30
RESERVE_INODES = 4096
CHUNK = 2**20
MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255  # of one folder or file name, on every Linux file system
_MAX_DEPTH = 64
# A file of zeros packs 1000 to 1, and small ones do no harm.
_RATIO_FLOOR_BYTES = 2**30
_MAX_ROOM_STEP_BYTES = 2**24
_MAX_ROOM_STEP_INODES = 2**8
_PACKED = (".tar.gz", ".tgz", ".tar")  # endings of what may be a packed Python environment
_SAFE_TIMES = 2**31  # seconds, which all file systems take
MAX_TIME = 2**33  # seconds; file systems and os.utime take no more for certain


@dataclass(frozen=True, slots=True)
class Free:
    """The free space of a disk."""

    bytes: int
    inodes: int | None  # files, folders and links that can still be made; None without a limit


def free_at(folder: str | os.PathLike[str]) -> Free:
    """Return the free space of the disk that a folder is on."""
    status = os.statvfs(folder)
    return Free(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)


def disk_bytes(size: int = 0) -> int:
    """Return what a file of so many bytes takes of a disk; folders, links and empty files take a
    block.
    """
    return max(BLOCK_BYTES, size + -size % BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what an archive may unpack to."""

    # larger models come as folders, which nobody has to unpack
    max_unpacked_bytes: int = 64 * 2**30
    max_entries: int = MAX_ENTRIES  # files, links, and folders, also those only named in a path
    max_ratio: int = 1000  # unpacked bytes for each packed one; checked above 1 GiB


class Unpacking:
    """Writes what an archive holds, and keeps count of it.

    Links are made when all else is there, so nothing is ever written through one. Folders that hold
    no file come just before: an archive may name any number of them for next to nothing.
    """

    def __init__(
        self,
        archive: Path,
        packed_bytes: int,  # of the archive
        target: Path,
        limits: Limits,
        room: Callable[[int, int], None] | None = None,
    ) -> None:
        """Begin with the empty folder `target`.

        `room(bytes, inodes)` is called before so many are written and made, and raises if there is
        no room for them; it also keeps the disk's reserve.
        """
        self._archive = archive
        self._target = target
        self._max_entries = limits.max_entries
        by_ratio = max(_RATIO_FLOOR_BYTES, limits.max_ratio * packed_bytes)
        self._max_bytes = min(limits.max_unpacked_bytes, by_ratio)
        self._limit = (
            "that of every archive: a folder has none"
            if limits.max_unpacked_bytes <= by_ratio
            else f"1 GiB, or {limits.max_ratio} times its own size where that is more"
        )
        self._free = free_at(target)
        self._room = room
        self._granted_bytes = self._granted_inodes = 0
        self._bytes = 0
        self._disk_bytes = 0
        self._entry = ""
        self._kinds: dict[str, str] = {}  # by path in the target
        self._links: dict[str, str] = {}
        self._folder_times: dict[str, float] = {}

    def begin(self, entry: str) -> None:
        """Name the entry that the following calls, and their errors, are about."""
        self._entry = entry

    def expect(self, entries: int) -> None:
        """Raise InvalidModel if an archive of so many entries has too many."""
        if entries > self._max_entries:
            raise self.make_error(f"the archive holds more than {self._max_entries} entries")

    def make_error(self, reason: str) -> InvalidModel:
        """Return the error for the archive and the entry that `begin` named."""
        entry = f": entry {self._entry[:MAX_NAME_BYTES]!r}" if self._entry else ""
        return invalid_model(f"{self._archive}{entry}", reason)

    def _make_size_error(self) -> InvalidModel:
        """Return the error for an archive that unpacks to too many bytes."""
        return self.make_error(
            f"the archive unpacks to more than {self._max_bytes} bytes; the limit is {self._limit}"
        )

    def spend(self, size: int) -> None:
        """Count bytes that came out of the archive. Raise InvalidModel if they are too many."""
        self._bytes += size
        if self._bytes > self._max_bytes:
            raise self._make_size_error()

    def foresee(self, sizes: Sequence[int]) -> None:
        """Reserve room for all entries at once, where the archive says how large they are. Raise
        InvalidModel if they are too large together.
        """
        if sum(sizes) > self._max_bytes:
            raise self._make_size_error()
        if self._room is not None and sizes:
            self._granted_bytes = sum(map(disk_bytes, sizes))
            self._granted_inodes = len(sizes)
            self._room(self._granted_bytes, self._granted_inodes)

    def _occupy(self, size: int) -> None:
        """Count bytes on disk before they are written, and the entries that `_note` has counted.
        Raise an error if the disk has no room for them.
        """
        self._disk_bytes += size
        inodes = len(self._kinds)
        if self._room is None:
            self._refuse_without_room(size, inodes)
        elif self._disk_bytes > self._granted_bytes or inodes > self._granted_inodes:
            step = _choose_room_step(self._disk_bytes, self._granted_bytes, _MAX_ROOM_STEP_BYTES)
            more = _choose_room_step(inodes, self._granted_inodes, _MAX_ROOM_STEP_INODES)
            self._room(step, more)
            self._granted_bytes += step
            self._granted_inodes += more

    def _refuse_without_room(self, size: int, inodes: int) -> None:
        """Raise BackendError if what was counted would leave less than the disk's reserve. Others
        may write to the disk meanwhile: it is asked again for each `size`.
        """
        free = self._free
        what = f"cannot unpack {shown(self._archive)}"
        disk = f"the disk of {shown(self._target)}"
        written = self._disk_bytes - size
        room = min(free.bytes, free_at(self._target).bytes + written) - RESERVE_BYTES
        if self._disk_bytes > room:
            raise BackendError(f"{what}: {disk} has no more than {max(0, room)} bytes for it")
        if free.inodes is not None and inodes > free.inodes - RESERVE_INODES:
            raise BackendError(
                f"{what}: {inodes} files and folders or more are in it, and {disk} has"
                f" {free.inodes} inodes free, of which {RESERVE_INODES} are kept; remove files"
                " there, or name another disk by the setting repository"
            )

    def add_folder(self, mtime: float) -> None:
        """Note a folder, which may come twice: `tar -C a . -C b .` writes `./` each time."""
        parts = self._parts(self._entry)
        if parts:
            path = "/".join(parts)
            if self._kinds.get(path) != "folder":
                self._claim(parts, "folder")
            self._folder_times[path] = mtime

    def add_file(self, source: IO[bytes], *, size: int, mode: int, mtime: float) -> None:
        """Write the entry's file. Raise InvalidModel if its path is not allowed, or `source` has
        other than `size` bytes. Of `mode` only whether the owner may execute it is kept.
        """
        path = self._path(self._claim(self._parts(self._entry), "file"))
        path.parent.mkdir(parents=True, exist_ok=True)
        written = 0
        digest = sha256()
        is_packed = path.name.endswith(_PACKED)
        with path.open("xb") as file:
            while chunk := source.read(CHUNK):
                self.spend(len(chunk))
                self._occupy(disk_bytes(written + len(chunk)) - disk_bytes(written))
                written += file.write(chunk)
                if is_packed:
                    digest.update(chunk)
        if written != size:
            raise self.make_error(f"the archive is damaged: {written} of {size} bytes are there")
        path.chmod(0o755 if mode & stat.S_IXUSR else 0o644)
        # Triton takes an environment of the same path and time for one that it has unpacked already
        moment = int.from_bytes(digest.digest()[:4], "big") % _SAFE_TIMES if is_packed else mtime
        _set_time(path, moment)

    def add_link(self, to: str) -> None:
        """Note the entry as a link, which `finish` makes. Raise InvalidModel if its path is not
        allowed, or `to` cannot be a path.
        """
        if not to or "\0" in to or len(to) > MAX_NAME_BYTES:
            raise self.make_error("it is a link to something that is not a path")
        self._links[self._claim(self._parts(self._entry), "link")] = to

    def add_hard_link(self, to: str) -> None:
        """Make the entry a hard link. Raise InvalidModel if its path is not allowed, or `to` is not
        the path of a file that came before it.
        """
        first = "/".join(self._parts(to))
        if self._kinds.get(first) != "file":
            raise self.make_error(f"it is a hard link to {to!r}, which is not a file before it")
        path = self._path(self._claim(self._parts(self._entry), "file"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(self._path(first))

    def finish(self) -> None:
        """Make the links and the folders that hold no file, and set modes and times of folders.
        Raise InvalidModel if a link may lead out of the archive.
        """
        for name, to in self._links.items():
            self.begin(name)
            if self._leads_out(name, to):
                raise self.make_error(f"it is a link to {to!r}, which may lead out of the archive")
        for name in [name for name, kind in self._kinds.items() if kind == "folder"]:
            self._path(name).mkdir(parents=True, exist_ok=True)
        for name, to in self._links.items():
            # as Path writes it: os.path.realpath takes what follows "//" in a loop for absolute
            self._path(name).symlink_to(Path(to))
        for name in [name for name, kind in self._kinds.items() if kind == "folder"] + [""]:
            self._path(name).chmod(0o755)
        for name, mtime in self._folder_times.items():
            _set_time(self._path(name), mtime)

    def _path(self, name: str) -> Path:
        """Return where an entry is written, of a path that was checked."""
        return self._target / name

    def _parts(self, name: str) -> list[str]:
        """Return an entry's path below the target, part by part; nothing for the target itself.
        Raise InvalidModel for a path that leads out of the target, or that is too deep or long.
        """
        parts = [part for part in name.split("/") if part not in {"", "."}]
        if "\0" in name:
            raise self.make_error("its path holds a NUL")
        if name.startswith("/"):
            raise self.make_error(f"the path {name!r} is absolute")
        if ".." in parts:
            raise self.make_error(f'the path {name!r} holds ".."')
        if len(parts) > _MAX_DEPTH:
            raise self.make_error(f"it is more than {_MAX_DEPTH} folders deep")
        sizes = [len(os.fsencode(part)) for part in parts]
        if max(sizes, default=0) > _MAX_PART_BYTES or sum(sizes) > MAX_NAME_BYTES:
            raise self.make_error("its path is too long")
        return parts

    def _claim(self, parts: list[str], kind: str) -> str:
        """Note that an entry of a kind, `file`, `folder` or `link`, has a path, and which folders
        are above it; return the path. Raise InvalidModel if another entry has the path, or if what
        is above it is no folder.
        """
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above not in self._kinds:
                self._note(above, "folder")
            elif self._kinds[above] != "folder":
                raise self.make_error(f"it is below {above!r}, which is a {self._kinds[above]}")
        path = "/".join(parts)
        if not parts or path in self._kinds:
            raise self.make_error("its path is taken by an earlier entry")
        self._note(path, kind)
        return path

    def _note(self, path: str, kind: str) -> None:
        """Count an entry of this path, and the block on disk that each takes. Raise InvalidModel if
        the entries are too many, or what `_occupy` raises.
        """
        self._kinds[path] = kind
        self.expect(len(self._kinds))
        self._occupy(BLOCK_BYTES)

    def _leads_out(self, name: str, to: str) -> bool:
        """Return whether a link at the path `name` may lead out of the archive. A link may not lead
        up from behind another one: that is not where the text says.
        """
        here = name.split("/")[:-1]
        behind_link = False
        for part in to.split("/"):
            if part == "..":
                if behind_link or not here:
                    return True
                here.pop()
            elif part not in {"", "."}:
                here.append(part)
                behind_link = behind_link or self._kinds.get("/".join(here)) == "link"
        return to.startswith("/")


def _choose_room_step(needed: int, granted: int, max_step: int) -> int:
    """Return how much room to request: 0 if no more is needed than was granted, else what is
    missing. To make requests rare, an eighth of what was granted, but at most `max_step`, if that
    is more.
    """
    if needed <= granted:
        return 0
    return max(needed - granted, min(granted // 8, max_step))


def _set_time(path: Path, mtime: float) -> None:
    """Set the modification time of a path; one before 1970, after 2242 or not a number becomes
    1970.
    """
    nanoseconds = int(mtime * 10**9) if 0 <= mtime < MAX_TIME else 0
    os.utime(path, ns=(nanoseconds, nanoseconds))
