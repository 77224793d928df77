"""NVML with GPUs of the test's making: the functions of pynvml that are used, and its errors."""

import threading
from dataclasses import dataclass, field

import pynvml


@dataclass
class FakeGpu:
    """Bytes. `error` is raised when its memory is asked for. `slices` are its MIG instances by
    place; None is an empty place. `has_mig`: the driver answers what is asked about them.
    """

    uuid: str
    total: int = 1000
    free: int = 1000
    error: pynvml.NVMLError | None = None
    slices: list["FakeGpu | None"] = field(default_factory=list)
    has_mig: bool = True


@dataclass(frozen=True)
class FakeMemoryInfo:
    """`used` leaves out what the driver keeps for itself, as some versions do."""

    total: int
    free: int
    used: int


class FakeNvml:
    """A driver that can be missing, fail at the next call, hang, and be loaded again."""

    NVMLError = pynvml.NVMLError
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_NoPermission = pynvml.NVMLError_NoPermission
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.missing: pynvml.NVMLError | None = None
        self.inits = 0
        self.looks = 0
        self.runs = threading.Event()
        self.runs.set()
        self._is_open = False

    def reload(self) -> None:
        """What was opened before is of no use any more."""
        self._is_open = False

    def nvmlInit(self) -> None:  # noqa: N802 - pynvml's name
        self.inits += 1
        assert self.runs.wait(60), "nobody let the driver go on"
        if self.missing is not None:
            raise self.missing
        self._is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check()
        self._is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        self._check()
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        self._check()
        slices = [each for gpu in self.gpus for each in gpu.slices if each is not None]
        for each in [*self.gpus, *slices]:
            if each.uuid == uuid:
                return each
        raise pynvml.NVMLError_NotFound

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:  # noqa: N802
        self._check()
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> FakeMemoryInfo:  # noqa: N802
        self._check()
        self.looks += 1
        assert self.runs.wait(60), "nobody let the driver go on"
        if handle.error is not None:
            raise handle.error
        used = max(0, handle.total - handle.free - 10)
        return FakeMemoryInfo(handle.total, handle.free, used)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:  # noqa: N802
        self._check()
        if not handle.has_mig:
            raise pynvml.NVMLError_NotSupported
        return len(handle.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        self._check()
        if (place := handle.slices[index]) is None:
            raise pynvml.NVMLError_NotFound
        return place

    def _check(self) -> None:
        if not self._is_open:
            raise pynvml.NVMLError_Uninitialized
