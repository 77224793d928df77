"""Decides whether to believe a failed inference that claims to have run out of memory.

Each 507 makes the platform unload other models, and a model may repeat in its error what its caller
wrote. So the first such failure of a model is believed; after that the text is compared with what
is known of memory, and a 507 that cannot help is not repeated.
"""

import re
from collections.abc import Mapping

from adapter.core.breaker import EvictionLoopBreaker
from adapter.core.memory import HOST, Device
from adapter.errors import InferenceFailed, OutOfMemory

_MAX_KEYS = 10_000
# An allocator hardly ever fails with four times as much free as was requested.
_FAR_MORE = 4
_OF_GPU = re.compile(
    r"\b(?:cuda|gpu|hip|cu(?:blas|dnn|solver|sparse|rand|fft))|cuda_", re.IGNORECASE
)
_OF_SHM = re.compile(r"shared memory|/dev/shm|\bshm\b", re.IGNORECASE)


class Doubt:
    """Keeps past failures by key, one for each package."""

    def __init__(self) -> None:
        self._breaker = EvictionLoopBreaker()
        self._failed: dict[str, None] = {}

    def judged(
        self,
        error: OutOfMemory,
        key: str,
        *,
        free: Mapping[Device, int],
        has_no_gpu: bool,
        is_alone: bool,
    ) -> OutOfMemory | InferenceFailed:
        """Return `error` if it is believed, else InferenceFailed. `free`: the free bytes of each
        device by a reading that does not lag, empty without one. `is_alone`: no other model is
        loaded.
        """
        is_first = key not in self._failed
        self._failed.pop(key, None)
        self._failed[key] = None
        if len(self._failed) > _MAX_KEYS:
            del self._failed[next(iter(self._failed))]
        hopeless = self._breaker.out_of_memory(
            key, alone=is_alone, requested_bytes=None, limit_bytes=None
        )
        if is_first:
            return error
        if why := "no GPU is here" if has_no_gpu and _OF_GPU.search(str(error)) else "":
            return _doubted(error, why)
        if _is_far_more(error, free):
            return _doubted(error, "far more was free than that")
        return _doubted(error, "again with nothing else loaded") if hopeless else error


def _is_far_more(error: OutOfMemory, free: Mapping[Device, int]) -> bool:
    """Return whether every device that the text may be about has far more free than requested.
    For /dev/shm, and for host memory on a machine with GPUs, that is unknown.
    """
    needed, text = error.figures.needed_bytes, str(error)
    is_of_gpu = _OF_GPU.search(text) is not None
    about = [count for device, count in free.items() if (device != HOST) == is_of_gpu]
    if needed is None or not about or _OF_SHM.search(text):
        return False
    return needed * _FAR_MORE <= min(about)


def _doubted(error: OutOfMemory, why: str) -> InferenceFailed:
    found = InferenceFailed(
        f"{error} (not taken for out of memory: {why})", model_id=error.model_id
    )
    found.__cause__ = error
    return found
