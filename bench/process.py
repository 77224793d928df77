"""Reads CPU time and resident memory of other processes."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_SCHED = 2  # CPUCLOCK_SCHED of Linux: the clock of all threads of a process, exact to nanoseconds
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_seconds: float
    rss_bytes: int


def usage(pid: int) -> Usage | None:
    """None when there is no such process."""
    try:
        cpu = time.clock_gettime(~pid << 3 | _SCHED)
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return Usage(cpu, int(pages) * _PAGE_BYTES)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "gone"
