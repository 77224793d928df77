"""Shows what a load would make of a package, by the code of the load, without a Triton."""

import argparse
import asyncio
import difflib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from adapter.cli.load_checks import check
from adapter.cli.text import printable, printable_lines
from adapter.core.model import (
    ModelId,
    ModelPart,
    ModelSource,
    Package,
    Placement,
    Role,
    TritonName,
    parse_model_id,
    triton_name,
)
from adapter.core.sizing import format_size
from adapter.errors import AdapterError, InvalidRequest
from adapter.frontends.status import HTTP, lookup
from adapter.packages.backends import MARKER, backend_of, is_ensemble
from adapter.packages.config import parse, read_config
from adapter.packages.contents import CONFIG, Contents, is_within
from adapter.packages.faults import shown
from adapter.packages.formats import is_version, layout
from adapter.packages.inspection import SCHEMA
from adapter.packages.staging import Packages

# Backends of NVIDIA's that report what their models take.
_REPORTING = frozenset({"onnxruntime", "tensorrt"})

Origin = Literal["file", "changed", "made", "triton"]
_ORIGINS: dict[Origin, str] = {
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

_EXIT_CODES = """\
exit codes: 0 it would be staged as shown; 1 the load would be refused; 2 bad arguments; 3 with
--strict, there are warnings"""


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the output."""

    name: str  # in Triton
    own_name: str
    role: str
    is_ensemble: bool
    backend: str | None
    versions: tuple[str, ...]
    config_from: Origin
    config_text: str | None
    config_diff: tuple[str, ...]  # from the caller's config.pbtxt to the staged one
    # paths in its folder -> link targets, relative to the package if within it, or None if created;
    # folder paths end in a slash
    staged: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Report:
    """Holds what `inspect` prints of a package."""

    path: str
    model_name: str
    is_archive: bool
    size_bytes: int
    declared_bytes: int | None
    content_types: tuple[str, ...]
    backends: tuple[str, ...]
    measured_by: str
    gpus: str
    warnings: tuple[str, ...]
    models: tuple[Model, ...]


_ANY_GPU = "as gpu_placement says"
_READINGS = "readings of memory"
_STATISTICS = "Triton's statistics on a GPU, else by readings of memory"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `inspect`."""
    command.add_argument("path", metavar="PATH", help="folder, model file or archive")
    command.add_argument("--model-type", metavar="TYPE", help="as in the load: onnx, pytorch ...")
    command.add_argument(
        "--entry", metavar="NAME", help="which of several models answers, as in the load"
    )
    command.add_argument(
        "--schema", type=Path, metavar="FILE", help="inputs and outputs as JSON, of ModelMesh"
    )
    command.add_argument(
        "--name", type=_model_id, help="model_name of the load (default: the last part of PATH)"
    )
    command.add_argument(
        "--model-roots",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="folder that must contain the package and its links' targets, as in serve; repeatable"
        " (default: the folders that hold PATH and FILE)",
    )
    command.add_argument("--json", action="store_true", help="as one JSON object")
    text = "fail for warnings, too: exit code 3"
    command.add_argument("--strict", action="store_true", help=text)
    command.epilog = f"{command.epilog or ''}\n{_EXIT_CODES}"


def run(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Run the command; return 1 if the load would be refused, 3 if --strict is given and there are
    warnings, else 0. PATH is not changed.
    """
    is_file_url = args.path.startswith("file:///")
    path = Path(unquote(args.path[len("file://") :]) if is_file_url else args.path).absolute()
    is_other_url = "://" in args.path and not is_file_url
    source = ModelSource(
        args.path if is_other_url else path.as_uri(),  # which holds any bytes, as paths may
        args.model_type,
        str(args.schema.absolute()) if args.schema else None,
        args.entry,
    )
    near = [Path(os.path.realpath(p)).parent for p in (path, args.schema) if p is not None]
    with tempfile.TemporaryDirectory(prefix="triton-adapter-inspect-") as folder:
        repository = Path(os.path.realpath(folder))
        try:
            name = args.name or parse_model_id(shown(os.path.basename(os.path.abspath(path))))  # noqa: PTH100, PTH119 - pathlib keeps ".."
            packages = Packages(repository, args.model_roots or near)
            report = asyncio.run(_inspect(packages, repository, name, source, path))
        except (AdapterError, OSError) as error:
            found = lookup(HTTP, error)
            failure = {"error": str(error), "code": found[1] if found else "InternalError"}
            text = printable_lines(f"triton-adapter: {error}")
            text = json.dumps(failure) if args.json else text
            code, out = 1, sys.stdout if args.json else sys.stderr
        else:
            text = json.dumps(asdict(report), indent=2) if args.json else _text(report)
            code, out = 3 if args.strict and report.warnings else 0, sys.stdout
    out.write(text.replace(f"{repository}/", "") + "\n")  # the folder is gone
    return code


def _model_id(text: str) -> ModelId:
    try:
        return parse_model_id(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from error


async def _inspect(
    packages: Packages, repository: Path, model_id: ModelId, source: ModelSource, path: Path
) -> Report:
    name = triton_name(model_id)
    package = await packages.prepare(name, model_id, source)
    placement = await packages.place(name, model_id, package)
    named = [(repository / given, part) for given, part in _named(placement, package.parts)]
    warnings = check(package, [folder for folder, _ in named], path)
    return Report(
        path=shown(path),
        model_name=model_id,
        is_archive=is_within(package.root, str(repository)),
        size_bytes=package.size_bytes,
        declared_bytes=package.declared_bytes,
        content_types=package.content_types.types if package.content_types else (),
        backends=tuple(sorted(package.backends)),
        measured_by=_STATISTICS
        if package.backends and package.backends <= _REPORTING
        else _READINGS,
        gpus=_gpus(package),
        warnings=(*package.warnings, *warnings),
        models=tuple(_model(folder, part, package) for folder, part in named),
    )


def _gpus(package: Package) -> str:
    """Say on which GPUs the package runs, where there are any."""
    if package.gpus is None:
        return _ANY_GPU if package.leaves_gpu_open else "as Triton, or the backend, chooses"
    return ", ".join(map(str, sorted(package.gpus))) or "none"


def _named(
    placement: Placement, parts: tuple[ModelPart, ...]
) -> Iterator[tuple[TritonName, ModelPart]]:
    """Pair parts with names: each tuple of a placement is in the order of the parts."""
    load, along = iter(placement.load), iter(placement.along)
    for part in parts:
        yield next(along if part.role is Role.STEP else load), part


def _model(folder: Path, part: ModelPart, package: Package) -> Model:
    root = Path(package.root)
    staged = dict(_staged(folder, str(root if root.is_dir() else root.parent)))
    text = read_config(folder / CONFIG) if CONFIG in staged else None
    config = parse(text, folder / CONFIG).config if text is not None else None
    if config is not None:
        backend = backend_of(config)
    elif len(package.parts) == 1:
        backend = next(iter(package.backends), None)
    else:
        found = layout(folder.name, Contents(str(folder), ["/"]).tree, None)
        backend = found.backend if found is not None else None
    origin, diff = _origin(text, folder.name, part, package)
    tops = {path.partition("/")[0] for path in staged}
    return Model(
        name=folder.name,
        own_name=shown(part.own_name),
        role=part.role.value,
        is_ensemble=config is not None and is_ensemble(config),
        backend=backend,
        versions=tuple(sorted(filter(is_version, tops), key=int)),
        config_from=origin,
        config_text=text,
        config_diff=diff,
        staged=staged,
    )


def _staged(folder: Path, root: str, above: str = "") -> Iterator[tuple[str, str | None]]:
    for path in sorted(folder.iterdir()):
        name = above + shown(path.name)
        if path.is_symlink():
            target = os.path.realpath(path)
            inside = is_within(target, root)
            yield name, shown(os.path.relpath(target, root) if inside else target)
        elif not path.is_dir():
            if path.name != MARKER:
                yield name, None
        elif str(path) != root:  # unpacked files lie in the staged folder
            yield name + "/", None
            yield from _staged(path, root, name + "/")


def _origin(
    text: str | None, name: str, part: ModelPart, package: Package
) -> tuple[Origin, tuple[str, ...]]:
    if text is None:
        return "triton", ()
    file = _callers_config(part, Path(package.root))
    if file is None:
        return "made", ()
    before = read_config(file)
    if before == text:
        return "file", ()
    names = shown(file.relative_to(package.root)), f"{name}/{CONFIG}"
    lines = before.splitlines(), text.splitlines()
    return "changed", tuple(difflib.unified_diff(*lines, *names, lineterm=""))


def _callers_config(part: ModelPart, root: Path) -> Path | None:
    """Return the config.pbtxt of the folder that the part links to, if it links to all of it."""
    for depth in ("", "*/", "*/*/"):
        for file in sorted(root.glob(depth + CONFIG)):
            folder = file.parent
            beside = {path.name for path in folder.iterdir()} - {CONFIG, SCHEMA, MARKER}
            tops = {link.path.partition("/")[0] for link in part.links}
            leads = all(os.path.realpath(folder / link.path) == link.target for link in part.links)
            if part.own_name in {"", folder.name} and beside == tops and leads:
                return file
    return None


def _text(report: Report) -> str:
    """Return the report as text; characters of names that would break a line are escaped."""
    return "\n".join(printable(line.expandtabs()) for line in _lines(report))


def _lines(report: Report) -> Iterator[str]:
    declared = report.declared_bytes
    yield f"package   {report.path}{' (archive, unpacked)' if report.is_archive else ''}"
    yield f"name      {report.model_name}"
    yield f"disk      {format_size(report.size_bytes)}"
    yield f"declared  {'no size' if declared is None else format_size(declared)}"
    yield f"backends  {', '.join(report.backends) or 'not known'}"
    yield f"measured  by {report.measured_by}"
    yield f"GPUs      {report.gpus}"
    if report.content_types:
        yield f"accepts   {', '.join(report.content_types)}, besides JSON"
    for warning in report.warnings:
        yield f"warning   {warning}"
    for model in report.models:
        yield ""
        yield from _model_lines(model)


def _model_lines(model: Model) -> Iterator[str]:
    own = f" ({model.own_name} in the package)" if model.own_name else ""
    backend = "none, an ensemble" if model.is_ensemble else model.backend or "not known"
    yield f"{model.name}{own}"
    yield f"  {_ROLES[model.role]}"
    yield f"  backend   {backend}"
    yield f"  versions  {', '.join(model.versions) or 'none'}"
    yield f"  config    {_ORIGINS[model.config_from]}"
    yield "  staged"
    for path, target in model.staged.items():
        above, slash, name = path.rstrip("/").rpartition("/")
        indent = "  " * (above + slash).count("/")
        folder = "/" if path.endswith("/") else ""
        yield f"    {indent}{name}{folder}{f' -> {target}' if target is not None else ''}"
    made = (model.config_text or "").splitlines() if model.config_from == "made" else ()
    for line in (*model.config_diff, *made):
        yield f"  | {line}"


COMMANDS = {"inspect": (add_options, run)}
