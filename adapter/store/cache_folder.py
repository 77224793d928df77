"""Keeps the cache on disk: a folder for each artifact, with a note of what it is.

    triton-adapter-cache        locked by the process that uses the folder
    artifacts/ID/current.json   key, ETag, size and files; its modification time is the last use
    artifacts/ID/replaced.json  the same note, once the store had another version or none
    artifacts/ID/files/         the package
    work/                       what is being fetched or removed

An artifact gets its place by one rename when it is whole, note included, and leaves it by another.
So whatever moment the process is killed at, what lies in `artifacts` is whole, and all in `work`
can go. The name of the note is changed by a rename as well: so the disk says of each artifact, at
any moment, whether it is the version that the store had last, which alone is served in an outage.
"""

import fcntl
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from adapter.errors import BackendUnavailable, InvalidSettings
from adapter.packages.unpack import BLOCK_BYTES, Free, disk_bytes, free_at
from adapter.runtime import clock

log = logging.getLogger(__name__)

_LOCK = "triton-adapter-cache"
_OF_THE_DISK = {"lost+found"}  # ext4 makes it in every new file system
_LOCK_PAUSE_SECONDS = 0.05
_CURRENT = "current.json"
_REPLACED = "replaced.json"


@dataclass(frozen=True, slots=True)
class Note:
    """The note of an artifact."""

    store: str  # the location, as a URL or a path
    path: str
    etag: str
    name: str  # of the package below `files`
    size_bytes: int
    sizes: dict[str, int]  # bytes of each regular file, by path below `files`

    @property
    def id(self) -> str:
        """Return the name of the artifact's folder."""
        return artifact_id(self.store, self.path, self.etag)


@dataclass(slots=True)
class Cached:
    """An artifact on disk."""

    note: Note
    last_used: float  # in seconds since 1970
    pins: int = 0  # by fetches and loads; an artifact without any may leave
    is_replaced: bool = False  # the store has another version, or none; the folder says so too
    is_lost: bool = False  # some of its files were deleted, so that nobody finds it any more


def artifact_id(store: str, path: str, etag: str) -> str:
    """Name the folder of an artifact."""
    return sha256(f"{store}\0{path}\0{etag}".encode()).hexdigest()[:32]


class CacheFolder:
    """The folder, locked by this process. `open` comes first; all methods are for threads."""

    def __init__(self, path: Path, *, lock_seconds: float = 2.0) -> None:
        # a process that was killed amid a fork holds its lock until the fork is another program
        self._lock_seconds = lock_seconds
        self.path = Path(os.path.realpath(path.expanduser()))
        self._artifacts = self.path / "artifacts"
        self._work = self.path / "work"
        self._lock: int | None = None
        self._is_open = False
        # another adapter took the folder after somebody had emptied it
        self.lost_reason: str | None = None
        self._restoring = threading.Lock()
        self._undeleted: dict[Path, int] = {}  # folders, and their bytes that are still on disk

    def open(self) -> list[Cached]:
        """Take the folder over, remove what is not whole, and return the artifacts that are.

        Raises InvalidSettings if the folder cannot be used, or another process uses it.
        """
        try:
            self._take()
            self._is_open = True
            for folder in (self._artifacts, self._work):
                folder.mkdir(exist_ok=True)
            for leftover in sorted(self._work.iterdir()):
                self._delete(leftover)
            return list(self._read_artifacts())
        except OSError as error:
            raise InvalidSettings([f"cache_dir: {self.path}: {error.strerror}"]) from error

    def close(self) -> None:
        """Let other processes use the folder."""
        self._is_open = False
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def new_work(self) -> Path:
        """Return where `make` may make a folder, which `drop` removes or `publish` moves."""
        return self._work / uuid4().hex

    def make(self, work: Path) -> None:
        """Make the folder of a fetch."""
        self._restore()
        work.mkdir()

    def drop(self, work: Path) -> None:
        """Delete what a fetch has written."""
        self._delete(work)

    @property
    def undeleted_bytes(self) -> int:
        """Return what files take on disk that should be gone and could not be deleted."""
        return sum(self._undeleted.copy().values())

    def delete_again(self) -> None:
        """Try again to delete what could not be deleted."""
        for folder in list(self._undeleted):
            self._delete(folder)

    def _delete(self, folder: Path) -> None:
        """Delete a folder; count and log what cannot be deleted now."""
        try:
            if folder.is_dir():
                shutil.rmtree(folder)
            else:
                folder.unlink(missing_ok=True)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)  # delete the rest of the folder
            reason = error.strerror or str(error)
        if not folder.exists():
            self._undeleted.pop(folder, None)
            return
        size_bytes, _ = _measure(folder)
        if folder not in self._undeleted:
            fields = {"folder": str(folder), "bytes": size_bytes, "reason": reason}
            log.warning("artifact.not_deleted", extra=fields)
        self._undeleted[folder] = size_bytes

    def measure(self, work: Path) -> tuple[int, dict[str, int]]:
        """Return what the package of a fetch takes on disk, and the size of each file."""
        return _measure(work / "files")

    def publish(self, work: Path, note: Note) -> None:
        """Make the fetched package an artifact."""
        written = json.dumps(asdict(note)).encode()
        with (work / _CURRENT).open("wb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        target = self._artifacts / note.id
        if target.exists():  # of a version that was evicted, and could not be moved away
            self.remove(note.id)
        self._restore()
        work.rename(target)

    def is_complete(self, note: Note) -> bool:
        """Return whether the files of an artifact are there, whatever is in them by now."""
        files = self._artifacts / note.id / "files"
        return all(os.path.exists(files / path) for path in (note.name, *note.sizes))  # noqa: PTH110 - many

    def place(self, note: Note) -> str:
        """Return the real path of the package."""
        return str(self._artifacts / note.id / "files" / note.name)

    def remove(self, id_: str) -> None:
        """Remove an artifact; at once it is none any more."""
        self._restore()
        leaving = self.new_work()
        with suppress(FileNotFoundError):
            (self._artifacts / id_).rename(leaving)
        self._delete(leaving)

    def touch(self, id_: str, last_used: float) -> None:
        """Set the time of the artifact's note to its last use, for later runs."""
        for name in (_CURRENT, _REPLACED):
            with suppress(OSError):  # an artifact has its note under one of the two names
                os.utime(self._artifacts / id_ / name, (last_used, last_used))

    def mark(self, id_: str, *, is_replaced: bool) -> None:
        """Note for later runs whether the store has another version than this artifact, or none."""
        self._restore()
        folder = self._artifacts / id_
        with suppress(FileNotFoundError):  # the artifact was removed
            if is_replaced:
                (folder / _CURRENT).rename(folder / _REPLACED)
            else:
                (folder / _REPLACED).rename(folder / _CURRENT)

    def free(self) -> Free:
        """Return what is free on the disk."""
        return free_at(self.path)

    def refresh(self) -> str | None:
        """Return `lost_reason`, as of now."""
        with self._restoring, suppress(BackendUnavailable, OSError):
            if (self.path / _LOCK).exists():  # without the file nobody has taken the folder
                self._renew_lock()
        return self.lost_reason

    def _restore(self) -> None:
        """Make again what somebody has deleted since `open`. Raises BackendUnavailable if another
        adapter has the folder now.
        """
        with self._restoring:
            for folder in (self._artifacts, self._work):
                folder.mkdir(parents=True, exist_ok=True)
            self._renew_lock()

    def _renew_lock(self) -> None:
        """Take the lock again if its file is not the one that this process has locked.

        Raises BackendUnavailable if another process has locked it.
        """
        if not self._is_open or self._is_locked():
            return
        self._unlock()
        try:
            self._take_lock()
        except InvalidSettings as error:
            self.lost_reason = str(error)
            text = "the disk cache is in use by another triton-adapter"  # callers see no paths
            raise BackendUnavailable(text, delivered=False) from error
        self.lost_reason = None

    def _is_locked(self) -> bool:
        """Return whether the lock file is still the one that we hold."""
        try:
            lock = os.stat(self.path / _LOCK)  # noqa: PTH116
        except FileNotFoundError:
            return False
        return self._lock is not None and os.path.samestat(os.fstat(self._lock), lock)

    def _take(self) -> None:
        """Lock the folder; make it where it is not there."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.path / _LOCK
        if not lock.exists() and set(os.listdir(self.path)) - _OF_THE_DISK:  # noqa: PTH208 - names
            raise InvalidSettings(
                [f"cache_dir: {self.path} holds other files: set it to an empty or a new folder"]
            )
        self._take_lock()

    def _take_lock(self) -> None:
        lock = self.path / _LOCK
        self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            self._wait_for_lock(self._lock)
        except BlockingIOError as error:
            owner = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
            self._unlock()
            text = (
                f"cache_dir: {self.path} is in use by another triton-adapter (process {owner}):"
                " set another with --cache-dir or ADAPTER_CACHE_DIR; see docs/stores.md#the-disk"
            )
            raise InvalidSettings([text]) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _wait_for_lock(self, lock: int) -> None:
        end = clock.monotonic() + self._lock_seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if clock.monotonic() >= end:
                    raise
                clock.sleep(_LOCK_PAUSE_SECONDS)
            else:
                return

    def _read_artifacts(self) -> Iterator[Cached]:
        """Yield the complete artifacts in the folder, and remove the others."""
        for folder in sorted(self._artifacts.iterdir()):
            if (cached := _read(folder)) is None:
                self.remove(folder.name)
            else:
                yield cached


def _read(folder: Path) -> Cached | None:
    """Return the artifact; None if its note cannot be read, or not all of its files are there.

    Other files may be there: python code writes some beside itself.
    """
    is_replaced = (folder / _REPLACED).exists()
    file = folder / (_REPLACED if is_replaced else _CURRENT)
    try:
        last_used = file.stat().st_mtime
        note = Note(**json.loads(file.read_bytes()))
        for path, size in note.sizes.items():
            status = (folder / "files" / path).lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    is_named = folder.name == note.id and (folder / "files" / note.name).exists()
    return Cached(note, last_used, is_replaced=is_replaced) if is_named else None


def _measure(root: Path) -> tuple[int, dict[str, int]]:
    """Return what a folder takes on disk, and the size of each file in it by its path there."""
    total = BLOCK_BYTES
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for folder, folders, names in os.walk(root):
        for name in names + folders:
            status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - many
            if stat.S_ISREG(status.st_mode):
                path = os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118
                sizes[path] = status.st_size
                if status.st_ino in seen:
                    continue
                seen.add(status.st_ino)
                total += disk_bytes(status.st_size)
            else:
                total += BLOCK_BYTES
    return total, sizes
