"""Sizes for ModelMesh: of a model before its load, of a loaded one, and the capacity."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.control.models import ModelControl
from adapter.core.ledger import UNSEEN
from adapter.core.memory import HOST, total
from adapter.core.model import ModelId
from adapter.errors import BackendError, CallerError, ModelNotFound
from adapter.frontends.callers_json import parsed
from adapter.packages.config.footprint import quick_size
from adapter.runtime.threads import LOOKUPS
from adapter.settings.modelmesh import refuse_capacity

# ModelMesh waits 500 ms for a prediction, in one of its loading threads.
_SCAN_SECONDS = 0.03
# A lagging memory sensor shows a model after seconds; ModelMesh waits 30 s for a size.
_MEASURE_SECONDS = 20.0
_MAX_BYTES = 2**63


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The known fields of a modelKey; others, and a key that is not JSON, are ignored."""

    model_type: str | None = None
    schema_path: object = None
    disk_size_bytes: float = 0


def parse_key(text: str) -> ModelKey:
    try:
        found = parsed(text, "modelKey")
    except CallerError:
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
    """Reports measured sizes as they are, and estimates not below the default: ModelMesh asks once,
    and books the answer.
    """

    def __init__(
        self,
        control: ModelControl,
        roots: Sequence[Path],
        *,
        default_bytes: int,
        size_factor: float,
        memory_bytes: int | None,
        buffer_bytes: int,
    ) -> None:
        """`memory_bytes`: that of Triton's container, of which `buffer_bytes` are not for models;
        None: unknown.
        """
        self.default_bytes = default_bytes
        self._control = control
        self._learned = control.memory.sizes
        self._factor = size_factor
        self._memory = memory_bytes
        self._buffer = buffer_bytes
        self._roots = [os.path.realpath(root) for root in roots]

    def capacity(self) -> int:
        """Return what the ledger may grant; without a GPU at most the part of the memory of
        Triton's container that is for models. BackendError when that is unknown, or when ModelMesh
        would not start with it.
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
            refuse_capacity(min(bounds), self.default_bytes)
        except ValueError as error:
            raise BackendError(f"what there is of memory {error}") from error
        return min(bounds)

    async def predicted(self, model_id: ModelId, path: str, key: ModelKey) -> int:
        """Return the learned size, else the declared one, else one estimated from the files. The
        puller asks with a path that nothing was loaded from: hence by the id as well.
        """
        if learned := self._learned.of_url(path) or self._learned.of_model(model_id):
            return learned
        end = time.monotonic() + _SCAN_SECONDS
        scan = LOOKUPS.run(quick_size, path, self._roots, end)
        try:
            declared, on_disk = await asyncio.wait_for(scan, _SCAN_SECONDS)
        except TimeoutError:
            declared, on_disk = None, 0
        if declared is None:
            declared = self._learned.declared_by(model_id)
        return self._guess(declared, key.disk_size_bytes or on_disk)

    def after_load(self, model_id: ModelId) -> int:
        """Return what a loaded model takes; 0 while that is measured: `of_loaded` waits for it."""
        return self._size(model_id) if self._control.memory.is_measured(model_id) else 0

    async def of_loaded(self, model_id: ModelId) -> int:
        """Return it after the measurement. ModelNotFound when the model is not loaded."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEASURE_SECONDS):
                # once after a load, and over in seconds: no event is worth it
                while not self._control.memory.is_measured(model_id):  # noqa: ASYNC110
                    await asyncio.sleep(_SCAN_SECONDS)
        return self._size(model_id)

    def _size(self, model_id: ModelId) -> int:
        record = self._control.registry.get(model_id)
        if record is None:
            raise ModelNotFound(f"model {model_id!r} is not loaded", model_id=model_id)
        held = total(self._control.memory.ledger.of(model_id))
        if held and self._learned.learned(record.package_key) is not None:
            return held
        return max(held, self._guess(record.declared_bytes, record.disk_bytes))

    def _guess(self, declared: int | None, on_disk: float) -> int:
        size_bytes = on_disk * self._factor if declared is None else declared
        return max(self.default_bytes, min(int(size_bytes), _MAX_BYTES))
