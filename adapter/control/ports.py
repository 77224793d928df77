"""The protocols that control depends on. Classes of backend and packages fit them structurally."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from adapter.core.artifacts import (
    Artifact,
    ArtifactKey,
    CacheUse,
    DiskUse,
    FetchProgress,
)
from adapter.core.measuring import GpuBytes
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
from adapter.core.residency.placement import Placing, as_triton_does
from adapter.core.triton_input import Unclassified
from adapter.errors import CapacityError


class Triton(Protocol):
    @property
    def live(self) -> bool:
        """Whether Triton answered the last probe."""

    @property
    def lives(self) -> int:
        """How many times Triton became live."""

    @property
    def version(self) -> str:
        """The version that Triton reports; "" if unknown."""

    async def load(self, name: TritonName, model_id: ModelId) -> None: ...
    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        """Have the model compute zeros once; return why it was not asked to, None where it was.

        Raises as an inference does.
        """

    async def gpu_bytes(self, name: TritonName) -> GpuBytes:
        """Return what Triton reports that the model takes of each GPU; nothing if it does not."""

    async def unclassified(self, name: TritonName) -> Unclassified | None:
        """Return the outputs whose `classification` ends Triton; None where it does not tell."""

    async def unload(self, name: TritonName, model_id: ModelId) -> None: ...
    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]: ...
    async def ready(self) -> set[str]: ...
    async def being_loaded(self) -> set[str]: ...
    async def present(self) -> set[str]:
        """Return the models that Triton has, or is loading or unloading."""


class Server(Protocol):
    """The process of an embedded tritonserver."""

    @property
    def pid(self) -> int | None:
        """The pid of the process; None while there is none."""

    async def restart(self, reason: str) -> None:
        """End the process at once, so that another one is started."""


class Processes(Protocol):
    """Lists and kills the processes of models below an embedded Triton, and waits for their end.

    Listing raises BackendUnavailable while processes cannot be seen.
    """

    @property
    def are_seen(self) -> bool:
        """Whether Triton is embedded, so that its processes can be seen at all."""

    # -- list -------------------------------------------------------------------------------

    async def models(self) -> frozenset[TritonName]:
        """Return the models with a process, loaded or not."""

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        """Return the instances of each model whose python processes live.

        An instance is None while its process completes the configuration. A model that needs no
        python process is missing; one that has lost its process has no instance.
        """

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the processes of models that are being unloaded, and all that those started.

        A process that may also belong to another model belongs to that one from now on.
        """

    async def abandoned(self) -> frozenset[ProcessId]:
        """Return processes started by models that have no python process any more."""

    async def resident_bytes(self) -> Mapping[str, int]:
        """Return the host memory of processes by their only model, and under "" that of the others.

        Return nothing while processes cannot be seen.
        """

    # -- kill -------------------------------------------------------------------------------

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Kill these processes and all that they started; return those that lived."""

    async def kill_models(self, names: Collection[TritonName]) -> None:
        """Kill the python processes of these models; their loads or requests then fail."""

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        """Kill the python processes in which these models are initialized; return whether any were.

        None is killed while one completes the configuration of its model: Triton would never
        answer that load.
        """

    async def free_regions(self, names: Collection[TritonName]) -> int:
        """Free the shared memory of python processes that have died; return the bytes.

        Triton, which keeps it, must have let go of these models.
        """

    # -- wait -------------------------------------------------------------------------------

    async def wait(
        self,
        names: Collection[TritonName],
        processes: Collection[ProcessId],
        limit_seconds: float,
    ) -> frozenset[ProcessId]:
        """Wait until these processes, and all others of these models, have ended.

        Return those that still live after `limit_seconds`; never raises BackendUnavailable.
        """


class NoProcesses:
    """Stands for the processes below an external Triton: none can be seen."""

    are_seen = False

    async def models(self) -> frozenset[TritonName]:
        """Return nothing."""
        return frozenset()

    async def instances(
        self, _names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        """Return nothing."""
        return {}

    async def claim(self, _names: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return nothing."""
        return frozenset()

    async def abandoned(self) -> frozenset[ProcessId]:
        """Return nothing."""
        return frozenset()

    async def resident_bytes(self) -> Mapping[str, int]:
        """Return nothing."""
        return {}

    async def kill(self, _processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Kill nothing."""
        return frozenset()

    async def kill_models(self, _names: Collection[TritonName]) -> None:
        """Kill nothing."""

    async def end_loads(self, _names: Collection[TritonName]) -> bool:
        """Kill nothing."""
        return False

    async def free_regions(self, _names: Collection[TritonName]) -> int:
        """Free nothing."""
        return 0

    async def wait(
        self,
        _names: Collection[TritonName],
        _processes: Collection[ProcessId],
        _limit_seconds: float,
    ) -> frozenset[ProcessId]:
        """Return at once."""
        return frozenset()


class Packages(Protocol):
    async def prepare(
        self, name: TritonName, model_id: ModelId, source: ModelSource
    ) -> Package: ...
    async def has_changed(self, source: ModelSource, content_key: str, since: float) -> bool:
        """Return whether the files are others than those of `content_key`; those of an archive
        since then (time.time). Raises as `prepare` does.
        """

    async def place(
        self, name: TritonName, model_id: ModelId, package: Package, gpu: int | None = None
    ) -> Placement: ...
    async def confirm(
        self, name: TritonName, source: ModelSource, content_key: str, held: Bytes
    ) -> None: ...
    async def remove(self, name: TritonName) -> None: ...
    async def keep(self, name: TritonName) -> str:
        """Keep what was unpacked of the package, or written for it, beyond its removal; return what
        ModelSource.kept is then, empty where all files are the caller's.
        """

    async def discard(self, kept: str) -> None:
        """Remove what `keep` has kept, if anything."""

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


class Evictor(Protocol):
    """Makes room for what does not fit: evicts models that were loaded on demand."""

    @property
    def can_evict(self) -> bool: ...
    def is_pinned(self, model_id: ModelId) -> bool: ...
    async def evict_for(self, error: CapacityError) -> bool:
        """Evict what `error` needs, at least one model; return False when nothing could go."""


class DiskEvictor(Protocol):
    """Unloads models, so that their files may leave the disk for others."""

    async def unload_one(self, missing_bytes: int) -> bool:
        """Unload the least recently used of the models that `missing_bytes` need.

        Return False when none may be unloaded now.
        """

    @property
    def can_unload(self) -> bool:
        """Whether a model that is busy now may be unloaded later."""

    def bytes_that_stay(self) -> int:
        """Return what the files of models take on disk that are never unloaded for others."""


class Artifacts(Protocol):
    """The stores, and the disk cache in front of them."""

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        *,
        models: DiskEvictor | None = None,
        callers: Collection[str] = (),
    ) -> tuple[Artifact, CacheUse]:
        """Return the artifact from disk (DISK) or from the store (MISS), in the version that the
        store has now. The artifact stays on disk until `release`, one for each fetch. `models`:
        of which idle ones are unloaded when nothing else may leave the disk for it. `callers`: who
        waits for it, at any time; each has its turn.

        Raises ArtifactNotFound, InvalidModel, NoRoom, StoreDenied, StoreUnavailable.
        """

    def release(self, artifact: Artifact) -> None:
        """Note that it is no longer loaded, and may leave the disk."""

    def disk(self) -> DiskUse:
        """Return how full the disk cache is."""

    def unused(self) -> tuple[int, int]:
        """Return how many artifacts on disk await no `release`, and their bytes."""

    async def is_current(self, artifact: Artifact) -> bool:
        """Return whether the store still has this version. Raises as `fetch` does."""

    async def find(self, key: ArtifactKey) -> ArtifactKey | None:
        """Return the key that the store has: `key` itself, or with .tar.gz, .tgz, .tar or .zip
        behind it; None where it has none. Raises as `fetch` does.
        """


@dataclass(frozen=True, slots=True)
class Ports:
    """Holds what control uses of the world."""

    triton: Triton
    packages: Packages
    memory: MemoryReader
    server: Server | None = None  # None for an external Triton
    sizes: SizeStore | None = None  # None keeps no learned sizes
    processes: Processes = field(default_factory=NoProcesses)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds.

    `stall`: how long an unload may make no progress before its processes are killed. `recovery`:
    how long to wait for memory that is about to be freed. `alone`: how long a load of unknown size
    waits to run without others. `stub_gone`: how long a load goes on without its python process
    before it is given up; `stub_gone_slow`: the same where Triton itself is slow to notice that it
    died; `stub_unseen`: the same if none was ever seen. `linger`: how long
    processes started by a model may outlive it; `killed`: how long a killed process may. `warm_up`:
    how long the inference may take that warms a model up; None: there is none.
    """

    load: float = 350.0
    unload: float = 340.0
    stall: float = 30.0
    recovery: float = 5.0
    alone: float = 20.0
    stub_gone: float = 5.0
    stub_gone_slow: float = 25.0
    stub_unseen: float = 60.0
    linger: float = 3.0
    killed: float = 5.0
    warm_up: float | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """`loads_again`: as in TritonStatus; `load_threads`: how many loads Triton runs at a time;
    `placing`: as in Placer.
    """

    limits: TimeLimits = TimeLimits()
    loads_again: bool | None = False
    load_threads: int = 4
    placing: Placing = as_triton_does
