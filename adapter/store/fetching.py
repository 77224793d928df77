"""Brings an artifact from its store to disk: downloads with resumption, and unpacks."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from adapter.core.artifacts import FetchProgress
from adapter.errors import (
    AdapterError,
    InvalidArtifact,
    InvalidModel,
    NoRoom,
    StoreUnavailable,
)
from adapter.packages.archive_kinds import is_archive
from adapter.packages.contents import MAX_DEPTH, MAX_ENTRIES
from adapter.packages.roots import Inside
from adapter.packages.unpacking import Limits, disk_bytes
from adapter.packages.unpacking_process import UnpackingProcess
from adapter.runtime.threads import CACHE, FETCHED
from adapter.store.disk import Reservation
from adapter.store.ports import Changed, Store, StoredFile, failed
from adapter.store.waiting import RoomForFetches

# Requests without a byte of new content, one after the other, before a download is given up. Each
# was tried several times by obstore.
_MAX_IDLE_TRIES = 2
_FILES_AT_ONCE = 8
_LARGE_BYTES = 2**23  # then one more request is little
_MAX_NAME_BYTES = 255  # of one file or folder, on every Linux file system
_KILL_SECONDS = 5.0  # a process that waits for a disk may not end


@dataclass(frozen=True, slots=True)
class Version:
    """The version that a store has of a key: one object, or all those below a folder."""

    path: str
    etag: str  # the object's, or the hash of a folder's listing
    files: tuple[StoredFile, ...]
    is_folder: bool

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def disk_bytes(self) -> int:
        """Return what the objects take on disk as they are stored, without folders."""
        return sum(disk_bytes(file.size_bytes) for file in self.files)


def version_of_folder(path: str, files: Sequence[StoredFile]) -> Version:
    """Return the version that a listing means. Objects that only stand for a folder are left out:
    those of the folder's own name, and those that others are below.
    """
    parents = {path}
    for file in files:
        parts = file.path.split("/")
        parents.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    kept = sorted((file for file in files if file.path not in parents), key=lambda f: f.path)
    digest = sha256()
    for file in kept:
        digest.update(f"{file.path}\0{file.etag}\0{file.size_bytes}\0".encode())
    return Version(path, digest.hexdigest(), tuple(kept), is_folder=True)


class Fetch:
    """Fetches one version into `work`, once. After an error the caller removes what is there."""

    def __init__(
        self,
        store: Store,
        version: Version,
        *,
        work: Path,
        reservation: Reservation,
        room: RoomForFetches,
        progress: FetchProgress,
        limits: Limits,
    ) -> None:
        self._store = store
        self._room = room
        self._version = version
        self._reservation = reservation
        self._progress = progress
        self._limits = limits
        self._name = version.path.rpartition("/")[2]
        self._part = work / "part" / self._name
        self._files = work / "files"

    async def run(self) -> str:
        """Fetch and unpack; return the name of the package below `work`/files.

        Raises Changed if the store has another version meanwhile, BeginsAgain, StoreDenied,
        StoreUnavailable, InvalidArtifact, NoRoom, or OSError of the disk.
        """
        version = self._version
        self._refuse_names()
        self._progress.done_bytes, self._progress.total_bytes = 0, version.size_bytes
        if version.is_folder:
            self._refuse_too_much()
        need, files = self._reservation.need, len(version.files)
        size, inodes = max(version.disk_bytes, need.size_bytes), max(files, need.inodes)
        await self._room.reserve(self._reservation, size, inodes)
        await CACHE.run_to_end(self._files.mkdir)
        if version.is_folder:
            await self._fetch_folder(self._files / self._name)
            return self._name
        await CACHE.run_to_end(self._part.parent.mkdir)
        await self._download(version.files[0], self._part)
        if await CACHE.run(is_archive, self._part):
            await self._unpack()
        else:
            await CACHE.run_to_end(self._part.rename, self._files / self._name)
        return self._name

    # -- one object -------------------------------------------------------------------------

    async def _download(self, file: StoredFile, target: Path) -> None:
        """Write one object to `target`, going on where a connection broke."""
        descriptor = await CACHE.run_to_end(os.open, target, os.O_CREAT | os.O_WRONLY | os.O_EXCL)
        try:
            await self._download_to(descriptor, file)
            os.utime(descriptor, (file.modified, file.modified))
        finally:
            os.close(descriptor)

    async def _download_to(self, descriptor: int, file: StoredFile) -> None:
        done, idle = 0, 0
        while True:
            received, error = await self._receive(descriptor, file, done)
            done += received
            if done == file.size_bytes:
                return
            idle = 0 if received and file.is_exact else idle + 1
            if idle == _MAX_IDLE_TRIES or done > file.size_bytes:
                raise error or StoreUnavailable(self._wrong_length(file, done))
            if not file.is_exact:
                self._progress.done_bytes -= done
                done = 0
                await CACHE.run_to_end(self._begin_again, descriptor)

    async def _receive(
        self, descriptor: int, file: StoredFile, offset: int
    ) -> tuple[int, StoreUnavailable | None]:
        """Write what one request brings. Returns the bytes that came, and why no more did."""
        received = 0
        try:
            async with aclosing(self._store.read(file, offset)) as chunks:
                async for chunk in chunks:
                    received += len(chunk)
                    if offset + received > file.size_bytes:
                        break
                    await CACHE.run_to_end(self._write, descriptor, chunk)
                    self._progress.done_bytes += len(chunk)
        except StoreUnavailable as error:
            return received, error
        return received, None

    def _wrong_length(self, file: StoredFile, done: int) -> str:
        sent = "more than" if done > file.size_bytes else f"{done} of"
        reason = f"the store sent {sent} {file.size_bytes} bytes"
        return failed(self._store.location, file.path, reason)

    def _write(self, descriptor: int, chunk: bytes) -> None:
        self._reservation.take(len(chunk))
        left = memoryview(chunk)
        while left:
            left = left[os.write(descriptor, left) :]

    def _begin_again(self, descriptor: int) -> None:
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        self._reservation.settle(self._reservation.size_bytes - size)

    # -- a folder ---------------------------------------------------------------------------

    async def _fetch_folder(self, target: Path) -> None:
        await CACHE.run_to_end(target.mkdir)
        turns = asyncio.Semaphore(_FILES_AT_ONCE)

        async def fetch(file: StoredFile) -> None:
            async with turns:
                await self._fetch_file(file, target / file.path[len(self._version.path) + 1 :])

        tasks = [asyncio.create_task(fetch(file)) for file in self._version.files]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch_file(self, file: StoredFile, target: Path) -> None:
        """Fetch an object. An empty one that is not there stands for an empty folder, with a slash
        at the end of its key.
        """
        await CACHE.run_to_end(self._begin_file, target)
        try:
            await self._download(await self._exact(file), target)
        except Changed:
            if file.size_bytes:
                raise
            await CACHE.run_to_end(target.unlink)
            await CACHE.run_to_end(target.mkdir)

    def _begin_file(self, target: Path) -> None:
        self._reservation.take(0, inodes=1)
        target.parent.mkdir(parents=True, exist_ok=True)

    async def _exact(self, file: StoredFile) -> StoredFile:
        """Return a large file with the ETag by which its download can go on."""
        if not file.is_listed or file.size_bytes < _LARGE_BYTES:
            return file
        found = await self._store.stat(file.path)
        if found is None or found.size_bytes != file.size_bytes:
            raise Changed
        return found

    def _refuse_too_much(self) -> None:
        limit, files = self._limits.max_unpacked_bytes, self._version.files
        if len(files) > MAX_ENTRIES:
            raise self._invalid(f"it holds more than {MAX_ENTRIES} objects")
        if self._version.size_bytes > limit:
            raise self._invalid(
                f"it has {self._version.size_bytes} bytes; the limit is max_unpacked_bytes, {limit}"
            )

    def _refuse_names(self) -> None:
        for file in self._version.files:
            parts = file.path[len(self._version.path) + 1 :].split("/")
            if len(parts) > MAX_DEPTH or any(
                part in {".", ".."} or "\0" in part or len(part.encode()) > _MAX_NAME_BYTES
                for part in (*parts, self._name)
            ):
                raise self._invalid(
                    f"{file.path[:1024]!r} cannot be the path of a file: a part is '.', '..' or"
                    f" over {_MAX_NAME_BYTES} bytes, or there are more than {MAX_DEPTH} parts"
                )

    def _invalid(self, reason: str) -> InvalidArtifact:
        return InvalidArtifact(failed(self._store.location, self._version.path, reason))

    # -- an archive -------------------------------------------------------------------------

    async def _unpack(self) -> None:
        """Unpack the archive, and remove it. After cancellation nothing is written."""
        unpacking = UnpackingProcess()
        self._reservation.refresh()
        work = asyncio.ensure_future(FETCHED.run_to_end(self._unpack_by, unpacking))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._reservation.is_given_up = True
            unpacking.kill()
            work.cancel()
            await asyncio.wait({work}, timeout=_KILL_SECONDS)
            raise
        await CACHE.run_to_end(self._part.unlink)

    def _unpack_by(self, unpacking: UnpackingProcess) -> None:
        place, part = self._store.location.place(self._version.path), str(self._part)
        try:
            with Inside([str(self._part.parent)]).open_entry(part) as content:
                target = self._files / self._name
                unpacking.run(self._part, target, self._limits, content, self._reservation)
        except (InvalidArtifact, NoRoom):  # of the reservation, which has said what and where
            raise
        except AdapterError as error:  # callers see no path of this machine
            said = str(error).removeprefix(f"{part}: ").replace(part, self._name)
            text = f"the archive cannot be unpacked ({place}): {said}"
            if isinstance(error, InvalidModel):
                raise InvalidArtifact(text) from error
            error.args = (text.replace(str(self._files.parent), "the cache"),)
            raise
