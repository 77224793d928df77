"""Checks the files that a model with a config needs, as far as its backend is known."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.packages.backends import files_needed_by, library_of
from adapter.packages.config import backend_of, is_ensemble
from adapter.packages.config_paths import BATCHING_LIBRARY, ENVIRONMENT, MODEL_FOLDER
from adapter.packages.config_rules import served_versions
from adapter.packages.contents import CONFIG
from adapter.packages.formats import Tree, is_version
from adapter.packages.messages import invalid_model, listed, shown

# The python backend's process, which a model may bring. Triton sets the mode of one that is not
# executable to 0100.
STUB = "triton_python_backend_stub"

# Triton reads every folder name with std::stoll, and crashes if one overflows (seen on 2.51).
_NUMBERED = re.compile(r"\s*[+-]?([0-9]+)")
_NUMPY = re.compile(r"numpy-(\d+)(\.[^-]*)?\.dist-info")


def list_missing_folders(tree: Tree, config: ModelConfig) -> tuple[str, ...]:
    """Return the version folder to be made for an ensemble without one: not every store keeps empty
    folders.
    """
    return ("1",) if is_ensemble(config) and not any(map(is_version, tree)) else ()


def has_own_backend(tree: Tree, config: ModelConfig) -> bool:
    """Return whether the model's folder holds the library of its backend, which `runtime` names.

    Triton looks for a backend that is written in Python, `runtime: "model.py"`, only among its own.
    """
    library = _name_own_library(config)
    if library.endswith(".py"):
        return False
    versions = (below for name, below in tree.items() if below is not None and is_version(name))
    return any(library in folder for folder in (tree, *versions))


def _name_own_library(config: ModelConfig) -> str:
    """Return the name of the library of the model's backend, as Triton looks for it in the model's
    folder.
    """
    return config.runtime or library_of(config.backend)


def list_files_kept_inside(config: ModelConfig) -> frozenset[tuple[str, ...]]:
    """Return the paths, part by part, of the files that Triton refuses when a link leads out of the
    model's folder (docs/triton.md, Versions): labels, and libraries beside the config.

    A batching library is named by its path in Triton's repository, of which only the end is ours.
    """
    parameter = config.parameters.get(BATCHING_LIBRARY)
    libraries = (
        _name_own_library(config),
        PurePosixPath(parameter.string_value if parameter else "").name,
    )
    named = (*(output.label_filename for output in config.output), *libraries)
    paths = (PurePosixPath(name).parts for name in named)
    return frozenset(parts for parts in paths if parts)


def check_model_files(root: Path, tree: Tree, config: ModelConfig) -> tuple[str, ...]:
    """Return the versions that Triton would serve. Raise InvalidModel if files are missing
    that the backend certainly needs.
    """
    versions = _list_versions(root, tree)
    if is_ensemble(config):
        if not config.ensemble_scheduling.step:
            raise invalid_model(root, f"{CONFIG} is of an ensemble without steps")
        versions = versions or [*list_missing_folders(tree, config)]
    if not versions:
        contents = f"it holds {listed(sorted(tree))}"
        raise invalid_model(root, contents, remedy="add a version folder such as 1")
    try:
        served = served_versions(config, versions)
    except ValueError as error:
        raise invalid_model(root / CONFIG, str(error)) from error
    if not is_ensemble(config):
        _check_named_files(root, config)
        _check_backend_files(root, config, served)
    return tuple(served)


def _check_backend_files(root: Path, config: ModelConfig, served: Sequence[str]) -> None:
    """Raise InvalidModel if a served version has no file that the config's backend can open."""
    kind = config.platform or config.backend
    # with cc_model_filenames the file depends on the GPU; another runtime opens what it likes, as
    # the one in Python of the backend pytorch
    has_other_runtime = config.runtime not in {"", library_of(backend_of(config))}
    is_unusual = bool(config.cc_model_filenames) or has_other_runtime
    names = () if is_unusual else files_needed_by(kind)
    if names:
        names = (config.default_model_filename,) if config.default_model_filename else names
        _check_versions(root, served, kind, names)


def _check_versions(root: Path, served: Sequence[str], kind: str, names: tuple[str, ...]) -> None:
    """Raise InvalidModel if a version that Triton would serve has none of the files, or empty ones.

    Triton does not answer for a minute to the load of a python model without its model.py.
    """
    for version in served:
        present = [path for name in names if (path := root / version / name).exists()]
        if not present:
            remedy = f"add {' or '.join(names)} in version {version}"
            raise invalid_model(root, f"{kind} needs it", remedy=remedy)
        for path in present:
            if path.is_file() and not path.stat().st_size:
                raise invalid_model(path, "it is empty")


def _check_named_files(root: Path, config: ModelConfig) -> None:
    """Raise InvalidModel if a file of labels or of warmup data is missing."""
    samples = (given for sample in config.model_warmup for given in sample.inputs.values())
    named = [output.label_filename for output in config.output if output.label_filename]
    named += [f"warmup/{given.input_data_file}" for given in samples if given.input_data_file]
    for name in named:
        path = root / name
        if not path.exists():
            raise invalid_model(root / CONFIG, f"it names {shown(path)}: no such file")


def _list_versions(root: Path, tree: Tree) -> list[str]:
    """Return the names of a model's version folders. Raise InvalidModel for a number that Triton
    cannot hold, which ends it.
    """
    folders = sorted(name for name, below in tree.items() if below is not None)
    for name in folders:
        if (number := _NUMBERED.match(name)) and int(number[1]) >= 2**63:
            raise invalid_model(root / name, "a version number must be below 2**63")
    return [name for name in folders if is_version(name)]


def find_odd_environment(folder: Path, tree: Tree, config: ModelConfig) -> Iterator[str]:
    """Yield a warning if a model's Python environment has a numpy that Triton's python backend
    cannot use. Packed environments are not read.
    """
    parameter = config.parameters.get(ENVIRONMENT)
    place = "" if parameter is None else parameter.string_value
    if not place.startswith(MODEL_FOLDER):
        return
    name = place.removeprefix(MODEL_FOLDER)
    for python, packages in (_find_below(tree, PurePosixPath(name, "lib")) or {}).items():
        installed = (packages or {}).get("site-packages") if python.startswith("python") else None
        for match in filter(None, map(_NUMPY.fullmatch, installed or {})):
            if int(match[1]) > 1:
                yield (
                    f"{shown(folder / name)}: has numpy {match[1]}{match[2] or ''}; with Triton"
                    ' 2.51 each inference fails then: "output tensor shape does not match size of'
                    " output\". Make it with: pip install 'numpy<2'"
                )


def _find_below(tree: Tree | None, path: PurePosixPath) -> Tree | None:
    """Return the folder at a path in a tree; None if there is none."""
    for part in path.parts:
        tree = (tree or {}).get(part)
    return tree
