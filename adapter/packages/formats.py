"""Recognises models without a config.pbtxt by their files, and lays them out as Triton needs them.

The formats are one table: a backend, the file that it opens, and the names that callers use.

Where the caller's type is known its files are sought, else those of every type: at the top, in
the highest version folder, in one sub-folder of either; what lies higher goes first. Folders are
versions when all beside them are integers above 0 too.

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

from adapter.errors import InvalidModel
from adapter.packages.faults import listed, shown

# A folder's entries by name. None is a file, a mapping a folder.
Tree: TypeAlias = Mapping[str, "Tree | None"]

# Triton passes over leading zeros, and dies on what overflows 64 bits.
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
# Left by a Mac's archiver, by Python, and by ModelMesh's puller.
_NO_MODEL = {"__MACOSX", "__pycache__", "_schema.json"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The links of the staged folder, and the config that Triton needs."""

    # a path in the staged folder, and its target below the model's root, () for the root itself
    links: tuple[tuple[str, tuple[str, ...]], ...]
    backend: str
    # config.pbtxt as far as it is certain, None if Triton needs none; some backends also want
    # inputs and outputs
    config: str | None


@dataclass(frozen=True, slots=True)
class _Format:
    """Files of one kind, and the backend that opens them."""

    backend: str
    file: str  # the name that the backend opens
    patterns: tuple[str, ...]  # names that callers use; an ending if it begins with a dot
    config: str | None = None
    decides: bool = False  # files of other formats beside it are its own, not other models
    platform: str | None = None  # the backend's name in the older field `platform`
    is_needed: bool = True  # without such a file no model of the backend can be loaded
    module: str | None = None  # of Python, which opens the file as well


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder that may hold the model."""

    version: str
    path: tuple[str, ...]
    entries: Tree
    nested: bool = False  # below the top or the version folder


@dataclass(frozen=True, slots=True)
class _Candidate:
    place: _Place
    format: _Format
    file: str


def _fil(model_type: str, file: str, pattern: str, module: str) -> _Format:
    """Return a format of FIL, which opens another file for each `model_type`."""
    parameter = f'parameters {{ key: "model_type" value {{ string_value: "{model_type}" }} }}'
    config = f'backend: "fil"\n{parameter}\n'
    return _Format("fil", file, (pattern,), config, is_needed=False, module=module)


def _program(
    backend: str, file: str, pattern: str, config: str = "", *, is_needed: bool = True
) -> _Format:
    """Return the format of a model that is code: what lies beside it belongs to it."""
    text = f'backend: "{backend}"\n{config}'
    return _Format(backend, file, (pattern,), text, decides=True, is_needed=is_needed)


_PYTHON = _program("python", "model.py", "model.py")
_DALI = (
    _program("dali", "dali.py", "dali.py", is_needed=False),
    _program("dali", "model.dali", ".dali", is_needed=False),
)
# The engine places itself on its GPUs: KIND_MODEL.
_VLLM_CONFIG = "instance_group [ { count: 1 kind: KIND_MODEL } ]\n"
_VLLM = _program("vllm", "model.json", "model.json", _VLLM_CONFIG, is_needed=False)
_SAVED_MODEL = _Format(
    *("tensorflow", "model.savedmodel", ("saved_model.pb",)),
    decides=True,
    platform="tensorflow_savedmodel",
    module="tensorflow",
)
_GRAPH_DEF = _Format(
    "tensorflow",
    "model.graphdef",
    (".graphdef", ".pb"),
    platform="tensorflow_graphdef",
    module="tensorflow",
)
_ONNX = _Format(
    "onnxruntime",
    "model.onnx",
    (".onnx",),
    platform="onnxruntime_onnx",
    module="onnxruntime",
)
_TENSORRT = _Format("tensorrt", "model.plan", (".plan", ".engine"), platform="tensorrt_plan")
_PYTORCH = _Format(
    *("pytorch", "model.pt", (".pt", ".pth", ".torchscript")),
    # the backend cannot read the inputs out of a TorchScript file; Triton wants them in the config
    config='backend: "pytorch"\n',
    platform="pytorch_libtorch",
    module="torch",
)
_OPENVINO = _Format("openvino", "model.xml", (".xml",), module="openvino")
# An ending such as .json or .txt says something only where the caller said the type.
_XGBOOST = (
    _fil("xgboost_json", "xgboost.json", ".json", "xgboost"),
    _fil("xgboost_ubj", "xgboost.ubj", ".ubj", "xgboost"),
    _fil("xgboost", "xgboost.model", ".model", "xgboost"),
)
_LIGHTGBM = _fil("lightgbm", "model.txt", ".txt", "lightgbm")
_TREELITE = _fil("treelite_checkpoint", "checkpoint.tl", ".tl", "treelite")
_FIL = (
    *(replace(one, patterns=(one.file,)) for one in (_XGBOOST[0], _XGBOOST[2], _LIGHTGBM)),
    _XGBOOST[1],
    _TREELITE,
)

_TYPES: Mapping[str, tuple[_Format, ...]] = {
    "tensorflow": (_SAVED_MODEL, _GRAPH_DEF),
    "keras": (_SAVED_MODEL,),
    "onnx": (_ONNX,),
    "tensorrt": (_TENSORRT,),
    "pytorch": (_PYTORCH,),
    "openvino": (_OPENVINO,),
    "openvino_ir": (_OPENVINO,),
    "python": (_PYTHON,),
    "xgboost": _XGBOOST,
    "lightgbm": (_LIGHTGBM,),
    "fil": _FIL,
    "vllm": (_VLLM,),
    "dali": _DALI,
}
_PROGRAMS = (_PYTHON, *_DALI, _VLLM)
_ALL = (*_PROGRAMS, _SAVED_MODEL, _GRAPH_DEF, _ONNX, _TENSORRT, _PYTORCH, _OPENVINO, *_FIL)

# Backends that come with Triton; others may be in the package itself, as libtriton_<name>.so.
BACKENDS = frozenset(one.backend for one in _ALL)
# `platform` is the older field; these are its backends.
PLATFORMS = {one.platform: one.backend for one in _ALL if one.platform}


def needed_files(kind: str) -> tuple[str, ...]:
    """Return the files one of which a model of this backend or platform must have; often none."""
    return tuple(f.file for f in _ALL if f.is_needed and kind in {f.backend, f.platform})


def modules_for(backend: str) -> tuple[str, ...]:
    """Return the modules of Python that open files of this backend."""
    modules = (one.module for one in _ALL if one.backend == backend)
    return tuple(dict.fromkeys(module for module in modules if module is not None))


def is_version(name: str) -> bool:
    """Return whether Triton takes a folder of this name for a version."""
    return _VERSION.fullmatch(name) is not None and int(name) < 2**63


def known() -> str:
    """List the files that say by their names what they are."""
    return ", ".join(dict.fromkeys(_expected(one) for one in _ALL))


def layout(name: str, tree: Tree | None, model_type: str | None) -> Layout | None:
    """Lay out the folder or, without a tree, the single file `name`; None for no known format.

    `model_type` is the caller's word, such as `tensorflow:1.5`; the files decide when it is None or
    unknown. InvalidModel when they are of no use to the type, or could be several models.
    """
    formats = _TYPES.get((model_type or "").partition(":")[0].lower())
    root = {name: None} if tree is None else _visible(tree)
    home = _home((), root)
    if not home.entries:
        raise InvalidModel(f"{shown(name, *home.path)} holds no files")
    found = _found(name, root, formats or _ALL)
    if found is None and formats is not None:
        found = _guessed(name, home, formats)
    if found is None:
        return None
    result = _of(name, found)
    if tree is None:  # the root is the file
        return replace(result, links=tuple((path, ()) for path, _ in result.links))
    return result


def _visible(tree: Tree) -> Tree:
    return {
        name: below
        for name, below in tree.items()
        if name not in _NO_MODEL and not name.startswith(".")
    }


def _folders(tree: Tree) -> dict[str, Tree]:
    return {name: _visible(below) for name, below in tree.items() if below is not None}


def _home(path: tuple[str, ...], entries: Tree) -> _Place:
    """Return the folder, or its highest version if all folders in it are versions."""
    folders = _folders(entries)
    if not folders or not all(map(is_version, folders)):
        return _Place("1", path, entries)
    highest = max(folders, key=int)
    return _Place(highest, (*path, highest), folders[highest])


def _levels(root: Tree) -> Iterator[list[_Place]]:
    """Yield where to look, best first: the top, its folders, then the same in the only folder."""
    home = _home((), root)
    yield from _home_and_below(home)
    folders = _folders(root)
    if len(folders) == 1:
        name = next(iter(folders))
        yield from _home_and_below(_home((name,), folders[name]))


def _home_and_below(home: _Place) -> Iterator[list[_Place]]:
    yield [home]
    yield [
        _Place(home.version, (*home.path, name), below, nested=True)
        for name, below in sorted(_folders(home.entries).items())
    ]


def _found(name: str, root: Tree, formats: Sequence[_Format]) -> _Candidate | None:
    for places in _levels(root):
        found = [one for place in places for one in _candidates(place, formats)]
        if len(found) > 1:
            files = [shown(*one.place.path, one.file) for one in found]
            raise InvalidModel(
                f"{shown(name)} holds several models: {listed(files)}; one per package is"
                " supported where there is no config.pbtxt"
            )
        if found:
            return found[0]
    return None


def _candidates(place: _Place, formats: Sequence[_Format]) -> list[_Candidate]:
    found: list[_Candidate] = []
    for one in formats:
        of_this = [_Candidate(place, one, file) for file in _files(place, one)]
        if of_this and one.decides:
            return of_this
        found += of_this
    return found


def _files(place: _Place, of: _Format) -> list[str]:
    if of is _SAVED_MODEL:
        return [*of.patterns] if _is_saved_model(place) else []
    files = [name for name, below in sorted(place.entries.items()) if below is None]
    return [
        file
        for file in files
        if any(file.endswith(p) if p.startswith(".") else file == p for p in of.patterns)
        and (of is not _OPENVINO or _weights(file) in files)
    ]


def _is_saved_model(place: _Place) -> bool:
    """Return whether this is a SavedModel. A lone saved_model.pb at the top is a GraphDef, as it is
    for ModelMesh.
    """
    if "variables" in place.entries and any(name.endswith(".pb") for name in place.entries):
        return True
    return "saved_model.pb" in place.entries and (place.nested or len(place.entries) > 1)


def _weights(xml: str) -> str:
    return xml.removesuffix(".xml") + ".bin"


def _guessed(name: str, home: _Place, formats: tuple[_Format, ...]) -> _Candidate:
    """Choose the model's file by the caller's type, as the files' names do not tell."""
    files = [one for one in formats if one not in (_SAVED_MODEL, _OPENVINO)]
    entries = sorted(home.entries)
    if len(files) == len(entries) == 1 and home.entries[entries[0]] is None:
        return _Candidate(home, files[0], entries[0])
    is_mixed = not home.path and any(map(is_version, _folders(home.entries)))
    if _SAVED_MODEL in formats and is_mixed:
        return _Candidate(home, _SAVED_MODEL, *_SAVED_MODEL.patterns)
    expected = " or ".join(_expected(one) for one in formats)
    raise InvalidModel(f"{shown(name, *home.path)}: expected {expected}; found {listed(entries)}")


def _expected(of: _Format) -> str:
    companion = {_SAVED_MODEL: " beside variables", _OPENVINO: " beside its .bin"}.get(of, "")
    patterns = (f"*{p}" if p.startswith(".") else p for p in of.patterns)
    return " or ".join(patterns) + companion


def _of(name: str, found: _Candidate) -> Layout:
    """Lay out the model that was found. A file with siblings comes with its folder if it has the
    right name already.
    """
    place, own = found.place, found.format
    is_alone = len(place.entries) == 1
    links = [(f"{place.version}/{own.file}", (*place.path, found.file))]
    config = own.config
    if own is _SAVED_MODEL:
        links = [(f"{place.version}/{own.file}", place.path)]
    elif own is _OPENVINO:
        weights = (*place.path, _weights(found.file))
        links.append((f"{place.version}/{_weights(own.file)}", weights))
    elif found.file == own.file and own is _ONNX and (place.nested or not is_alone):
        links = [(f"{place.version}/{own.file}", place.path)]
    elif not is_alone and (found.file == own.file or own is _ONNX):
        links = [(place.version, place.path)]
        if found.file != own.file:
            config = _config_naming(name, found)
    return Layout(tuple(links), own.backend, config)


def _config_naming(name: str, found: _Candidate) -> str:
    """Return a config that names the file: newer ONNX Runtimes refuse weights behind a link of
    their own, so the file cannot be renamed by a link.
    """
    if not found.file.isprintable():
        path = shown(name, *found.place.path, found.file)
        raise InvalidModel(f"{path}: a config cannot hold this name; call it {found.format.file}")
    file = json.dumps(found.file, ensure_ascii=False)
    return f'backend: "{found.format.backend}"\ndefault_model_filename: {file}\n'
