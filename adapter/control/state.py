"""Gathers what control knows in one place, which frontends and pages read (door.py)."""

from collections.abc import Mapping, Sequence

from adapter.control.door import (
    LostModel,
    RequestCounts,
    SizeState,
    StoreModel,
    WantedModel,
)
from adapter.control.models import ModelControl
from adapter.control.residency import Residency
from adapter.core.artifacts import DiskUse
from adapter.core.desired import Want
from adapter.core.memory import NOT_MEASURED, Bytes, Device, DeviceState, MemoryReading
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.runtime import clock


class StoreState:
    """Says what is known of the models of stores."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    @property
    def waiting(self) -> int:
        """Count the callers that have no lease yet."""
        return self._residency.waiting

    @property
    def evictions(self) -> Mapping[str, int]:
        """Count the models that were evicted, by reason."""
        return self._residency.evictions

    def waiting_for(self, model_id: ModelId) -> int:
        """Return how many callers wait for the model."""
        return self._residency.waiting_for(model_id)

    def is_pinned(self, model_id: ModelId) -> bool:
        """Return whether the model is never evicted."""
        return self._residency.is_pinned(model_id)

    def models(self) -> Sequence[ModelRecord]:
        """Return the models that calls have had fetched."""
        return self._residency.models()

    def files_of(self, record: ModelRecord) -> StoreModel | None:
        """Return what is known of the model's files; None if they come from elsewhere."""
        files = record.files
        if files is None:
            return None
        return StoreModel(files.key, files.progress, files.is_outdated)

    def disk(self) -> DiskUse:
        """Return how full the disk cache is."""
        return self._residency.disk()

    def unused(self) -> tuple[int, int]:
        """Return how many models are on disk alone, and their bytes."""
        return self._residency.unused()


class State:
    """Answers questions about control from its parts."""

    def __init__(
        self,
        control: ModelControl,
        residency: Residency | None,  # None without a store
    ) -> None:
        self._control = control
        self._memory = control.memory
        self.triton = control.triton_status
        self.stores = StoreState(residency) if residency is not None else None

    @property
    def pending_operations(self) -> int:
        """Count the loads, unloads and the like that are in progress."""
        return self._control.operations.in_flight

    @property
    def requests(self) -> RequestCounts:
        """Count the inferences of all models."""
        leases = self._control.leases
        return RequestCounts(leases.begun, leases.begun - leases.ended, leases.abandoned)

    def wanted(self) -> Sequence[WantedModel]:
        """Return the models that are wanted from the start on."""
        return [
            WantedModel(
                model.model_id,
                model.url,
                model.state.value,
                model.why,
                is_loaded=model.state is Want.LOADED,
            )
            for model in self._control.desired.wanted()
        ]

    def count_wanted(self) -> Mapping[str, int]:
        """Return how many of them are loaded, missing, and unloaded by a caller."""
        return self._control.desired.count()

    def lost(self) -> Mapping[ModelId, LostModel]:
        """Return the models that Triton has exited with and that are not loaded again."""
        lost = self._control.registry.lost
        return {
            model_id: LostModel(model.at, model.reason, model.is_given_up)
            for model_id, model in lost.items()
        }

    def hangs_since(self, record: ModelRecord) -> float | None:
        """Return since when the load of the model has made no progress."""
        return self._control.load_threads.hangs_since(record)

    def reasons(self, *, needs_wanted: bool) -> Sequence[str]:
        """Return why calls cannot be answered as they should; nothing if they can."""
        found = [self.triton.explain_mismatch(), self._control.why_stuck()]
        if needs_wanted:
            found.append(self._control.desired.why_missing())
        return [reason for reason in found if reason is not None]

    def notes(self) -> Sequence[str]:
        """Return what is amiss although calls can be answered."""
        memory = [] if self._memory.ledger.has_devices else [NOT_MEASURED]
        return [*memory, *self._control.load_threads.notes(), *self._control.desired.refused()]

    # -- memory -----------------------------------------------------------------------------

    async def read_memory(self, max_age_seconds: float = 0.0) -> MemoryReading | None:
        """Read memory, unless the last reading is younger than that. Return the last reading."""
        readings = self._memory.readings
        samples = readings.samples
        if samples and clock.monotonic() - samples[-1][0] < max_age_seconds:
            return readings.last
        return await readings.read()

    def devices(self, reading: MemoryReading | None = None) -> Mapping[Device, DeviceState]:
        """Return the memory of each device that is known."""
        return self._memory.ledger.snapshot().show(reading)

    def held(self, record: ModelRecord) -> Bytes:
        """Return what is booked for the model on each device."""
        return self._memory.ledger.of(record.name)

    def size_of(self, record: ModelRecord) -> SizeState:
        """Return what the model takes, and how that is known."""
        sizes = self._memory.sizes
        return SizeState(
            held=self._memory.ledger.of(record.name),
            is_learned=sizes.learned(record.package_key) is not None,
            is_measured=self._memory.accounts.is_measured(record.name),
            is_reported=sizes.is_reported(record.package_key),
            basis=record.basis.value if record.basis else None,
            declared_bytes=record.declared_bytes,
            disk_bytes=record.disk_bytes,
        )

    # -- sizes that ModelMesh asks for ------------------------------------------------------

    def measured_bytes(self, url: str, model_id: ModelId) -> int | None:
        """Return what the package was learned to take, by its place, else by its name."""
        sizes = self._memory.sizes
        return sizes.of_url(url) or sizes.of_model(model_id)

    def mean_bytes(self) -> int:
        """Return the mean of all learned sizes; 0 before the first."""
        return self._memory.sizes.mean_bytes()

    def largest(self) -> Bytes:
        """Return the largest learned size on each device."""
        return self._memory.sizes.largest()

    def earlier_baseline(self) -> Bytes:
        """Return the most that earlier runs have seen in use with nothing loaded."""
        return self._memory.sizes.earlier_baseline
