"""Inspects a model package as a caller provides it, and reports its faults.

Triton itself answers most of these faults only with "failed to poll from model repository", so they
are found here, each with file and reason. Nothing is written.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import Link, ModelPart, ModelSource, Package, Role
from adapter.errors import InvalidModel
from adapter.packages.config import footprint
from adapter.packages.config.check import decoded, parse
from adapter.packages.config.text import quoted, with_tensors
from adapter.packages.source import formats
from adapter.packages.source.backends import (
    MARKER,
    UNPACKED,
    backend_of,
    check_model_files,
    is_ensemble,
    is_version,
    missing_folders,
)
from adapter.packages.source.confined import Inside
from adapter.packages.source.contents import Contents, shown
from adapter.packages.source.ensemble import Member, mentioned, plan
from adapter.packages.source.schema import Schema, merge, parse_schema, tensors_text

CONFIG = "config.pbtxt"
SCHEMA = "_schema.json"
_MAX_CODE_BYTES = 2**20  # of a file
_MAX_ALL_CODE_BYTES = 2**24  # of a model


@dataclass(frozen=True, slots=True)
class _Model:
    """A folder (or file) with one model. `config` is None without a config.pbtxt."""

    folder: Path
    part: ModelPart
    backend: str | None
    config: ModelConfig | None = None
    warnings: tuple[str, ...] = ()


def inspect(source: ModelSource, path: Path, roots: Sequence[str]) -> Package:
    """Inspect the package at `path`, a real path within one of `roots`, real paths as well.

    Raises InvalidModel for any fault. Weights are not read.
    """
    try:
        contents = Contents(str(path), roots)
        inside = Inside(roots)
        schema = _schema(source, path, contents, inside)
        models = _models(source, path, contents, schema, inside)
        declared = _declared_bytes(source, models)
    except OSError as error:
        name = shown(error.filename or path)
        raise InvalidModel(f"{name}: {error.strerror}") from error
    hints = (source.model_type, source.entry, [model.part.config_text for model in models])
    contents.digest.update(repr(hints).encode("utf-8", "backslashreplace"))
    return Package(
        root=str(path),
        parts=tuple(model.part for model in models),
        size_bytes=contents.size_bytes,
        declared_bytes=declared,
        content_key=contents.digest.hexdigest(),
        backends=frozenset(m.backend for m in models if m.backend is not None),
        warnings=tuple(warning for m in models for warning in m.warnings),
        gpus=footprint.gpus(model.config for model in models),
    )


def _declared_bytes(source: ModelSource, models: Iterable[_Model]) -> int | None:
    """Return the caller's figure, else the sum of the models' own."""
    found = [footprint.declared_bytes(m.config, m.folder / CONFIG) for m in models]
    declared = [size for size in found if size is not None]
    if source.declared_bytes is not None or not declared:
        return source.declared_bytes
    return sum(declared)


def _models(
    source: ModelSource, path: Path, contents: Contents, schema: Schema | None, inside: Inside
) -> list[_Model]:
    """Return the models, helpers first and the entry last."""
    tree = contents.tree
    if tree is not None and (wrapper := _wrapper(tree)):
        path, tree = path / wrapper, tree[wrapper]
    folders = [] if tree is None or CONFIG in tree else _model_folders(tree)
    if tree is not None and len(folders) > 1:
        return _several(source, path, tree, folders, inside)
    if tree is not None and folders:
        path, tree = path / folders[0], tree[folders[0]]
    if tree is not None and CONFIG in tree:
        model = _native(path, tree, schema, inside)
        # a lone ensemble lacks its steps, and must not use those of other packages
        plan([_member(path, path.name, model, (), inside)], None, shown(path))
        return [model]
    return [_laid_out(path, tree, source.model_type, schema)]


def _wrapper(tree: formats.Tree) -> str | None:
    """Return the single folder that holds all models, as is common in archives."""
    visible = [name for name in tree if not name.startswith(".") and name != "__MACOSX"]
    below = tree[visible[0]] if len(visible) == 1 else None
    if below is None or CONFIG in below or not _model_folders(below):
        return None
    return visible[0]


def _model_folders(tree: formats.Tree) -> list[str]:
    """Return the sub-folders that are models, if at least one of them has a config.

    Archives made on a Mac contain a `__MACOSX` folder that mirrors the real one.
    """
    folders = {
        name: below
        for name, below in tree.items()
        if below is not None and not name.startswith(".") and name != "__MACOSX"
    }
    if not any(CONFIG in below for below in folders.values()):
        return []
    return sorted(
        name
        for name, below in folders.items()
        if CONFIG in below or any(is_version(n) and b is not None for n, b in below.items())
    )


def _several(
    source: ModelSource, path: Path, tree: formats.Tree, folders: list[str], inside: Inside
) -> list[_Model]:
    models: dict[str, _Model] = {}
    for name in folders:
        below = tree[name] or {}
        model = _native(path / name, below, None, inside) if CONFIG in below else None
        models[name] = model or _laid_out(path / name, below, None, None)
    members = {name: _member(path / name, name, models[name], folders, inside) for name in folders}
    order = plan(list(members.values()), source.entry, shown(path))
    roles = dict.fromkeys(order.helpers, Role.HELPER) | dict.fromkeys(order.steps, Role.STEP)
    roles[order.entry] = Role.ENTRY
    for name, role in roles.items():
        part = replace(models[name].part, own_name=name, role=role, mentions=members[name].mentions)
        models[name] = replace(models[name], part=part)
    return [models[name] for name in roles]


def _member(folder: Path, name: str, model: _Model, names: Iterable[str], inside: Inside) -> Member:
    config = model.config
    if config is None:
        return Member(name, is_ensemble=False, steps=(), mentions=frozenset())
    steps = tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))
    others = frozenset(names) - {name}
    mentions: frozenset[str] = frozenset()
    if model.backend == "python" and others:
        left = _MAX_ALL_CODE_BYTES
        for code in sorted(folder.rglob("*.py")):
            with inside.reading(code) as file:
                raw = file.read(min(_MAX_CODE_BYTES, left))
            mentions |= mentioned(raw.decode("utf-8", "replace"), others)
            left -= len(raw)
    return Member(name, is_ensemble(config), steps, mentions)


def _native(folder: Path, tree: formats.Tree, schema: Schema | None, inside: Inside) -> _Model:
    """Lay out a folder in Triton's layout: every entry is linked, the config is edited."""
    path = folder / CONFIG
    with inside.reading(path) as file:
        text = decoded(file, path)
    checked = parse(text, path)
    check_model_files(folder, tree, checked.config)
    if schema is not None:
        fitting = merge(schema, checked.config.max_batch_size, shown(path))
        text = with_tensors(text, tensors_text(fitting.inputs), tensors_text(fitting.outputs))
    names = (name for name in tree if name not in {CONFIG, SCHEMA, MARKER, UNPACKED})
    links = tuple(Link(name, os.path.realpath(folder / name)) for name in names)
    part = ModelPart("", Role.ENTRY, text, links, missing_folders(tree, checked.config))
    return _Model(folder, part, backend_of(checked.config), checked.config, checked.warnings)


def _laid_out(
    path: Path, tree: formats.Tree | None, model_type: str | None, schema: Schema | None
) -> _Model:
    """Lay out a model without a config by the rules of its format."""
    found = formats.layout(path.name, tree, model_type)
    links = tuple(
        Link(link, os.path.realpath(path.joinpath(*target))) for link, target in found.links
    )
    text = found.config
    if schema is not None and found.backend is not None:
        fitting = merge(schema, 0, shown(path))
        text = with_tensors(
            text or f"backend: {quoted(found.backend)}\n",
            tensors_text(fitting.inputs),
            tensors_text(fitting.outputs),
        )
    return _Model(path, ModelPart("", Role.ENTRY, text, links), found.backend)


def _schema(source: ModelSource, path: Path, contents: Contents, inside: Inside) -> Schema | None:
    """Read ModelMesh's schema of inputs and outputs, given by path or found in the folder."""
    file = Path(source.schema) if source.schema else path / SCHEMA
    if source.schema is None and SCHEMA not in (contents.tree or {}):
        return None
    if file.exists() and not file.is_file() and not file.is_dir():
        raise InvalidModel(f"{shown(file)} is neither a file nor a folder")
    with inside.reading(file) as opened:
        return parse_schema(opened.read(2**20), shown(file))
