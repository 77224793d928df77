"""Tunes Python and libc in a serving process, so that requests delay each other less."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress

# How long the event loop waits for the interpreter lock while a thread that reads disk or /proc
# computes. Python's default of 5 ms made a call of 0.2 ms take 5.4 ms; with this it takes 0.4 ms.
_SWITCH_SECONDS = 0.0001

_DESCRIPTORS = 2**16

# glibc's mallopt: from which size blocks are mapped, and how much freed memory is kept.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


def tune() -> None:
    """Set the limits and parameters. To be called before the first request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _DESCRIPTORS):  # the usual soft limit is 1024, with a far higher hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _DESCRIPTORS), hard))
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A large body arrives in pieces of 256 KiB, and glibc would return each to the kernel: page
    # faults were a third of the cost of such bodies.
    with suppress(AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)


def settle() -> None:
    """Exempt all present objects from garbage collection. To be called after the start."""
    gc.collect()
    gc.freeze()
