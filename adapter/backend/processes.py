"""Lists the processes of this machine with their descendants, and kills them."""

import os
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adapter.core.model import ProcessId

# Errors of /proc for a process that has just ended or may not be read. Any other error, such as a
# lack of descriptors, means that the state of the process is unknown.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PARENT, _STARTED = 1, 19  # of the fields behind the name in the stat of a process


@dataclass(frozen=True, slots=True)
class Member:
    """A process with the pid of its parent."""

    id: ProcessId
    parent: int


@dataclass(frozen=True, slots=True)
class _Table:
    """All living processes: when each began, and the pids of its children."""

    started: Mapping[int, int]
    children: Mapping[int, Sequence[int]]

    def below(self, ancestors: Iterable[int]) -> list[Member]:
        found = [self._member(pid, each) for each in ancestors for pid in self._of(each)]
        for member in found:
            found += [self._member(pid, member.id.pid) for pid in self._of(member.id.pid)]
        return found

    def _of(self, parent: int) -> Sequence[int]:
        return self.children.get(parent, ())

    def _member(self, pid: int, parent: int) -> Member:
        return Member(ProcessId(pid, self.started[pid]), parent)


def family(ancestor: int) -> list[Member]:
    """Return the living descendants, parents first, without zombies. OSError if they cannot be
    listed.
    """
    return _table().below([ancestor])


def descendants(ancestor: int) -> list[int]:
    return [member.id.pid for member in family(ancestor)]


def living(known: Collection[ProcessId]) -> frozenset[ProcessId]:
    """Return those that live and their descendants; all of `known` if none can be listed."""
    try:
        table = _table()
    except OSError:
        return frozenset(known)
    alive = {each for each in known if table.started.get(each.pid) == each.started}
    below = table.below([process.pid for process in alive])
    return frozenset([*alive, *(member.id for member in below)])


def kill(known: Collection[ProcessId]) -> None:
    """Kill those that live, and their descendants."""
    for process in living(known):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def arguments_of(pid: int) -> list[bytes]:
    """Return the arguments of a process, empty if it has ended. OSError if unknown."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except _GONE:
        return []


def maps(pid: int, library: bytes) -> bool:
    """Return whether a process has mapped a file with this in its path; False if unknown."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def _table() -> _Table:
    """List all processes. An adapter does this several times for each load, beside hundreds of
    processes of others: the stat of the first thread says the same as that of the process, for a
    quarter of the CPU, as the kernel need not add up all threads (7 us against 35 in Python 3.11,
    with pathlib).
    """
    started: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes as long as all the rest
        if not name.isdecimal():
            continue
        with suppress(*_GONE):
            # the name, in brackets, may hold any bytes
            fields = _read(f"/proc/{name}/task/{name}/stat").rpartition(b")")[2].split()
            if fields[0] not in b"ZX":
                pid = int(name)
                started[pid] = int(fields[_STARTED])
                children[int(fields[_PARENT])].append(pid)
    return _Table(started, children)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
