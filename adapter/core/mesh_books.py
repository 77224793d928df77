"""Count the loads that ModelMesh has planned, as ModelMesh itself does.

ModelMesh fills its capacity to the last unit, and evicts only by its own figures: a predicted size
from the moment that it queues a load, and the real size after the load. It counts a prediction at
once and evicts for it, also models that it is loading. So no prediction is larger than
`defaultModelSizeInBytes`, the room that ModelMesh keeps free for loads. A load uses this room and
the headroom, until ModelMesh has learned the real size and evicted for it.

While the sizes exceed the capacity, an eviction is on its way, but ModelMesh does not hold back the
next load for it. So the adapter lets that load wait.
"""

from dataclasses import dataclass, field

from adapter.core.model import ModelId

# ModelMesh counts in units of 8 KiB, rounded down.
MESH_UNIT_BYTES = 8192


@dataclass(slots=True)
class MeshBooks:
    """Counts the models of a ModelMesh as ModelMesh itself does."""

    capacity_bytes: int | None = None  # told to ModelMesh when it started; None before
    _units: dict[ModelId, int] = field(default_factory=dict)  # loaded, loading and queued models

    def start(self, capacity_bytes: int) -> None:
        """Record that a ModelMesh has started, with nothing loaded."""
        self.capacity_bytes = capacity_bytes
        self._units.clear()

    def count(self, model_id: ModelId, size_bytes: int) -> None:
        """Record the size of a model, as predicted for its load or as answered after it."""
        self._units[model_id] = max(1, size_bytes // MESH_UNIT_BYTES)

    def drop(self, model_id: ModelId) -> None:
        """Forget a model that was unloaded, or whose load has failed. Harmless if it is unknown."""
        self._units.pop(model_id, None)

    @property
    def is_evicting(self) -> bool:
        """Return whether ModelMesh is about to unload models, as they exceed the capacity."""
        if self.capacity_bytes is None:
            return False
        return sum(self._units.values()) > self.capacity_bytes // MESH_UNIT_BYTES
