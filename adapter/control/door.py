"""Declares all that frontends, probes and listeners may use of control.

`Models` has the verbs for every model, `StoreModels` those for models that calls load from stores,
and `ControlState` is the one place to read what control knows. Whoever serves callers imports this
module and nothing else of control; `app` builds what is behind it.

What frontends need of records and values is imported from here as well.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeAlias

from adapter.core.artifacts import ArtifactKey, CacheUse, DiskUse, FetchProgress
from adapter.core.forgotten import ForgottenModel
from adapter.core.ledger import ForgottenSize
from adapter.core.memory import Bytes, Device, DeviceState, MemoryReading
from adapter.core.mesh_books import MeshBooks
from adapter.core.model import ModelId, ModelSource
from adapter.core.record import ModelRecord
from adapter.core.registry import Registry
from adapter.core.requests import Replaces, RoomMaker
from adapter.core.states import BEING_LOADED, ModelState
from adapter.errors import AdapterError, BackendUnavailable, CapacityError, ModelNotFound

__all__ = [
    "BEING_LOADED",
    "ControlState",
    "DeviceState",
    "ForgottenModel",
    "Lease",
    "MeshBooks",
    "ModelRecord",
    "ModelState",
    "Models",
    "Registry",
    "Replaces",
    "RequestCounts",
    "RoomMaker",
    "SizeState",
    "StoreModel",
    "StoreModels",
    "StoreState",
    "TritonState",
    "WaitForLease",
    "WantedModel",
]

# -- one request -----------------------------------------------------------------------------


class Lease(Protocol):
    """Keeps a model loaded while Triton works on one request of it.

    A caller who leaves does not end the lease, because Triton goes on: after `abandon` only `end`
    ends it. As a context manager it begins at the start of the block and ends after it.
    """

    record: ModelRecord
    # False, set before `begin`, for a request for metadata or the like: it counts neither as a use
    # of the model nor as work that may make Triton exit
    is_inference: bool

    def begin(self, now: float | None = None) -> None:
        """Begin the lease, once, and before anything else is awaited: an unload may run meanwhile.

        `now` is time.monotonic, if the caller has just read it.
        """

    def on_unload(self, refuse: Callable[[], None]) -> None:
        """Have `refuse` called if the model is unloaded while the lease waits for its caller, who
        still sends the request or takes the answer.
        """

    def abandon(self) -> None:
        """Mark the lease as abandoned: nobody waits for the answer any more."""

    def is_held(self) -> bool:
        """Return whether the request has begun, and its caller still waits."""

    def is_lost(self) -> bool:
        """Return whether the request can never be answered, as its processes have ended."""

    def end(
        self, error: BaseException | None = None, now: float | None = None
    ) -> BaseException | None:
        """End the lease: Triton is done with the request.

        Return the error for the caller of a request that failed with `error`.
        """

    def note_failure(self, error: BaseException) -> BaseException:
        """Report a failure as `end` does, of a request whose stream goes on."""

    async def judge(self, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`.

        Its text may mean a lack of memory, or that a process of the model has ended.
        """

    def note_missing_outputs(self) -> None:
        """Warn once that the model has answered without any of its outputs."""

    def __enter__(self) -> ModelRecord: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


# Returns a lease of a model; waits so many seconds for a load of it that is in progress.
WaitForLease: TypeAlias = Callable[[ModelId, float], Awaitable[Lease]]


# -- the verbs -------------------------------------------------------------------------------


class Models(Protocol):
    """Leases, loads, unloads and replaces models for callers.

    Each operation outlives its caller. `log_fields` go into its log lines: request ids and the
    like.
    """

    @property
    def registry(self) -> Registry:
        """Return the table of all models, to be read."""

    def lease(self, model_id: ModelId) -> Lease:
        """Return a lease of a ready model. Raises ModelNotReady and ModelNotFound."""

    async def wait_for_lease(self, model_id: ModelId, limit_seconds: float) -> Lease:
        """Return a lease; wait for a load or an update of the model that is in progress."""

    def is_being_loaded(self, model_id: ModelId) -> bool:
        """Return whether a load or an update is in progress, which `wait_for_lease` waits for."""

    async def wait_for_load(self, model_id: ModelId) -> ModelRecord:
        """Return the record of a loaded model; wait for its load, and raise the failure of that."""

    async def load(
        self,
        model_id: ModelId,
        source: ModelSource,
        room_maker: RoomMaker = RoomMaker.ADAPTER,
        /,
        **log_fields: str,
    ) -> ModelRecord:
        """Load the model. Raises AlreadyLoaded at once, also while its load is in progress."""

    async def unload(self, model_id: ModelId, **log_fields: str) -> None:
        """Unload the model, or end its load. Return when it and its memory are gone."""

    async def unload_all(self, **log_fields: str) -> None:
        """Unload every model, end every load, and unload what was loaded past the adapter."""

    async def replace(
        self, model_id: ModelId, source: ModelSource, replaces: Replaces, **log_fields: str
    ) -> None:
        """Have the model loaded from the package of `source`, whatever is loaded now.

        A model that is not loaded is loaded, and a load in progress is waited for. A package with a
        fault, or one that is too large, changes nothing.
        """

    def forget(self, model_id: ModelId) -> ForgottenSize:
        """Forget what loads of the model's package have shown of its size.

        Raises ModelNotFound if no load of the model was ever begun.
        """

    def close(self) -> None:
        """Accept no more operations."""


class StoreModels(Protocol):
    """Leases models of the stores, which are fetched and loaded for the calls that need them."""

    def lease(self, model_id: ModelId, key: ArtifactKey | None = None) -> Lease | None:
        """Return a lease of a model that is loaded; None if it must be waited for.

        With a key, raise the error of a call that would be refused before it waits.
        """

    async def wait_for_lease(
        self,
        model_id: ModelId,
        key: ArtifactKey,
        caller: str = "",  # each caller has its turn; "" if unknown
    ) -> tuple[Lease, CacheUse]:
        """Return a lease of the model, and where it was found; fetch and load it where need be."""

    async def wait_for_named(self, model_id: ModelId, limit_seconds: float) -> Lease:
        """Return a lease of a model that is asked for by its name alone, as V2 does.

        `limit_seconds` bounds the wait for a load by somebody else. Raises ArtifactNotFound if no
        store has the name.
        """

    async def load(self, model_id: ModelId, is_forced: bool = False) -> bool:
        """Load the model, which then stays; return whether a store has it.

        `is_forced` also loads the store's present version of a model that is loaded.
        """

    async def make_room(self, error: CapacityError) -> bool:
        """Evict idle models for an inference that ran out of memory; return whether any went."""


# -- the state -------------------------------------------------------------------------------


class TritonState(Protocol):
    """Says whether Triton is up, and which models went with its last exit."""

    @property
    def is_open(self) -> bool:
        """Whether the adapter takes operations: it has started, and does not stop."""

    @property
    def on_restart(self) -> tuple[str, str]:
        """Return what happens to the models when Triton restarts, and the reason."""

    def has_lost(self, record: ModelRecord) -> bool:
        """Return whether Triton has exited with this model, which comes back by a call alone."""

    def refuse_unless_open(self) -> None:
        """Raise BackendUnavailable while the adapter starts, and once it drains."""

    def refuse_lost(self, model_id: ModelId) -> None:
        """Raise ModelNotFound while a platform has to load its models anew."""

    def explain_lost(self, model_id: ModelId) -> ModelNotFound:
        """Return the error for a call of a model that Triton has exited with."""

    def note_mesh(self) -> None:
        """Note that a ModelMesh is there, which loads its models again itself."""

    async def was_caused_by_exit(self, error: BackendUnavailable) -> bool:
        """Return whether a call failed because Triton has exited, and a platform has to load the
        models again. Wait for the exit to show: a process closes its connections before it has
        ended.
        """

    async def wait_until_up(self, deadline: float) -> None:
        """Wait until the adapter is open and Triton is up. Raises BackendUnavailable at `deadline`,
        by time.monotonic.
        """


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Counts the inferences of all models."""

    begun: int  # ever
    in_flight: int
    abandoned: int  # Triton still works on them, and nobody waits for the answer


@dataclass(frozen=True, slots=True)
class SizeState:
    """Shows what one model takes, and how that is known."""

    held: Bytes
    is_learned: bool  # its package was measured, now or in an earlier run
    is_measured: bool  # no measurement of this load is still to come
    is_reported: bool  # by Triton, not by readings
    basis: str | None  # what its reservation was based on; None for a model of an earlier run
    declared_bytes: int | None  # by its package
    disk_bytes: int  # of its files; 0 for a model of an earlier run

    @property
    def basis_of_held(self) -> str | None:
        """Return what `held` is based on: the measurement, once it replaced the reservation."""
        return "measured" if self.is_learned and self.is_measured else self.basis


@dataclass(frozen=True, slots=True)
class WantedModel:
    """Shows one model that is wanted from the start on."""

    model_id: ModelId
    url: str
    state: str
    reason: str  # the error of its last load
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class StoreModel:
    """Shows the files of a model that a call has had fetched."""

    key: ArtifactKey
    progress: FetchProgress
    is_outdated: bool  # the store has another version, or none


class StoreState(Protocol):
    """Says what is known of the models of stores."""

    @property
    def waiting(self) -> int:
        """Count the callers that have no lease yet."""

    @property
    def evictions(self) -> Mapping[str, int]:
        """Count the models that were evicted, by reason."""

    def count_waiting(self, model_id: ModelId) -> int:
        """Return how many callers wait for the model."""

    def is_pinned(self, model_id: ModelId) -> bool:
        """Return whether the model is never evicted."""

    def models(self) -> Sequence[ModelRecord]:
        """Return the models that calls have had fetched, or are having fetched."""

    def files_of(self, record: ModelRecord) -> StoreModel | None:
        """Return what is known of the model's files; None if they come from elsewhere."""

    def disk(self) -> DiskUse:
        """Return how full the disk cache is."""

    def unused(self) -> tuple[int, int]:
        """Return how many models are on disk alone, and their bytes."""


class ControlState(Protocol):
    """Holds what control knows, for probes, pages and contracts. Nobody outside changes it."""

    @property
    def triton(self) -> TritonState:
        """Return what is known of Triton."""

    @property
    def stores(self) -> StoreState | None:
        """Return what is known of the models of stores; None without a store."""

    @property
    def pending_operations(self) -> int:
        """Count the loads, unloads and the like that are in progress."""

    @property
    def requests(self) -> RequestCounts:
        """Count the inferences of all models."""

    def wanted(self) -> Sequence[WantedModel]:
        """Return the models that are wanted from the start on."""

    def count_wanted(self) -> Mapping[str, int]:
        """Return how many of them are loaded, and how many are not, by state."""

    def forgotten(self) -> Mapping[ModelId, ForgottenModel]:
        """Return the models that Triton has exited with and that are not loaded again, the latest
        last.
        """

    def hangs_since(self, record: ModelRecord) -> float | None:
        """Return since when the load of the model has made no progress, by time.monotonic."""

    def reasons(self) -> Sequence[str]:
        """Return why calls cannot be answered as they should; nothing if they can.

        A model that is wanted from the start on and is not loaded is a reason.
        """

    def notes(self) -> Sequence[str]:
        """Return what is amiss although calls can be answered."""

    # -- memory -----------------------------------------------------------------------------

    async def read_memory(self, max_age_seconds: float = 0.0) -> MemoryReading | None:
        """Read memory, unless the last reading is younger than that. Return the last reading."""

    def devices(self, reading: MemoryReading | None = None) -> Mapping[Device, DeviceState]:
        """Return the memory of each device that is known."""

    def held(self, record: ModelRecord) -> Bytes:
        """Return what is booked for the model on each device."""

    def size_of(self, record: ModelRecord) -> SizeState:
        """Return what the model takes, and how that is known."""

    # -- sizes that ModelMesh asks for ------------------------------------------------------

    def measured_bytes(self, url: str, model_id: ModelId) -> int | None:
        """Return what the package took that was last loaded from the place, else under the name;
        None if neither was ever measured.
        """

    def mean_bytes(self) -> int:
        """Return the mean of all measured sizes, each on all devices; 0 before the first."""

    def largest(self) -> Bytes:
        """Return the largest measured size on each device."""
