"""Recognises models without a config.pbtxt by their files, and lays them out as Triton needs them.

The files of a caller's type of model are sought, or those of every backend if there is none: at the
top, in the highest version folder, in one sub-folder of either; what lies higher goes first.
Folders are versions when all beside them are integers above 0 too.

The rules are those of ModelMesh's own adapter, whose cases are rows of
tests/unit/packages/test_layouts.py. Where a row asks for what Triton cannot load it is answered
differently (docs/modelmesh.md, Layouts). Row 21, version folders beside another,
is kept: TensorFlow gets the whole folder.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from adapter.packages.backends import (
    Format,
    backend_of_format,
    formats_of_type,
    list_formats,
)
from adapter.packages.messages import invalid_model, listed, shown

# A folder's entries by name. None is a file, a mapping a folder.
Tree: TypeAlias = Mapping[str, "Tree | None"]

# Triton passes over leading zeros, and dies on what overflows 64 bits.
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
# Left by a Mac's archiver, by Python, and by ModelMesh's puller.
_NO_MODEL = {"__MACOSX", "__pycache__", "_schema.json"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Says how a model without a config is laid out: links, backend, config."""

    # a path in the staged folder, and its target below the model's root, () for the root itself
    links: tuple[tuple[str, tuple[str, ...]], ...]
    backend: str
    # config.pbtxt as far as it is certain, None if Triton needs none; some backends also want
    # inputs and outputs
    config: str | None


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder that may hold the model."""

    version: str
    path: tuple[str, ...]
    entries: Tree
    nested: bool = False  # below the top or the version folder


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A file that may be the model."""

    place: _Place
    format: Format
    file: str


def is_version(name: str) -> bool:
    """Return whether Triton takes a folder of this name for a version."""
    return _VERSION.fullmatch(name) is not None and int(name) < 2**63


def describe_formats() -> str:
    """List the names of files that say by themselves what they are, for messages."""
    return ", ".join(dict.fromkeys(map(_describe_names, list_formats())))


def layout(name: str, tree: Tree | None, model_type: str | None) -> Layout | None:
    """Return how to lay out the folder or, without a tree, the single file `name`; None for no
    known format.

    `model_type` is the caller's word, such as `tensorflow:1.5`; the files decide when it is None or
    unknown. InvalidModel when they are of no use to the type, or could be several models.
    """
    formats = formats_of_type(model_type)
    root = {name: None} if tree is None else _drop_hidden(tree)
    home = _find_home((), root)
    if not home.entries:
        raise invalid_model(shown(name, *home.path), "it holds no files")
    candidate = _find(name, root, formats or list_formats())
    if candidate is None and formats is not None:
        candidate = _guess(name, home, formats)
    if candidate is None:
        return None
    result = _lay_out(name, candidate)
    if tree is None:  # the root is the file
        return replace(result, links=tuple((path, ()) for path, _ in result.links))
    return result


def _drop_hidden(tree: Tree) -> Tree:
    """Return the entries of a folder without hidden ones and those that no model's file is in."""
    return {
        name: below
        for name, below in tree.items()
        if name not in _NO_MODEL and not name.startswith(".")
    }


def _list_folders(tree: Tree) -> dict[str, Tree]:
    """Return the folders in a folder, each with its visible entries."""
    return {name: _drop_hidden(below) for name, below in tree.items() if below is not None}


def _find_home(path: tuple[str, ...], entries: Tree) -> _Place:
    """Return the folder at a path, or its highest version if all folders in it are versions."""
    folders = _list_folders(entries)
    if not folders or not all(map(is_version, folders)):
        return _Place("1", path, entries)
    highest = max(folders, key=int)
    return _Place(highest, (*path, highest), folders[highest])


def _list_levels(root: Tree) -> Iterator[list[_Place]]:
    """Yield the levels of folders in which a model is sought, best first: the top, its folders,
    then the same in the only folder.
    """
    home = _find_home((), root)
    yield from _list_home_and_below(home)
    folders = _list_folders(root)
    if len(folders) == 1:
        name = next(iter(folders))
        yield from _list_home_and_below(_find_home((name,), folders[name]))


def _list_home_and_below(home: _Place) -> Iterator[list[_Place]]:
    """Yield a folder, and then all folders in it."""
    yield [home]
    yield [
        _Place(home.version, (*home.path, name), below, nested=True)
        for name, below in sorted(_list_folders(home.entries).items())
    ]


def _find(name: str, root: Tree, formats: Sequence[Format]) -> _Candidate | None:
    """Return the model's file in the first level that has one; None if no level has. Raise
    InvalidModel if a level has several.
    """
    for places in _list_levels(root):
        candidates = [one for place in places for one in _list_candidates(place, formats)]
        if len(candidates) > 1:
            files = [shown(*one.place.path, one.file) for one in candidates]
            remedy = "give a package of one model, or each model a folder with a config.pbtxt"
            raise invalid_model(name, f"it holds several models: {listed(files)}", remedy=remedy)
        if candidates:
            return candidates[0]
    return None


def _list_candidates(place: _Place, formats: Sequence[Format]) -> list[_Candidate]:
    """Return the files of a folder that may be the model. A program is the only one: what lies
    beside it belongs to it.
    """
    candidates: list[_Candidate] = []
    for one in formats:
        of_this = [_Candidate(place, one, file) for file in _list_files(place, one)]
        if of_this and one.is_program:
            return of_this
        candidates += of_this
    return candidates


def _list_files(place: _Place, of: Format) -> list[str]:
    """Return the names of the files in a folder that are of a format."""
    if of.is_folder:
        return [*of.patterns] if _is_saved_model(place) else []
    files = [name for name, below in sorted(place.entries.items()) if below is None]
    return [
        file
        for file in files
        if any(file.endswith(p) if p.startswith(".") else file == p for p in of.patterns)
        and (not of.companion or _name_companion(file, of) in files)
    ]


def _is_saved_model(place: _Place) -> bool:
    """Return whether a folder is a SavedModel of TensorFlow. A lone saved_model.pb at the top is a
    GraphDef, as it is for ModelMesh.
    """
    if "variables" in place.entries and any(name.endswith(".pb") for name in place.entries):
        return True
    return "saved_model.pb" in place.entries and (place.nested or len(place.entries) > 1)


def _name_companion(file: str, of: Format) -> str:
    """Return the name of the file that belongs to a model's file, as `net.bin` to `net.xml`."""
    return file.rpartition(".")[0] + of.companion


def _guess(name: str, home: _Place, formats: tuple[Format, ...]) -> _Candidate:
    """Return the model's file by the caller's type, where the files' names do not tell. Raise
    InvalidModel if there is not only one.
    """
    files = [one for one in formats if not one.is_folder and not one.companion]
    folders = [one for one in formats if one.is_folder]
    entries = sorted(home.entries)
    if len(files) == len(entries) == 1 and home.entries[entries[0]] is None:
        return _Candidate(home, files[0], entries[0])
    is_mixed = not home.path and any(map(is_version, _list_folders(home.entries)))
    if folders and is_mixed:
        return _Candidate(home, folders[0], folders[0].patterns[0])
    expected = " or ".join(map(_describe_names, formats))
    fault = f"expected {expected}; found {listed(entries)}"
    raise invalid_model(shown(name, *home.path), fault)


def _describe_names(of: Format) -> str:
    """Return the names of a format's files, as `*.xml beside its .bin`, for messages."""
    patterns = (f"*{p}" if p.startswith(".") else p for p in of.patterns)
    companion = f" beside its {of.companion}" if of.companion else ""
    folder = " beside variables" if of.is_folder else ""
    return " or ".join(patterns) + companion + folder


def _lay_out(name: str, candidate: _Candidate) -> Layout:
    """Return the layout of the model that was found. A file with siblings comes with its folder if
    it has the right name already.
    """
    place = candidate.place
    own = candidate.format
    backend = backend_of_format(own)
    is_alone = len(place.entries) == 1
    has_own_name = candidate.file == own.file
    links = [(f"{place.version}/{own.file}", (*place.path, candidate.file))]
    config = None if own.config is None else f'backend: "{backend}"\n{own.config}'
    if own.is_folder:
        links = [(f"{place.version}/{own.file}", place.path)]
    elif own.companion:
        companion = (*place.path, _name_companion(candidate.file, own))
        links.append((f"{place.version}/{_name_companion(own.file, own)}", companion))
    elif has_own_name and own.has_siblings and (place.nested or not is_alone):
        links = [(f"{place.version}/{own.file}", place.path)]
    elif not is_alone and (has_own_name or own.has_siblings):
        links = [(place.version, place.path)]
        if not has_own_name:
            config = _make_config_naming(name, candidate, backend)
    return Layout(tuple(links), backend, config)


def _make_config_naming(name: str, candidate: _Candidate, backend: str) -> str:
    """Return a config that names the file: newer ONNX Runtimes refuse weights behind a link of
    their own, so the file cannot be renamed by a link.
    """
    if not candidate.file.isprintable():
        path = shown(name, *candidate.place.path, candidate.file)
        remedy = f"call it {candidate.format.file}"
        raise invalid_model(path, "a config cannot hold this name", remedy=remedy)
    file = json.dumps(candidate.file, ensure_ascii=False)
    return f'backend: "{backend}"\ndefault_model_filename: {file}\n'
