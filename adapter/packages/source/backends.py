"""Checks the files that a model with a config needs, as far as its backend is known."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path, PurePosixPath

from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import Package
from adapter.errors import InvalidModel
from adapter.packages.config.rules import served_versions
from adapter.packages.source.contents import is_within, shown
from adapter.packages.source.formats import Tree

# Marks a folder in Triton's repository as the adapter's.
MARKER = ".triton-adapter.json"

# Files of a request or an archive, within the entry's folder. Triton reads only numbered folders.
UNPACKED = ".unpacked"

# Triton ignores version folders with leading zeros.
_VERSION = re.compile(r"[1-9][0-9]*")
# Triton reads every folder name with std::stoll, and crashes if one overflows (seen on 2.51).
_NUMBERED = re.compile(r"\s*[+-]?([0-9]+)")
_MODEL_FILES = {
    "python": ("model.py",),
    "onnxruntime": ("model.onnx",),
    "onnxruntime_onnx": ("model.onnx",),
    "tensorrt": ("model.plan",),
    "tensorrt_plan": ("model.plan",),
    "pytorch": ("model.pt",),
    "pytorch_libtorch": ("model.pt",),
    "tensorflow": ("model.savedmodel", "model.graphdef"),
    "tensorflow_savedmodel": ("model.savedmodel",),
    "tensorflow_graphdef": ("model.graphdef",),
    "openvino": ("model.xml",),
}
# `platform` is the older field; these are its backends
_BACKENDS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
}
# Backends that come with Triton; others may be in the package itself, as libtriton_<name>.so.
BACKENDS = frozenset({"dali", "fil", "onnxruntime", "openvino", "python", "pytorch"}) | frozenset(
    {"tensorflow", "tensorrt", "vllm"}
)
_MAX_LISTED = 10


def is_version(name: str) -> bool:
    return _VERSION.fullmatch(name) is not None


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))


def backend_of(config: ModelConfig) -> str | None:
    """Return the backend; None if Triton detects it, and for ensembles, which need none."""
    if is_ensemble(config):
        return None
    return config.backend or _BACKENDS.get(config.platform)


def missing_folders(tree: Tree, config: ModelConfig) -> tuple[str, ...]:
    """Return the version folder of an ensemble if missing: not every store keeps empty folders."""
    return ("1",) if is_ensemble(config) and not any(map(is_version, tree)) else ()


def refuse_missing_backends(package: Package, known: frozenset[str] | None) -> None:
    """Raise InvalidModel for a backend that neither this Triton nor the package has.

    `known`: Triton's, None if unknown.
    """
    if known is not None and (missing := package.backends - package.own_backends - known):
        raise InvalidModel(
            f"{shown(package.root)} needs Triton's backend {', '.join(sorted(missing))};"
            f" this Triton has {', '.join(sorted(known)) or 'none'}{meant(missing, known)}"
        )


def meant(backends: Iterable[str], known: Iterable[str]) -> str:
    """Propose a known name for misspelt ones, as the end of a message; nothing if none is near."""
    near = [one for name in sorted(backends) for one in get_close_matches(name[:100], known, 1)]
    return f"; did you mean {', '.join(near)}?" if near else ""


def unknown_platform(config: ModelConfig) -> str | None:
    """Return a warning about a `platform` that no Triton of today knows; it decides alone only
    where there is no `backend`.
    """
    known = {*_BACKENDS, "ensemble"}
    if not config.platform or config.backend or config.platform in known:
        return None
    name = config.platform[:100]
    proposal = meant([name], known) or "; to name a backend, the field is `backend`"
    return f"platform {name!r} is not known{proposal}"


def has_own_backend(tree: Tree, config: ModelConfig) -> bool:
    """Return whether the model's folder holds the library of its backend, which `runtime` names."""
    library = _own_library(config)
    versions = (below for name, below in tree.items() if below is not None and is_version(name))
    return any(library in folder for folder in (tree, *versions))


def _own_library(config: ModelConfig) -> str:
    return config.runtime or f"libtriton_{config.backend}.so"


def kept_inside(config: ModelConfig) -> frozenset[tuple[str, ...]]:
    """Return the paths, part by part, of the files that Triton refuses when a link leads out of the
    model's folder (docs/triton.md, Versions): labels, and libraries beside the config.

    A batching library is named by its path in Triton's repository, of which only the end is ours.
    """
    given = config.parameters.get("TRITON_BATCH_STRATEGY_PATH")
    libraries = (_own_library(config), PurePosixPath(given.string_value if given else "").name)
    named = (*(output.label_filename for output in config.output), *libraries)
    paths = (PurePosixPath(name).parts for name in named)
    return frozenset(parts for parts in paths if parts and parts[0] != "/" and ".." not in parts)


def check_model_files(root: Path, tree: Tree, config: ModelConfig) -> None:
    """Raise InvalidModel if files are missing that the backend certainly needs."""
    versions = _versions(root, tree)
    if is_ensemble(config):
        if not config.ensemble_scheduling.step:
            raise InvalidModel(f"{shown(root)}: config.pbtxt is of an ensemble without steps")
        return
    if not versions:
        raise InvalidModel(f"{shown(root)}: no version folder such as 1; found {_listed(tree)}")
    try:
        served = served_versions(config, versions)
    except ValueError as error:
        raise InvalidModel(f"{shown(root / 'config.pbtxt')}: {error}") from error
    _check_named_files(root, config)
    kind = config.platform or config.backend
    # with cc_model_filenames the file depends on the GPU
    names = () if config.cc_model_filenames else _MODEL_FILES.get(kind, ())
    if names:
        names = (config.default_model_filename,) if config.default_model_filename else names
        _check_versions(root, served, kind, names)


def _check_versions(root: Path, served: list[str], kind: str, names: tuple[str, ...]) -> None:
    """Raise InvalidModel if a version that Triton would serve has none of the files, or empty ones.

    Triton does not answer for a minute to the load of a python model without its model.py.
    """
    for version in served:
        present = [path for name in names if (path := root / version / name).exists()]
        if not present:
            missing = f"{' or '.join(names)} in version {version}"
            raise InvalidModel(f"{shown(root)} holds no {missing}; {kind} needs it")
        for path in present:
            if path.is_file() and not path.stat().st_size:
                raise InvalidModel(f"{shown(path)} is empty")


def _check_named_files(root: Path, config: ModelConfig) -> None:
    """Raise InvalidModel if a file of labels or of warmup data is missing.

    Whether there is anything at a path that leaves the model's folder is not looked at.
    """
    samples = (given for sample in config.model_warmup for given in sample.inputs.values())
    named = [output.label_filename for output in config.output if output.label_filename]
    named += [f"warmup/{given.input_data_file}" for given in samples if given.input_data_file]
    for name in named:
        path = root / name
        if ".." not in path.parts and is_within(str(path), str(root)) and not path.exists():
            raise InvalidModel(f"{shown(root / 'config.pbtxt')} names {shown(path)}: no such file")


def _versions(root: Path, tree: Tree) -> list[str]:
    folders = sorted(name for name, below in tree.items() if below is not None)
    for name in folders:
        if (number := _NUMBERED.match(name)) and int(number[1]) >= 2**63:
            raise InvalidModel(f"{shown(root / name)}: a version number must be below 2**63")
    return [name for name in folders if is_version(name)]


def _listed(names: Tree | list[str]) -> str:
    """List at most ten names for a message."""
    texts = [shown(name) for name in sorted(names)]
    more = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return (", ".join(texts[:_MAX_LISTED]) or "nothing") + more
