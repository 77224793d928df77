"""Inspects a model package as a caller provides it, and reports its faults.

Triton itself answers most of these faults only with "failed to poll from model repository", so they
are found here, each with file and reason. Nothing is written.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import (
    Link,
    LinkKind,
    ModelPart,
    ModelSource,
    Package,
    Role,
    show_own_names,
)
from adapter.core.tensors import ContentTypes
from adapter.errors import InvalidModel
from adapter.packages import formats
from adapter.packages.archive_kinds import is_packed
from adapter.packages.backends import BACKENDS, PYTHON, WITHOUT_BACKEND
from adapter.packages.config import (
    MAX_CONFIG_BYTES,
    Checked,
    backend_of,
    decode,
    explain_unknown_platform,
    is_ensemble,
    parse,
)
from adapter.packages.config_parameters import (
    count_processes,
    find_misspelt_parameters,
    is_declared_entry,
    leaves_gpu_open,
    list_gpus,
    read_content_types,
    read_declared_bytes,
)
from adapter.packages.config_paths import find_path_faults
from adapter.packages.config_rules import find_config_faults
from adapter.packages.config_sizes import find_size_faults
from adapter.packages.config_text import quoted, rename_steps, with_tensors
from adapter.packages.contents import CONFIG, OWN_NAMES, Contents
from adapter.packages.formats import is_version
from adapter.packages.members import Member, mentioned, names_in_paths, plan
from adapter.packages.messages import (
    cut,
    invalid_model,
    listed,
    quoted_list,
    refuse_faults,
    shown,
)
from adapter.packages.model_files import (
    STUB,
    check_model_files,
    find_odd_environment,
    has_own_backend,
    list_files_kept_inside,
    list_missing_folders,
)
from adapter.packages.roots import Inside
from adapter.packages.schema import Schema, merge, parse_schema, tensors_text

SCHEMA = "_schema.json"
_MAX_CODE_BYTES = 2**20  # of a file
_MAX_ALL_CODE_BYTES = 2**24  # of a model
_CALLS = "InferenceRequest"
_COMPLETES = "auto_complete_config"
_SCHEMAS = "docs/packages.md#schemas"
_NOT_CACHED = "response_cache is off for a model that Python code calls by its name"
# Files of models that no backend opens; code for the python backend can load them.
_NO_BACKEND = (".pkl", ".pickle", ".joblib", ".h5", ".keras", ".safetensors")


@dataclass(frozen=True, slots=True)
class _Model:
    """Says what was found in a folder, or a file, with one model."""

    folder: Path
    part: ModelPart
    versions: tuple[str, ...]  # the served ones
    has_own_backend: bool = False
    config: ModelConfig | None = None  # None without a config.pbtxt
    warnings: tuple[str, ...] = ()
    content_types: ContentTypes | None = None

    @property
    def asks_for_cache(self) -> bool:
        """Return whether the config turns Triton's response cache on."""
        return self.config is not None and self.config.response_cache.enable

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs that the config declares."""
        return () if self.config is None else tuple(each.name for each in self.config.output)


def inspect(
    source: ModelSource,
    path: Path,
    roots: Sequence[str],  # real paths, one of which holds `path`
    schema_roots: Sequence[str] = (),  # where a schema that the load names may be as well
) -> Package:
    """Return what a load needs to know of the package at `path`, a real path.

    Raises InvalidModel for any fault. Weights are not read.
    """
    inside = Inside(roots)
    try:
        members = _list_members_beside(source, path, inside)
        if members is not None:
            source = replace(source, entry=path.name)
            path = path.parent
        contents = Contents(str(path), roots, only=members)
        schema_inside = Inside([*roots, *schema_roots]) if source.schema else inside
        schema = _read_schema(source, path, contents, schema_inside)
        models = _inspect_models(source, path, contents, schema, inside)
        declared = _sum_declared_bytes(source, models)
    except OSError as error:
        raise invalid_model(error.filename or path, str(error.strerror)) from error
    # sizes that are learned under one key of a store do not count for another key, which may be
    # somebody else's
    configs = [model.part.config_text for model in models]
    hints = (source.model_type, source.entry, source.key, configs)
    contents.digest.update(repr(hints).encode("utf-8", "backslashreplace"))
    return Package(
        root=str(path),
        parts=tuple(model.part for model in models),
        size_bytes=contents.size_bytes,
        declared_bytes=declared,
        content_key=contents.digest.hexdigest(),
        backends=frozenset(m.part.backend for m in models if m.part.backend is not None),
        own_backends=frozenset(
            m.part.backend for m in models if m.part.backend and m.has_own_backend
        ),
        warnings=tuple(warning for m in models for warning in m.warnings),
        gpus=list_gpus(model.config for model in models),
        content_types=models[-1].content_types,
        outputs=models[-1].outputs,
        processes=count_processes((model.part.backend, model.config) for model in models),
        leaves_gpu_open=leaves_gpu_open((model.part.backend, model.config) for model in models),
        asks_for_cache=any(m.asks_for_cache for m in models if m.part.role is not Role.HELPER),
        neighbours=tuple(_list_neighbours(path, contents.tree, inside)),
    )


def _sum_declared_bytes(source: ModelSource, models: Iterable[_Model]) -> int | None:
    """Return the bytes of memory that the caller says a package takes, else the sum of what its
    models' configs say; None if nothing says it.
    """
    sizes = [read_declared_bytes(m.config, m.folder / CONFIG) for m in models]
    declared = [size for size in sizes if size is not None]
    if source.declared_bytes is not None or not declared:
        return source.declared_bytes
    return sum(declared)


def _inspect_models(
    source: ModelSource, path: Path, contents: Contents, schema: Schema | None, inside: Inside
) -> list[_Model]:
    """Inspect the models of a package; return them, helpers first and the entry last."""
    # a config that came with the files of a request was written along with them
    config = None if source.files else source.config
    tree = contents.tree
    if tree is None and config is not None:
        raise invalid_model(path, "it is not a folder, so its config cannot be replaced")
    path, tree = _enter_wrapper(path, tree)
    folders = [] if tree is None or CONFIG in tree else _list_model_folders(tree)
    if tree is not None and len(folders) > 1:
        return _inspect_several(source, path, tree, folders, inside)
    if tree is not None and folders:
        path, tree = path / folders[0], tree[folders[0]]
    has_config = tree is not None and CONFIG in tree if config is None else bool(config)
    if tree is not None and has_config:
        call_roots = None if source.config is None else inside.roots
        model = _inspect_native(path, tree, schema, inside, call_roots, replacement=config)
        # a lone ensemble lacks its steps, and must not use those of other packages
        plan([_describe_member(path, path.name, model, (), inside)], None, shown(path))
        return [model]
    if tree is not None and config is not None:
        tree = {name: below for name, below in tree.items() if name != CONFIG}
    return [_inspect_without_config(path, tree, source.model_type, schema, inside)]


def _list_neighbours(path: Path, tree: formats.Tree | None, inside: Inside) -> Iterator[ModelPart]:
    """Yield the folders of the package that code may find by their names: all that are no models,
    and the models to whose folders the code has paths.
    """
    path, tree = _enter_wrapper(path, tree)
    if tree is None or CONFIG in tree:
        return
    models = _list_model_folders(tree)
    folders = {name: below for name, below in tree.items() if below and not _is_hidden(name)}
    known = {name for name in models if name in folders}
    named: set[str] = set()
    for name in models:
        for code in _read_code(path / name, inside):
            named |= known & names_in_paths(code)
    for name, below in folders.items() if models else ():
        if name not in models or name in named:
            own = {entry: below[entry] for entry in below if entry not in {*OWN_NAMES, SCHEMA}}
            links = tuple(_make_links(path / name, own, frozenset()))
            yield ModelPart(name, Role.NEIGHBOUR, None, links)


def _is_hidden(name: str) -> bool:
    """Return whether a folder is no part of a package: a Mac's archiver makes `__MACOSX`."""
    return name.startswith(".") or name == "__MACOSX"


def _enter_wrapper(path: Path, tree: formats.Tree | None) -> tuple[Path, formats.Tree | None]:
    """Return the folder that holds the models: the package, or its only folder if that does, as is
    common in archives.
    """
    visible = [name for name in tree if not _is_hidden(name)] if tree is not None else []
    below = tree[visible[0]] if tree is not None and len(visible) == 1 else None
    if below is None or CONFIG in below or not _list_model_folders(below):
        return path, tree
    return path / visible[0], below


def _list_members_beside(source: ModelSource, path: Path, inside: Inside) -> frozenset[str] | None:
    """Return the names of the package's folders where the package is a model and others beside it;
    None where it is all that is at `path`.
    """
    if source.helpers is None:
        return None
    names = {path.name, *_list_models_beside(path)}
    if missing := sorted(set(source.helpers) - names):
        wanted = f"no model {cut(missing[0])!r} to load along with {cut(path.name)!r}"
        fault = f"there is {wanted}; it holds {quoted_list(sorted(names))}"
        raise invalid_model(path.parent, fault)
    members: set[str] = set()
    pending = [path.name, *source.helpers]
    while pending:
        name = pending.pop()
        if name not in members:
            members.add(name)
            pending += names & _find_references(path.with_name(name), names, inside)
    return frozenset(members) if len(members) > 1 else None


def _list_models_beside(path: Path) -> list[str]:
    """Return the names of the folders beside a model that Triton would take for models. Those that
    cannot be read are left out: the model itself may do without them.
    """
    names: list[str] = []
    with suppress(PermissionError):
        for each in path.parent.iterdir():
            with suppress(PermissionError):
                if _is_model(each):
                    names.append(each.name)
    return names


def _is_model(folder: Path) -> bool:
    """Return whether Triton would take a folder of its repository for a model: it has a
    config.pbtxt or a version folder.
    """
    if folder.name.startswith(".") or not folder.is_dir():
        return False
    if (folder / CONFIG).is_file():
        return True
    return any(is_version(each.name) and each.is_dir() for each in folder.iterdir())


def _find_references(folder: Path, names: Collection[str], inside: Inside) -> frozenset[str]:
    """Return the steps of an ensemble's config, and those of `names` that are strings in the Python
    code of the model. Empty for a model without a config.
    """
    file = folder / CONFIG
    if not file.is_file():
        return frozenset()
    config = parse(_read_config(file, inside), file).config
    steps = frozenset(step.model_name for step in config.ensemble_scheduling.step)
    files = _read_python_code(folder, config, inside)
    return steps.union(*(mentioned(code, names) for code in files))


def _list_model_folders(tree: formats.Tree) -> list[str]:
    """Return the sub-folders that are models, if at least one of them has a config."""
    folders = {
        name: below for name, below in tree.items() if below is not None and not _is_hidden(name)
    }
    if not any(CONFIG in below for below in folders.values()):
        return []
    return sorted(
        name
        for name, below in folders.items()
        if CONFIG in below or any(is_version(n) and b is not None for n, b in below.items())
    )


def _inspect_several(
    source: ModelSource, path: Path, tree: formats.Tree, folders: list[str], inside: Inside
) -> list[_Model]:
    """Inspect a package of several models, whose folders are given by name. Return them with their
    roles, helpers first and the entry last.
    """
    models: dict[str, _Model] = {}
    for name in folders:
        below = tree[name] or {}
        model = _inspect_native(path / name, below, None, inside, None) if CONFIG in below else None
        models[name] = model or _inspect_without_config(path / name, below, None, None, inside)
    members = {
        name: _describe_member(path / name, name, models[name], folders, inside) for name in folders
    }
    order = plan(list(members.values()), source.entry, shown(path))
    if source.config:
        entry = order.entry
        text = _restore_own_steps(source.config, path / entry / CONFIG, folders)
        below = tree[entry] or {}
        roots = inside.roots
        models[entry] = _inspect_native(path / entry, below, None, inside, roots, replacement=text)
        members[entry] = _describe_member(path / entry, entry, models[entry], folders, inside)
        order = plan(list(members.values()), entry, shown(path))
    for name in folders:
        _check_step_versions(path / name, models[name].config, models)
    roles = dict.fromkeys(order.helpers, Role.HELPER) | dict.fromkeys(order.steps, Role.STEP)
    roles[order.entry] = Role.ENTRY
    for name, role in roles.items():
        model = models[name]
        part = replace(model.part, own_name=name, role=role, mentions=members[name].mentions)
        warnings = model.warnings
        if role is Role.HELPER and model.asks_for_cache:
            warnings = (*warnings, f"{shown(path / name / CONFIG)}: {_NOT_CACHED}")
        models[name] = replace(model, part=part, warnings=warnings)
    return [models[name] for name in roles]


def _restore_own_steps(text: str, path: Path, names: Collection[str]) -> str:
    """Return the config with the steps' own names. A config that Triton showed has private ones."""
    steps = {step.model_name for step in parse(text, path).config.ensemble_scheduling.step}
    own = {step: show_own_names(step) for step in steps}
    return rename_steps(text, {step: name for step, name in own.items() if name in names})


def _check_step_versions(
    folder: Path, config: ModelConfig | None, models: Mapping[str, _Model]
) -> None:
    """Raise InvalidModel if an ensemble asks for a version of a step that is not served."""
    for step in config.ensemble_scheduling.step if config is not None else ():
        served = models[step.model_name].versions
        if step.model_version == -1 or str(step.model_version) in served:
            continue
        place = f"{folder / CONFIG}: step {cut(step.model_name)!r}"
        remedy = "set model_version to -1, for the latest"
        if not step.model_version:
            raise invalid_model(place, "it has none", remedy=remedy)
        fault = f"it is {step.model_version}, and served are {listed(served)}"
        raise invalid_model(place, fault, remedy=remedy)


def _describe_member(
    folder: Path, name: str, model: _Model, names: Iterable[str], inside: Inside
) -> Member:
    """Return what decides on the role of a model in a package with models of these names."""
    config = model.config
    if config is None:
        return Member(name, is_ensemble=False, steps=(), mentions=frozenset())
    steps = tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))
    others = frozenset(names) - {name}
    files = [*_read_python_code(folder, config, inside)] if others else []
    return Member(
        name,
        is_ensemble(config),
        steps,
        frozenset[str]().union(*(mentioned(code, others) for code in files)),
        is_entry=is_declared_entry(config, folder / CONFIG),
        has_calls=any(_CALLS in code for code in files),
    )


def _read_python_code(folder: Path, config: ModelConfig, inside: Inside) -> Iterator[str]:
    """Yield the Python files of a model of the python backend; nothing for other models."""
    if backend_of(config) == PYTHON:
        yield from _read_code(folder, inside)


def _read_code(path: Path, inside: Inside) -> Iterator[str]:
    """Yield the text of the Python files at or below a path, up to the limits."""
    remaining_bytes = _MAX_ALL_CODE_BYTES
    for code in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        if not code.is_file():
            continue
        with inside.reading(code) as file:
            raw = file.read(min(_MAX_CODE_BYTES, remaining_bytes))
        yield raw.decode("utf-8", "replace")
        remaining_bytes -= len(raw)


def _find_missing_tensors(path: Path, backend: str | None, inside: Inside) -> tuple[str, ...]:
    """Warn of a model whose inputs and outputs stand nowhere, where Triton cannot find them out."""
    remedy = f"{shown(path)}: name the inputs and outputs, in {CONFIG} or in {SCHEMA} ({_SCHEMAS})"
    known = BACKENDS.get(backend or "")
    if known is not None and not known.reads_tensors:
        return (f"{remedy}: Triton cannot read them out of a TorchScript file",)
    if backend == PYTHON and not any(_COMPLETES in code for code in _read_code(path, inside)):
        reason = "nothing names them, and Triton will refuse every inference"
        return (f"{remedy}, or in {_COMPLETES} of its Python: {reason}",)
    return ()


def _read_config(path: Path, inside: Inside) -> str:
    """Read a config.pbtxt, whose path may have links. Raise InvalidModel if it leads outside."""
    with inside.reading(path) as file:
        return decode(file.read(MAX_CONFIG_BYTES + 1), path)


def _parse_safe(text: str, path: Path, call_roots: Sequence[str] | None) -> Checked:
    """Parse a config. Raise InvalidModel for a path that leads outside, or an excessive size.

    Every config comes through here, also one that the adapter made. `call_roots` are the folders
    that a config of a load call may name; None for a package's own config.
    """
    checked = parse(text, path)
    refuse_faults(path, find_path_faults(checked.config, call_roots))
    refuse_faults(path, find_size_faults(checked.config))
    return checked


def _inspect_native(
    folder: Path,
    tree: formats.Tree,
    schema: Schema | None,
    inside: Inside,
    call_roots: Sequence[str] | None,  # None unless the config came with the load call
    *,
    replacement: str | None = None,  # a config in place of the folder's
) -> _Model:
    """Inspect a folder in Triton's layout, which has a config or gets the `replacement` for one.
    Every entry is linked, and the config is edited. Raise InvalidModel for its faults.
    """
    path = folder / CONFIG
    if replacement is not None:
        written = decode(replacement.encode(), path)
    else:
        written = _read_config(path, inside)
    text = written
    checked = _parse_safe(text, path, call_roots)
    config = checked.config
    served = check_model_files(folder, tree, config)
    if schema is not None:
        fitting = merge(schema, config.max_batch_size, shown(path))
        text = with_tensors(text, tensors_text(fitting.inputs), tensors_text(fitting.outputs))
        config = _parse_safe(text, path, call_roots).config
    refuse_faults(path, find_config_faults(config))
    types = read_content_types(config, written, path)
    own = {name: tree[name] for name in tree if name not in {*OWN_NAMES, SCHEMA}}
    links = tuple(_make_links(folder, own, list_files_kept_inside(config)))
    part = ModelPart(
        "",
        Role.ENTRY,
        text,
        links,
        list_missing_folders(tree, config),
        backend=backend_of(config),
        config_file=str(path),
    )
    odd = explain_unknown_platform(config)
    warnings = checked.warnings if odd is None else (*checked.warnings, f"{shown(path)}: {odd}")
    warnings = (*warnings, *find_misspelt_parameters(config, path))
    has_no_tensors = not config.input and not config.output
    if has_no_tensors and not config.runtime.endswith(".py"):
        warnings = (*warnings, *_find_missing_tensors(folder, backend_of(config), inside))
    if backend_of(config) == PYTHON:
        warnings = (*warnings, *find_odd_environment(folder, tree, config))
    has_own = has_own_backend(tree, config)
    return _Model(folder, part, served, has_own, config, warnings, types)


def _make_links(
    folder: Path, tree: formats.Tree, kept: frozenset[tuple[str, ...]], above: str = ""
) -> Iterator[Link]:
    """Yield a link for each entry of a folder, but for a folder with a file of `kept` those to its
    entries.
    """
    for name, below in tree.items():
        deeper = frozenset(path[1:] for path in kept if path[0] == name and path[1:])
        if below is not None and deeper:
            yield from _make_links(folder / name, below, deeper, f"{above}{name}/")
        else:
            kind = LinkKind.SHOWN
            if below is None and above + name == STUB:
                kind = LinkKind.COPIED
            elif below is None and (name,) in kept:
                kind = LinkKind.INSIDE
            yield Link(above + name, os.path.realpath(folder / name), kind)


def _inspect_without_config(
    path: Path,
    tree: formats.Tree | None,
    model_type: str | None,
    schema: Schema | None,
    inside: Inside,
) -> _Model:
    """Inspect a model without a config, by the rules of its format. Raise InvalidModel if it has
    none.
    """
    if tree is None and path.name == CONFIG:
        raise invalid_model(path, "it is a config and no model", remedy="name its folder")
    layout = formats.layout(path.name, tree, model_type)
    if layout is None:
        # Triton would take the end of the name for a backend: `net.gz` for the backend `gz`
        raise _make_format_error(path, tree)
    links = tuple(
        Link(link, os.path.realpath(path.joinpath(*target))) for link, target in layout.links
    )
    text = layout.config
    if schema is not None:
        fitting = merge(schema, 0, shown(path))
        text = with_tensors(
            text or f"backend: {quoted(layout.backend)}\n",
            tensors_text(fitting.inputs),
            tensors_text(fitting.outputs),
        )
    if text is not None:
        _parse_safe(text, path / CONFIG, None)
    part = ModelPart("", Role.ENTRY, text, links, backend=layout.backend)
    warnings = [*_find_misspelt_configs(path, tree)]
    if schema is None and not warnings:
        warnings += _find_missing_tensors(path, layout.backend, inside)
    versions = tuple({link.path.partition("/")[0] for link in links})
    return _Model(path, part, versions, warnings=tuple(warnings))


def _find_misspelt_configs(path: Path, tree: formats.Tree | None) -> Iterator[str]:
    """Warn of files whose names are almost config.pbtxt."""
    files = [name for name, below in (tree or {}).items() if below is None]
    for name in get_close_matches(CONFIG, files, cutoff=0.85):
        yield f"{shown(path / name)} is not read; did you mean {CONFIG}?"


def _make_format_error(path: Path, tree: formats.Tree | None) -> InvalidModel:
    """Return the error for files of no known format: what to do, and which formats are known."""
    entries = {path.name: None} if tree is None else tree
    what = "it is" if tree is None else f"it holds {listed(sorted(tree))}:"
    misspelt = "".join(f"; {warning}" for warning in _find_misspelt_configs(path, tree))
    fault = (
        f"{what} no model file of a known format ({formats.describe_formats()}), no {CONFIG} and no"
        f" archive that is unpacked (.tar, .tar.gz, .tgz, .zip){misspelt}"
    )
    return invalid_model(path, fault, remedy=_choose_remedy(entries, is_folder=tree is not None))


def _choose_remedy(entries: formats.Tree, *, is_folder: bool) -> str:
    """Return what the caller can do to make a package of files of no known format."""
    files = [name for name, below in entries.items() if below is None]
    for version, below in entries.items():
        if below and version.isdecimal():
            files += [f"{version}/{name}" for name, inner in below.items() if inner is None]
    for name in sorted(files):
        if is_folder and is_packed(name):
            return f"give the content of {shown(name)} itself, which is not unpacked"
        if name.endswith(_NO_BACKEND):
            return (
                f"add a model.py that loads {shown(name)}, for the python backend, as Triton has"
                f" none for such a file ({WITHOUT_BACKEND})"
            )
    if (folder := _find_config_folder(entries)) is not None:
        return f"give the folder {shown(folder)} itself: its {CONFIG} is too deep"
    return f"add a {CONFIG}, or name the file as below"


def _find_config_folder(entries: formats.Tree) -> str | None:
    """Return the path of the first folder with a config.pbtxt, at any depth; None without one."""
    pending = [(name, below) for name, below in sorted(entries.items(), reverse=True) if below]
    while pending:
        path, folder = pending.pop()
        if CONFIG in folder:
            return path
        pending += [
            (f"{path}/{name}", below) for name, below in sorted(folder.items()) if below is not None
        ]
    return None


def _read_schema(
    source: ModelSource, path: Path, contents: Contents, inside: Inside
) -> Schema | None:
    """Read ModelMesh's schema of inputs and outputs, given by path or found in the folder."""
    file = Path(source.schema) if source.schema else path / SCHEMA
    if source.schema is None and SCHEMA not in (contents.tree or {}):
        return None
    if file.exists() and not file.is_file() and not file.is_dir():
        raise invalid_model(file, "it is neither a file nor a folder")
    with inside.reading(file) as opened:
        return parse_schema(opened.read(2**20), shown(file))
