"""Judges failures that may be a lack of memory: was memory low, and is the text to be believed?

Some failures for lack of memory do not mention it (a killed python process, TensorRT's enqueue).
Such weak evidence counts only when an observation agrees (docs/memory.md, Words that need
evidence).

A text that does mention it is believed once of each model that answers an inference with it: each
507 makes the platform unload other models, and a model may repeat in its error what its caller
wrote. After that the text is compared with what is known of memory, and a 507 that cannot help is
not repeated.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from adapter.core.ledger import LedgerSnapshot
from adapter.core.limits import EvictionLoopBreaker
from adapter.core.memory import HOST, Bytes, Device, MemoryReading
from adapter.core.sizing import remember
from adapter.errors import (
    AdapterError,
    InferenceFailed,
    MemoryFigures,
    ModelFailed,
    OutOfMemory,
)

_MIB = 2**20
# below a twentieth of a device allocators begin to fail, whatever the headroom is
_LOW_SHARE = 20
# An allocator hardly ever fails with four times as much free as was requested.
_FAR_MORE = 4
SUSPECTED = "suspected"  # the rule of a failure that counts because memory was low
_OF_GPU = re.compile(
    r"\b(?:cuda|gpu|hip|cu(?:blas|dnn|solver|sparse|rand|fft))|cuda_", re.IGNORECASE
)
_OF_SHM = re.compile(r"shared memory|/dev/shm|\bshm\b", re.IGNORECASE)


class View(Enum):
    LOW = "low"
    OK = "ok"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device. `free_bytes` is limit less used, as observed; reservations are not deducted."""

    free_bytes: int
    limit_bytes: int
    headroom_bytes: int

    @property
    def is_low(self) -> bool:
        return self.free_bytes < max(self.headroom_bytes, self.limit_bytes // _LOW_SHARE)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One observation of all devices. The other fields are as in MemoryReading."""

    devices: Mapping[Device, DeviceSample]
    shm_free_bytes: int | None = None
    oom_kills: int | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.devices) or self.shm_free_bytes is not None or self.oom_kills is not None

    @property
    def is_shm_low(self) -> bool:
        return self.shm_free_bytes is not None and self.shm_free_bytes < _MIB

    @property
    def is_low(self) -> bool:
        return self.is_shm_low or any(device.is_low for device in self.devices.values())


def sample_of(book: LedgerSnapshot, reading: MemoryReading) -> MemorySample:
    devices = {}
    for device, figures in reading.devices.items():
        booked = book.devices.get(device)
        limit = booked.limit_bytes if booked else figures.limit_bytes
        devices[device] = DeviceSample(
            free_bytes=limit - figures.used_bytes,
            limit_bytes=limit,
            headroom_bytes=booked.headroom_bytes if booked else 0,
        )
    return MemorySample(devices, reading.shm_free_bytes, reading.oom_kills)


def view_of(samples: Sequence[MemorySample], *, predicted: Bytes) -> View:
    """Return whether memory was low. `samples` are from shortly before the failing call until just
    after it, in order; `predicted` is what the call was expected to take beyond the first sample.
    """
    if not any(sample.says_something for sample in samples):
        return View.UNKNOWN
    low = (
        any(sample.is_low for sample in samples)
        or _lacks(samples[0], predicted)
        or _processes_were_killed(samples)
    )
    return View.LOW if low else View.OK


def view_of_shm(samples: Sequence[MemorySample]) -> View:
    """Return whether /dev/shm was full."""
    if all(sample.shm_free_bytes is None for sample in samples):
        return View.UNKNOWN
    return View.LOW if any(sample.is_shm_low for sample in samples) else View.OK


def corroborated(error: AdapterError, view: View, figures: MemoryFigures) -> AdapterError:
    """Return OutOfMemory for a suspected failure while memory was low; else `error`."""
    if view is not View.LOW or not isinstance(error, ModelFailed) or error.suspected is None:
        return error
    found = OutOfMemory(
        f"{error} (memory was low at that time)",
        model_id=error.model_id,
        figures=figures,
        matched=error.suspected,
        pattern=SUSPECTED,
    )
    found.__cause__ = error.__cause__
    return found


def _lacks(sample: MemorySample, predicted: Bytes) -> bool:
    return any(
        device in sample.devices and sample.devices[device].free_bytes < needed
        for device, needed in predicted.items()
    )


def _processes_were_killed(samples: Sequence[MemorySample]) -> bool:
    counts = [sample.oom_kills for sample in samples if sample.oom_kills is not None]
    return bool(counts) and counts[-1] > counts[0]


class Suspicion:
    """Doubts texts of failed inferences. Keeps past failures by key, one for each package."""

    def __init__(self) -> None:
        self._breaker = EvictionLoopBreaker()
        self._failed: dict[str, None] = {}

    def judged(
        self,
        error: OutOfMemory,
        key: str,
        *,
        free: Mapping[Device, int],
        is_alone: bool,
    ) -> OutOfMemory | InferenceFailed:
        """Return `error` if it is believed, else InferenceFailed. `free`: the free bytes of each
        device by a reading that does not lag, empty without one. `is_alone`: no other model is
        loaded.
        """
        is_first = key not in self._failed
        remember(self._failed, key, None)
        hopeless = self._breaker.out_of_memory(
            key, alone=is_alone, requested_bytes=None, limit_bytes=None
        )
        if is_first:
            return error
        if _is_far_more(error, free):
            return _doubted(error, "far more was free than that")
        return _doubted(error, "again with nothing else loaded") if hopeless else error


def is_of_gpu(error: AdapterError) -> bool:
    """Return whether the text is about the memory of a GPU."""
    return _OF_GPU.search(str(error)) is not None


def _is_far_more(error: OutOfMemory, free: Mapping[Device, int]) -> bool:
    """Return whether every device that the text may be about has far more free than requested.
    For /dev/shm, and for host memory on a machine with GPUs, that is unknown.
    """
    needed, is_about_gpu = error.figures.needed_bytes, is_of_gpu(error)
    about = [count for device, count in free.items() if (device != HOST) == is_about_gpu]
    if needed is None or not about or _OF_SHM.search(str(error)):
        return False
    return needed * _FAR_MORE <= min(about)


def _doubted(error: OutOfMemory, reason: str) -> InferenceFailed:
    """Return the error of an inference whose text is not believed."""
    failure = InferenceFailed(
        f"{error} (not taken for out of memory: {reason})", model_id=error.model_id
    )
    failure.__cause__ = error
    return failure
