"""Keeps what callers name within the model roots: resolves the `url` of a load, and opens files
safe against links that are planted meanwhile.

A path that was checked may lead elsewhere a moment later. So the path is walked part by part, each
opened without following links; links are read and walked in the same way.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote_to_bytes

from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.errors import InvalidRequest, SourceMissing
from adapter.packages.contents import MAX_DEPTH, MAX_ENTRIES, ROOTS_SETTING, is_within
from adapter.packages.messages import invalid_model, shown

_MAX_LINKS = 40  # the kernel's own limit
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}
_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_NO_MODELS = ("_", ".", "lost+found")  # a repository of Triton's, what is hidden, what ext4 makes


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened file or folder."""

    descriptor: int  # opened with O_PATH
    real: str  # its path when it was opened
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        """Return whether a folder was opened; else it is a file."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def by_descriptor(self) -> str:
        """Return a path to this very file, whatever has its name now."""
        return f"/proc/self/fd/{self.descriptor}"


class Inside:
    """Opens entries within `roots`: real paths whose parents only the operator can change.

    Raises InvalidModel for a path that leads out of the roots, and the OSError of any open.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        """Open entries within the folders `roots`."""
        self._roots = roots

    @property
    def roots(self) -> Sequence[str]:
        """Return the folders in which entries are opened."""
        return self._roots

    @contextmanager
    def open_entry(self, path: str) -> Iterator[Opened]:
        """Open the file or folder at a path, links followed. Raise InvalidModel for anything else,
        and for a path that leads out of the roots.
        """
        with ExitStack() as stack:
            try:
                descriptor, real = self._walked(path, stack)
            except OSError as error:
                error.filename = path  # instead of one part
                raise
            if not any(is_within(real, root) for root in self._roots):
                raise invalid_model(path, f"it leads out of the model roots{ROOTS_SETTING}")
            status = os.fstat(descriptor)
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                raise invalid_model(path, "it is neither a file nor a folder")
            yield Opened(descriptor, real, status)

    @contextmanager
    def reading(self, path: str | Path) -> Iterator[IO[bytes]]:
        """Open the file at a path for reading. Raise as `open_entry` does, and IsADirectoryError
        for a folder.
        """
        with self.open_entry(str(path)) as entry:
            if entry.is_folder:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            with Path(entry.by_descriptor).open("rb") as file:
                yield file

    def tree(
        self, path: str, *, without: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, Opened]]:
        """Yield the path itself as "", then all below it by relative path, folders before contents.

        Each entry is open until the next is requested. `without`: names at the top to leave out.
        """
        waiting = [("", path)]
        counted = 0
        while waiting:
            name, here = waiting.pop()
            with self.open_entry(here) as found:
                yield name, found
                if not found.is_folder:
                    continue
                with os.scandir(found.by_descriptor) as entries:
                    below = sorted(
                        {entry.name for entry in entries} - (without if not name else set())
                    )
                counted += len(below)
                if counted > MAX_ENTRIES or name.count("/") > MAX_DEPTH:
                    raise invalid_model(path, "it holds too many entries")
                real = found.real
            waiting += [(os.path.join(name, one), f"{real}/{one}") for one in reversed(below)]  # noqa: PTH118

    def _walked(self, path: str, stack: ExitStack) -> tuple[int, str]:
        """Open a path part by part, following links. Return the descriptor of its target, which
        `stack` closes, and its real path.
        """
        place = self._start(path, stack)
        todo = _parts(path.removeprefix(place[0][0]) if place[0][0] != "/" else path)
        links = 0
        while todo:
            part = todo.pop()
            here = place[-1][1]
            real = place[-1][0]
            if part == "..":
                if len(place) > 1:
                    place.pop()
                elif real != "/":  # above the root: start over from /
                    todo += _parts(str(Path(real).parent))
                    place = self._top(stack)
                continue
            descriptor = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            stack.callback(os.close, descriptor)
            if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
                place.append((os.path.join(real, part), descriptor))  # noqa: PTH118 - many
                continue
            if (links := links + 1) > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            text = os.readlink("", dir_fd=descriptor)
            if text.startswith("/"):
                place = self._top(stack)
            todo += _parts(text)
        return place[-1][1], place[-1][0]

    def _start(self, path: str, stack: ExitStack) -> list[tuple[str, int]]:
        """Open the root that a path lies in by its text, or / if there is none. Return the stack of
        the walk.
        """
        root = next((root for root in self._roots if is_within(path, root)), None)
        return self._top(stack) if root is None else self._top(stack, root)

    def _top(self, stack: ExitStack, folder: str = "/") -> list[tuple[str, int]]:
        """Open a folder to begin a walk at. Return the stack of the walk: path and descriptor."""
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        return [(folder, descriptor)]


def _parts(path: str) -> list[str]:
    """Return the names that a path consists of, the last first."""
    return [part for part in reversed(path.split("/")) if part not in {"", "."}]


def _local_path(url: str) -> str:
    """Return the path that an absolute path or a `file:///` URL means. Raise InvalidRequest for any
    other text.
    """
    try:
        is_file_url = url.startswith("file:///")
        raw = unquote_to_bytes(url[len("file://") :]) if is_file_url else url.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("url is not valid UTF-8") from error
    path = os.fsdecode(raw)
    if "\0" in path:
        raise InvalidRequest("url holds a NUL")
    if not path.startswith("/"):
        hint = "; models of a bucket: the setting model_store" if "://" in url else ""
        raise InvalidRequest(f"url {url!r} is neither an absolute path nor a file:/// URL{hint}")
    return path


def resolve(url: str, roots: Sequence[str]) -> Path:
    """Return the real path that the `url` of a load names. Raise InvalidRequest if it is outside
    the roots, whether it exists or not, and SourceMissing if it does not exist.
    """
    path = _local_path(url)
    if not any(is_within(os.path.realpath(path), root) for root in roots):
        raise InvalidRequest(f"url {shown(path)} is outside the model roots{ROOTS_SETTING}")
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno in _ABSENT:
            raise SourceMissing(f"url {shown(path)} does not exist") from error
        raise InvalidRequest(f"url {shown(path)}: {error.strerror}") from error


def start_models(entries: Sequence[str], root: Path) -> dict[ModelId, ModelSource]:
    """Return what `load_at_start` means: entries PATH, NAME=PATH or FOLDER/*, those that do not
    begin with a slash below `root`. Without a name a model is called as its file or folder.

    Raises SourceMissing where a FOLDER cannot be listed, InvalidRequest for a name given twice.
    """
    sources: dict[ModelId, ModelSource] = {}
    for entry in entries:
        named = _NAMED.fullmatch(entry)
        path = root / (named[2] if named else entry)
        paths = [path] if named or path.name != "*" else _listed(path.parent)
        for each in paths:
            model_id = parse_model_id(named[1] if named else each.name)
            if model_id in sources:
                raise InvalidRequest(f"load_at_start names {model_id!r} twice")
            sources[model_id] = ModelSource(str(each))
    return sources


def _listed(folder: Path) -> list[Path]:
    """Return the paths of all models in a folder. Raise SourceMissing if it cannot be listed."""
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith(_NO_MODELS))
    except OSError as error:
        text = f"load_at_start: {shown(str(folder))}: {error.strerror}"
        raise SourceMissing(text) from error
