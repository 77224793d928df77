"""Asks a store which version it has of a key, and remembers briefly what it lacks."""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from adapter.errors import AdapterError, ArtifactNotFound, StoreUnavailable
from adapter.packages.contents import MAX_ENTRIES
from adapter.packages.unpack import disk_bytes
from adapter.store.ports import Store, StoredFile, describe_failure
from adapter.store.refusals import OF_KEYS, Refusals

log = logging.getLogger(__name__)

# A store that has been silent for so long is reported; a bucket has time limits of its own.
_SILENT_SECONDS = 60.0

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


@dataclass(frozen=True, slots=True)
class Version:
    """The version that a store has of a key: one object, or all those below a folder."""

    path: str
    etag: str  # the object's, or the hash of a folder's listing
    files: tuple[StoredFile, ...]
    is_folder: bool

    @property
    def name(self) -> str:
        """Return the last part of the key, which the package has on disk as well."""
        return self.path.rpartition("/")[2]

    @property
    def size_bytes(self) -> int:
        """Return how many bytes the objects have."""
        return sum(file.size_bytes for file in self.files)

    @property
    def disk_bytes(self) -> int:
        """Return what the objects take on disk as they are stored, without folders."""
        return sum(disk_bytes(file.size_bytes) for file in self.files)


class StoreVersions:
    """Knows which versions one store has, and whether it can be asked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        # None if the store could be used when it was last asked, or was not asked yet
        self.unreachable_reason: str | None = None
        self.is_checked = False
        self._refusals = Refusals(OF_KEYS)

    async def check_again(self) -> None:
        """Check the store unless it could be used when it was last asked."""
        if self.unreachable_reason or not self.is_checked:
            await self.check()

    async def check(self) -> None:
        """Note whether the store can be used, and log why not, once for each reason.

        A folder on a disk that hangs is waited for: each try would take one more thread for ever.
        """
        silence = asyncio.get_running_loop().call_later(_SILENT_SECONDS, self._report_silence)
        try:
            await self.store.check()
        except AdapterError as error:
            self._report(error)
        else:
            self.unreachable_reason = None
        finally:
            silence.cancel()
        self.is_checked = True

    def _report_silence(self) -> None:
        """Note that the store does not answer a check, which continues."""
        reason = f"it has not answered within {_SILENT_SECONDS:g} s"
        self._report(StoreUnavailable(describe_failure(self.store.location, "", reason)))

    def _report(self, error: AdapterError) -> None:
        """Note that the store cannot be used, and log why unless that was noted before."""
        known = self.unreachable_reason
        self._note_unreachable(error)
        if self.unreachable_reason != known:
            fields = {"store": str(self.store.location), "reason": str(error)}
            log.warning("artifact.store_unreachable", extra=fields)

    async def ask(self, path: str, *, is_existence_enough: bool = False) -> Version:
        """Return what the store has; with `is_existence_enough` not all objects of a folder.

        Raises ArtifactNotFound, InvalidArtifact, InvalidRequest, StoreDenied, StoreUnavailable.
        """
        self._refusals.raise_known((path,))
        try:
            version = await self._read_version(path, 2 if is_existence_enough else MAX_ENTRIES + 1)
        except AdapterError as error:
            self._refusals.remember((path,), error)
            if isinstance(error, StoreUnavailable):
                self._note_unreachable(error)
            raise
        self.unreachable_reason = None
        if version.files:
            return version
        hint = "" if is_existence_enough else await self._hint_at_archive(path)
        self._refusals.remember((path,), self._make_absent(path, hint))
        # raised without a name: a frame that names the error which it raises is a cycle of garbage
        raise self._make_absent(path, hint)

    async def list_folder(self, path: str) -> Version:
        """Return what the store has below a folder now."""
        return _version_of_folder(path, await self.store.list_below(path, MAX_ENTRIES + 1))

    async def find_archive(self, path: str) -> str | None:
        """Return the key that is `path` with the suffix of an archive; None if there is none."""
        question = (path, *SUFFIXES)
        if self._refusals.knows(question):
            return None
        paths = [path + suffix for suffix in SUFFIXES]
        files = await asyncio.gather(*map(self.store.stat, paths))
        for archive, file in zip(paths, files, strict=True):
            if file is not None:
                return archive
        self._refusals.remember(question, self._make_absent(path))
        return None

    def _note_unreachable(self, error: AdapterError) -> None:
        self.unreachable_reason = f"store {self.store.location}: {error}"

    async def _read_version(self, path: str, limit: int) -> Version:
        """Return what the store has, which is a folder without files where it has nothing."""
        file = await self.store.stat(path)
        if file is not None:
            return Version(path, file.etag, (file,), is_folder=False)
        return _version_of_folder(path, await self.store.list_below(path, limit))

    def _make_absent(self, path: str, hint: str = "") -> ArtifactNotFound:
        return ArtifactNotFound(
            describe_failure(self.store.location, path, f"there is no such key{hint}")
        )

    async def _hint_at_archive(self, path: str) -> str:
        """Return the archive that may be meant, to be added to an error; empty if there is none.
        Keys with a suffix are not looked up.
        """
        if not path.endswith(SUFFIXES):
            with suppress(AdapterError):
                if (archive := await self.find_archive(path)) is not None:
                    return f"; did you mean {archive}?"
        return ""


def _version_of_folder(path: str, files: Sequence[StoredFile]) -> Version:
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
        # names on a disk need not be UTF-8
        digest.update(os.fsencode(f"{file.path}\0{file.etag}\0{file.size_bytes}\0"))
    return Version(path, digest.hexdigest(), tuple(kept), is_folder=True)
