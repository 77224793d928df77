"""What a process that serves asks of Python and of libc, so that one request costs another less."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress

# The threads that look at disk and /proc compute in Python too, and the loop waits so long for one
# of them to make way. Python's own 5 ms made a call of 0.2 ms one of 5.4 ms; so it takes 0.4.
_SWITCH_SECONDS = 0.0001

_DESCRIPTORS = 2**16

# glibc's mallopt: from which size on a block is the kernel's, and how much freed memory is kept.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def tune() -> None:
    """Before the first request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _DESCRIPTORS):  # 1024 is usual, with far more to be had
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _DESCRIPTORS), hard))
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A large body comes in pieces of 256 KiB, and glibc would give each back to the kernel: page
    # faults were a third of what such bodies cost there.
    with suppress(AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)


def settle() -> None:
    """When all is started: what is there now stays, and no collection stops the loop for it."""
    gc.collect()
    gc.freeze()
