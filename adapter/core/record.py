"""Describe one model: its state, its step, its requests, and how to undo its load."""

from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import Enum

from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, FetchProgress
from adapter.core.model import (
    ModelId,
    ModelSource,
    Package,
    Placement,
    StagedModel,
    TritonName,
)
from adapter.core.sizes import Basis
from adapter.core.states import ModelState
from adapter.core.tensors import ContentTypes
from adapter.core.triton_input import Unclassified

_LATENCIES = 200  # 7 KB of a model that is in use
_SEQUENCES = "sequence_batching"
_WARM_UP = "model_warmup"


class Step(Enum):
    """Tells operators what an operation spends its time on; no decision depends on it.

    The values are those of `waits_for` in /debug/state.
    """

    FETCH = "fetch"  # its files come from the store, or from the disk cache
    PACKAGE = "package"  # the adapter unpacks its archive, and reads and checks its files
    TRITON_START = "triton_start"  # Triton is away
    TURN = "turn"  # earlier loads come first, or the model may have ended Triton
    MEMORY = "memory"  # the model does not fit yet
    FILES = "files"  # the files are linked, copied or sent to where Triton reads them
    THREAD = "thread"  # Triton works on as many loads as it has threads for
    TRITON = "triton"  # Triton loads or unloads the model
    REQUESTS = "requests"  # an unload waits for the requests in flight
    UNDOING = "undoing"  # the load has failed, and what there is of it is taken down


class LoadedFor(Enum):
    """Says for whom a model is loaded. That decides whether others may evict it."""

    PLATFORM = "platform"  # somebody asked for its load: the model stays until its unload
    CALLS = "calls"  # a call needed it: it may be evicted, and the next call loads it again


class OnExit(Enum):
    """Says whether the adapter loads a model again after an exit of Triton."""

    FORGET = "forget"
    RELOAD = "reload"


@dataclass(slots=True)
class Usage:
    """Counts the requests of a model. Leases write it; times are of the monotonic clock."""

    in_flight: int = 0  # requests that Triton works on, those for metadata included
    abandoned: int = 0  # requests in flight whose callers have gone
    # requests of an unloaded model whose processes were killed: they get no answer
    unanswerable: int = 0
    inferring: int = 0  # inferences among the requests in flight
    served: int = 0  # inferences that have begun
    used_at: float = 0.0  # begin of the last inference, or the end of the load
    answered_at: float = 0.0  # end of the last inference that went well
    # by caller, as far as callers are known: begin of its last call
    called_at: dict[str, float] = field(default_factory=dict)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelRecord:
    """Describes one model, from the start of its load to the end of its unload.

    Each load has a record of its own: another version, and a model that comes back after an exit of
    Triton. `undo` holds what the load has done outside of Triton: files kept, memory reserved or
    booked, a folder placed. Closing it is the rest of an unload, whether the load has failed or the
    model has served for days.
    """

    id: ModelId
    name: TritonName  # after Registry.add only Registry.rename changes it
    source: ModelSource
    loaded_for: LoadedFor
    on_exit: OnExit = OnExit.FORGET

    # -- set by the registry alone; None is absent ----------------------------------------------
    state: ModelState | None = None
    state_since: float = 0.0  # by the registry's clock

    # -- shown to operators; each change of state clears both -----------------------------------
    step: Step | None = None
    blockers: tuple[ModelId, ...] = ()  # models that the step waits for

    # -- what is loaded -------------------------------------------------------------------------
    key: ArtifactKey | None = None  # None unless the files come from a store
    is_source_complete: bool = True  # False if the load request brought files or a config
    files: Artifact | None = None  # of a store, kept on disk until the undo
    failed_update: Artifact | None = None  # the store's version that failed in this one's place
    progress: FetchProgress | None = None  # of the fetch
    cache_use: CacheUse = CacheUse.HIT  # where its files were, until the call that loaded it knows
    package: Package | None = None  # None until it was inspected
    warnings: tuple[str, ...] = ()  # of the package, and what was odd about its answers
    basis: Basis | None = None  # of its reservation; None for a model of an earlier run
    load_started_at: float | None = None  # time.time(); None for a model of an earlier run
    fetch_seconds: float = 0.0  # without the wait for other fetches
    load_seconds: float = 0.0  # in Triton; 0 until Triton has answered the load

    # -- where it is in Triton ------------------------------------------------------------------
    life: int = 0  # number of the Triton that its load began in; read by the load alone
    placement: Placement = field(default_factory=lambda: Placement(()))  # by Registry.place
    gpu: int | None = None  # CUDA's number, None where Triton or the package decides
    instances: frozenset[str] = frozenset()  # with a python process when the load ended
    # outputs whose `classification` ends Triton; None where Triton does not tell
    unclassified: Unclassified | None = None
    is_decoupled: bool | None = None  # None until a stream has asked Triton

    usage: Usage = field(default_factory=Usage)
    undo: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def origin(self) -> ModelSource | ArtifactKey:
        """Return what another load of the model begins with: its key in a store, or its source."""
        return self.key or self.source

    @property
    def is_renamed(self) -> bool:
        """Return whether the model has another name in Triton than for its callers."""
        return str(self.name) != self.id

    @property
    def asked_for(self) -> ModelId:
        """Return the name that answers carry: the one that callers use."""
        return self.id

    @property
    def content_types(self) -> ContentTypes | None:
        """Return the content types that the package has opted into; None without any."""
        return self.package.content_types if self.package else None

    @property
    def inspected(self) -> Package:
        """Return the package. Raises ValueError as long as the load has not inspected it."""
        if self.package is None:
            raise ValueError(f"the package of model {self.id!r} was not inspected yet")
        return self.package

    @property
    def can_run_beside(self) -> bool:
        """Return whether another version may be loaded while this one is.

        Models of one package know each other by name, and the requests of one sequence belong to
        one version. Of a model of an earlier run neither is known.
        """
        parts = self.package.parts if self.package else ()
        return len(parts) == 1 and _SEQUENCES not in (parts[0].config_text or "")

    @property
    def has_warm_up(self) -> bool:
        """Return whether Triton runs samples of the package before it answers the load."""
        parts = self.package.parts if self.package else ()
        return any(_WARM_UP in (part.config_text or "") for part in parts)


def describe_staged(model: StagedModel) -> Package:
    """Return the package of a model that an earlier run has loaded: its content key and content
    types.

    The adapter does not read its files again, so every other field is empty or a default.
    """
    return Package(
        root="",
        parts=(),
        size_bytes=0,
        declared_bytes=None,
        content_key=model.content_key,
        content_types=model.content_types,
    )
