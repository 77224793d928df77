"""Makes, fills, empties and removes our folders in Triton's repository, and their notes.

The note in each folder says whose it is and what Triton serves. It outlives the process: after a
restart it says what to take over and what to clear away.

A process that is killed between any two steps leaves no folder there that is nobody's: a folder
comes and goes under a hidden name, so under a model's name it has a note at all times. Helpers and
steps are in the entry's note from before they are made until after they are gone.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from adapter.core.byte_sizes import format_size
from adapter.core.memory import Bytes, Device
from adapter.core.model import LinkKind, ModelPart, ModelSource, Role
from adapter.errors import BackendError, InvalidRequest
from adapter.packages.config_text import (
    rename_steps,
    with_gpu,
    with_parameters,
    without_cache,
    without_name,
)
from adapter.packages.contents import CONFIG, MARKER, MARKER_DRAFT
from adapter.packages.roots import Inside, Opened
from adapter.packages.unpack import CHUNK, RESERVE_BYTES, free_at

Staging = Literal["symlink", "hardlink", "copy"]
# Triton loads by name, so it never reads these.
_HIDDEN = ".ta-half-"
_KEPT = f"{_HIDDEN}-kept-"  # no folder is hidden under such a name: no model's begins with a dash
# The fields of a source that a note has: all but what the request itself brought.
_NOTED_FIELDS = ("url", "model_type", "schema", "entry", "declared_bytes", "is_cached", "helpers")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Says in a note what Triton serves of a package, and from which source."""

    source: ModelSource  # without what the request itself brought
    can_load_again: bool  # False if the request brought something
    content_key: str
    held: Bytes


@dataclass(frozen=True, slots=True)
class Ownership:
    """Says in a note whose a folder in Triton's repository is, and which others belong to it."""

    owner: str  # Triton's name of the package's entry
    model_id: str  # the caller's name of it
    # the package's placement; only the entry's folder has it, and `loaded`
    load: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    loaded: Loaded | None = None  # None until Triton serves the model
    gpu: int | None = None  # the number of the one that the package was put on
    beside: tuple[str, ...] = ()  # folders of the package that are no models
    is_model: bool = True  # False for a folder that gives way to a model of its name


def note_ownership(folder: Path, ownership: Ownership) -> None:
    """Write the note of a folder in one step, so that a crash of this process leaves the old or the
    new one.

    Nothing is flushed to the disk: a machine that loses its power has lost the models as well. A
    note that it damaged is none, and the folder then is for its operator to remove.
    """
    draft = folder / MARKER_DRAFT
    draft.write_text(json.dumps(_serialize_note(ownership)))
    draft.rename(folder / MARKER)


def ownership_of(folder: Path) -> Ownership | None:
    """Return the note of a folder; None for a folder that is not ours. A link to one of ours is not
    ours.
    """
    marker = folder / MARKER
    if folder.is_symlink() or marker.is_symlink():
        return None
    try:
        note = json.loads(marker.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    match note:
        case {
            "owner": str(owner),
            "model_id": str(model_id),
            "load": list(load),
            "along": list(along),
        } if all(isinstance(name, str) for name in (*load, *along)):
            loaded = _read_loaded(note.get("loaded"))
            gpu = note.get("gpu")
            gpu = gpu if isinstance(gpu, int) else None
            beside = note.get("beside")
            beside = tuple(map(str, beside)) if isinstance(beside, list) else ()
            is_model = note.get("is_model") is not False
            return Ownership(
                owner, model_id, tuple(load), tuple(along), loaded, gpu, beside, is_model
            )
    return None


def _serialize_note(ownership: Ownership) -> dict[str, Any]:
    """Return the content of a note as JSON."""
    note: dict[str, Any] = {
        "owner": ownership.owner,
        "model_id": ownership.model_id,
        "load": ownership.load,
        "along": ownership.along,
    }
    if ownership.beside:
        note["beside"] = ownership.beside
    if not ownership.is_model:
        note["is_model"] = False
    if ownership.gpu is not None:
        note["gpu"] = ownership.gpu
    loaded = ownership.loaded
    if loaded is not None:
        note["loaded"] = {
            **{field: getattr(loaded.source, field) for field in _NOTED_FIELDS},
            "can_load_again": loaded.can_load_again,
            "content_key": loaded.content_key,
            "held": dict(loaded.held),
        }
    return note


def _read_loaded(value: Any) -> Loaded | None:
    """Return what a note says is loaded; None if it says nothing or is damaged: the folder is still
    ours, and is cleared then.
    """
    match value:
        case {
            "url": str(url),
            "is_cached": bool(is_cached),
            "model_type": (str() | None) as model_type,
            "schema": (str() | None) as schema,
            "entry": (str() | None) as entry,
            "declared_bytes": (int() | None) as declared,
            "can_load_again": bool(can_load_again),
            "content_key": str(content_key),
            "held": dict(held),
        } if all(isinstance(count, int) and count >= 0 for count in held.values()):
            helpers = value.get("helpers")
            source = ModelSource(
                url,
                model_type,
                schema,
                entry,
                declared_bytes=declared,
                is_cached=is_cached,
                helpers=tuple(helpers) if isinstance(helpers, list) else None,
            )
            amounts = {Device(device): count for device, count in held.items()}
            return Loaded(source, can_load_again, content_key, amounts)
    return None


def claim(folder: Path, ownership: Ownership, keep: str = "") -> None:
    """Make a folder in Triton's repository ours, emptied of what an earlier run left in it but for
    `keep`.

    Raise InvalidRequest if it is somebody else's, BackendError if the disk refuses.
    """
    known = ownership_of(folder)
    if known is None and os.path.lexists(folder):
        raise InvalidRequest(
            f"{folder} is in Triton's repository already and not of this adapter's making"
        )
    is_others = known is not None and known.owner != ownership.owner
    if known is not None and known.is_model and is_others:
        raise InvalidRequest(
            f"{folder.name!r} is the name of a model in the package {known.model_id!r}"
        )
    try:
        if is_others:
            clear(folder)
            known = None
        if known is None:
            _make(folder, ownership)
        else:
            note_ownership(folder, ownership)
            empty(folder, keep)
    except OSError as error:
        raise disk_error(folder, error) from error


def claim_entry(repository: Path, ownership: Ownership, keep: str = "") -> Path:
    """Make the folder of a package's entry ours, and clear what an earlier run put beside it."""
    folder = repository / ownership.owner
    note_unloaded(folder)
    try:
        clear_others(repository, ownership.owner)
    except OSError as error:
        raise disk_error(folder, error) from error
    claim(folder, ownership, keep)
    return folder


def note_unloaded(folder: Path) -> None:
    """Note in a folder that Triton serves nothing of its package, before the package loses files: a
    part of a package must not be taken over.
    """
    known = ownership_of(folder)
    if known is not None and known.loaded is not None:
        with suppress(OSError):  # a full disk must not keep anything from going
            note_ownership(folder, replace(known, loaded=None))


def clear(folder: Path) -> None:
    """Remove a folder of ours. Links in it are removed, never followed."""
    empty(folder)
    hidden = _find_hidden_place(folder)
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def clear_others(repository: Path, owner: str) -> None:
    """Clear the folders of a package beside the entry's own."""
    known = ownership_of(repository / owner)
    others = {*known.load, *known.along, *known.beside} if known is not None else set()
    for other in others - {owner}:
        folder = repository / other
        theirs = ownership_of(folder)
        if theirs is not None and theirs.owner == owner:
            clear(folder)


def kept_folder(folder: Path) -> Path:
    """Return where the files of a package are kept while another takes its place."""
    return folder.with_name(_KEPT + folder.name)


def link_tree(source: Path, target: Path) -> bool:
    """Make `target` a tree of hard links to the files of `source`, in place of what it was. Return
    whether there is such a source.
    """
    if not source.is_dir():
        return False
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)
    return True


def sweep(repository: Path) -> None:
    """Remove the folders that a killed process was making or removing, or kept."""
    for path in repository.glob(f"{_HIDDEN}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def disk_error(folder: Path, error: OSError) -> BackendError:
    """Return the error for a disk that refused to stage a model in a folder."""
    # copytree collects what went wrong as (source, target, reason)
    reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
    return BackendError(f"cannot stage the model in {folder}: {reason}")


def _make(folder: Path, ownership: Ownership) -> None:
    """Make a folder that has its note from the first moment on."""
    hidden = _find_hidden_place(folder)
    try:
        hidden.mkdir(exist_ok=True)
        note_ownership(hidden, ownership)
        hidden.rename(folder)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def empty(folder: Path, keep: str = "") -> None:
    """Remove what is in a folder of ours, but for the note and an entry named `keep`."""
    for path in folder.iterdir():
        if path.name in {keep, MARKER}:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _find_hidden_place(folder: Path) -> Path:
    """Return where a folder is while it is made or removed."""
    return folder.with_name(_HIDDEN + folder.name)


def fill(
    folder: Path,
    part: ModelPart,
    renamed: Mapping[str, str],
    parameters: Mapping[str, str],
    *,
    staging: Staging,
    inside: Inside,
    gpu: int | None = None,
) -> None:
    """Fill the folder of one model in Triton's repository. `renamed` maps names within the package
    to Triton's; `parameters` are added to the model's config; `gpu` is the only one that it may
    use, None for any.

    Raises InvalidModel for a file that by now leads out of `inside`, and the OSError of the disk.
    """
    for made in part.folders:
        (folder / made).mkdir()
    for link in part.links:
        path = folder / link.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if link.kind is LinkKind.COPIED:
            _copy_executable(path, link.target, inside)
        elif link.kind is LinkKind.INSIDE and staging == "symlink":
            _place(path, link.target, inside)
        else:
            _show(path, link.target, staging, inside)
    if part.config_text is not None or gpu is not None:
        text = rename_steps(without_name(part.config_text or ""), renamed)
        if part.role is Role.HELPER:  # Triton may still cache answers of another model of this name
            text = without_cache(text)
        text = text if gpu is None else with_gpu(text, gpu)
        (folder / CONFIG).write_bytes(with_parameters(text, parameters).encode())


def _show(path: Path, target: str, staging: Staging, inside: Inside) -> None:
    """Link or copy `target`, which may have changed since the inspection. Relative links also work
    where the two folders are mounted together elsewhere.
    """
    if staging == "symlink":
        with inside.open_entry(target) as entry:
            path.symlink_to(os.path.relpath(entry.real, os.path.realpath(path.parent)))
        return
    for name, entry in inside.tree(target):
        shown_as = path / name
        if entry.is_folder:
            shown_as.mkdir()
        elif staging == "copy":
            _copy(entry, shown_as)
        else:
            _hard_link(entry, shown_as)


def _place(path: Path, target: str, inside: Inside) -> None:
    """Hard-link the file `target` at a path; copy it if the file system refuses: another one, or
    another's file.
    """
    with inside.open_entry(target) as entry:
        try:
            _hard_link(entry, path)
        except OSError:
            shutil.copy2(entry.by_descriptor, path)


def _copy_executable(path: Path, target: str, inside: Inside) -> None:
    """Copy the file `target` to a path, executable for its owner. Stores drop the executable bit,
    and Triton then leaves the owner no other.
    """
    with inside.open_entry(target) as entry:
        shutil.copy2(entry.by_descriptor, path)
    path.chmod(path.stat().st_mode | stat.S_IRWXU)


def _copy(entry: Opened, path: Path) -> None:
    """Copy an opened file of a package that is copied whole. Raise OSError where that would need
    the last GiB of the disk, whoever else writes to it meanwhile.
    """
    with open(entry.by_descriptor, "rb") as source, path.open("wb") as copied:  # noqa: PTH123
        while chunk := source.read(CHUNK):
            free = free_at(path.parent).bytes
            if free - len(chunk) < RESERVE_BYTES:
                kept = f"{format_size(RESERVE_BYTES)} of it are kept for others"
                reason = f"no room for a copy of {path.name}: {format_size(free)} free, and {kept}"
                raise OSError(errno.ENOSPC, reason)
            copied.write(chunk)
    shutil.copystat(entry.by_descriptor, path)


def _hard_link(entry: Opened, path: Path) -> None:
    """Make a path a hard link to an opened file, by its descriptor; without src_dir_fd the link in
    /proc itself would be linked.
    """
    os.link(entry.by_descriptor, path, src_dir_fd=entry.descriptor, follow_symlinks=True)
