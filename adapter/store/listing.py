"""Lists the packages of a store, which has keys alone.

A key belongs to a package by its name: an archive and a model file are packages themselves, and a
folder is one if it has a `config.pbtxt`, a folder whose name is a number (a version of the model),
or a file by the name of a model. What is on disk was called by its key, and so is a package,
whatever it looks like. Other keys are left out, though a call may name them.

A listing is sorted, so that all keys below a folder follow each other. It is read as far as one
page needs, and the next page begins behind the last package. So no page depends on how many keys
the store has.
"""

import asyncio
import re
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise

from adapter.core.artifacts import (
    ArtifactKey,
    PackageOnDisk,
    PackagePage,
    StorePackage,
    parse_artifact_path,
)
from adapter.errors import AdapterError, ArtifactNotFound, InvalidRequest
from adapter.store.disk import Disk
from adapter.store.ports import StoredFile
from adapter.store.versions import SUFFIXES, StoreVersions

_MAX_KEYS = 20_000  # read for one page
_MAX_SECONDS = 30.0  # a store may take so long for one page
# Of a store that could not be used when it was last asked.
_BRIEFLY_SECONDS = 1.0
_LAST = "\U0010ffff"  # behind all other characters
_WILD = re.compile(r"[*?\[]")
_CONFIG = "config.pbtxt"
# Files that are a model, alone or in a folder of their own.
_MODEL_FILE = re.compile(r".+\.(onnx|plan|engine|pt|pth|torchscript|graphdef|dali)")
# Files that say that the folder around them is a model.
_IN_FOLDER = re.compile(
    r"model\.(onnx|plan|pt|py|json|graphdef|xml|dali|txt)|saved_model\.pb|dali\.py"
    r"|xgboost\.(json|ubj|model)|checkpoint\.tl"
)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Selects packages by name."""

    text: str

    @property
    def prefix(self) -> str:
        """Return what all names begin with."""
        wild = _WILD.search(self.text)
        return self.text[: wild.start()] if wild else ""

    def matches(self, name: str) -> bool:
        """Return whether the name is one of those that are asked for."""
        if _WILD.search(self.text):
            return fnmatchcase(name, self.text)
        return self.text.casefold() in name.casefold()


@dataclass(slots=True)
class _Found:
    """Collects what the listing has of one package."""

    path: str
    is_folder: bool
    size_bytes: int = 0
    modified: float = 0.0
    etag: str | None = None

    def add(self, file: StoredFile) -> None:
        """Count an object of the package."""
        self.size_bytes += file.size_bytes
        self.modified = max(self.modified, file.modified)
        self.etag = None if self.is_folder else file.etag

    def contains(self, path: str) -> bool:
        """Return whether the key is one of the folder."""
        return self.is_folder and path.startswith(f"{self.path}/")

    @property
    def end(self) -> str:
        """Return the last key that may belong to the package."""
        return f"{self.path}/{_LAST}" if self.is_folder else self.path


class StorePackages:
    """Lists the packages of the stores, and says which of them are on disk: a Catalogue."""

    def __init__(self, versions: Mapping[str, StoreVersions], disk: Disk) -> None:
        self._versions = versions
        self._disk = disk

    @property
    def stores(self) -> Collection[str]:
        """Return the names of the stores."""
        return self._versions.keys()

    async def list_page(self, store: str, pattern: str, after: str, limit: int) -> PackagePage:
        """Return a page as Catalogue says. Raises ArtifactNotFound for an unknown store."""
        versions = self._get_versions(store)
        gone: list[StorePackage] = []
        reader = _Reader(
            ArtifactKey(store, ""),
            _Pattern(pattern),
            frozenset(self._list_disk(versions)),
            limit,
        )
        is_known_down = versions.unreachable_reason is not None
        try:
            async with asyncio.timeout(_BRIEFLY_SECONDS if is_known_down else _MAX_SECONDS):
                page = await reader.read(versions, after)
                gone = await self._find_gone(store, page, reader.pattern, after)
        except TimeoutError:
            page = self._list_known(store, reader.pattern, after, limit)
            page = replace(page, note=f"{versions.store.location} does not answer in time")
        except AdapterError as error:
            page = self._list_known(store, reader.pattern, after, limit)
            page = replace(page, note=str(error))
        packages = [replace(each, on_disk=self._find_on_disk(each.key)) for each in page.packages]
        if gone:
            packages = sorted([*packages, *gone], key=lambda each: each.key.path)
        return replace(page, packages=packages)

    async def _find_gone(
        self, store: str, page: PackagePage, pattern: _Pattern, after: str
    ) -> list[StorePackage]:
        """Return the packages of a page's part of the keys that are loaded, though the store has
        them no longer. Raises what the store does.
        """
        versions = self._get_versions(store)
        listed = {package.key.path for package in page.packages}
        gone: list[StorePackage] = []
        for path in self._disk.list_pinned_paths(str(versions.store.location)):
            is_of_page = f"{path}/" > after and (page.after is None or f"{path}/" <= page.after)
            if path in listed or not is_of_page or not pattern.matches(path):
                continue
            try:
                await versions.ask(path)
            except ArtifactNotFound:
                gone.append(self._describe_gone(ArtifactKey(store, path)))
        return gone

    def _describe_gone(self, key: ArtifactKey) -> StorePackage:
        """Describe a package that is on disk and not in the store any more."""
        on_disk = self._find_on_disk(key)
        if on_disk is not None:
            on_disk = replace(on_disk, is_current=False)
        return StorePackage(key, None, None, None, on_disk)

    async def describe(self, key: ArtifactKey) -> StorePackage | None:
        """Return the package of a key as Catalogue says. Raises what the store does, unless the
        package is on disk.
        """
        versions = self._get_versions(key.store)
        keys = [key, *(replace(key, path=key.path + suffix) for suffix in SUFFIXES)]
        on_disk = next((each for each in keys if self._find_on_disk(each) is not None), None)
        try:
            package = await self._ask(versions, key)
        except AdapterError:
            if on_disk is None:
                raise
            return StorePackage(on_disk, None, None, None, self._find_on_disk(on_disk))
        if package is not None or on_disk is None:
            return package
        return self._describe_gone(on_disk)

    async def _ask(self, versions: StoreVersions, key: ArtifactKey) -> StorePackage | None:
        try:
            version = await versions.ask(key.path)
        except ArtifactNotFound:
            archive = await versions.find_archive(key.path)
            if archive is None:
                return None
            version = await versions.ask(archive)
        key = replace(key, path=version.path)
        modified = max(file.modified for file in version.files)
        on_disk = self._find_on_disk(key)
        return StorePackage(key, version.size_bytes, version.etag, modified, on_disk)

    def _get_versions(self, store: str) -> StoreVersions:
        versions = self._versions.get(store)
        if versions is None:
            known = ", ".join(repr(name) for name in self._versions)
            raise ArtifactNotFound(f"there is no store {store!r}; known: {known}")
        return versions

    def _list_disk(self, versions: StoreVersions) -> list[str]:
        return self._disk.list_paths(str(versions.store.location))

    def _list_known(self, store: str, pattern: _Pattern, after: str, limit: int) -> PackagePage:
        """Return a page of the packages that are on disk."""
        keys = [
            ArtifactKey(store, path)
            for path in self._list_disk(self._get_versions(store))
            if f"{path}/" > after and path != after
        ]
        matches = [key for key in keys if pattern.matches(key.path)]
        packages = [StorePackage(key, None, None, None, None) for key in matches[:limit]]
        has_more = len(matches) > limit
        return PackagePage(packages, f"{packages[-1].key.path}/{_LAST}" if has_more else None)

    def _find_on_disk(self, key: ArtifactKey) -> PackageOnDisk | None:
        place = str(self._get_versions(key.store).store.location)
        current = self._disk.find_current(place, key.path)
        others = [each for each in self._disk.find(place, key.path) if not each.is_lost]
        cached = current or next(reversed(others), None)
        if cached is None:
            return None
        note = cached.note
        return PackageOnDisk(note.size_bytes, note.etag, cached.last_used, current is not None)


class _Reader:
    """Reads one page of packages from a listing of keys."""

    def __init__(
        self,
        base: ArtifactKey,  # of the store
        pattern: _Pattern,
        known: frozenset[str],  # paths that are packages, whatever they look like
        limit: int,  # of packages
    ) -> None:
        self.pattern = pattern
        self._base = base
        self._known = known
        self._limit = limit
        self._packages: list[StorePackage] = []
        self._current: _Found | None = None  # the package whose keys are being read
        self._after = ""  # the next page begins behind this place

    async def read(self, versions: StoreVersions, after: str) -> PackagePage:
        """Return the page behind `after`. Raises as the store does."""
        prefix = self.pattern.prefix
        # a key that is the prefix itself comes behind the prefix without its last character
        start = max(after, prefix[:-1])
        count = 0
        async with aclosing(versions.store.list_after(start)) as pages:
            async for files in pages:
                for file in files:
                    if file.path > prefix and not file.path.startswith(prefix):
                        return self._finish()
                    if not self._take(file):
                        return PackagePage(self._packages, self._after)
                count += len(files)
                if count >= _MAX_KEYS:
                    self._close_current(is_whole=False)
                    return PackagePage(self._packages, self._after)
        return self._finish()

    def _finish(self) -> PackagePage:
        """Close the current package and return the page, behind which no other follows."""
        self._close_current()
        return PackagePage(self._packages, None)

    def _take(self, file: StoredFile) -> bool:
        """Add an object to its package; return False if the page is full without it."""
        if self._current is None or not self._current.contains(file.path):
            self._close_current()
            if len(self._packages) == self._limit:
                return False
            self._current = _find_package(file.path, self._known)
        self._after = file.path
        if self._current is not None:
            self._current.add(file)
            self._after = self._current.end
        return True

    def _close_current(self, *, is_whole: bool = True) -> None:
        """Add the package that was read to the page if its path matches the pattern.

        A folder that was not read to its end (`is_whole` is false) has no size and no time.
        """
        package = self._current
        self._current = None
        if package is None or not self.pattern.matches(package.path):
            return
        has_all = is_whole or not package.is_folder
        self._packages.append(
            StorePackage(
                replace(self._base, path=package.path),
                package.size_bytes if has_all else None,
                package.etag,
                package.modified if has_all else None,
                None,
            )
        )


def _find_package(path: str, known: Collection[str]) -> _Found | None:
    """Return the package that a key belongs to; None if it looks like none."""
    try:
        parts = parse_artifact_path(path).split("/")
    except InvalidRequest:
        return None
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    called = next((folder for folder in folders if folder in known), None)
    if called is not None:
        return _Found(called, is_folder=True)
    name = parts[-1]
    if path in known or name.endswith(SUFFIXES):
        return _Found(path, is_folder=False)
    for folder, part in pairwise([*folders, path]):
        below = part.rpartition("/")[2]
        if part != path and below.isascii() and below.isdigit():
            return _Found(folder, is_folder=True)
    if folders and (name == _CONFIG or _IN_FOLDER.fullmatch(name)):
        return _Found(folders[-1], is_folder=True)
    return _Found(path, is_folder=False) if _MODEL_FILE.fullmatch(name) else None
