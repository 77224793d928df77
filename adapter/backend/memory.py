"""How much memory Triton takes, and how much there is. 'Unknown' is an answer: None."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from adapter.core.ledger import MemoryReading

_PROC = Path("/proc")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # v2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # v1
)


class HostMemory:
    """The process tree of the embedded Triton, held to a limit of host memory."""

    source = "host"

    def __init__(self, process_ids: Callable[[], Iterable[int]], limit_bytes: int) -> None:
        self.last: MemoryReading | None = None
        self._process_ids = process_ids
        self._limit = limit_bytes

    async def read(self) -> MemoryReading | None:
        # In a thread: the kernel walks the page tables of every process, milliseconds for each.
        self.last = await asyncio.to_thread(self._look)
        return self.last

    def _look(self) -> MemoryReading | None:
        pids = list(self._process_ids())
        if not pids:
            return None
        return MemoryReading(self._limit, sum(_resident_bytes(pid) for pid in pids))


class NoMemory:
    """memory_source off: nothing is measured; a limit that was set still bounds the ledger."""

    source = "off"
    last: MemoryReading | None = None

    async def read(self) -> MemoryReading | None:
        return None


def host_limit_bytes() -> int:
    """The memory limit of our own cgroup, or all physical memory."""
    total = _kib_field(_PROC / "meminfo", "MemTotal:")
    assert total is not None  # noqa: S101 - every Linux has it
    for path in _CGROUP_LIMITS:
        try:
            return min(total, int(path.read_text()))
        except (OSError, ValueError):  # not this cgroup version; 'max'
            continue
    return total


def _resident_bytes(pid: int) -> int:
    """Proportional share of what the process has in memory, so that shared pages count once."""
    process = _PROC / str(pid)
    share = _kib_field(process / "smaps_rollup", "Pss:")
    if share is None:  # another user's process
        share = _kib_field(process / "status", "VmRSS:")
    return share or 0  # gone meanwhile


def _kib_field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
