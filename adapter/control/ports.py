"""The protocols that control depends on. Classes of backend and packages fit them structurally."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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

    def end_instances(self, name: TritonName) -> bool:
        """Kill the python processes that serve this model, or begin to; return whether there were
        any. None is killed while one completes the model's configuration: Triton would never
        answer its load.
        """

    async def running_models(self) -> frozenset[TritonName]:
        """Return the models with a python process, loaded or not. OSError if none can be seen."""

    async def resident_bytes(self) -> Mapping[str, int]:
        """Return the host memory of the server's processes by their only model, and under "" that
        of the others; nothing if none can be seen.
        """

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

    async def free_regions(self, names: Collection[TritonName]) -> int:
        """Free the shared memory that Triton keeps of python processes that have died; return the
        bytes. To be called only once Triton has let go of these models.
        """

    async def restart(self, reason: str) -> None: ...


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
    """The adapters that control uses. `server` is None for an external Triton, `store` if no sizes
    are kept.
    """

    triton: Triton
    packages: Packages
    memory: MemoryReader
    server: Server | None = None
    store: SizeStore | None = None


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
