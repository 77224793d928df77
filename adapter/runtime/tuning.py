"""Tunes Python and libc in a serving process, so that requests delay each other less."""

import ctypes
import gc
import os
import platform
import resource
import struct
import sys
from contextlib import suppress

from adapter.runtime import clock

# How long the event loop waits for the interpreter lock while a thread that reads disk or /proc
# computes. Python's default of 5 ms made a call of 0.2 ms take 5.4 ms; with this it takes 0.4 ms.
_SWITCH_SECONDS = 0.0001

_DESCRIPTORS = 2**16

# The event loop works for some tenths of a millisecond at a time. A thread that asks for little at
# a time is given a CPU sooner, and no more of it in all: Linux 6.12 and later.
_SLICE_NANOSECONDS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call; neither libc nor os has it
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, slice, two unused
_SCHED_FLAG_RESET_ON_FORK = 1

# glibc's mallopt: from which size blocks are mapped, how much freed memory is kept, and how many
# heaps there are. Threads with heaps of their own would keep that much in each.
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8

GIVE_BACK_SECONDS = 20.0
# A full pass of the garbage collector reads every object that lives, and holds all calls: 600 ms
# with 6,000 open streams. While more objects live than so many, there is one in ten minutes.
_MOST_OLD_OBJECTS = 100_000
_RARELY_SECONDS = 600.0
_OLDEST = 2
_NEVER = 2**30


def tune() -> None:
    """Set the limits and parameters. To be called in the thread of the event loop, before the first
    request.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _DESCRIPTORS):  # the usual soft limit is 1024, with a far higher hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _DESCRIPTORS), hard))
    sys.setswitchinterval(_SWITCH_SECONDS)
    youngest, younger, _ = gc.get_threshold()
    gc.set_threshold(youngest, younger, _NEVER)  # MemoryReturns does full passes
    _shorten_slice()
    # A large body arrives in pieces of 256 KiB, and glibc would return each to the kernel: page
    # faults were a third of the cost of such bodies.
    with suppress(AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)
        mallopt(_M_ARENA_MAX, 1)


def _shorten_slice() -> None:
    """Ask for a short time slice for this thread, not for those that it starts, nor for processes.

    Nothing is done under another scheduling policy than the usual, nor with a raised priority,
    which its children would lose; a kernel that refuses is left alone.
    """
    call = _SCHED_SETATTR.get(platform.machine())
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if call is None or nice < 0 or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    flags = _SCHED_FLAG_RESET_ON_FORK
    size = _SCHED_ATTR.size
    wanted = _SCHED_ATTR.pack(size, os.SCHED_OTHER, flags, nice, 0, _SLICE_NANOSECONDS, 0, 0)
    ctypes.CDLL(None).syscall(call, 0, wanted, 0)


def settle() -> None:
    """Exempt all present objects from garbage collection. To be called after the start."""
    gc.collect()
    gc.freeze()


class MemoryReturns:
    """Returns free memory to the system.

    Python collects what is old only here, and libc trims the end of its heap alone: behind a minute
    of hostile requests that was 120 MiB. It takes 1 ms where nothing is to be returned, and 20 ms
    for 200 MiB. While very many objects live, old garbage is collected every ten minutes.
    """

    def __init__(self) -> None:
        self._collected_at = clock.monotonic()

    async def give_back(self) -> None:
        """Return what is free. To be called every `GIVE_BACK_SECONDS`."""
        now = clock.monotonic()
        are_few = len(gc.get_objects(_OLDEST)) <= _MOST_OLD_OBJECTS
        if are_few or now - self._collected_at >= _RARELY_SECONDS:
            self._collected_at = now
            gc.collect()
        with suppress(AttributeError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)
