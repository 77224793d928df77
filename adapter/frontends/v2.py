"""Triton's model repository extension over REST: index, load and unload, all through control.

It differs from Triton where a model is loaded already: a load that brings nothing new is done, and
one that does is an unload and a load, since both would not fit into memory side by side.
"""

import asyncio
import base64
import binascii
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from adapter.control import ModelControl
from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from adapter.errors import AlreadyLoaded, InvalidRequest, ModelNotFound, SourceMissing
from adapter.frontends.body import whole_body
from adapter.frontends.http import (
    answer,
    logged_headers,
    method_not_allowed,
    path_segments,
)
from adapter.packages.uploads import config_text

_FILE = "file:"
# Triton reads versions as 64-bit numbers and passes over those with leading zeros.
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_MAX_PART_BYTES, _MAX_PATH_BYTES = 255, 1024
_POLL_SECONDS = 0.05

_STATES = {state: state.value for state in ModelState} | {ModelState.DEAD: "UNAVAILABLE"}
_REASONS = {ModelState.DEAD: "the model has lost its process; load it again"}


class V2Repository:
    """`versions` tells which versions of each model Triton's index has ready, by Triton's names."""

    def __init__(
        self,
        control: ModelControl,
        versions: Callable[[], Awaitable[Mapping[str, Sequence[str]]]],
        model_roots: Sequence[Path],
        *,
        max_body_bytes: int,
        max_control_body_bytes: int,
    ) -> None:
        self._control = control
        self._versions = versions
        self._roots = model_roots
        self._max_body = max_body_bytes
        self._max_control_body = max_control_body_bytes

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        segments = path_segments(request)
        if segments[-1] == "":
            segments.pop()  # one trailing slash means nothing
        match segments:
            case [_, "repository", "index"]:
                operation, act = "repository_index", self._index
            case [_, "repository", "models", name, "load"]:
                request["model_id"] = parse_model_id(name)
                operation, act = "repository_load", self._load
            case [_, "repository", "models", name, "unload"]:
                request["model_id"] = parse_model_id(name)
                operation, act = "repository_unload", self._unload
            case _:
                raise InvalidRequest(f"there is nothing at {request.raw_path[:200]!r}")
        if request.method != "POST":
            return method_not_allowed(request, "POST")
        request["frontend"], request["operation"] = "v2", operation
        return await act(request)

    async def _index(self, request: web.BaseRequest) -> web.Response:
        """Of our models alone. One entry for each version that Triton lists, else one without."""
        only_ready = (await _body(request, self._max_control_body)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("ready must be true or false")
        versions = await self._versions()
        return answer(
            [
                _entry(record, version)
                for record in sorted(self._control.registry.records(), key=lambda r: r.id)
                if record.state is ModelState.READY or not only_ready
                for version in versions.get(record.name) or [""]
            ]
        )

    async def _load(self, request: web.BaseRequest) -> web.Response:
        model_id: ModelId = request["model_id"]
        given = _parameters(await _body(request, self._max_body))
        known = self._control.registry.get(model_id)
        if given or known is None or known.state is not ModelState.READY:
            source = await asyncio.to_thread(_source, model_id, given, self._roots)
            await self._bring_up(model_id, source, given, logged_headers(request))
        return answer({})

    async def _bring_up(
        self, model_id: ModelId, source: ModelSource, given: Mapping[str, Any], seen: dict[str, str]
    ) -> None:
        """Return when the model is loaded with what was given. A load under way is waited for."""
        kept = replace(source, files=())
        while True:
            try:
                record = await self._control.load(model_id, source, **seen)
            except AlreadyLoaded:  # "or reloaded if the model is already loaded"
                known = self._control.registry.get(model_id)
                if known is None or known.state is not ModelState.READY:
                    await asyncio.sleep(_POLL_SECONDS)
                elif not given or known.source == kept:
                    return
                else:
                    await self._take_down(model_id, seen)
            else:
                record.source = kept  # the contents are in Triton now
                return

    async def _unload(self, request: web.BaseRequest) -> web.Response:
        """The models of a package always go together, whatever unload_dependents says."""
        given = _parameters(await _body(request, self._max_control_body))
        dependents = given.pop("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest("parameter unload_dependents must be true or false")
        _refuse_unknown(given)
        await self._take_down(request["model_id"], logged_headers(request))
        return answer({})

    async def _take_down(self, model_id: ModelId, seen: dict[str, str]) -> None:
        try:
            await self._control.unload(model_id, **seen)
        except ModelNotFound:
            return  # Triton says OK to the unload of what it does not have


def _entry(record: ModelRecord, version: str) -> dict[str, str]:
    return {
        "name": record.id,
        "version": version,
        "state": _STATES[record.state],
        "reason": _REASONS.get(record.state, ""),
    }


async def _body(request: web.BaseRequest, limit: int) -> dict[str, Any]:
    """An empty body means what an empty object does."""
    raw = await whole_body(request, limit)
    if not raw:
        return {}
    return _object(raw, "the body")


def _object(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} must be a JSON object")
    return found


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters", {})
    if not isinstance(found, dict):
        raise InvalidRequest("parameters must be a JSON object")
    return found


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
    contents = tuple(sorted(_file(name, text) for name, text in files.items()))
    _refuse_nested([path for path, _ in contents])
    digest = hashlib.sha256()
    for path, content in contents:
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return ModelSource(f"request:{digest.hexdigest()}", config=config, files=contents)


def _config(found: object) -> dict[str, Any]:
    if isinstance(found, str):
        return _object(found, "parameter config")
    if not isinstance(found, dict):
        raise InvalidRequest("parameter config must be JSON text or an object")
    return found


def _file(parameter: str, text: object) -> tuple[str, bytes]:
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
    if not isinstance(text, str):
        raise InvalidRequest(f"parameter {shown} must be base64 text")
    try:
        return path, base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"parameter {shown} is not base64: {error}") from error


def _refuse_nested(paths: Sequence[str]) -> None:
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    if both := sorted(folders.intersection(paths)):
        raise InvalidRequest(f"{both[0][:200]!r} cannot be both a file and a folder")


def _folder(model_id: ModelId, roots: Sequence[Path]) -> str:
    """What Triton would look for in its repository: the folder of that name."""
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
