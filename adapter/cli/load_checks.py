"""Checks of a package that only `inspect` does.

A load leaves them to Triton, which has clear words for these faults: to parse a model.py stops all
threads of a process, for seconds where the source is made for it; and backends, GPUs and modules
are those of Triton's machine, which need not be this one.
"""

import ast
import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from adapter.backend.tritonserver import wheel_backends, wheel_folder
from adapter.core.faults import ENVIRONMENTS
from adapter.core.model import Package
from adapter.errors import InvalidModel
from adapter.packages.backends import backend_of, describe_missing_backends
from adapter.packages.config import parse, read_config
from adapter.packages.config_rules import served_versions
from adapter.packages.contents import CONFIG
from adapter.packages.faults import did_you_mean, shown
from adapter.packages.formats import BACKENDS, is_version

_CLASS = "TritonPythonModel"
_MAX_CODE_BYTES = 2**22
_OTHER_PYTHON = "EXECUTION_ENV_PATH"
_OF_TRITON = frozenset({"triton_python_backend_utils", "c_python_backend_utils"})


def check(package: Package, folders: Sequence[Path], path: Path) -> tuple[str, ...]:
    """Return warnings. InvalidModel if Python could not read a model.py.

    `folders` are those of the package's models in the repository; `path` is the package's, for
    messages.
    """
    configs = {folder: _config(folder) for folder in folders}
    found = [*_absent_backends(package, path), *_absent_gpus(configs.values())]
    for folder, config in configs.items():
        backend = backend_of(config) if config is not None else next(iter(package.backends), None)
        if backend != "python":
            continue
        is_ours = config is None or _OTHER_PYTHON not in config.parameters
        for code in _code_of(folder, config or ModelConfig()):
            name = _named(code, package, path)
            try:
                tree = _parsed(code, name)
            except InvalidModel as fault:
                if is_ours:
                    raise
                found.append(f"{fault}; Triton runs it with the Python of {_OTHER_PYTHON}")
            else:
                if is_ours and tree is not None and wheel_folder() is not None:
                    found += _absent_modules(tree, code, name)
    return tuple(found)


def _config(folder: Path) -> ModelConfig | None:
    path = folder / CONFIG
    return parse(read_config(path), path).config if path.exists() else None


def _named(code: Path, package: Package, path: Path) -> str:
    below = os.path.relpath(os.path.realpath(code), package.root)
    return shown(os.path.normpath(path / below))


def _absent_backends(package: Package, path: Path) -> Iterator[str]:
    needed = package.backends - package.own_backends
    for name in sorted(needed - BACKENDS):
        yield f"backend {name!r} does not come with Triton{did_you_mean([name], BACKENDS)}"
    reason = describe_missing_backends(needed & BACKENDS, wheel_backends())
    if reason is not None:
        yield f"{shown(path)} {reason}"


def _absent_gpus(configs: Iterable[ModelConfig | None]) -> Iterator[str]:
    groups = [group for config in configs if config is not None for group in config.instance_group]
    named = {gpu for group in groups for gpu in group.gpus}
    asks = bool(named) or any(group.kind == ModelInstanceGroup.KIND_GPU for group in groups)
    if not asks:
        return
    visible = visible_gpus()
    if visible is None:
        return
    if not visible:
        yield "instance_group asks for GPUs, and this machine shows none"
    elif absent := sorted(gpu for gpu in named if gpu >= visible):
        listed = ", ".join(map(str, absent))
        yield f"instance_group asks for GPU {listed}; this machine shows {visible}, from 0 on"


def visible_gpus(library: Any = None) -> int | None:
    """Return how many GPUs this machine shows by NVML; None if that cannot be told.

    `library` is pynvml or has the same functions and errors.
    """
    try:
        nvml = library or import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return 0
    except nvml.NVMLError:
        return None


def _code_of(folder: Path, config: ModelConfig) -> Iterator[Path]:
    """Return the files of the versions that Triton would serve."""
    versions = [path.name for path in folder.iterdir() if is_version(path.name)]
    for version in served_versions(config, versions):
        path = folder / version / (config.default_model_filename or "model.py")
        if path.is_file():
            yield path


def _parsed(path: Path, name: str) -> ast.Module | None:
    """Return the code of this file, None if it cannot be judged without running it. InvalidModel
    if Triton could not load it.

    `name` is the file's name in the message.
    """
    with path.open("rb") as file:
        source = file.read(_MAX_CODE_BYTES + 1)
    if len(source) > _MAX_CODE_BYTES:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        python = platform.python_version()
        fault = f"{name}{line}: {type(error).__name__}: {error.msg} (Python {python})"
        raise InvalidModel(fault) from error
    except ValueError as error:  # a NUL
        raise InvalidModel(f"{name}: {error}") from error
    except (RecursionError, MemoryError):
        return None
    if not _can_define_class(tree):
        raise InvalidModel(f"{name}: it has no class {_CLASS}")
    return tree


def _absent_modules(tree: ast.Module, path: Path, name: str) -> Iterator[str]:
    """Warn of imports on the top level: those in a `try` or a function may be optional."""
    beside = [str(path.parent), str(path.parent.parent)]  # as the stub has them in sys.path
    for line, module in _imports(tree):
        known = module in _OF_TRITON or find_spec(module) or PathFinder.find_spec(module, beside)
        if not known:
            yield (
                f"{name}:{line}: imports {module}, which the Python of an embedded Triton does not"
                f" have; install it there, or bring it along: {ENVIRONMENTS}"
            )


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        yield from ((node.lineno, name.partition(".")[0]) for name in names)


def _can_define_class(tree: ast.Module) -> bool:
    """Return whether anything in it may bind that name: `*`, or whatever has the name."""
    for node in ast.walk(tree):
        names: set[object] = set()
        if isinstance(node, ast.alias):
            names = {node.name, node.asname}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = {node.name}
        elif isinstance(node, ast.Name):
            names = {node.id}
        elif isinstance(node, ast.Constant):
            names = {node.value}
        if not names.isdisjoint({_CLASS, "*"}):
            return True
    return False
