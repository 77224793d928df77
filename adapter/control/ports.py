"""The protocols that control depends on. Classes of backend and packages fit them structurally."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from adapter.core.memory import Bytes, MemoryReading
from adapter.core.model import (
    ModelId,
    ModelSource,
    Package,
    Placement,
    ProcessId,
    StagedModel,
    TritonName,
)


class Triton(Protocol):
    @property
    def live(self) -> bool:
        """Whether Triton answered the last probe."""

    @property
    def lives(self) -> int:
        """How many times Triton became live."""

    async def load(self, name: TritonName, model_id: ModelId) -> None: ...
    async def unload(self, name: TritonName, model_id: ModelId) -> None: ...
    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]: ...
    async def ready(self) -> set[str]: ...
    async def present(self) -> set[str]:
        """Return the models that Triton has, or is loading or unloading."""


class Server(Protocol):
    """The embedded tritonserver."""

    @property
    def pid(self) -> int | None:
        """The pid of the server process; None while there is none."""

    @property
    def load_threads(self) -> int:
        """How many loads the server runs at a time."""

    def has_live_stub(self, name: TritonName) -> bool | None:
        """Return whether a python process of this model runs; None when unknown."""

    def live_instances(self, name: TritonName) -> frozenset[str] | None:
        """Return the instances of this model whose python processes run; None when unknown."""

    def end_stubs(self, name: TritonName) -> None:
        """Kill the python processes of this model."""

    async def running_models(self) -> frozenset[TritonName]:
        """Return the models with a python process, loaded or not. OSError if none can be seen."""

    async def processes_of(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the python processes of these models, which are being unloaded, and all processes
        that those started, daemons included.
        """

    async def abandoned(self) -> frozenset[ProcessId]:
        """Return processes started by models that no longer have a python process."""

    async def living(self, known: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Return the live ones and what they started since; all of `known` if none can be seen."""

    async def kill(self, known: Collection[ProcessId]) -> None:
        """Kill these processes and all that they started."""

    async def restart(self, reason: str) -> None: ...


class Packages(Protocol):
    async def prepare(
        self, name: TritonName, model_id: ModelId, source: ModelSource
    ) -> Package: ...
    async def place(self, name: TritonName, model_id: ModelId, package: Package) -> Placement: ...
    async def confirm(
        self, name: TritonName, source: ModelSource, content_key: str, held: Bytes
    ) -> None: ...
    async def remove(self, name: TritonName) -> None: ...
    async def staged(self) -> Sequence[StagedModel]: ...


class MemoryReader(Protocol):
    @property
    def last(self) -> MemoryReading | None: ...
    async def read(self) -> MemoryReading | None: ...
    @property
    def is_in_doubt(self) -> bool:
        """Whether the readings have not changed since a change of memory that they must show."""

    def changed(self, since: float) -> None:
        """Note a change that readings must show, from `since` (time.monotonic) at the earliest."""


class SizeStore(Protocol):
    async def save(self, data: object) -> None: ...


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds.

    `stall`: how long an unload may make no progress before its processes are killed. `recovery`:
    how long to wait for memory that is about to be freed. `alone`: how long a load of unknown size
    waits to run without others. `stub_gone`: how long a load goes on without its python process
    before it is given up; `stub_unseen`: the same if none was ever seen. `linger`: how long
    processes started by a model may outlive it; `killed`: how long a killed process may.
    """

    load: float = 350.0
    unload: float = 340.0
    stall: float = 30.0
    recovery: float = 5.0
    alone: float = 20.0
    stub_gone: float = 5.0
    stub_unseen: float = 60.0
    linger: float = 3.0
    killed: float = 5.0
