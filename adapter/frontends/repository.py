"""Triton's model repository extension, for HTTP and gRPC: index, load and unload through control.

It differs from Triton for a loaded model: a load without changes does nothing unless it has the
parameter force_reload, and one with changes is an update (control/updates.py), which has the old
version unloaded first where both do not fit into memory together.
"""

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.control.door import (
    BEING_LOADED,
    ModelRecord,
    Models,
    ModelState,
    Registry,
    Replaces,
    StoreModels,
)
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.errors import (
    AdapterError,
    InlineFilesOff,
    InvalidRequest,
    ModelNotFound,
    SourceMissing,
)
from adapter.frontends.bodies import json_object
from adapter.frontends.catalogue import Catalogue, list_all
from adapter.packages.contents import ROOTS_SETTING
from adapter.packages.uploads import config_text
from adapter.runtime.threads import LOOKUPS, UNPACKS

_FILE = "file:"
# Triton reads versions as 64-bit numbers and ignores those with leading zeros.
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MAX_PART_BYTES = 255
_MAX_PATH_BYTES = 1024

_STATES = {
    **{state: state.value for state in ModelState},
    **dict.fromkeys(BEING_LOADED, "LOADING"),
    ModelState.DEAD: "UNAVAILABLE",
    ModelState.LOST: "LOADING",
}
# the repository_name of an index that has the models of the stores, too
STORE_REPOSITORY = "store"
# Triton's words for a model of its repository that is not loaded
_UNLOADED_STATE = "UNAVAILABLE"
_UNLOADED = "unloaded"
_REASONS = {ModelState.DEAD: "the model has lost its process; load it again"}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the index; `version` is empty where Triton's index has none."""

    name: ModelId
    version: str
    state: str
    reason: str


class NoFolder(InvalidRequest):
    """The name is none that a folder in a model root can have."""


class Repository:
    """Lists, loads and unloads models for the callers of both protocols.

    The parameters of a load or an unload are those of the extension: the contents of a `file:` are
    bytes from gRPC, base64 text from HTTP. Log fields are added to the log lines.
    """

    def __init__(
        self,
        models: Models,
        # returns the ready versions in Triton's index, by Triton's names of models
        versions: Callable[[], Awaitable[Mapping[str, Sequence[str]]]],
        model_roots: Sequence[Path],
        *,
        takes_files: bool = True,  # of a load that brings them
        stores: StoreModels | None = None,  # whose models are loaded by name; None for none
        catalogue: Catalogue | None = None,  # lists the models of `stores`
        hint: str = "",  # added to the error about a name that no model root has
    ) -> None:
        self._models = models
        self._registry = models.registry
        self._versions = versions
        self._roots = model_roots
        self._takes_files = takes_files
        self._stores = stores
        self._catalogue = catalogue
        self._hint = hint
        self._prefixes = sorted(
            {f"{way}/" for root in model_roots for way in _list_spellings(root)}, key=len
        )

    async def index(self, *, only_ready: bool, repository: str = "") -> list[IndexEntry]:
        """List our models: one entry for each version that Triton lists, else one without.

        With the name of the store's repository, add its models that are not loaded.
        """
        self._check_repository(repository)
        versions = await self._versions()
        records = sorted(self._registry.records(), key=lambda r: r.id)
        entries = [
            _make_entry(record, version)
            for record in records
            if self._registry.get(record.asked_for) is record  # not the other one of two versions
            if record.state is ModelState.READY or not only_ready
            for version in versions.get(record.name) or [""]
        ]
        if only_ready or not repository or self._catalogue is None:
            return entries
        loaded = {record.key for record in self._registry.records()}
        packages = await list_all(self._catalogue)
        unloaded = [str(package.key) for package in packages if package.key not in loaded]
        return entries + [
            IndexEntry(ModelId(name), "", _UNLOADED_STATE, _UNLOADED) for name in unloaded
        ]

    def _check_repository(self, name: str) -> None:
        """Raise InvalidRequest for a repository that there is not."""
        if name not in {"", STORE_REPOSITORY}:
            raise InvalidRequest(
                f"repository_name must be empty or {STORE_REPOSITORY!r}: there is no other one"
            )
        if name and self._catalogue is None:
            raise InvalidRequest(
                f"repository_name {STORE_REPOSITORY!r} needs a store and the setting on_demand; "
                "see docs/v2.md#models-of-a-store"
            )

    async def load(
        self, model_id: ModelId, parameters: Mapping[str, Any], **log_fields: str
    ) -> None:
        """Load the model as given; wait for a load that is under way. What is wrong with a package
        is told by its path in the model root: the caller has not said where that is.
        """
        try:
            await self._load(model_id, parameters, log_fields)
        except AdapterError as error:
            text = str(error)
            for prefix in reversed(self._prefixes):
                text = text.replace(prefix, "")
            error.args = (text,)
            raise

    async def _load(
        self, model_id: ModelId, parameters: Mapping[str, Any], log_fields: Mapping[str, str]
    ) -> None:
        """Load the model from where its parameters say. A load without parameters is one of the
        model that is loaded, else of the folder of its name in a model root, else of a store.
        """
        brings_files = any(name.startswith(_FILE) for name in parameters)
        if brings_files and not self._takes_files:
            raise InlineFilesOff(
                "a load must not carry files: the setting inline_files is off; see docs/v2.md#load"
            )
        of_source = dict(parameters)
        is_forced = of_source.pop("force_reload", False)
        if not isinstance(is_forced, bool):
            raise InvalidRequest("parameter force_reload must be true or false")
        record = self._registry.get(model_id)
        is_ready = record is not None and record.state is ModelState.READY
        if record is not None and is_ready and not of_source:
            await self._load_again(record, log_fields, is_forced=is_forced)
            return
        threads = UNPACKS if brings_files else LOOKUPS
        try:
            source = await threads.run(_make_source, model_id, of_source, self._roots)
        except (SourceMissing, NoFolder) as error:
            if of_source:  # a config or files need a folder: those of a store have their own
                raise
            if not await self._load_of_store(model_id, is_forced=is_forced):
                error.args = (f"{error}{self._hint}",)
                raise
            return
        replaces = Replaces.OTHER_SOURCE if of_source else Replaces.CHANGED_FILES
        if is_forced:
            replaces = Replaces.ALWAYS
        await self._models.replace(model_id, source, replaces, **log_fields)

    async def _load_of_store(self, model_id: ModelId, *, is_forced: bool) -> bool:
        """Load the model from a store; return whether one has it."""
        return self._stores is not None and await self._stores.load(model_id, is_forced)

    async def _load_again(
        self, record: ModelRecord, log_fields: Mapping[str, str], *, is_forced: bool
    ) -> None:
        """Load a READY model once more from where it was loaded, if its files have changed or
        `is_forced`.
        """
        if record.source.is_cached and await self._load_of_store(record.id, is_forced=is_forced):
            return
        source = record.source
        # the source of a load that brought a config or files lacks them
        if is_forced and not record.is_source_complete:
            source = await LOOKUPS.run(_make_source, record.id, {}, self._roots)
        replaces = Replaces.ALWAYS if is_forced else Replaces.CHANGED_FILES
        await self._models.replace(record.id, source, replaces, **log_fields)

    async def unload(
        self, model_id: ModelId, parameters: Mapping[str, Any], **log_fields: str
    ) -> None:
        """Unload all models of the package, whatever unload_dependents says."""
        unread = dict(parameters)
        if not isinstance(unread.pop("unload_dependents", False), bool):
            raise InvalidRequest("parameter unload_dependents must be true or false")
        _refuse_unknown(unread, "unload_dependents")
        with suppress(ModelNotFound):  # Triton also accepts the unload of what it does not have
            await self._models.unload(model_id, **log_fields)


def find_ensemble(registry: Registry, step: str) -> ModelRecord | None:
    """Return the model one of whose steps has this name in Triton; None if no step has it."""
    owner = registry.owner_of(TritonName(step))
    is_step = owner is not None and step in owner.placement.along
    return owner if is_step else None


def _list_spellings(root: Path) -> tuple[str, str]:
    """Return the paths of a model root as it is set and with links followed."""
    return str(root), os.path.realpath(root)


def _make_entry(record: ModelRecord, version: str) -> IndexEntry:
    """Return the entry of the index for a version of a model."""
    # the record of a model that was just unloaded has no state any more
    state = record.state or ModelState.UNLOADING
    return IndexEntry(record.asked_for, version, _STATES[state], _REASONS.get(state, ""))


def _refuse_unknown(parameters: Mapping[str, Any], known: str) -> None:
    """Raise InvalidRequest if there are parameters; `known` are those that would be accepted."""
    if parameters:
        names = ", ".join(repr(name[:100]) for name in sorted(parameters)[:10])
        raise InvalidRequest(f"no such parameter: {names}; the known ones are: {known}")


def _make_source(
    model_id: ModelId, parameters: Mapping[str, Any], roots: Sequence[Path]
) -> ModelSource:
    """Return the source that the parameters of a load describe: the files that they bring, or the
    folder of the model's name in a model root. Raises InvalidRequest and SourceMissing.
    """
    unread = dict(parameters)
    config = config_text(_read_config(unread.pop("config"))) if "config" in unread else None
    files = {name: unread.pop(name) for name in parameters if name.startswith(_FILE)}
    _refuse_unknown(unread, f"config, force_reload, {_FILE}<version>/<file-name>")
    if not files:
        return ModelSource(_find_folder(model_id, roots), config=config)
    if config is None:
        raise InvalidRequest("file: parameters need the parameter config beside them")
    contents = tuple(sorted(_read_file(name, content) for name, content in files.items()))
    _refuse_nested([path for path, _ in contents])
    digest = hashlib.sha256()
    for path, content in contents:
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return ModelSource(f"request:{digest.hexdigest()}", config=config, files=contents)


def _read_config(value: object) -> dict[str, Any]:
    """Return the config in the parameter of a load. Raises InvalidRequest."""
    if isinstance(value, str):
        return json_object(value, "parameter config")
    if not isinstance(value, dict):
        raise InvalidRequest("parameter config must be JSON text or an object")
    return value


def _read_file(parameter: str, content: object) -> tuple[str, bytes]:
    """Return the path and the bytes of a file that a load brings. Raises InvalidRequest."""
    path = parameter.removeprefix(_FILE)
    version, *names = path.split("/")
    parts = [len(name.encode("utf-8", "surrogatepass")) for name in names]
    is_path = (
        _VERSION.fullmatch(version) is not None
        and bool(names)
        and {"", ".", ".."}.isdisjoint(names)
        and path.isprintable()
        and max(parts) <= _MAX_PART_BYTES
        and sum(parts) + len(parts) <= _MAX_PATH_BYTES
    )
    shown = repr(parameter[:200])
    if not is_path:
        raise InvalidRequest(f"parameter {shown} is not file:<version>/<file-name>")
    if isinstance(content, bytes):
        return path, content
    if not isinstance(content, str):
        raise InvalidRequest(f"parameter {shown} must be base64 text")
    try:
        return path, base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"parameter {shown} is not base64: {error}") from error


def _refuse_nested(paths: Sequence[str]) -> None:
    """Raise InvalidRequest if one of the paths is that of a folder which another one is in."""
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    both = sorted(folders.intersection(paths))
    if both:
        raise InvalidRequest(f"{both[0][:200]!r} cannot be both a file and a folder")


def _find_folder(model_id: ModelId, roots: Sequence[Path]) -> str:
    """Return the path of the model root's folder that has the model's name, as Triton would look
    for it in its repository. Raises NoFolder for a name that no folder has, and SourceMissing.
    """
    if "/" in model_id or model_id in {".", ".."}:
        raise NoFolder(
            f"{model_id!r} names no folder in a model root; bring config and file: parameters"
        )
    for root in roots:
        try:
            if (root / model_id).exists():
                return str(root / model_id)
        except OSError:  # the name is too long for a file
            continue
    # Triton's clients look for `failed to load`
    text = f"failed to load {model_id!r}: no folder of this name in the model roots{ROOTS_SETTING}"
    raise SourceMissing(text)
