"""Shows what a load would make of a package, by the code of the load, without a Triton.

Some checks are done here alone. A load leaves them to Triton, which reports them clearly: parsing a
model.py stops all threads of a process, for seconds if the source is made for it; and backends,
GPUs and modules are those of Triton's machine, which need not be this one.
"""

import argparse
import ast
import asyncio
import difflib
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pynvml
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from adapter.cli.text import escape, escape_lines
from adapter.core.byte_sizes import format_size
from adapter.core.model import (
    ModelId,
    ModelPart,
    ModelSource,
    Package,
    Placement,
    Role,
    parse_model_id,
    triton_name,
)
from adapter.core.triton_errors import ENVIRONMENTS
from adapter.errors import AdapterError, InvalidModel, InvalidRequest
from adapter.frontends.status import HTTP, lookup
from adapter.packages.backends import BACKENDS, PYTHON, describe_missing_backends
from adapter.packages.config import is_ensemble, parse, read_config
from adapter.packages.config_paths import ENVIRONMENT
from adapter.packages.config_rules import served_versions
from adapter.packages.contents import CONFIG, MARKER, is_within
from adapter.packages.formats import is_version
from adapter.packages.messages import did_you_mean, invalid_model, shown
from adapter.packages.staging import Packages
from adapter.triton.server.launch import wheel_backends, wheel_folder

_CONFIG_ORIGINS = {
    "file": "the caller's file, unchanged",
    "changed": "the caller's file, changed as below",
    "made": "made by the adapter, as below",
    "triton": "none: Triton completes it from the model file",
}
_ROLES = {
    "entry": "entry: answers to the caller",
    "step": "step: Triton loads it along with the ensemble",
    "helper": "helper: loaded before the entry",
}
_PYTHON_CLASS = "TritonPythonModel"
_MAX_CODE_BYTES = 2**22
_TRITON_MODULES = frozenset(
    {"triton_python_backend_utils", "c_python_backend_utils", "__main__"}  # a stub's own
)

Report = dict[str, Any]  # as --json prints it


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="folder, model file or archive")
    text = "as in the load: onnx, pytorch ..."
    parser.add_argument("--model-type", metavar="TYPE", help=text)
    text = "which of several models answers, as in the load"
    parser.add_argument("--entry", metavar="NAME", help=text)
    text = "inputs and outputs as JSON, of ModelMesh"
    parser.add_argument("--schema", type=Path, metavar="FILE", help=text)
    text = "model_name of the load (default: the last part of PATH)"
    parser.add_argument("--name", type=_parse_name, help=text)
    text = (
        "folder that must contain the package and its links' targets, as in serve; repeatable "
        "(default: the folders that hold PATH and FILE)"
    )
    parser.add_argument("--model-roots", action="append", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    text = "fail for warnings, too: exit code 3"
    parser.add_argument("--strict", action="store_true", help=text)


def _parse_name(text: str) -> ModelId:
    """Parse the name of a model. Raises ArgumentTypeError."""
    try:
        return parse_model_id(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _inspect(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print what a load would make of the package, or why it would be refused.

    Return 1 if the load would be refused, 3 for warnings with --strict, otherwise 0.
    """
    with tempfile.TemporaryDirectory(prefix="triton-adapter-inspect-") as folder:
        repository = os.path.realpath(folder)
        try:
            report = _make_report(args, repository)
        except (AdapterError, OSError) as error:
            code = 1
            out = sys.stdout if args.json else sys.stderr
            status = lookup(HTTP, error)
            failure = {"error": str(error), "code": status[1] if status else "InternalError"}
            text = json.dumps(failure)
            if not args.json:
                text = escape_lines(f"triton-adapter: {error}")
        else:
            code = 3 if args.strict and report["warnings"] else 0
            out = sys.stdout
            text = json.dumps(report, indent=2)
            if not args.json:
                text = "\n".join(escape(line.expandtabs()) for line in _format_report(report))
    out.write(text.replace(f"{repository}/", "") + "\n")
    return code


def _make_report(args: argparse.Namespace, repository: str) -> Report:
    """Stage the package in the repository, and return what was staged.

    Raises an error of the load, or InvalidModel.
    """
    is_file_url = args.path.startswith("file:///")
    path = Path(unquote(args.path[len("file://") :]) if is_file_url else args.path).absolute()
    is_other_url = "://" in args.path and not is_file_url
    source = ModelSource(
        args.path if is_other_url else path.as_uri(),  # a URI can hold any bytes, as paths may
        args.model_type,
        str(args.schema.absolute()) if args.schema else None,
        args.entry,
    )
    last_part = os.path.basename(os.path.abspath(path))  # noqa: PTH100, PTH119 - pathlib keeps ".."
    model_id = args.name or parse_model_id(shown(last_part))
    near = [Path(os.path.realpath(file)).parent for file in (path, args.schema) if file is not None]
    packages = Packages(Path(repository), args.model_roots or near)
    package, placement = asyncio.run(_stage_package(packages, model_id, source))
    # each tuple of a placement is in the order of the parts
    step_names = iter(placement.along)
    other_names = iter(placement.load)
    models = []
    configs = []
    warnings_of_code: list[str] = []
    for part in package.parts:
        folder = Path(repository, next(step_names if part.role is Role.STEP else other_names))
        file = folder / CONFIG
        text = read_config(file) if file.exists() else None
        config = ModelConfig() if text is None else parse(text, file).config
        configs.append(config)
        models.append(_describe_model(folder, part, package, text, is_ensemble(config)))
        if part.backend == PYTHON:
            warnings_of_code += _check_code(folder, config, package, path)
    return {
        "path": shown(path),
        "model_name": model_id,
        "is_archive": is_within(package.root, repository),
        "size_bytes": package.size_bytes,
        "declared_bytes": package.declared_bytes,
        "content_types": package.content_types.types if package.content_types else (),
        "backends": sorted(package.backends),
        "gpus": _describe_gpus(package),
        "warnings": [
            *package.warnings,
            *_find_absent_backends(package, path),
            *_find_absent_gpus(configs),
            *warnings_of_code,
        ],
        "models": models,
    }


async def _stage_package(
    packages: Packages, model_id: ModelId, source: ModelSource
) -> tuple[Package, Placement]:
    """Stage the package as a load does. Raises an error of the load."""
    name = triton_name(model_id)
    package = await packages.prepare(name, model_id, source)
    return package, await packages.place(name, model_id, package)


def _describe_model(
    folder: Path, part: ModelPart, package: Package, config_text: str | None, is_ensemble: bool
) -> Report:
    """Return what was staged of one model of the package."""
    root = Path(package.root)
    staged = dict(_list_staged(folder, str(root if root.is_dir() else root.parent)))
    diff: list[str] = []
    if config_text is None:
        origin = "triton"
    elif part.config_file is None:
        origin = "made"
    else:
        before = read_config(Path(part.config_file))
        name = shown(os.path.relpath(part.config_file, package.root))
        names = (name, f"{folder.name}/{CONFIG}")
        lines = (before.splitlines(), config_text.splitlines())
        diff = [*difflib.unified_diff(*lines, *names, lineterm="")]
        origin = "file" if before == config_text else "changed"
    versions = {path.partition("/")[0] for path in staged}
    return {
        "name": folder.name,
        "own_name": shown(part.own_name),
        "role": part.role.value,
        "is_ensemble": is_ensemble,
        "backend": part.backend,
        "versions": sorted(filter(is_version, versions), key=int),
        "config_from": origin,
        "config_text": config_text,
        "config_diff": diff,
        "staged": staged,
    }


def _list_staged(folder: Path, root: str, above: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield the paths in a staged folder, those of folders with a slash at the end.

    Each comes with the target of its link, relative to the package if it is within, or None.
    """
    for path in sorted(folder.iterdir()):
        name = above + shown(path.name)
        if path.is_symlink():
            target = os.path.realpath(path)
            yield name, shown(os.path.relpath(target, root) if is_within(target, root) else target)
        elif not path.is_dir():
            if path.name != MARKER:
                yield name, None
        elif str(path) != root:  # unpacked files lie in the staged folder
            yield f"{name}/", None
            yield from _list_staged(path, root, f"{name}/")


def _describe_gpus(package: Package) -> str:
    """Return the numbers of the GPUs that a package asks for, or who chooses them."""
    if package.gpus is not None:
        return ", ".join(map(str, sorted(package.gpus))) or "none"
    if package.leaves_gpu_open:
        return "as gpu_placement says"
    return "as Triton, or the backend, chooses"


# -- text ---------------------------------------------------------------------------------------


def _format_report(report: Report) -> Iterator[str]:
    """Yield the lines of a report for people."""
    declared = report["declared_bytes"]
    yield f"package   {report['path']}{' (archive, unpacked)' if report['is_archive'] else ''}"
    yield f"name      {report['model_name']}"
    yield f"disk      {format_size(report['size_bytes'])}"
    yield f"declared  {'no size' if declared is None else format_size(declared)}"
    yield f"backends  {', '.join(report['backends']) or 'not known'}"
    yield f"GPUs      {report['gpus']}"
    if report["content_types"]:
        yield f"accepts   {', '.join(report['content_types'])}, besides JSON"
    for warning in report["warnings"]:
        yield f"warning   {warning}"
    for model in report["models"]:
        yield ""
        yield from _format_model(model)


def _format_model(model: Report) -> Iterator[str]:
    """Yield the lines of one model for people."""
    own_name = f" ({model['own_name']} in the package)" if model["own_name"] else ""
    backend = "none, an ensemble" if model["is_ensemble"] else model["backend"] or "not known"
    yield f"{model['name']}{own_name}"
    yield f"  {_ROLES[model['role']]}"
    yield f"  backend   {backend}"
    yield f"  versions  {', '.join(model['versions']) or 'none'}"
    yield f"  config    {_CONFIG_ORIGINS[model['config_from']]}"
    yield "  staged"
    for path, target in model["staged"].items():
        above, slash, name = path.rstrip("/").rpartition("/")
        indent = "  " * (above + slash).count("/")
        folder = "/" if path.endswith("/") else ""
        yield f"    {indent}{name}{folder}{f' -> {target}' if target is not None else ''}"
    made = model["config_text"].splitlines() if model["config_from"] == "made" else ()
    for line in (*model["config_diff"], *made):
        yield f"  | {line}"


# -- checks of this machine and of Python code --------------------------------------------------


def _find_absent_backends(package: Package, path: Path) -> Iterator[str]:
    """Warn of backends that the package lacks and that no Triton, or the embedded one, has."""
    needed = package.backends - package.own_backends
    for name in sorted(needed - BACKENDS.keys()):
        yield f"backend {name!r} does not come with Triton{did_you_mean([name], BACKENDS)}"
    reason = describe_missing_backends(frozenset(needed & BACKENDS.keys()), wheel_backends())
    if reason is not None:
        yield f"{shown(path)}: {reason}"


def _find_absent_gpus(configs: Iterable[ModelConfig]) -> Iterator[str]:
    """Warn of GPUs that instance groups ask for and this machine lacks."""
    groups = [group for config in configs for group in config.instance_group]
    gpus = {gpu for group in groups for gpu in group.gpus}
    if not gpus and all(group.kind != ModelInstanceGroup.KIND_GPU for group in groups):
        return
    count = count_gpus()
    if count == 0:
        yield "instance_group asks for GPUs, and this machine shows none"
    elif count is not None and max(gpus, default=0) >= count:
        absent = ", ".join(str(gpu) for gpu in sorted(gpus) if gpu >= count)
        yield f"instance_group asks for GPU {absent}; this machine shows {count}, from 0 on"


def count_gpus() -> int | None:
    """Return how many GPUs this machine shows, 0 without a driver; None if the driver fails."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return 0
    except pynvml.NVMLError:
        return None


def _check_code(folder: Path, config: ModelConfig, package: Package, path: Path) -> Iterator[str]:
    """Check the code of the versions that Triton would serve, and yield warnings.

    The texts name the files by their paths in the package, which is at `path`. Raises InvalidModel
    if Python could not read a file, or if it lacks the class of a model. With a Python of its own
    (EXECUTION_ENV_PATH) the model runs elsewhere: then this is a warning, and modules are not
    looked for.
    """
    has_other_python = ENVIRONMENT in config.parameters
    versions = [entry.name for entry in folder.iterdir() if is_version(entry.name)]
    for version in served_versions(config, versions):
        file = folder / version / (config.default_model_filename or "model.py")
        if not file.is_file():
            continue
        below = os.path.relpath(os.path.realpath(file), package.root)
        name = shown(os.path.normpath(path / below))
        try:
            tree = _parse_code(file, name)
        except InvalidModel as fault:
            if not has_other_python:
                raise
            yield f"{fault}; Triton runs it with the Python of {ENVIRONMENT}"
            continue
        if tree is not None and not has_other_python and wheel_folder() is not None:
            yield from _find_absent_modules(tree, file, name)


def _parse_code(file: Path, name: str) -> ast.Module | None:
    """Return the parsed code of a file, or None if only running it could tell whether it is right.

    Raises InvalidModel if Python could not read it, or if it cannot define the class of a model.
    """
    with file.open("rb") as opened:
        source = opened.read(_MAX_CODE_BYTES + 1)
    if len(source) > _MAX_CODE_BYTES:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        reason = f"{type(error).__name__}: {error.msg} (Python {platform.python_version()})"
        raise invalid_model(f"{name}{line}", reason) from error
    except ValueError as error:  # a NUL
        raise invalid_model(name, str(error)) from error
    except (RecursionError, MemoryError):
        return None
    # whatever has this name may define the class, and so may `import *`
    fields = ("name", "asname", "id", "value")
    names = {getattr(node, name, None) for node in ast.walk(tree) for name in fields}
    if names.isdisjoint({_PYTHON_CLASS, "*"}):
        raise invalid_model(name, f"it has no class {_PYTHON_CLASS}")
    return tree


def _find_absent_modules(tree: ast.Module, file: Path, name: str) -> Iterator[str]:
    """Warn of absent modules that code imports on its top level; others may be optional."""
    folders = [str(file.parent), str(file.parent.parent)]  # in sys.path of Triton's Python
    for node in tree.body:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules = [node.module]
        for module in modules:
            top = module.partition(".")[0]
            if top in _TRITON_MODULES or find_spec(top) or PathFinder.find_spec(top, folders):
                continue
            yield (
                f"{name}:{node.lineno}: imports {top}, which the Python of an embedded Triton does"
                f" not have; install it there, or bring it along: {ENVIRONMENTS}"
            )


COMMANDS = {"inspect": (_add_options, _inspect)}
