"""What control needs of the world. Satisfied by shape: backend and packages import none of this."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapter.core.ledger import MemoryReading
from adapter.core.model import ModelId, ModelSource, Package, Placement, TritonName


class Triton(Protocol):
    async def load(self, name: TritonName, model_id: ModelId) -> None: ...
    async def unload(self, name: TritonName, model_id: ModelId) -> None: ...
    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]: ...
    async def ready(self) -> set[str]: ...


class Processes(Protocol):
    def has_live_stub(self, name: TritonName) -> bool | None:
        """Whether a python process of this model runs; None when that cannot be known."""


class StagedModel(Protocol):
    @property
    def name(self) -> TritonName: ...
    @property
    def model_id(self) -> ModelId: ...
    @property
    def placement(self) -> Placement: ...


class Packages(Protocol):
    async def prepare(
        self, name: TritonName, model_id: ModelId, source: ModelSource
    ) -> Package: ...
    async def place(self, name: TritonName, model_id: ModelId, package: Package) -> Placement: ...
    async def remove(self, name: TritonName) -> None: ...
    async def staged(self) -> Sequence[StagedModel]: ...


class MemoryReader(Protocol):
    @property
    def last(self) -> MemoryReading | None: ...
    async def read(self) -> MemoryReading | None: ...


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """In seconds. `stall`: how long an unload may stand still before it is helped along."""

    load: float = 350.0
    unload: float = 340.0
    stall: float = 30.0
