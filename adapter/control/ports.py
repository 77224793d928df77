"""What control needs of the world. Satisfied by shape: backend and packages import none of this."""

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
        """It answered at the last look."""

    @property
    def lives(self) -> int:
        """How often it came, the first time included."""

    async def load(self, name: TritonName, model_id: ModelId) -> None: ...
    async def unload(self, name: TritonName, model_id: ModelId) -> None: ...
    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]: ...
    async def ready(self) -> set[str]: ...
    async def present(self) -> set[str]:
        """Those that Triton has, or is bringing up or down."""


class Server(Protocol):
    """A Triton of our own."""

    @property
    def pid(self) -> int | None:
        """Of its process; None while there is none."""

    @property
    def load_threads(self) -> int:
        """How many loads it works on at a time."""

    def has_live_stub(self, name: TritonName) -> bool | None:
        """Whether a python process of this model runs; None when that cannot be known."""

    def live_instances(self, name: TritonName) -> frozenset[str] | None:
        """The instances of this model whose python processes run; None as above."""

    def end_stubs(self, name: TritonName) -> None:
        """Kill the python processes of this model."""

    async def running_models(self) -> frozenset[TritonName]:
        """Those that have a python process, loaded or not. OSError when none can be seen."""

    async def processes_of(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        """The python processes of these models, which are being unloaded, and what they have
        started, daemons included.
        """

    async def abandoned(self) -> frozenset[ProcessId]:
        """What models have started that have no python process any more."""

    async def living(self, known: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Those that live, and what these have started since; all while none can be seen."""

    async def kill(self, known: Collection[ProcessId]) -> None:
        """End them at once, and what they have started."""

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
        """What it says has not moved since a change that it must show."""

    def changed(self, since: float) -> None:
        """Models came or went that it must show, at `since` (time.monotonic) at the earliest."""


class SizeStore(Protocol):
    async def save(self, data: object) -> None: ...


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """In seconds.

    `stall`: how long an unload may stand still before it is helped along. `recovery`: how long
    memory that is about to come back is waited for. `alone`: how long a load of unknown footprint
    waits to run without others. `stub_gone`: how long a load goes on without its python process
    before it is given up; `stub_unseen`: the same where none was ever seen. `linger`: how long what
    a model has started may outlive it; `killed`: how long a process may that was killed.
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
