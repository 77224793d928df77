"""Reads the host memory of the embedded Triton's processes from /proc."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter.core.memory import HOST, DeviceReading, MemoryReading
from adapter.errors import BackendUnavailable
from adapter.runtime import clock
from adapter.runtime.threads import PROCESSES
from adapter.triton.server.processes import PageCounts, page_counts, resident_bytes

_STALE_SECONDS = 5.0
# 98 MiB of resident memory were seen, and connections and uploads take more
_ADAPTER_BYTES = 128 * 2**20
# Errors that concern the file; any other, such as a lack of descriptors, concerns the reader.
_ABSENT = (FileNotFoundError, NotADirectoryError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, slots=True)
class ContainerStats:
    """Figures of the container that the adapter and Triton share; None if they cannot be read."""

    shm_free_bytes: int | None
    oom_kills: int | None  # how often the kernel killed a process of this cgroup for memory


@dataclass(frozen=True, slots=True)
class _Process:
    counts: PageCounts
    share_bytes: int


class HostMemory:
    """Measures the process tree of the embedded Triton against a limit of host memory.

    Each process counts with its proportional share (PSS), so that shared pages count once. For
    that the kernel walks the process's pages, 8 ms a GiB and 0.4 ms for a small python process,
    against 0.01 ms for the page counts alone. So the share is cached while the counts stand still.
    They do not show the effect of one process on the share of another: all are walked again when a
    process or shared pages came or went, and every 5 seconds (only so does a forked process show
    that writes to inherited pages). No cheaper figure is as exact: RSS counts shared pages many
    times, and a cgroup also counts the adapter, other services and file caches.
    """

    def __init__(
        self,
        list_pids: Callable[[], Collection[int]],
        limit_bytes: int,
        *,
        root: Path = Path("/"),  # the folder of proc, sys and dev
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self.last: MemoryReading | None = None
        self.why = "it was not asked yet"
        self._list_pids = list_pids
        self._limit = limit_bytes
        self._root = root
        self._clock = clock
        self._walked: Mapping[int, _Process] = {}
        self._walked_at = -_STALE_SECONDS

    async def read(self) -> MemoryReading | None:
        """Return a reading; None while no process runs or can be listed, and `why` says which."""
        try:
            self.last = await PROCESSES.run(self._poll)
            self.why = "" if self.last else "no process of Triton runs"
        except (OSError, BackendUnavailable) as error:  # a partial reading would be too low
            self.last = None
            self.why = f"Triton's processes cannot be seen: {error}"
        return self.last

    def container_stats(self) -> ContainerStats:
        """Read the figures of the container."""
        try:
            return ContainerStats(_free_bytes(self._root / "dev/shm"), self._oom_kills())
        except OSError:
            return ContainerStats(None, None)

    def _poll(self) -> MemoryReading | None:
        """Measure the processes that run; return None without any. Raises OSError."""
        self._walked = self._measure(self._list_pids())
        if not self._walked:
            return None
        used = sum(process.share_bytes for process in self._walked.values())
        container = self.container_stats()
        return MemoryReading(
            {HOST: DeviceReading(self._limit, used)},
            source=HOST,
            shm_free_bytes=container.shm_free_bytes,
            oom_kills=container.oom_kills,
            available_bytes=available_bytes(self._root),
        )

    def _measure(self, pids: Iterable[int]) -> Mapping[int, _Process]:
        """Return the share of each process, from the cache where its pages stand still."""
        counted = {pid: page_counts(self._folder(pid)) for pid in pids}
        counts = {pid: counts for pid, counts in counted.items() if counts is not None}
        known = self._walked
        now = self._clock()
        known_counts = {pid: process.counts for pid, process in known.items()}
        has_changed = _select_shared(counts) != _select_shared(known_counts)
        if has_changed or now - self._walked_at >= _STALE_SECONDS:
            known = {}
            self._walked_at = now
        cached = {pid: process for pid, process in known.items() if process.counts == counts[pid]}
        return {
            pid: cached.get(pid) or _Process(pages, _read_share(self._folder(pid)))
            for pid, pages in counts.items()
        }

    def _folder(self, pid: int | str) -> Path:
        return self._root / "proc" / str(pid)

    def _oom_kills(self) -> int | None:
        """Read the count of this cgroup, which a container sees as the root of the mount."""
        groups = self._root / "sys/fs/cgroup"
        own = _parse_cgroups(self._folder("self") / "cgroup")
        for path in (
            groups / own.get("", "") / "memory.events",  # v2
            groups / "memory.events",
            groups / "memory" / own.get("memory", "") / "memory.oom_control",  # v1
            groups / "memory/memory.oom_control",
        ):
            if (kills := _read_field(path, "oom_kill")) is not None:
                return kills
        return None


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """A memory cgroup of this process, or one above it."""

    folder: Path
    limit_file: str
    used_file: str
    file_cache: str  # the line of memory.stat with the file cache that the kernel drops first

    @property
    def limit_bytes(self) -> int | None:
        """Return its limit; None without one."""
        return _read_number(self.folder / self.limit_file)

    @property
    def available_bytes(self) -> int | None:
        """Return what may still be taken; None without a limit."""
        limit = self.limit_bytes
        used = _read_number(self.folder / self.used_file)
        if limit is None or used is None:
            return None
        cached = _read_field(self.folder / "memory.stat", self.file_cache) or 0
        return max(0, limit - used + cached)


def _list_cgroups(root: Path) -> list[_Cgroup]:
    """Return the memory cgroups that this process is in.

    A container sees its own cgroup as the root of the mount.
    """
    groups = root / "sys/fs/cgroup"
    own = _parse_cgroups(root / "proc/self/cgroup")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    v2 = ("memory.max", "memory.current", "inactive_file")
    cgroups = []
    for mounted, path, names in (
        (groups, own.get(""), v2),
        (groups / "unified", own.get(""), v2),  # beside v1
        (groups / "memory", own.get("memory"), v1),
    ):
        folder = mounted / (path or "")
        for each in (folder, *folder.parents):
            cgroups.append(_Cgroup(each, *names))
            if each == mounted:
                break
    return cgroups


def host_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory limit of this process: the lowest of its cgroups' limits and the physical
    memory.
    """
    kib = _read_field(root / "proc/meminfo", "MemTotal:")
    assert kib is not None  # noqa: S101 - every Linux has it
    limits = [group.limit_bytes for group in _list_cgroups(root)]
    return min([kib * 1024, *(limit for limit in limits if limit is not None)])


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what this process and its children may still take before the kernel ends one.

    That is the least that the machine and its cgroups have; None if none of it can be read.
    """
    kib = _read_field(root / "proc/meminfo", "MemAvailable:")
    figures = [group.available_bytes for group in _list_cgroups(root)]
    figures.append(None if kib is None else kib * 1024)
    return min((figure for figure in figures if figure is not None), default=None)


def models_limit_bytes(root: Path = Path("/")) -> int:
    """Return the limit of Triton and its models by default.

    That is the limit of this process less 128 MiB for the adapter itself, which lives under the
    same limit; half of a small one.
    """
    limit = host_limit_bytes(root)
    return limit - min(_ADAPTER_BYTES, limit // 2)


def unified_memory(root: Path = Path("/")) -> DeviceReading:
    """Return the host memory that a GPU without memory of its own shares.

    All programs count, those of CUDA included. The limit is that of this process.
    """
    total, available = (
        _read_field(root / "proc/meminfo", name) for name in ("MemTotal:", "MemAvailable:")
    )
    if total is None or available is None:
        raise BackendUnavailable("/proc/meminfo does not say what is available", delivered=True)
    limit = host_limit_bytes(root)
    return DeviceReading(limit, min(limit, (total - available) * 1024))


def _read_number(path: Path) -> int | None:
    """Return the number in a file of a cgroup; None without one: `max`, or no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _select_shared(counts: Mapping[int, PageCounts]) -> Mapping[int, int]:
    return {pid: pages.shared for pid, pages in counts.items()}


def _read_share(process: Path) -> int:
    """Return the PSS; the RSS if that may not be read, as of another user's process."""
    kib = _read_field(process / "smaps_rollup", "Pss:")
    if kib is not None:
        return kib * 1024
    return resident_bytes(process)


def _parse_cgroups(path: Path) -> dict[str, str]:
    """Return this process's cgroup by controller, without the first slash; v2 has the name ''."""
    try:
        lines = path.read_text().splitlines()
    except _ABSENT:
        return {}
    rows = [line.split(":", 2) for line in lines]
    return {name: row[2].lstrip("/") for row in rows for name in row[1].split(",")}


def _free_bytes(folder: Path) -> int | None:
    """Return the free bytes of a file system; None if they cannot be read."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize


def _read_field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of lines of names and numbers."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except _ABSENT:
        return None
    return next((int(row[1]) for row in rows if row[:1] == [name]), None)
