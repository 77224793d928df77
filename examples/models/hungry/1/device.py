"""A device with a limited memory that all models of one tritonserver share, without a GPU.

Triton runs every instance of a Python model in a process of its own, a child of tritonserver. What
these processes hold is what the device has in use, so memory comes back when a model is unloaded.
"""

import fcntl
import mmap
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

MIB = 2**20
UNITS = {"KiB": 2**10, "MiB": MIB, "GiB": 2**30}


def parameter_bytes(config, name):
    """A size from the parameters of config.pbtxt: bytes, or a whole number with KiB, MiB or GiB."""
    text = config["parameters"][name]["string_value"]
    unit = UNITS.get(text[-3:])
    return int(text) if unit is None else int(text[:-3]) * unit


def allocate(size, limit):
    """Take `size` bytes or raise MemoryError. `close()` of the result gives them back.

    The lock is held until every page is there: a second model that allocates at the same time
    must see what the first one got.
    """
    server = os.getppid()
    with locked(server):
        used = sum(private_bytes(child) for child in children(server))
        if used + size > limit:
            raise MemoryError(
                f"Unable to allocate {size // MIB} MiB on the device: {limit // MIB} MiB in all,"
                f" {used // MIB} MiB in use, {max(limit - used, 0) // MIB} MiB free"
            )
        # MAP_POPULATE: the kernel puts real memory behind every page before this returns
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


@contextmanager
def locked(server):
    path = Path(tempfile.gettempdir(), f"triton-device-{server}.lock")
    lock = open_locked(path)
    try:
        yield
    finally:
        path.unlink()  # before the lock goes: see open_locked
        lock.close()


def open_locked(path):
    """The file, locked. Its holder removes it, so whoever waited may get one without a name."""
    while True:
        lock = path.open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()


def children(parent):
    """The folders in /proc of the processes that `parent` started."""
    for process in Path("/proc").glob("[0-9]*"):
        # "pid (name) state ppid ...", where the name may hold anything
        fields = contents(process / "stat").rpartition(")")[2].split()
        if fields[1:2] == [str(parent)]:
            yield process


def private_bytes(process):
    """Memory that this process alone holds: resident pages less the shared ones."""
    pages = contents(process / "statm").split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE if pages else 0


def contents(path):
    """Empty when the process has gone meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
