"""Gathers what control knows in one place, which frontends and pages read (door.py)."""

from collections.abc import Mapping, Sequence

from adapter.control.door import DeviceState, RequestCounts, SizeState, WantedModel
from adapter.control.models import ModelControl
from adapter.control.residency import Residency
from adapter.core.ledger import NOT_MEASURED
from adapter.core.memory import Bytes, Device, MemoryReading
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Sizes
from adapter.runtime import clock


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
        self.stores = residency

    @property
    def pending_operations(self) -> int:
        """Count the loads, unloads and the like that are in progress."""
        return self._control.operations.in_flight

    @property
    def requests(self) -> RequestCounts:
        """Count the inferences of all models."""
        leases = self._control.leases
        return RequestCounts(leases.begun, leases.begun - leases.ended, leases.abandoned)

    @property
    def sizes(self) -> Sizes:
        """Return what packages are known to take."""
        return self._memory.sizes

    def wanted(self) -> Sequence[WantedModel]:
        """Return the models that are wanted from the start on."""
        return [
            WantedModel(model.model_id, model.url, model.state, model.why)
            for model in self._control.desired.wanted()
        ]

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
        used: Bytes = reading.used if reading else {}
        return {
            device: DeviceState(
                limit_bytes=book.limit_bytes,
                used_bytes=used.get(device),
                free_bytes=book.free_bytes(used.get(device)),
                baseline_bytes=book.baseline_bytes,
                reserved_bytes=book.reserved_bytes,
                held_bytes=book.held_bytes,
                headroom_bytes=book.headroom_bytes,
                unaccounted_bytes=book.unaccounted_bytes,
            )
            for device, book in self._memory.ledger.snapshot().devices.items()
        }

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
        )
