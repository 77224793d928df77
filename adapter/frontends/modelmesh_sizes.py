"""What a mesh is told of bytes: of a model before its load, of a loaded one, of all together."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.control import ModelControl
from adapter.core.ledger import UNSEEN
from adapter.core.memory import HOST, total
from adapter.core.model import ModelId
from adapter.errors import AdapterError, BackendError, ModelNotFound
from adapter.packages.location import resolve
from adapter.settings import Settings
from adapter.settings.modelmesh import refuse_capacity

# A mesh gives a prediction 500 ms, and holds up one of its loading threads with it.
_LOOK_SECONDS = 0.03
# A gauge that lags shows a model after seconds; a mesh waits 30 s for a size.
_MEASURE_SECONDS = 20.0
_MAX_BYTES = 2**63


@dataclass(frozen=True, slots=True)
class ModelKey:
    """What is understood of a modelKey; the rest of it, and a key that is no JSON, is ignored."""

    model_type: str | None = None
    schema_path: object = None
    disk_size_bytes: float = 0


def parse_key(text: str) -> ModelKey:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ModelKey()
    if not isinstance(found, dict):
        return ModelKey()
    return ModelKey(_type(found), found.get("schema_path"), _count(found.get("disk_size_bytes")))


def _type(key: dict[str, Any]) -> str | None:
    found = key.get("model_type")
    if isinstance(found, dict):
        found = found.get("name")
    return found if isinstance(found, str) and found else None


def _count(found: object) -> float:
    return found if isinstance(found, int | float) and 0 < found < _MAX_BYTES else 0


class MeshSizes:
    """`learned` knows what the files at a path were seen to take."""

    def __init__(
        self,
        control: ModelControl,
        settings: Settings,
        roots: Sequence[Path],
        learned: Callable[[str], int | None],
    ) -> None:
        self._control = control
        self._default = settings.modelmesh_default_size
        self._factor = settings.size_factor
        self._memory = settings.modelmesh_memory
        self._buffer = settings.modelmesh_memory_buffer
        self._roots = [os.path.realpath(root) for root in roots]
        self._learned = learned

    def capacity(self) -> int:
        """What the ledger may hand out; without a GPU no more than what of the memory of Triton's
        container is for models.

        BackendError when nobody knows, or when a mesh would not start with it.
        """
        book = self._control.memory.ledger.snapshot()
        bounds = []
        if book.limit_bytes is not None:
            bounds.append(book.limit_bytes - book.headroom_bytes - book.baseline_bytes)
        if self._memory is not None and book.devices.keys() <= {HOST, UNSEEN}:
            bounds.append(self._memory - self._buffer)
        if not bounds:
            names = "modelmesh_memory (CONTAINER_MEM_REQ_BYTES) or memory_limit"
            raise BackendError(f"no memory is measured here: set {names}")
        try:
            refuse_capacity(min(bounds), self._default)
        except ValueError as error:
            raise BackendError(f"what there is of memory {error}") from error
        return min(bounds)

    async def predicted(self, path: str, key: ModelKey) -> int:
        """Before the load, at once: learned, else from the size on disk, else the default."""
        if learned := self._learned(path):
            return learned
        if key.disk_size_bytes:
            return self._of_disk(key.disk_size_bytes)
        try:
            found = await asyncio.wait_for(self._on_disk(path, _LOOK_SECONDS), _LOOK_SECONDS)
        except TimeoutError:
            found = 0
        return self._of_disk(found) or self._default

    def after_load(self, model_id: ModelId, key: ModelKey) -> int:
        """What is held, else what the key says; 0 when only `of_loaded` can tell."""
        if not self._control.memory.is_measured(model_id):
            return 0
        return self._held(model_id) or self._of_disk(key.disk_size_bytes)

    async def of_loaded(self, model_id: ModelId) -> int:
        record = self._control.registry.get(model_id)
        if record is None:
            raise ModelNotFound(f"model {model_id!r} is not loaded", model_id=model_id)
        await self._wait_for_measure(model_id)
        if held := self._held(model_id):
            return held
        found = await self._on_disk(record.source.url, float("inf"))
        return self._of_disk(found) or self._default

    def _held(self, model_id: ModelId) -> int:
        return total(self._control.memory.ledger.of(model_id))

    async def _wait_for_measure(self, model_id: ModelId) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEASURE_SECONDS):
                # once after a load, and over in seconds: no event is worth it
                while not self._control.memory.is_measured(model_id):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)

    def _of_disk(self, size_bytes: float) -> int:
        return min(int(size_bytes * self._factor), _MAX_BYTES)

    async def _on_disk(self, path: str, seconds: float) -> int:
        return await asyncio.to_thread(bytes_at, path, self._roots, time.monotonic() + seconds)


def bytes_at(url: str, roots: Sequence[str], end: float) -> int:
    """Bytes of all files; 0 when they cannot be seen, or not all of them until `end`."""
    try:
        path = resolve(url, roots)
        if path.is_file():
            return path.stat().st_size
        found = 0
        for folder, _, names in os.walk(path):
            if time.monotonic() > end:
                return 0
            found += sum(Path(folder, name).stat().st_size for name in names)
    except (AdapterError, OSError):
        return 0
    return found
