"""Reads GPU memory from the driver through NVML (the package nvidia-ml-py)."""

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from adapter.core.memory import Device, DeviceReading, MemoryReading
from adapter.errors import BackendUnavailable
from adapter.triton.memory.checks import Totals, numbered
from adapter.triton.memory.host import unified_memory

# NVIDIA's MPS: what each CUDA client (a process) may take of a GPU
MPS_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_MPS_ENTRY = re.compile(r"\s*(\d+)\s*=\s*(\d+)\s*([GM])B?\s*", re.IGNORECASE)
_MPS_BYTES = {"G": 2**30, "M": 2**20}

_Devices = Mapping[Device, DeviceReading]
_Answer = tuple[_Devices, str]  # the second says why the first is empty


def mps_limits(text: str) -> Mapping[int, int]:
    """Return the limits in bytes by CUDA's number of the GPU, from a value such as `0=1G,1=512MB`;
    what is no such entry is left out.
    """
    entries = filter(None, map(_MPS_ENTRY.fullmatch, text.split(",")))
    return {int(each[1]): int(each[2]) * _MPS_BYTES[each[3].upper()] for each in entries}


class NvmlMemory:
    """Reads, without lag, the GPUs that are visible to this container.

    Those may be more than Triton's. While Triton's metrics name none, a single visible GPU is taken
    for Triton's; several are an error.
    """

    def __init__(
        self,
        uuids: Callable[[], Sequence[str]],  # of the GPUs that Triton's metrics name
        *,
        library: Any = None,  # pynvml, or the same functions and errors
        timeout_seconds: float = 2.0,
        root: Path = Path("/"),  # the folder of proc and sys
    ) -> None:
        self.why = "it was not asked yet"  # why the last reading was None
        self.has_gpus: bool | None = None  # whether a GPU was ever visible; None while unknown
        self._uuids = uuids
        self._library = library
        self._timeout = timeout_seconds
        self._root = root
        self._totals = Totals()
        self._is_open = False
        self._under_way: Future[_Answer] | None = None

    async def read(self) -> MemoryReading | None:
        """Return a reading; None after the time limit, and at once while an earlier call hangs."""
        if self._under_way is not None and not self._under_way.done():
            return None
        self._under_way = self._start()
        answer = asyncio.wrap_future(self._under_way)
        await asyncio.wait([answer], timeout=self._timeout)
        if not answer.done():
            self.why = f"the driver has not answered within {self._timeout:g} s"
            return None
        devices, self.why = answer.result()
        return MemoryReading(devices, source="nvml") if devices else None

    def _start(self) -> Future[_Answer]:
        work: Future[_Answer] = Future()
        uuids = tuple(self._uuids())

        def run() -> None:
            try:
                work.set_result((self._poll(uuids), ""))
            except BackendUnavailable as error:
                work.set_result(({}, str(error)))
            except BaseException as error:  # noqa: BLE001 - a bug, for whoever reads
                work.set_exception(error)

        # not a thread of a pool: Python waits for those at exit, and this one may hang for ever
        threading.Thread(target=run, name="nvml", daemon=True).start()
        return work

    def _poll(self, uuids: Sequence[str]) -> _Devices:
        if self._library is None:  # a slow import, so here in the thread
            self._library = import_module("pynvml")
        nvml = self._library
        try:
            if not self._is_open:
                nvml.nvmlInit()
                self._is_open = True
            return self._devices(uuids)
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
            self._count_visible(0)
            raise self._failed(error) from error
        except nvml.NVMLError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> BackendUnavailable:
        """Close the session: after a reload of the driver the old one stays broken."""
        if self._is_open:
            self._is_open = False
            with suppress(self._library.NVMLError):
                self._library.nvmlShutdown()
        return BackendUnavailable(f"NVML says: {error}", delivered=True)

    def _devices(self, uuids: Sequence[str]) -> _Devices:
        nvml = self._library
        devices: dict[Device, DeviceReading] = {}
        for uuid in uuids or [self._only_gpu()]:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._count_visible(1)
            devices |= self._figures(uuid, handle)
        return numbered(devices)

    def _only_gpu(self) -> str:
        nvml = self._library
        count = nvml.nvmlDeviceGetCount()
        self._count_visible(count)
        if count == 0:
            raise BackendUnavailable("no GPU is visible", delivered=True)
        if count > 1:
            raise BackendUnavailable(
                "several GPUs are visible and Triton's metrics do not say which are its own",
                delivered=True,
            )
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)))

    def _count_visible(self, count: int) -> None:
        self.has_gpus = bool(self.has_gpus or count)

    def _figures(self, uuid: str, handle: Any) -> _Devices:
        """Read a GPU; in MIG mode, where that needs privileges, its visible instances. One that
        supports neither has unified memory, as GB10 has: NVML has no figures of it.
        """
        nvml = self._library
        try:
            return self._memory(uuid, handle)
        except (nvml.NVMLError_NoPermission, nvml.NVMLError_NotSupported) as error:
            slots = self._slots(handle)
            if instances := self._instances(handle, slots):
                return instances
            if slots == 0 and isinstance(error, nvml.NVMLError_NotSupported):
                return {Device(uuid): unified_memory(self._root)}
            raise

    def _slots(self, handle: Any) -> int:
        """Return how many MIG instances the GPU can have."""
        with suppress(self._library.NVMLError_NotSupported):
            return int(self._library.nvmlDeviceGetMaxMigDeviceCount(handle))
        return 0

    def _instances(self, handle: Any, slots: int) -> _Devices:
        nvml = self._library
        devices: dict[Device, DeviceReading] = {}
        for number in range(slots):
            with suppress(
                nvml.NVMLError_NotFound
            ):  # an empty slot, or not visible to this container
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                devices |= self._memory(str(nvml.nvmlDeviceGetUUID(instance)), instance)
        return devices

    def _memory(self, uuid: str, handle: Any) -> _Devices:
        """Derive `used` from `free`: whether NVML's `used` includes the driver's share varies."""
        memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        read = DeviceReading(int(memory.total), int(memory.total) - int(memory.free))
        return {Device(uuid): self._totals.checked(Device(uuid), read)}
