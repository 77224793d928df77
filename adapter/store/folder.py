"""A folder of this machine as a store; needs nothing installed."""

import errno
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from adapter.errors import AdapterError, InvalidModel, InvalidRequest, StoreDenied, StoreUnavailable
from adapter.packages.contents import ROOTS_SETTING
from adapter.packages.roots import Inside
from adapter.runtime.threads import LOOKUPS, WALKS
from adapter.settings.locations import StoreLocation
from adapter.store.failures import failed
from adapter.store.ports import Changed, StoredFile

_CHUNK_BYTES = 2**21
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
_DENIED = frozenset({errno.EACCES, errno.EPERM})

T = TypeVar("T")


class FolderStore:
    """Its keys are paths below the folder. A path that leads out of it, by a link, is refused."""

    def __init__(self, location: StoreLocation) -> None:
        self.location = location
        self._root = os.path.realpath(location.base)
        self._inside = Inside([self._root])

    async def stat(self, path: str) -> StoredFile | None:
        return await LOOKUPS.run(self._asked, path, self._stat)

    async def below(self, path: str, limit: int) -> list[StoredFile]:
        found = await WALKS.run(self._asked, path, lambda each: self._below(each, limit))
        return found or []

    async def read(self, file: StoredFile, offset: int) -> AsyncGenerator[bytes, None]:
        descriptor = await LOOKUPS.run(self._asked, file.path, self._open)
        if descriptor is None:
            raise Changed
        try:
            if _version(os.fstat(descriptor)) != file.etag:
                raise Changed
            while chunk := await WALKS.run(self._chunk, file.path, descriptor, offset):
                offset += len(chunk)
                yield chunk
            if _version(os.fstat(descriptor)) != file.etag:  # it was written to meanwhile
                raise Changed
        finally:
            os.close(descriptor)

    async def check(self) -> None:
        await self.stat("")

    def _asked(self, path: str, act: Callable[[str], T]) -> T | None:
        """Return what `act` finds at the path; None if nothing is there."""
        try:
            return act(path)
        except OSError as error:
            raise_as = self._error(error, path)
            if raise_as is None:
                return None
            raise raise_as from error
        except InvalidModel as error:
            reason = str(error).replace(f"the model roots{ROOTS_SETTING}", "the store")
            reason = reason.replace(f"{self._root}/", "")  # callers are told no path of the machine
            raise InvalidRequest(failed(self.location, path, reason)) from error

    def _stat(self, path: str) -> StoredFile | None:
        with self._inside.at(self._place(path)) as found:
            return None if found.is_folder else _file(path, found.status)

    def _below(self, path: str, limit: int) -> list[StoredFile]:
        found: list[StoredFile] = []
        for name, entry in self._inside.tree(self._place(path)):
            if not entry.is_folder:
                found.append(_file(f"{path}/{name}" if name else path, entry.status))
            if len(found) == limit:
                break
        return found

    def _open(self, path: str) -> int:
        with self._inside.at(self._place(path)) as found:
            if found.is_folder:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return os.open(found.by_descriptor, os.O_RDONLY | os.O_CLOEXEC)

    def _chunk(self, path: str, descriptor: int, offset: int) -> bytes:
        try:
            return os.pread(descriptor, _CHUNK_BYTES, offset)
        except OSError as error:
            raise StoreUnavailable(failed(self.location, path, _said(error))) from error

    def _place(self, path: str) -> str:
        return str(Path(self._root, path))

    def _error(self, error: OSError, path: str) -> AdapterError | None:
        """None for a path that is definitely not there: not so where the folder itself is not."""
        if error.errno in _ABSENT:
            with suppress(OSError):
                if Path(self._root).is_dir():
                    return None
            return StoreUnavailable(failed(self.location, path, "the folder is not there"))
        if error.errno == errno.ELOOP:
            return InvalidRequest(failed(self.location, path, _said(error)))
        if error.errno in _DENIED:
            return StoreDenied(failed(self.location, path, _said(error)))
        return StoreUnavailable(failed(self.location, path, _said(error)))


def _file(path: str, status: os.stat_result) -> StoredFile:
    return StoredFile(path, status.st_size, _version(status), status.st_mtime)


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _said(error: OSError) -> str:
    return error.strerror or "it cannot be read"
