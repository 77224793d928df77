"""Resolves the `url` of a load to a real path within the model roots."""

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.errors import InvalidRequest, SourceMissing
from adapter.packages.source.contents import ROOTS_SETTING, is_within, shown

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}


def _local_path(url: str) -> str:
    """Return the path of an absolute path or a `file:///` URL; refuse anything else."""
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
    """Return the real path. One outside the roots is refused without telling if it exists."""
    path = _local_path(url)
    if not any(is_within(os.path.realpath(path), root) for root in roots):
        raise InvalidRequest(f"url {shown(path)} lies outside the model roots{ROOTS_SETTING}")
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno in _ABSENT:
            raise SourceMissing(f"url {shown(path)} does not exist") from error
        raise InvalidRequest(f"url {shown(path)}: {error.strerror}") from error


_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_NO_MODELS = ("_", ".", "lost+found")  # a repository of Triton's, what is hidden, what ext4 makes


def start_models(entries: Sequence[str], root: Path) -> dict[ModelId, ModelSource]:
    """Return what `load_at_start` means: entries PATH, NAME=PATH or FOLDER/*, those that do not
    begin with a slash below `root`. Without a name a model is called as its file or folder.

    Raises SourceMissing where a FOLDER cannot be listed, InvalidRequest for a name given twice.
    """
    found: dict[ModelId, ModelSource] = {}
    for entry in entries:
        named = _NAMED.fullmatch(entry)
        path = root / (named[2] if named else entry)
        paths = [path] if named or path.name != "*" else _listed(path.parent)
        for each in paths:
            model_id = parse_model_id(named[1] if named else each.name)
            if model_id in found:
                raise InvalidRequest(f"load_at_start names {model_id!r} twice")
            found[model_id] = ModelSource(str(each))
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith(_NO_MODELS))
    except OSError as error:
        said = f"load_at_start: {shown(str(folder))}: {error.strerror}"
        raise SourceMissing(said) from error
