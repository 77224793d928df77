"""Walks a package: checks every entry, and enters each real folder once."""

import errno
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from adapter.packages.messages import invalid_model, shown

if TYPE_CHECKING:
    from adapter.packages.formats import Tree

CONFIG = "config.pbtxt"
# Marks a folder in Triton's repository as the adapter's.
MARKER = ".triton-adapter.json"
MARKER_DRAFT = f"{MARKER}.new"
# Files of a request or an archive, within the entry's folder. Triton reads only numbered folders.
UNPACKED = ".unpacked"
# What the adapter itself puts into a folder in Triton's repository. Entries of a package with such
# a name are not staged: the adapter would write through a link, or read a note of somebody else.
OWN_NAMES = frozenset({CONFIG, MARKER, MARKER_DRAFT, UNPACKED})
# Follows the words "the model roots" in messages.
ROOTS_SETTING = ", which --model-roots (ADAPTER_MODEL_ROOTS) names"
MAX_ENTRIES = 100_000
# As Triton counts them at each load: what is behind a link once more for each link to it. Folders
# that have two links each to the next one double them from level to level.
MAX_PATHS = 1_000_000
MAX_DEPTH = 200


def is_within(path: str, folder: str) -> bool:
    """Return whether one real path lies within another; a folder lies within itself."""
    return os.path.commonpath([path, folder]) == folder


def follow(link: str, roots: Sequence[str]) -> str:
    """Return the real path of a link. Raise InvalidModel if it does not exist or lies outside the
    model roots.
    """
    named = f"it is a link to {shown(Path(link).readlink())}"
    try:
        target = os.path.realpath(link, strict=True)
    except OSError as error:
        reasons = {errno.ELOOP: "a loop of links", errno.ENOENT: "which does not exist"}
        reason = reasons.get(error.errno or 0, error.strerror)
        raise invalid_model(link, f"{named}: {reason}") from error
    if not any(is_within(target, root) for root in roots):
        outside = f"{shown(target)} is outside the model roots{ROOTS_SETTING}"
        raise invalid_model(link, f"{named}: {outside}")
    return target


def _refuse_endless(path: str, real: str, above: Collection[str]) -> None:
    """Raise InvalidModel for a folder at a path that is one of those above it, by its real path, or
    that has too many of them.
    """
    if real in above:
        raise invalid_model(path, f"it leads back to {shown(real)}: a loop")
    if len(above) > MAX_DEPTH:
        raise invalid_model(path, f"it is nested deeper than {MAX_DEPTH} folders")


class Contents:
    """The entries below a package's root, links followed, each real folder entered once.

    The key digests config, relative paths, sizes and modification times. Weights are not read:
    they may be many GB, and SageMaker waits. Unpacking the same archive again restores its times,
    so the key survives an eviction; touching a file only loses a learned size.
    """

    def __init__(
        self,
        root: str,  # the real path of a folder or a single file
        roots: Sequence[str],
        *,
        only: Collection[str] | None = None,  # the names at the top that are entered; None for all
    ) -> None:
        """Walk a package, and note its size, digest and tree. Raise InvalidModel for what may not
        be in a package, and the OSError of the disk.
        """
        self.size_bytes = 0
        self.digest = hashlib.sha256()
        self._root = root
        self._roots = roots
        self._only = only
        self._counted = 0
        self._inodes: set[tuple[int, int]] = set()
        self._trees: dict[str, dict[str, Tree | None]] = {}
        if Path(root).is_dir():
            self._trees[root] = {}
            self._walk()
        else:
            self._note(root, Path(root).stat(), root)

    @property
    def tree(self) -> "Tree | None":
        """Return the package's entries by name, a folder that is linked twice also twice; None for
        a file.
        """
        return self._trees.get(self._root)

    def _walk(self) -> None:
        """Note all entries below the root, depth first. Raise InvalidModel for links that make
        Triton walk for ever: to a parent folder, or to too many paths.
        """
        inside = {self._root: self._entries(self._root)}
        paths = Counter({self._root: 0})  # below each folder that was entered, links followed
        while inside:
            folder = next(reversed(inside))
            if paths[folder] > MAX_PATHS:
                raise invalid_model(folder, f"its links lead to more than {MAX_PATHS} paths")
            entry = next(inside[folder], None)
            if entry is None:
                del inside[folder]
                paths[next(reversed(inside), "")] += paths[folder]
                continue
            paths[folder] += 1
            real = follow(entry.path, self._roots) if entry.is_symlink() else entry.path
            if not self._note(entry.path, entry.stat(), real):
                self._trees[folder][entry.name] = None
                continue
            real = os.path.realpath(real)
            self._trees[folder][entry.name] = self._trees.setdefault(real, {})
            _refuse_endless(entry.path, real, inside)
            if real in paths:
                paths[folder] += paths[real]
            else:
                paths[real] = 0
                inside[real] = self._entries(entry.path)

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Return the entries of a folder by name, of the root only those that are entered. Raise
        InvalidModel if the package has too many.
        """
        with os.scandir(folder) as scanned:
            entries: Iterator[os.DirEntry[str]] = scanned
            if self._only is not None and folder == self._root:
                entries = (entry for entry in scanned if entry.name in self._only)
            entries_read = list(islice(entries, MAX_ENTRIES + 1 - self._counted))
        self._counted += len(entries_read)
        if self._counted > MAX_ENTRIES:
            raise invalid_model(self._root, f"it holds more than {MAX_ENTRIES} entries")
        return iter(sorted(entries_read, key=lambda entry: entry.name))

    def _note(self, path: str, status: os.stat_result, real: str) -> bool:
        """Count an entry at a path, whose target is `real`, in size and digest. Return whether it
        is a folder. Raise InvalidModel if it is neither file nor folder, or cannot be read.
        """
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder and not stat.S_ISREG(status.st_mode):
            raise invalid_model(path, "it is neither a file nor a folder")
        if not os.access(path, os.R_OK, effective_ids=True):
            raise invalid_model(path, os.strerror(errno.EACCES))
        name = os.path.relpath(path, self._root)
        if "__pycache__" in name.split("/"):
            return is_folder  # written by the first load
        detail = f"{status.st_size} {status.st_mtime_ns}"
        if is_folder:
            detail = os.path.relpath(real, self._root)
        elif (inode := (status.st_dev, status.st_ino)) not in self._inodes:
            self._inodes.add(inode)
            self.size_bytes += status.st_size
        self.digest.update(os.fsencode(f"{name}\0{detail}\0"))
        return is_folder
