"""Stands in for the package of this name in an adapter whose GPUs are scripted.

Only a process that has this folder on its path sees it (tests/fakes/scripted_gpus.py).
"""

from dataclasses import dataclass

from tests.fakes.scripted_gpus import ScriptedGpus, from_environment


class NVMLError(Exception):
    pass


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801 - pynvml's names, here and below
    pass


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801
    pass


class NVMLError_NoPermission(NVMLError):  # noqa: N801
    pass


class NVMLError_NotFound(NVMLError):  # noqa: N801
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801
    pass


@dataclass(frozen=True)
class Memory:
    total: int
    free: int
    used: int


def nvmlInit() -> None:  # noqa: N802
    _check()


def nvmlShutdown() -> None:  # noqa: N802
    return


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_check().total)


def nvmlDeviceGetHandleByIndex(index: int) -> str:  # noqa: N802
    return list(_check().total)[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:  # noqa: N802
    if uuid not in _check().total:
        raise NVMLError_NotFound
    return uuid


def nvmlDeviceGetUUID(handle: str) -> str:  # noqa: N802
    return handle


def nvmlDeviceGetMemoryInfo(handle: str) -> Memory:  # noqa: N802
    gpus = _check()
    total, used = gpus.total[handle], gpus.used[handle]
    return Memory(total, total - used, used)


def _check() -> ScriptedGpus:
    gpus = from_environment()
    if not gpus.has_driver:
        raise NVMLError_DriverNotLoaded("Driver Not Loaded")
    return gpus
