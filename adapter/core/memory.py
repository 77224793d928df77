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
    """One device. `index` is CUDA's number of the GPU within Triton, None if unknown."""

    limit_bytes: int
    used_bytes: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One result of a memory reader. `source` is the reader: nvml, triton or host.

    `lag_seconds`: how old the figures may be (Triton's metrics are polled).
    `shm_free_bytes` of /dev/shm, and `oom_kills`, how often the kernel has killed a process of
    this container for memory, are None where Triton's are not ours.
    `available_bytes` is what the machine and the cgroups of the adapter still have of host memory:
    the kernel ends a process that takes more. None where nobody can tell.
    """

    devices: Mapping[Device, DeviceReading]
    source: str = HOST
    lag_seconds: float = 0.0
    shm_free_bytes: int | None = None
    oom_kills: int | None = None
    available_bytes: int | None = None

    @property
    def used(self) -> Bytes:
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
    return sum(amounts.values())


def most_of(one: Bytes, other: Bytes) -> Bytes:
    return {d: max(one.get(d, 0), other.get(d, 0)) for d in {**one, **other}}
