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
from adapter.triton.memory.checks import Totals, number_devices
from adapter.triton.memory.host import unified_memory

# The variable of NVIDIA's MPS that bounds what each CUDA client, a process, may take of a GPU.
MPS_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_MPS_ENTRY = re.compile(r"\s*(\d+)\s*=\s*(\d+)\s*([GM])B?\s*", re.IGNORECASE)
_MPS_BYTES = {"G": 2**30, "M": 2**20}

_Devices = Mapping[Device, DeviceReading]
_Answer = tuple[_Devices, str]  # with the reason for which there are no devices


def mps_limits(text: str) -> Mapping[int, int]:
    """Parse the limits in bytes by CUDA's number of the GPU, from a value such as `0=1G,1=512MB`.

    Entries of another form are left out.
    """
    entries = filter(None, map(_MPS_ENTRY.fullmatch, text.split(",")))
    return {int(each[1]): int(each[2]) * _MPS_BYTES[each[3].upper()] for each in entries}


class NvmlMemory:
    """Reads the memory of GPUs from the driver, without lag.

    More GPUs may be visible to this container than Triton has. While Triton's metrics name none, a
    single visible GPU is taken for Triton's; several are an error.
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
        """Ask the driver in a thread; return the future answer."""
        answer: Future[_Answer] = Future()
        uuids = tuple(self._uuids())

        def run() -> None:
            try:
                answer.set_result((self._poll(uuids), ""))
            except BackendUnavailable as error:
                answer.set_result(({}, str(error)))
            except BaseException as error:  # noqa: BLE001 - a bug; `read` raises it
                answer.set_exception(error)

        # not a thread of a pool: Python waits for those at exit, and this one may hang for ever
        threading.Thread(target=run, name="nvml", daemon=True).start()
        return answer

    def _poll(self, uuids: Sequence[str]) -> _Devices:
        """Ask the driver, in a thread. Raises BackendUnavailable."""
        if self._library is None:  # imported here, in the thread, as that is slow
            self._library = import_module("pynvml")
        nvml = self._library
        try:
            if not self._is_open:
                nvml.nvmlInit()
                self._is_open = True
            return self._read_devices(uuids)
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
            self._note_visible(0)
            raise self._close(error) from error
        except nvml.NVMLError as error:
            raise self._close(error) from error

    def _close(self, error: Exception) -> BackendUnavailable:
        """Close the session after an error; return the error to raise.

        After a reload of the driver the old session stays broken.
        """
        if self._is_open:
            self._is_open = False
            with suppress(self._library.NVMLError):
                self._library.nvmlShutdown()
        return BackendUnavailable(f"NVML says: {error}", delivered=True)

    def _read_devices(self, uuids: Sequence[str]) -> _Devices:
        """Read these GPUs, without any the only one that is visible."""
        nvml = self._library
        devices: dict[Device, DeviceReading] = {}
        for uuid in uuids or [self._find_only_gpu()]:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._note_visible(1)
            devices |= self._read_gpu(uuid, handle)
        return number_devices(devices)

    def _find_only_gpu(self) -> str:
        """Return the UUID of the GPU that is visible. Raises BackendUnavailable for several."""
        nvml = self._library
        count = nvml.nvmlDeviceGetCount()
        self._note_visible(count)
        if count == 0:
            raise BackendUnavailable("no GPU is visible", delivered=True)
        if count > 1:
            raise BackendUnavailable(
                "several GPUs are visible and Triton's metrics do not say which are its own",
                delivered=True,
            )
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0)))

    def _note_visible(self, count: int) -> None:
        """Record whether any GPU was visible."""
        self.has_gpus = bool(self.has_gpus or count)

    def _read_gpu(self, uuid: str, handle: Any) -> _Devices:
        """Read a GPU; in MIG mode, where that needs privileges, its visible instances.

        A GPU that supports neither has unified memory, as GB10 has: NVML has no figures of it.
        """
        nvml = self._library
        try:
            return self._read_memory(uuid, handle)
        except (nvml.NVMLError_NoPermission, nvml.NVMLError_NotSupported) as error:
            slots = self._count_slots(handle)
            if instances := self._read_instances(handle, slots):
                return instances
            if slots == 0 and isinstance(error, nvml.NVMLError_NotSupported):
                return {Device(uuid): unified_memory(self._root)}
            raise

    def _count_slots(self, handle: Any) -> int:
        """Return how many MIG instances the GPU can have."""
        with suppress(self._library.NVMLError_NotSupported):
            return int(self._library.nvmlDeviceGetMaxMigDeviceCount(handle))
        return 0

    def _read_instances(self, handle: Any, slots: int) -> _Devices:
        """Read the MIG instances of a GPU that are visible to this container."""
        nvml = self._library
        devices: dict[Device, DeviceReading] = {}
        for number in range(slots):
            # NotFound: the slot is empty, or its instance is not visible here
            with suppress(nvml.NVMLError_NotFound):
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                devices |= self._read_memory(str(nvml.nvmlDeviceGetUUID(instance)), instance)
        return devices

    def _read_memory(self, uuid: str, handle: Any) -> _Devices:
        """Read a GPU or an instance of one.

        `used` is derived from `free`: whether NVML's `used` includes the driver's share varies.
        """
        memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        reading = DeviceReading(int(memory.total), int(memory.total) - int(memory.free))
        return {Device(uuid): self._totals.check(Device(uuid), reading)}
