"""Sizes for ModelMesh: of a model before its load, of a loaded one, and the capacity."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adapter.control.door import ControlState, DeviceState, MeshBooks, Models
from adapter.core.memory import HOST, UNSEEN, Device, total
from adapter.core.model import ModelId
from adapter.core.sizes import SIZE_FACTOR
from adapter.errors import BackendError, CallerError, ModelNotFound
from adapter.frontends.bodies import parsed
from adapter.settings.modelmesh import refuse_capacity

_POLL_SECONDS = 0.03  # between two looks at a measurement
# A lagging memory sensor shows a model after seconds; ModelMesh waits 30 s for a size.
_MEASURE_SECONDS = 20.0
_MAX_BYTES = 2**63
# ModelMesh is told less than there is, since it fills what it is told and reads it once.
_GROWTH_SHARE = _STRIP_SHARE = 10
_GPU_GROWTH_BYTES = 512 * 2**20  # a CUDA context and what libraries keep
_LARGEST_STRIP_SHARE = 4


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The known fields of a modelKey; others, and a key that is not JSON, are ignored."""

    model_type: str | None = None
    schema_path: object = None
    disk_size_bytes: float = 0


def parse_key(text: str) -> ModelKey:
    """Parse a modelKey; one that is not JSON has no fields."""
    try:
        key = parsed(text, "modelKey")
    except CallerError:
        return ModelKey()
    if not isinstance(key, dict):
        return ModelKey()
    return ModelKey(
        _read_model_type(key),
        key.get("schema_path"),
        _read_disk_size(key.get("disk_size_bytes")),
    )


def _read_model_type(key: dict[str, Any]) -> str | None:
    """Return the model type of a modelKey, which is a string or the `name` of an object; None if it
    has none.
    """
    model_type = key.get("model_type")
    if isinstance(model_type, dict):
        model_type = model_type.get("name")
    return model_type if isinstance(model_type, str) and model_type else None


def _read_disk_size(value: object) -> float:
    """Return the size on disk of a modelKey; 0 if it is not a positive number."""
    return value if isinstance(value, int | float) and 0 < value < _MAX_BYTES else 0


class MeshSizes:
    """Tells ModelMesh the sizes of models: at most the default before a load, and all of it after.

    ModelMesh books a prediction when it queues the load, and evicts for it at once, also models
    that it is loading. With full sizes a few callers make it evict each load before its end. What a
    load takes beyond its prediction has room in the landing strip, until ModelMesh has evicted.
    """

    def __init__(
        self,
        models: Models,
        state: ControlState,
        books: MeshBooks,  # the books of ModelMesh, which the admission of loads reads
        *,
        default_bytes: int,
        size_factor: float | None,  # the operator's, if any
        capacity_bytes: int | None,  # for models in Triton's container; None: unknown
    ) -> None:
        self.default_bytes = default_bytes
        self._registry = models.registry
        self._state = state
        self._books = books
        self._changed = asyncio.Event()  # set when what ModelMesh counts may have shrunk
        self._factor = size_factor or SIZE_FACTOR
        self._capacity_bytes = capacity_bytes

    def capacity(self) -> int:
        """Return what the ledger can grant for as long as the pod lives; without a GPU at most the
        part of the memory of Triton's container that is for models. BackendError when that is
        unknown, or when ModelMesh would not start with it.
        """
        devices = self._state.devices()
        bounds = []
        if devices:
            bounds.append(sum(self._promised(*each) for each in devices.items()))
        if self._capacity_bytes is not None and devices.keys() <= {HOST, UNSEEN}:
            bounds.append(self._capacity_bytes)
        if not bounds:
            names = "modelmesh_capacity (CONTAINER_MEM_REQ_BYTES) or memory_limit"
            raise BackendError(f"no memory is measured here: set {names}")
        try:
            refuse_capacity(min(bounds), self.default_bytes)
        except ValueError as error:
            raise BackendError(f"what there is of memory {error}") from error
        return min(bounds)

    def _promised(self, device: Device, book: DeviceState) -> int:
        """Return what will be free for models on one device: less what the baseline may grow by,
        and less a landing strip for one load that takes more than was predicted.
        """
        limit = book.limit_bytes
        free = limit - book.memory_reserve_bytes - book.empty_bytes
        if device == UNSEEN:  # nothing is measured, and the ledger holds predictions
            return free
        growth = max(limit // _GROWTH_SHARE, 0 if device == HOST else _GPU_GROWTH_BYTES)
        strip = self._state.largest().get(device) or limit // _STRIP_SHARE
        return free - growth - min(strip, limit // _LARGEST_STRIP_SHARE)

    def report_capacity(self) -> int:
        """Return `capacity` for ModelMesh, which now starts: begin its books anew with that
        capacity.
        """
        capacity = self.capacity()
        self._books.start(capacity)
        self._changed.set()
        return capacity

    async def wait_for_evictions(self, limit_seconds: float) -> None:
        """Wait while ModelMesh is to evict models by its books."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                while self._books.is_evicting:
                    self._changed.clear()
                    await self._changed.wait()

    def count(self, model_id: ModelId, size_bytes: int) -> None:
        """Count a model with this size in the books, as ModelMesh does from now on."""
        self._books.count(model_id, size_bytes)
        self._changed.set()

    def drop(self, model_id: ModelId) -> None:
        """Remove a model from the books: it was unloaded, or its load has failed."""
        self._books.drop(model_id)
        self._changed.set()

    def predict(self, model_id: ModelId, path: str) -> int:
        """Return the size for ModelMesh to book for a load: at most the default. It asks with a
        path of its storage before the files are here, and loads from a local one: so a size is
        found by the id, too.
        """
        return min(
            self._state.measured_bytes(path, model_id) or self.default_bytes, self.default_bytes
        )

    def begin_load(self, model_id: ModelId, path: str, key: ModelKey) -> int:
        """Count a load at its prediction, as ModelMesh does. Return the size that it will probably
        get after the load: the measured one, or the larger of a guess by its size on disk and the
        mean of all models.
        """
        self.count(model_id, self.predict(model_id, path))
        if (known := self._state.measured_bytes(path, model_id)) is not None:
            return known
        return max(self._guess(None, key.disk_size_bytes), self._state.mean_bytes())

    def after_load(self, model_id: ModelId) -> int:
        """Return the size of a loaded model, and count it in the books; 0 while it is measured."""
        return self._report_size(model_id) if self._is_measured(model_id) else 0

    async def measure_loaded(self, model_id: ModelId) -> int:
        """Return the size of a loaded model once it is measured, or after 20 s, and count it in the
        books. Raises ModelNotFound for a model that is not loaded.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEASURE_SECONDS):
                # once after a load, and over in seconds: no event is worth it
                while not self._is_measured(model_id):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)
        return self._report_size(model_id)

    def _is_measured(self, model_id: ModelId) -> bool:
        """Return whether the measurement of a model is over. That of a model that is not
        loaded is.
        """
        record = self._registry.get(model_id)
        return record is None or self._state.size_of(record).is_measured

    def _report_size(self, model_id: ModelId) -> int:
        """Return the size of a loaded model, and count it in the books, as ModelMesh will: what it
        was measured to hold, or a guess where nothing was learned. Raises ModelNotFound for a model
        that is not loaded.
        """
        record = self._registry.get(model_id)
        if record is None:
            raise ModelNotFound(f"model {model_id!r} is not loaded", model_id=model_id)
        size = self._state.size_of(record)
        held = total(size.held)
        if not held or not size.is_learned:
            held = max(held, self._guess(size.declared_bytes, size.disk_bytes))
        self.count(model_id, held)
        return held

    def _guess(self, declared: int | None, on_disk: float) -> int:
        """Return the declared size of a model, or one derived from its size on disk; at least the
        default.
        """
        size_bytes = on_disk * self._factor if declared is None else declared
        return max(self.default_bytes, min(int(size_bytes), _MAX_BYTES))
