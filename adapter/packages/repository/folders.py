"""Makes, empties and removes our folders in Triton's repository.

A process that is killed between any two steps leaves no folder there that is nobody's: a folder
comes and goes under a hidden name, so under a model's name it has a note at all times. Helpers and
steps are in the entry's note from before they are made until after they are gone.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from adapter.errors import BackendError, InvalidRequest
from adapter.packages.repository.ownership import Ownership, note_ownership, ownership_of
from adapter.packages.source.backends import MARKER

# Triton is told by name what to load, so it never looks into these.
_HIDDEN = ".ta-half-"


def claim(folder: Path, ownership: Ownership, keep: str = "") -> None:
    """Make the folder ours, emptied of what an earlier run left in it but for `keep`.

    InvalidRequest when it is somebody else's, BackendError when the disk refuses.
    """
    known = ownership_of(folder)
    if known is None and os.path.lexists(folder):
        raise InvalidRequest(
            f"{folder} is in Triton's repository already and not of this adapter's making"
        )
    if known is not None and known.owner != ownership.owner:
        raise InvalidRequest(
            f"{folder.name!r} is the name of a model in the package {known.model_id!r}"
        )
    try:
        if known is None:
            _make(folder, ownership)
        else:
            note_ownership(folder, ownership)
            _empty(folder, keep)
    except OSError as error:
        raise disk_error(folder, error) from error


def claim_entry(repository: Path, ownership: Ownership, keep: str = "") -> Path:
    """`claim` the entry's folder, after all that an earlier run put beside it has gone."""
    folder = repository / ownership.owner
    note_unloaded(folder)
    try:
        clear_others(repository, ownership.owner)
    except OSError as error:
        raise disk_error(folder, error) from error
    claim(folder, ownership, keep)
    return folder


def note_unloaded(folder: Path) -> None:
    """Before the package loses anything: what lacks a part of it must not be taken over."""
    known = ownership_of(folder)
    if known is not None and known.loaded is not None:
        with suppress(OSError):  # a full disk must not keep anything from going
            note_ownership(folder, replace(known, loaded=None))


def clear(folder: Path) -> None:
    """Remove a folder of ours. Links in it are removed, never followed."""
    _empty(folder)
    hidden = _hidden(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def clear_others(repository: Path, owner: str) -> None:
    """Clear the folders of a package beside the entry's own."""
    known = ownership_of(repository / owner)
    for other in {*known.load, *known.along} - {owner} if known is not None else ():
        folder = repository / other
        theirs = ownership_of(folder)
        if theirs is not None and theirs.owner == owner:
            clear(folder)


def sweep(repository: Path) -> None:
    """Remove the folders that a killed process was making or removing."""
    for path in repository.glob(f"{_HIDDEN}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def disk_error(folder: Path, error: OSError) -> BackendError:
    # copytree collects what went wrong as (source, target, reason)
    reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
    return BackendError(f"cannot stage the model in {folder}: {reason}")


def _make(folder: Path, ownership: Ownership) -> None:
    hidden = _hidden(folder)
    try:
        hidden.mkdir(exist_ok=True)
        note_ownership(hidden, ownership)
        hidden.rename(folder)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _empty(folder: Path, keep: str = "") -> None:
    for path in folder.iterdir():
        if path.name in {keep, MARKER}:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _hidden(folder: Path) -> Path:
    return folder.with_name(_HIDDEN + folder.name)
