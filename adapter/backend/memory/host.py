"""Host memory of the embedded Triton, as the kernel counts it."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter.core.memory import HOST, DeviceReading, MemoryReading
from adapter.errors import BackendUnavailable
from adapter.runtime.threads import PROCESSES

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STALE_SECONDS = 5.0
# Errors that say something of the file; any other, such as a lack of descriptors, of the reader.
_ABSENT = (FileNotFoundError, NotADirectoryError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What Triton shares with us when it runs in our container; None where it cannot be read.

    `oom_kills` is how often the kernel has killed a process of this cgroup for memory.
    """

    shm_free_bytes: int | None
    oom_kills: int | None


@dataclass(frozen=True, slots=True)
class _Counts:
    """Pages in memory, and those of them that belong to files or shared regions."""

    resident: int
    shared: int


@dataclass(frozen=True, slots=True)
class _Process:
    counts: _Counts
    share_bytes: int


class HostMemory:
    """The process tree of the embedded Triton, held to a limit of host memory.

    Each process counts with its proportional share (PSS), so that shared pages count once. For
    that the kernel walks the process's pages, 8 ms a GiB and 0.4 ms for a small python process,
    against 0.01 ms for the bare counts of pages. So a share is kept while the counts stand still.
    They cannot show what one process's pages mean for the share of another: all are walked when a
    process came or went, when shared pages did, and every 5 seconds (a forked process that writes
    to what it inherited shows nowhere else). No cheaper figure is as exact: resident pages count
    shared ones many times, and a cgroup counts the adapter, other services and file caches too.
    """

    def __init__(
        self,
        owners: Callable[[], Mapping[int, str | None]],
        limit_bytes: int,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owners` are the processes, each with the model that it is of, None where it is of no
        single one. `root` is where proc, sys and dev are looked for.
        """
        self.last: MemoryReading | None = None
        self.why = "it was not asked yet"
        self._owners = owners
        self._limit = limit_bytes
        self._root = root
        self._clock = clock
        self._walked: Mapping[int, _Process] = {}
        self._walked_at = -_STALE_SECONDS

    async def read(self) -> MemoryReading | None:
        """None while there is no process or it cannot be seen; `why` says so."""
        try:
            self.last = await PROCESSES.run(self._poll)
            self.why = "" if self.last else "no process of Triton runs"
        except (OSError, BackendUnavailable) as error:  # what could be read would be too little
            self.last, self.why = None, f"Triton's processes cannot be seen: {error}"
        return self.last

    def surroundings(self) -> Surroundings:
        try:
            return Surroundings(_free_bytes(self._root / "dev/shm"), self._oom_kills())
        except OSError:
            return Surroundings(None, None)

    def _poll(self) -> MemoryReading | None:
        owners = self._owners()
        self._walked = self._processes(owners)
        if not self._walked:
            return None
        used, of_models = 0, dict[str, int]()
        for pid, process in self._walked.items():
            used += process.share_bytes
            if (model := owners[pid]) is not None:
                of_models[model] = of_models.get(model, 0) + process.share_bytes
        around = self.surroundings()
        return MemoryReading(
            {HOST: DeviceReading(self._limit, used)},
            source=HOST,
            shm_free_bytes=around.shm_free_bytes,
            oom_kills=around.oom_kills,
            of_models=of_models,
        )

    def _processes(self, pids: Iterable[int]) -> Mapping[int, _Process]:
        counted = {pid: _page_counts(self._folder(pid)) for pid in pids}
        counts = {pid: counts for pid, counts in counted.items() if counts is not None}
        known, now = self._walked, self._clock()
        is_as_shared = _shared(counts) == _shared({pid: p.counts for pid, p in known.items()})
        if not is_as_shared or now - self._walked_at >= _STALE_SECONDS:
            known, self._walked_at = {}, now
        same = {pid: p for pid, p in known.items() if p.counts == counts[pid]}
        return {
            pid: same.get(pid) or _Process(seen, _share_bytes(self._folder(pid)))
            for pid, seen in counts.items()
        }

    def _folder(self, pid: int | str) -> Path:
        return self._root / "proc" / str(pid)

    def _oom_kills(self) -> int | None:
        """From the cgroup that we are in; a container sees it as the root of what is mounted."""
        groups = self._root / "sys/fs/cgroup"
        own = _cgroups(self._folder("self") / "cgroup")
        for path in (
            groups / own.get("", "") / "memory.events",  # v2
            groups / "memory.events",
            groups / "memory" / own.get("memory", "") / "memory.oom_control",  # v1
            groups / "memory/memory.oom_control",
        ):
            if (kills := _field(path, "oom_kill")) is not None:
                return kills
        return None


def host_limit_bytes(root: Path = Path("/")) -> int:
    """The memory limit that holds for this process, or all physical memory: the least that its
    cgroup or one above it sets. A container sees its own cgroup as the root of what is mounted.
    """
    kib = _field(root / "proc/meminfo", "MemTotal:")
    assert kib is not None  # noqa: S101 - every Linux has it
    groups = root / "sys/fs/cgroup"
    own = _cgroups(root / "proc/self/cgroup")
    limits = [kib * 1024]
    for mounted, path, name in (
        (groups, own.get(""), "memory.max"),  # v2
        (groups / "unified", own.get(""), "memory.max"),  # v2 beside v1
        (groups / "memory", own.get("memory"), "memory.limit_in_bytes"),  # v1
    ):
        folder = mounted / (path or "")
        for each in (folder, *folder.parents):
            if (limit := _limit(each / name)) is not None:
                limits.append(limit)
            if each == mounted:
                break
    return min(limits)


def _limit(path: Path) -> int | None:
    """None where there is none: `max`, or no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _shared(counts: Mapping[int, _Counts]) -> Mapping[int, int]:
    return {pid: seen.shared for pid, seen in counts.items()}


def _page_counts(process: Path) -> _Counts | None:
    """Resident pages and the shared ones of them; None when the process has ended."""
    try:
        _, resident, shared, *_ = (process / "statm").read_text().split()
    except (*_ABSENT, ValueError):
        return None
    return _Counts(int(resident), int(shared)) if int(resident) else None  # a zombie has none


def _share_bytes(process: Path) -> int:
    """All that is resident where the share cannot be read, as with another user's process."""
    kib = _field(process / "smaps_rollup", "Pss:")
    if kib is not None:
        return kib * 1024
    seen = _page_counts(process)
    return seen.resident * _PAGE_BYTES if seen else 0  # it has ended meanwhile


def _cgroups(path: Path) -> dict[str, str]:
    """Our own cgroup, without the first slash, by controller; v2 goes by the name ''."""
    try:
        lines = path.read_text().splitlines()
    except _ABSENT:
        return {}
    rows = [line.split(":", 2) for line in lines]
    return {name: row[2].lstrip("/") for row in rows for name in row[1].split(",")}


def _free_bytes(folder: Path) -> int | None:
    try:
        seen = os.statvfs(folder)
    except OSError:
        return None
    return seen.f_bavail * seen.f_frsize


def _field(path: Path, name: str) -> int | None:
    """The number after this name in a file of lines of names and numbers."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except _ABSENT:
        return None
    return next((int(row[1]) for row in rows if row[:1] == [name]), None)
