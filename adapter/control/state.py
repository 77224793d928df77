"""Gather what control knows in one place, which frontends and pages read.

`State` is the ControlState of adapter/control/door.py, and `StoreState` the part about stores.
Nothing here changes anything, but that memory may be read for a page.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from adapter.control.desired import Desired
from adapter.control.door import (
    DeviceState,
    RequestCounts,
    SizeState,
    StoreModel,
    WantedModel,
)
from adapter.control.eviction import Eviction
from adapter.control.leases import Leases
from adapter.control.loader import LoadSlots
from adapter.control.memory import Memory
from adapter.control.operations import Journal, Kind, Operations
from adapter.control.ports import Artifacts
from adapter.control.readings import Readings
from adapter.control.triton import TritonStatus, TritonWatcher
from adapter.core.artifacts import ArtifactKey, DiskUse, FetchProgress
from adapter.core.forgotten import ForgottenModel, ForgottenModels
from adapter.core.ledger import Ledger
from adapter.core.memory import NO_BYTES, NOT_MEASURED, Bytes, Device, MemoryReading
from adapter.core.model import ModelId
from adapter.core.record import ModelRecord
from adapter.core.registry import Registry
from adapter.core.states import ModelState
from adapter.core.wanted import WantedModel as CoreWantedModel
from adapter.core.wanted import WantedState
from adapter.runtime import clock


@dataclass(slots=True, eq=False)
class StoreState:
    """Says what is known of the models of stores."""

    registry: Registry
    leases: Leases
    eviction: Eviction
    operations: Operations
    journal: Journal
    artifacts: Artifacts

    @property
    def waiting(self) -> int:
        """Count the callers that wait for a lease."""
        return self.leases.waiting

    @property
    def evictions(self) -> Mapping[str, int]:
        """Count the models that were evicted, by reason."""
        return self.journal.evictions

    def count_waiting(self, model_id: ModelId) -> int:
        """Return how many callers wait for the model."""
        return self.leases.callers_of(model_id).total()

    def is_pinned(self, model_id: ModelId) -> bool:
        """Return whether the model is never evicted."""
        return self.eviction.is_pinned(model_id)

    def models(self) -> list[ModelRecord]:
        """Return the models that calls have had fetched, or are having fetched."""
        records = [record for record in self.registry.records() if record.key is not None]
        return [record for record in records if self.registry.get(record.id) is record]

    def files_of(self, record: ModelRecord) -> StoreModel | None:
        """Return what is known of the model's files; None if they come from elsewhere."""
        if record.key is None:
            return None
        operation = self.operations.load_of(record.id)
        is_replaced = operation is not None and operation.kind is Kind.REPLACE
        return StoreModel(record.key, record.progress or FetchProgress(), is_outdated=is_replaced)

    def disk(self) -> DiskUse:
        """Return how full the disk cache is."""
        return self.artifacts.disk()

    def unused(self) -> tuple[int, int]:
        """Return how many models are on disk alone, and their bytes."""
        return self.artifacts.unused()


@dataclass(slots=True, eq=False)
class State:
    """Answers questions about control from its parts."""

    registry: Registry
    ledger: Ledger
    memory: Memory
    readings: Readings
    operations: Operations
    leases: Leases
    slots: LoadSlots
    desired: Desired
    watcher: TritonWatcher
    triton: TritonStatus
    forgotten_models: ForgottenModels
    stores: StoreState | None  # None without a store

    # -- models -----------------------------------------------------------------------------

    @property
    def pending_operations(self) -> int:
        """Count the loads, unloads and updates that are in progress."""
        return len(self.operations)

    @property
    def requests(self) -> RequestCounts:
        """Count the inferences of all models."""
        leases = self.leases
        return RequestCounts(leases.started, leases.started - leases.ended, leases.abandoned)

    def wanted(self) -> list[WantedModel]:
        """Return the models that are wanted from the start on."""
        models = [*self.desired.list_from_start(), *self.desired.wanted.unloaded()]
        return list(map(_show_wanted, models))

    def count_wanted(self) -> dict[str, int]:
        """Return how many of them are loaded, missing for whatever reason, and unloaded by a
        caller.
        """
        models = self.desired.list_from_start()
        loaded = sum(self.registry.find_ready(model.model_id) is not None for model in models)
        unloaded = len(self.desired.wanted.unloaded())
        return {"loaded": loaded, "missing": len(models) - loaded, "unloaded": unloaded}

    def forgotten(self) -> dict[ModelId, ForgottenModel]:
        """Return the models that Triton has exited with and that are not loaded again, the latest
        last.
        """
        return self.forgotten_models.models()

    def hangs_since(self, record: ModelRecord) -> float | None:
        """Return since when Triton has been at the load of a model; None while that is not long."""
        if record.state is ModelState.STUCK:
            return record.state_since
        return self.slots.hangs_since(record)

    def reasons(self) -> list[str]:
        """Return why calls cannot be answered as they should; nothing if they can.

        Models that settings want from the start on are a reason until they are loaded.
        """
        reasons = (
            self.triton.explain_mismatch(),
            self.watcher.explain_stuck(),
            self.desired.explain_missing(),
        )
        return [reason for reason in reasons if reason is not None]

    def notes(self) -> list[str]:
        """Return what is amiss although calls can be answered."""
        unmeasured = [] if self.ledger.devices else [NOT_MEASURED]
        hanging = self.slots.explain()
        return [*unmeasured, *([hanging] if hanging else []), *self.desired.list_refused()]

    # -- memory -----------------------------------------------------------------------------

    async def read_memory(self, max_age_seconds: float = 0.0) -> MemoryReading | None:
        """Read memory, unless the last reading is younger than that. Return the last reading."""
        if clock.monotonic() - self.readings.read_at < max_age_seconds:
            return self.readings.last
        return await self.readings.read()

    def devices(self, reading: MemoryReading | None = None) -> dict[Device, DeviceState]:
        """Return the memory of each device that is known."""
        used: Bytes = reading.used if reading else NO_BYTES
        ledger = self.ledger
        return {
            device: DeviceState(
                limit_bytes=book.limit_bytes,
                used_bytes=used.get(device),
                free_bytes=max(0, ledger.free(device)),
                empty_bytes=book.empty_bytes or 0,
                reserved_bytes=ledger.reserved(device),
                used_by_models_bytes=ledger.booked(device),
                memory_reserve_bytes=book.headroom_bytes,
                not_attributed_bytes=ledger.not_attributed(device),
            )
            for device, book in ledger.devices.items()
        }

    def held(self, record: ModelRecord) -> Bytes:
        """Return what is booked or reserved for the model on each device."""
        return self.memory.held(record)

    def size_of(self, record: ModelRecord) -> SizeState:
        """Return what the model takes, and how that is known."""
        package = record.package
        size = None if package is None else self.ledger.sizes.find(package.content_key)
        is_known = record.load_started_at is not None  # not of a model of an earlier run
        return SizeState(
            held=self.memory.held(record),
            is_learned=size is not None and size.is_measured,
            is_measured=record.name in self.ledger.models,
            is_reported=size is not None and size.is_reported,
            basis=None if record.basis is None else record.basis.value,
            declared_bytes=package.declared_bytes if package else None,
            disk_bytes=package.size_bytes if package and is_known else 0,
        )

    # -- sizes that ModelMesh asks for ------------------------------------------------------

    def measured_bytes(self, url: str, model_id: ModelId) -> int | None:
        """Return what the package took that was last loaded from the place, else under the name;
        None if neither was ever measured.
        """
        return self.ledger.sizes.measured_bytes(url, model_id)

    def mean_bytes(self) -> int:
        """Return the mean of all measured sizes, each on all devices; 0 before the first."""
        return self.ledger.sizes.mean_bytes()

    def largest(self) -> Bytes:
        """Return the largest measured size on each device."""
        return self.ledger.sizes.largest()


def _show_wanted(model: CoreWantedModel) -> WantedModel:
    source = model.source
    url = str(source) if isinstance(source, ArtifactKey) else source.shown_url
    is_loaded = model.state is WantedState.LOADED
    state = model.state.value
    if model.state is WantedState.MISSING:
        state = "failed" if model.failure else "waiting"
    return WantedModel(model.model_id, url, state, model.failure, is_loaded)
