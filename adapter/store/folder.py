"""Reads a folder of this machine as a store."""

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from adapter.errors import (
    AdapterError,
    InvalidModel,
    InvalidRequest,
    StoreDenied,
    StoreUnavailable,
)
from adapter.packages.contents import ROOTS_SETTING
from adapter.packages.roots import Inside
from adapter.packages.unpack import MAX_TIME
from adapter.runtime.threads import LOOKUPS, WALKS
from adapter.settings.locations import StoreLocation
from adapter.store.ports import LISTED_AT_ONCE, Changed, StoredFile, describe_failure

_CHUNK_BYTES = 2**21
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
_DENIED = frozenset({errno.EACCES, errno.EPERM})

T = TypeVar("T")


class FolderStore:
    """A folder of this machine as a store. A path that a link leads out of it is refused."""

    def __init__(self, location: StoreLocation) -> None:
        self.location = location
        self._root = os.path.realpath(os.path.expanduser(location.base))  # noqa: PTH111 - a text
        self._inside = Inside([self._root])

    async def stat(self, path: str) -> StoredFile | None:
        """Return the file of exactly this path, as Store says."""
        return await LOOKUPS.run(self._apply, path, self._describe_file)

    async def list_below(self, path: str, limit: int) -> list[StoredFile]:
        """Return the files below a folder, as Store says."""
        files = await WALKS.run(self._apply, path, lambda each: self._list_below(each, limit))
        return files or []

    async def list_after(self, path: str) -> AsyncGenerator[Sequence[StoredFile], None]:
        """Yield all files whose paths follow `path`, as Store says."""
        files = self._walk_after(path)

        def take(_: str) -> list[StoredFile]:
            return list(islice(files, LISTED_AT_ONCE))

        while page := await WALKS.run(self._apply, "", take):
            yield page

    def _walk_after(self, after: str) -> Iterator[StoredFile]:
        """Yield the files that follow a path, sorted as a bucket sorts its keys.

        Entries that cannot be read, and those that a link leads out of the folder, are left out.
        """
        # each path with the folders above it, by their real paths: a link may lead back to one
        waiting: list[tuple[str, tuple[str, ...]]] = [("", ())]
        while waiting:
            path, parents = waiting.pop()
            try:
                with self._inside.open_entry(self._find_place(path.rstrip("/"))) as entry:
                    if not entry.is_folder:
                        file = _make_file(path, entry.status)
                    elif entry.real in parents:
                        continue
                    else:
                        file = None
                        with os.scandir(entry.by_descriptor) as entries:
                            names = [each.name + "/" * each.is_dir() for each in entries]
                        parents = (*parents, entry.real)
            except (OSError, InvalidModel):
                if path:
                    continue
                raise
            if file is not None:
                yield file
                continue
            paths = [path + name for name in names]
            # a folder that `after` lies in has files on both sides of it
            later = [
                each
                for each in paths
                if each > after or (each.endswith("/") and after.startswith(each))
            ]
            waiting += [(each, parents) for each in sorted(later, reverse=True)]

    async def read(self, file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the content from `offset` to before `end`, as Store says."""
        opening = asyncio.ensure_future(LOOKUPS.run(self._apply, file.path, self._open_file))
        try:
            descriptor = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)  # nobody waits for a disk that hangs
            raise
        if descriptor is None:
            raise Changed
        try:
            if _version(os.fstat(descriptor)) != file.etag:
                raise Changed
            while chunk := await WALKS.run(self._read_chunk, file.path, descriptor, offset, end):
                offset += len(chunk)
                yield chunk
            # somebody may have written to the file meanwhile
            if _version(os.fstat(descriptor)) != file.etag:
                raise Changed
        finally:
            os.close(descriptor)

    async def check(self) -> None:
        """Raise an error if the folder cannot be read."""
        await self.stat("")

    def _apply(self, path: str, act: Callable[[str], T]) -> T | None:
        """Return what `act` returns for the path; None if nothing is there. Word its errors for
        callers.
        """
        try:
            return act(path)
        except OSError as error:
            worded = self._make_error(error, path)
            if worded is None:
                return None
            raise worded from error
        except InvalidModel as error:
            reason = str(error).replace(f"the model roots{ROOTS_SETTING}", "the store")
            reason = reason.replace(f"{self._root}/", "")  # callers see no path of this machine
            raise InvalidRequest(describe_failure(self.location, path, reason)) from error

    def _describe_file(self, path: str) -> StoredFile | None:
        with self._inside.open_entry(self._find_place(path)) as entry:
            return None if entry.is_folder else _make_file(path, entry.status)

    def _list_below(self, path: str, limit: int) -> list[StoredFile]:
        """Return the files below a path, at most `limit`. Called in a thread."""
        files: list[StoredFile] = []
        for name, entry in self._inside.tree(self._find_place(path)):
            if not entry.is_folder:
                files.append(_make_file(f"{path}/{name}" if name else path, entry.status))
            if len(files) == limit:
                break
        return files

    def _open_file(self, path: str) -> int:
        with self._inside.open_entry(self._find_place(path)) as entry:
            if entry.is_folder:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return os.open(entry.by_descriptor, os.O_RDONLY | os.O_CLOEXEC)

    def _read_chunk(self, path: str, descriptor: int, offset: int, end: int) -> bytes:
        try:
            return os.pread(descriptor, min(_CHUNK_BYTES, end - offset), offset)
        except OSError as error:
            raise StoreUnavailable(
                describe_failure(self.location, path, _describe_error(error))
            ) from error

    def _find_place(self, path: str) -> str:
        # no Path: Python 3.12 keeps the parts of each one that was ever made
        return os.path.join(self._root, path)  # noqa: PTH118

    def _make_error(self, error: OSError, path: str) -> AdapterError | None:
        """Return the error for callers. Return None where nothing is at the path for certain: the
        store's own folder is there.
        """
        if error.errno in _ABSENT:
            with suppress(OSError):
                if os.path.isdir(self._root):  # noqa: PTH112 - as in `_find_place`
                    return None
            return StoreUnavailable(
                describe_failure(self.location, path, "the folder is not there")
            )
        if error.errno == errno.ELOOP:
            return InvalidRequest(describe_failure(self.location, path, _describe_error(error)))
        if error.errno in _DENIED:
            return StoreDenied(describe_failure(self.location, path, _describe_error(error)))
        return StoreUnavailable(describe_failure(self.location, path, _describe_error(error)))


def _close_opened(opening: asyncio.Future[int | None]) -> None:
    """Close the file whose reader was cancelled before it had the descriptor."""
    if opening.cancelled() or opening.exception() is not None:
        return
    descriptor = opening.result()
    if descriptor is not None:
        os.close(descriptor)


def _make_file(path: str, status: os.stat_result) -> StoredFile:
    """Describe a file. A time that no calendar here has, such as the year 11476, becomes 1970."""
    modified = status.st_mtime if status.st_mtime < MAX_TIME else 0.0
    return StoredFile(path, status.st_size, _version(status), modified)


def _version(status: os.stat_result) -> str:
    """Return the version of a file: its inode, size and time."""
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _describe_error(error: OSError) -> str:
    """Return the text of an error of the disk, without the path."""
    return error.strerror or "it cannot be read"
