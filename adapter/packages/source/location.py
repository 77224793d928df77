"""Resolves the `url` of a load to a real path within the model roots."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from adapter.errors import InvalidRequest, SourceMissing
from adapter.packages.source.contents import is_within, shown

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
        raise InvalidRequest(f"url {url!r} is neither an absolute path nor a file:/// URL")
    return path


def resolve(url: str, roots: Sequence[str]) -> Path:
    """Return the real path. One outside the roots is refused without telling if it exists."""
    path = _local_path(url)
    if not any(is_within(os.path.realpath(path), root) for root in roots):
        allowed = ", ".join(shown(root) for root in roots)
        raise InvalidRequest(f"url {shown(path)} lies outside the model roots ({allowed})")
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno in _ABSENT:
            raise SourceMissing(f"url {shown(path)} does not exist") from error
        raise InvalidRequest(f"url {shown(path)}: {error.strerror}") from error
