"""Declares what an adapter needs of a control, and what a control is built from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.memory import ChosenMemory
from adapter.backend.sizes_file import LearnedFile
from adapter.backend.triton import TritonControl
from adapter.control.door import ControlState, MeshBooks, Models, StoreModels
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, ModelSource
from adapter.packages.staging import Packages
from adapter.store.cache import ArtifactCache


@dataclass(frozen=True, slots=True)
class Outside:
    """Holds what lies around a control."""

    triton: TritonControl
    packages: Packages
    memory: ChosenMemory
    embedded: EmbeddedTriton | None  # None if Triton runs in another container
    cache: ArtifactCache | None  # None without a store
    sizes: LearnedFile | None  # None if no sizes are kept
    load_threads: int  # loads that Triton runs at a time
    process_limits: Mapping[int, int]  # of MPS, by CUDA's number of the GPU


class Control(Protocol):
    """Starts and stops what is behind the door, and opens the door."""

    @property
    def models(self) -> Models:
        """Return the verbs for every model."""

    @property
    def stores(self) -> StoreModels | None:
        """Return the verbs for models of stores; None without a store."""

    @property
    def state(self) -> ControlState:
        """Return what control knows."""

    @property
    def mesh(self) -> MeshBooks:
        """Return ModelMesh's books of the loads that it has planned."""

    def note_missing_outputs(self, record: Any) -> None:
        """Warn once that the model has answered without any of its outputs."""

    async def open(self) -> None:
        """Adopt what an earlier run has left, and begin the work that nobody asks for."""

    def want(self, sources: Mapping[ModelId, ModelSource]) -> None:
        """Have these models loaded from now on."""

    def key_of(self, name: str) -> ArtifactKey:
        """Return the key that `name` is, ENDPOINT/KEY or KEY. Raises InvalidRequest."""

    def preload(self, keys: Mapping[ModelId, ArtifactKey]) -> None:
        """Have these models of the stores loaded from now on."""

    async def note_triton_back(self) -> None:
        """Note that Triton answers again, after it did not."""

    async def drain(self, limit_seconds: float) -> None:
        """Start nothing any more; wait for what is in progress, then end the loads among it."""

    async def end_work(self) -> None:
        """End the work that nobody asks for."""

    async def stop(self) -> None:
        """Wait, for a bounded time, until what `drain` has ended is undone."""
