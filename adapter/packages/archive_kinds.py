"""Tells the kind of an archive by its name and its first bytes. Nothing else is read of it here.

The adapter itself asks no more than this: `archives`, in a process of its own, reads the rest.
"""

import os
import tarfile
from itertools import islice
from pathlib import Path

from adapter.errors import InvalidModel
from adapter.packages.messages import invalid_model

HEAD_BYTES = tarfile.BLOCKSIZE  # tell one kind of archive from another
_FEW = 16  # entries, hidden ones included, among which a lone archive is sought
_OTHER_PACKINGS = {
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
}


def is_archive(path: Path) -> bool:
    """Return whether a file is unpacked: by its name or, for tar and gzip, by its first bytes.

    A zip is known by its name alone: model files of PyTorch and Keras are zips as well.
    """
    if not path.is_file():
        return False  # SageMaker's names of models, thus of folders, end in .tar.gz
    return _kind_by_name(path) is not None or kind_by_bytes(path) in {"tar", "tar.gz"}


def is_packed(name: str) -> bool:
    """Return whether a file's name has the ending of an archive that is unpacked."""
    return _kind_by_name(Path(name)) is not None


def archive_at(path: Path) -> Path | None:
    """Return the archive at a path: the file itself, or the only visible file in the folder. None
    if there is no archive, or the file in the folder is a link.
    """
    if not path.is_dir():
        return path if is_archive(path) else None
    with os.scandir(path) as entries:
        visible = [e for e in islice(entries, _FEW) if not e.name.startswith(".")]
    alone = Path(visible[0].path) if len(visible) == 1 else None
    return alone if alone is not None and not alone.is_symlink() and is_archive(alone) else None


def kind_of(archive: Path, content: Path) -> str:
    """Return `tar`, `tar.gz` or `zip`. Raise InvalidModel if the file is none of them, or is not of
    the kind that its name says. `content` is where its bytes are read, `archive` the path that
    messages name.
    """
    return kind_by_head(archive, _read_head(content))


def kind_by_head(archive: Path, head: bytes) -> str:
    """Return the kind of an archive with these first bytes, as `kind_of` does."""
    named = _kind_by_name(archive)
    kind = _match_kind(head)
    if kind is None or named not in {None, kind}:
        raise _make_error(archive, head, named, kind)
    return kind


def can_stream(name: str, head: bytes) -> bool:
    """Return whether a file of this name with these first bytes is unpacked, or refused with a
    reason, while it arrives. A zip is read from its end.
    """
    named = _kind_by_name(Path(name))
    return named in {"tar", "tar.gz"} or (named is None and _match_kind(head) in {"tar", "tar.gz"})


def _make_error(archive: Path, head: bytes, named: str | None, found: str | None) -> InvalidModel:
    """Return the error for a file that is not unpacked: `named` is its kind by its name, `found`
    that by its first bytes.
    """
    if not head:
        return invalid_model(archive, "it is empty")
    if (packing := _other_packing(head)) is not None:
        fault = f"its first bytes are those of {packing}, which is not unpacked"
        return invalid_model(archive, fault, remedy=f"pack it as {named or 'tar.gz'}")
    expected = f", not those of a {named}" if named else ""
    return invalid_model(archive, f"its first bytes are those of {found or 'no archive'}{expected}")


def _other_packing(head: bytes) -> str | None:
    """Return the name of a packing that is common, and that is not unpacked."""
    return next((name for magic, name in _OTHER_PACKINGS.items() if head.startswith(magic)), None)


def _kind_by_name(path: Path) -> str | None:
    """Return the kind that the ending of the name says; None for other endings."""
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz")):
        return "tar.gz"
    return next((kind for kind in ("tar", "zip") if name.endswith("." + kind)), None)


def kind_by_bytes(path: Path) -> str | None:
    """Return the kind of an archive by its first block; None if it is no archive that is read."""
    return _match_kind(_read_head(path))


def _read_head(path: Path) -> bytes:
    """Return the first block of a file."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _match_kind(head: bytes) -> str | None:
    """Return the kind of an archive with this first block; None if none that is read."""
    if head.startswith(b"\x1f\x8b"):
        return "tar.gz"
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return "zip"
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return "tar"
