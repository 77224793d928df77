"""Declare what control needs of the world; classes of backend, packages and store match it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from adapter.core.admission import Evictable
from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, DiskUse, FetchProgress
from adapter.core.memory import Bytes, GpuBytes, MemoryReading
from adapter.core.model import (
    ModelId,
    ModelSource,
    Package,
    Placement,
    ProcessId,
    StagedModel,
    TritonName,
)
from adapter.core.record import ModelRecord, OnExit
from adapter.core.triton_input import Unclassified


class Triton(Protocol):
    """Sends control calls to Triton. Each raises BackendUnavailable if Triton exits meanwhile."""

    @property
    def live(self) -> bool:
        """Return whether Triton answered the last probe."""

    @property
    def lives(self) -> int:
        """Return how many times Triton became live."""

    @property
    def version(self) -> str:
        """The version that Triton reports; "" if unknown."""

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        """Load a model of Triton's repository. Raises LoadFailed and OutOfMemory."""

    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        """Have the model compute zeros once; return why it was not asked to, None where it was.

        Raises as an inference does.
        """

    async def gpu_bytes(self, name: TritonName) -> GpuBytes:
        """Return what Triton reports that the model takes of each GPU; nothing if it does not."""

    async def unclassified(self, name: TritonName) -> Unclassified | None:
        """Return the outputs whose `classification` ends Triton; None where it does not tell."""

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        """Ask for an unload. Triton answers before the model is gone."""

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        """Wait until Triton has unloaded these models; return those that it still has."""

    async def ready(self) -> set[str]:
        """Return the models that Triton serves."""

    async def being_loaded(self) -> set[str]:
        """Return the models that Triton is loading."""

    async def present(self) -> set[str]:
        """Return the models that Triton has, or is loading or unloading."""


class Server(Protocol):
    """The process of an embedded tritonserver."""

    @property
    def pid(self) -> int | None:
        """The pid of the process; None while there is none."""

    @property
    def exit_reason(self) -> str:
        """Return how the latest process that has ended did so, as "exited with 1"; "" before."""

    async def restart(self, reason: str) -> None:
        """End the process at once, so that another one is started."""


class Processes(Protocol):
    """Lists and kills the processes of models below an embedded Triton, and waits for their end.

    Listing raises BackendUnavailable while processes cannot be seen.
    """

    @property
    def are_seen(self) -> bool:
        """Whether Triton is embedded: only then its processes can be seen."""

    # -- list -------------------------------------------------------------------------------

    async def models(self) -> frozenset[TritonName]:
        """Return the models with a process, loaded or not."""

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        """Return the instances of each model whose python processes live.

        None stands for a process that completes the configuration. A model without python
        is missing; a model that has lost its process is listed without an instance.
        """

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the processes of models that are being unloaded, and all that those started.

        A process that may also belong to another model belongs to that one from now on.
        """

    async def abandoned(self) -> frozenset[ProcessId]:
        """Return processes that models have started whose own python processes have ended."""

    # -- kill -------------------------------------------------------------------------------

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Kill these processes and all that they started; return those that lived."""

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        """Kill the python processes in which these models are initialized; return whether any were.

        None is killed while one completes the configuration of its model: Triton would never
        answer that load.
        """

    async def free_regions(self, names: Collection[TritonName]) -> int:
        """Free the shared memory of python processes that have died; return the bytes.

        Triton keeps it, so it must have unloaded these models before.
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

    async def kill(self, _processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Kill nothing."""
        return frozenset()

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
    """Inspects packages, and places them in Triton's repository."""

    async def prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        """Read a package, unpacked under the name where need be. Raises InvalidModel."""

    async def has_changed(self, source: ModelSource, content_key: str, since: float) -> bool:
        """Return whether the files are others than those of `content_key`; those of an archive
        since then (time.time). Raises as `prepare` does.
        """

    async def place(
        self,
        name: TritonName,
        model_id: ModelId,
        package: Package,
        gpu: int | None = None,
        *,
        is_taken: Callable[[TritonName], bool],  # by a model that has no folder yet
    ) -> Placement:
        """Put a prepared package where Triton reads it; return the names of its models."""

    async def confirm(
        self, name: TritonName, source: ModelSource, content_key: str, size: Bytes
    ) -> None:
        """Note for later runs that Triton serves the model, and what it takes."""

    async def remove(self, name: TritonName) -> None:
        """Remove what was prepared and placed under the name, if anything."""

    async def set_aside(self, name: TritonName) -> str:
        """Put aside what was unpacked of the package, or written for it, so that it outlasts the
        removal of the package. Return the path for ModelSource.kept; "" if all files are the
        caller's.
        """

    async def discard(self, path: str) -> None:
        """Remove what `set_aside` has put aside, if anything."""

    async def staged(self) -> Sequence[StagedModel]:
        """Return what an earlier run has left in Triton's repository."""


class MemoryReader(Protocol):
    """Reads the memory of Triton's devices."""

    async def read(self) -> MemoryReading | None:
        """Return a reading that is begun after this call; None if nothing can be read."""


class SizeStore(Protocol):
    """Keeps learned sizes from one run to the next."""

    async def save(self, data: object) -> None:
        """Write the sizes. Raises AdapterError if that fails."""


class DiskEvictor(Protocol):
    """Unloads models whose files keep others from the disk."""

    async def unload_one(self, missing_bytes: int) -> bool:
        """Unload a model that may be evicted, so that its files may leave: the least recently used
        of those that `missing_bytes` need. Return False when none may be now.
        """

    @property
    def can_unload_later(self) -> bool:
        """Whether any model may be unloaded, now or once what keeps it is over."""

    def unevictable_bytes(self) -> int:
        """Return the bytes on disk of loaded models that are never unloaded for others."""


class Artifacts(Protocol):
    """Fetches models of the stores through the disk cache."""

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        *,
        evictor: DiskEvictor | None = None,  # unloads models when nothing else may leave the disk
        callers: Collection[str] = (),  # of the model, at any time: fetches alternate among them
    ) -> tuple[Artifact, CacheUse]:
        """Return the artifact from disk (DISK) or from the store (MISS), in the version that the
        store has now. The artifact stays on disk until `release`, one for each fetch.

        Raises ArtifactNotFound, InvalidModel, NoRoom, StoreDenied, StoreUnavailable.
        """

    def release(self, artifact: Artifact, *, idle_seconds: float = 0.0) -> None:
        """Note that it is no longer loaded, and may leave the disk.

        Its last use was `idle_seconds` ago.
        """

    def disk(self) -> DiskUse:
        """Return how full the disk cache is."""

    def unused(self) -> tuple[int, int]:
        """Return how many artifacts on disk await no `release`, and their bytes."""

    async def is_current(self, artifact: Artifact) -> bool:
        """Return whether the store still has this version. Raises as `fetch` does."""

    async def find(self, key: ArtifactKey) -> ArtifactKey | None:
        """Return the key that the store has: `key` itself, or with the suffix of an archive behind
        it; None without either. Raises as `fetch` does.
        """


class Evictor(Protocol):
    """Makes room in memory for one load."""

    def candidates(self, record: ModelRecord) -> tuple[Evictable, ...]:
        """Return the models that may be evicted for the load of `record`, now or once they are
        idle, in their order.
        """

    async def make_room(self, victims: Collection[TritonName], record: ModelRecord) -> bool:
        """Evict these for the load of `record`; return whether any went."""


@dataclass(frozen=True, slots=True)
class World:
    """Holds the implementations of the ports."""

    triton: Triton
    packages: Packages
    memory: MemoryReader
    server: Server | None = None  # None for a Triton that is not embedded
    processes: Processes = field(default_factory=NoProcesses)
    sizes: SizeStore | None = None  # None if no sizes are kept
    artifacts: Artifacts | None = None  # None without a store


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Holds time limits in seconds. `unload` is no setting: app/parts.py has it."""

    load: float = 350.0
    # Half is for the requests in flight, half for the answer to each call of Triton. The waits of
    # core/times.py, HANG_SECONDS above all, come on top: no unload is ended by this
    unload: float = 340.0
    warm_up: float | None = None  # of the inference that warms a model up; None for no warm-up
    model_wait: float = 55.0  # a call waits for its model to be fetched and loaded


def keep_no_headroom(_limit_bytes: int) -> int:
    """Return the headroom of a device for which none is set."""
    return 0


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Holds the settings about memory."""

    limit_bytes: int | None = None  # of each device; None for all that it has
    headroom_of: Callable[[int], int] = keep_no_headroom  # by the limit of a device
    process_limits: Mapping[int, int] = field(default_factory=dict)  # MPS, by CUDA's number
    places_gpus: bool = False  # choose the GPU of a package that leaves it open
    mesh_default_bytes: int | None = None  # the most that a load planned by ModelMesh may guess


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Holds the settings about models of stores."""

    names: frozenset[str] = frozenset({""})  # of the stores; "" is `model_store`
    pin: tuple[str, ...] = ()  # patterns of models that are never evicted
    idle_unload_seconds: float = 0.0  # 0 disables it
    revalidate_seconds: float = 0.0  # 0 disables it
    load_concurrency: int = 2  # loads that calls wait for, at a time
    max_waiting: int = 256  # callers without a lease, of all models
    max_waiting_for_one: int = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds all settings of control."""

    limits: TimeLimits = TimeLimits()
    memory: MemorySettings = field(default_factory=MemorySettings)
    stores: StoreSettings = StoreSettings()
    on_exit: OnExit | None = None  # None: reload, unless a ModelMesh loads its models again
    load_threads: int = 4  # loads that Triton runs at a time
