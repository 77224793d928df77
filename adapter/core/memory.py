"""Bytes of memory by device, and readings of them. None means unknown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

# A GPU by its UUID (`GPU-...`, `MIG-...`), or HOST.
Device = NewType("Device", str)
HOST = Device("host")
# Shown to operators while no memory is known.
NOT_MEASURED = "memory is not measured: set memory_limit; see docs/memory.md#limits"
# Stands for all memory there is where nothing reads memory and only a limit was set.
UNSEEN = Device("memory")

# A device that is missing takes no bytes.
Bytes = Mapping[Device, int]
NO_BYTES: Bytes = {}
# Bytes of one model by CUDA's number of the GPU.
GpuBytes = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Holds the figures of one device."""

    limit_bytes: int
    used_bytes: int
    index: int | None = None  # CUDA's number of the GPU within Triton; None if unknown


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Holds one result of a memory reader."""

    devices: Mapping[Device, DeviceReading]
    source: str = HOST  # the reader: nvml, triton or host
    lag_seconds: float = 0.0  # how old the figures may be: Triton's metrics are polled
    shm_free_bytes: int | None = None  # of /dev/shm; None if Triton has another one
    # how often the kernel has killed a process of this container for memory; None if Triton is in
    # another container
    oom_kills: int | None = None
    # what the machine and the cgroups of the adapter still have of host memory: the kernel ends a
    # process that takes more. None if nobody can tell
    available_bytes: int | None = None

    @property
    def used(self) -> Bytes:
        """Return the bytes in use on each device."""
        return {device: figures.used_bytes for device, figures in self.devices.items()}


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Shows the memory of one device to operators, probes and contracts."""

    limit_bytes: int
    used_bytes: int | None  # None while nothing is read
    free_bytes: int  # for the next load
    empty_bytes: int  # in use with nothing loaded; 0 before the first reading
    reserved_bytes: int
    used_by_models_bytes: int  # booked for loaded models
    memory_reserve_bytes: int  # loads are not admitted into the reserve
    not_attributed_bytes: int  # settled - booked - empty; no decision reads this


def total(amounts: Bytes) -> int:
    """Return the sum of the bytes on all devices."""
    return sum(amounts.values())


def find_larger(one: Bytes, other: Bytes) -> Bytes:
    """Return the larger figure for each device."""
    return {d: max(one.get(d, 0), other.get(d, 0)) for d in {**one, **other}}
