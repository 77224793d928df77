"""Is a failed inference that says out of memory to be believed?

Each 507 makes the platform unload other models, and a model may repeat in its error what its caller
wrote. So the first such failure of a model counts as it stands; after that the text is held against
what is known, and a 507 that can help nobody is not given again and again.
"""

import re
from collections.abc import Mapping

from adapter.core.breaker import EvictionLoopBreaker
from adapter.core.memory import HOST, Device
from adapter.errors import InferenceFailed, OutOfMemory

_MAX_KEYS = 10_000
# An allocator that fails with four times as much free as it was asked for would be a rare thing.
_FAR_MORE = 4
_OF_GPU = re.compile(
    r"\b(?:cuda|gpu|hip|cu(?:blas|dnn|solver|sparse|rand|fft))|cuda_", re.IGNORECASE
)
_OF_SHM = re.compile(r"shared memory|/dev/shm|\bshm\b", re.IGNORECASE)


class Doubt:
    """By key, one for each package."""

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
        """`error` by its text, or InferenceFailed. `free` is what a reading that does not lag shows
        free of each device, empty where there is none. `is_alone`: no other model is loaded.
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
    """On every device that the text may be about. Of /dev/shm, and of host memory beside GPUs,
    nothing is known.
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
