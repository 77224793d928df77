"""Frees regions of shared memory that Triton keeps though their python process has died."""

import mmap
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton puts them
# Threads of Triton that served the process wait for ever on its message queues, seen below 36 KiB
# of a region on 2.51. What they look at must stay as it is.
_KEPT_BYTES = 64 * 1024


def free(region: Path) -> int:
    """Remove a region that Triton has mapped but no longer uses; return the bytes given back.

    Removing the file alone gives nothing back while the mapping lives, and to shorten it would
    kill Triton at its next access. 0 if there is no such region. OSError if it cannot be freed.
    """
    try:
        descriptor = os.open(region, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        before = os.fstat(descriptor)
        if before.st_size > _KEPT_BYTES:
            with mmap.mmap(descriptor, before.st_size) as pages:
                # as fallocate with PUNCH_HOLE | KEEP_SIZE
                pages.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)
        region.unlink(missing_ok=True)
        return (before.st_blocks - os.fstat(descriptor).st_blocks) * 512
    finally:
        os.close(descriptor)
