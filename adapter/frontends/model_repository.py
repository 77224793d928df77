"""Triton's model repository extension, for HTTP and gRPC: index, load and unload through control.

It differs from Triton for a loaded model: a load without changes does nothing, and one with changes
is an unload and a load, since both versions would not fit into memory together.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapter.control.models import ModelControl
from adapter.core.model import ModelId, ModelSource
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AdapterError, AlreadyLoaded, InvalidRequest, ModelNotFound, SourceMissing
from adapter.frontends.callers_json import json_object
from adapter.packages.repository.uploads import config_text
from adapter.runtime.threads import LOOKUPS, UNPACKS

_FILE = "file:"
# Triton reads versions as 64-bit numbers and ignores those with leading zeros.
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MAX_PART_BYTES, _MAX_PATH_BYTES = 255, 1024

_STATES = {state: state.value for state in ModelState} | {ModelState.DEAD: "UNAVAILABLE"}
_REASONS = {ModelState.DEAD: "the model has lost its process; load it again"}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An entry of the index; `version` is empty where Triton's index has none."""

    name: ModelId
    version: str
    state: str
    reason: str


class Repository:
    """`versions` returns the ready versions of Triton's index by Triton's names of models.

    `parameters` are those of the extension: the contents of a `file:` are bytes from gRPC, base64
    text from HTTP. `log_fields` are added to the log lines.
    """

    def __init__(
        self,
        control: ModelControl,
        versions: Callable[[], Awaitable[Mapping[str, Sequence[str]]]],
        model_roots: Sequence[Path],
    ) -> None:
        self._control = control
        self._versions = versions
        self._roots = model_roots

    async def index(self, *, only_ready: bool) -> list[IndexEntry]:
        """List our models: one entry for each version that Triton lists, else one without."""
        versions = await self._versions()
        return [
            _entry(record, version)
            for record in sorted(self._control.registry.records(), key=lambda r: r.id)
            if record.state is ModelState.READY or not only_ready
            for version in versions.get(record.name) or [""]
        ]

    async def load(
        self, model_id: ModelId, parameters: Mapping[str, Any], **log_fields: str
    ) -> None:
        """Load the model as given; wait for a load that is under way."""
        known = self._control.registry.get(model_id)
        if not parameters and known is not None and known.state is ModelState.READY:
            return
        brings_files = any(name.startswith(_FILE) for name in parameters)
        threads = UNPACKS if brings_files else LOOKUPS
        source = await threads.run(_source, model_id, parameters, self._roots)
        kept = replace(source, files=())
        while True:
            try:
                await self._control.load(model_id, source, **log_fields)
            except AlreadyLoaded:  # "or reloaded if the model is already loaded"
                try:
                    known = await self._control.loaded(model_id)
                except AdapterError:  # the other load failed
                    continue
                if not parameters or known.source == kept:
                    return
                await self._unload(model_id, log_fields)
            else:
                return

    async def unload(
        self, model_id: ModelId, parameters: Mapping[str, Any], **log_fields: str
    ) -> None:
        """Unload all models of the package, whatever unload_dependents says."""
        left = dict(parameters)
        if not isinstance(left.pop("unload_dependents", False), bool):
            raise InvalidRequest("parameter unload_dependents must be true or false")
        _refuse_unknown(left)
        await self._unload(model_id, log_fields)

    async def _unload(self, model_id: ModelId, log_fields: dict[str, str]) -> None:
        try:
            await self._control.unload(model_id, **log_fields)
        except ModelNotFound:
            return  # Triton also accepts the unload of a model that it does not have


def _entry(record: ModelRecord, version: str) -> IndexEntry:
    return IndexEntry(record.id, version, _STATES[record.state], _REASONS.get(record.state, ""))


def _refuse_unknown(parameters: Mapping[str, Any]) -> None:
    if parameters:
        names = ", ".join(repr(name[:100]) for name in sorted(parameters)[:10])
        raise InvalidRequest(f"no such parameter: {names}")


def _source(model_id: ModelId, given: Mapping[str, Any], roots: Sequence[Path]) -> ModelSource:
    left = dict(given)
    found = left.pop("config", None)
    config = None if found is None else config_text(_config(found))
    files = {name: left.pop(name) for name in given if name.startswith(_FILE)}
    _refuse_unknown(left)
    if not files:
        return ModelSource(_folder(model_id, roots), config=config)
    if config is None:
        raise InvalidRequest("file: parameters need the parameter config beside them")
    contents = tuple(sorted(_file(name, content) for name, content in files.items()))
    _refuse_nested([path for path, _ in contents])
    digest = hashlib.sha256()
    for path, content in contents:
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return ModelSource(f"request:{digest.hexdigest()}", config=config, files=contents)


def _config(found: object) -> dict[str, Any]:
    if isinstance(found, str):
        return json_object(found, "parameter config")
    if not isinstance(found, dict):
        raise InvalidRequest("parameter config must be JSON text or an object")
    return found


def _file(parameter: str, content: object) -> tuple[str, bytes]:
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
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    if both := sorted(folders.intersection(paths)):
        raise InvalidRequest(f"{both[0][:200]!r} cannot be both a file and a folder")


def _folder(model_id: ModelId, roots: Sequence[Path]) -> str:
    """Return the folder of that name, which Triton would look for in its repository."""
    if "/" in model_id or model_id in {".", ".."}:
        raise InvalidRequest(
            f"{model_id!r} names no folder in a model root; bring config and file: parameters"
        )
    for root in roots:
        try:
            if (root / model_id).exists():
                return str(root / model_id)
        except OSError:  # the name is too long for a file
            continue
    places = ", ".join(map(str, roots))
    raise SourceMissing(f"no folder {model_id!r} in the model roots ({places})")
