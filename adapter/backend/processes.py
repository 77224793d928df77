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
_PARENT, _STARTED = 1, 19  # of the fields behind the name in /proc/PID/stat


@dataclass(frozen=True, slots=True)
class Member:
    """A process with the pid of its parent."""

    id: ProcessId
    parent: int


_Children = Mapping[int, Sequence[Member]]


def family(ancestor: int) -> list[Member]:
    """Return the living descendants, parents first, without zombies. OSError if they cannot be
    listed.
    """
    return _below([ancestor], _children())


def descendants(ancestor: int) -> list[int]:
    return [member.id.pid for member in family(ancestor)]


def living(known: Collection[ProcessId]) -> frozenset[ProcessId]:
    """Return those that live and their descendants; all of `known` if none can be listed."""
    try:
        children = _children()
    except OSError:
        return frozenset(known)
    alive = {member.id for each in children.values() for member in each} & set(known)
    below = _below([process.pid for process in alive], children)
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


def _below(ancestors: Iterable[int], children: _Children) -> list[Member]:
    found = [member for ancestor in ancestors for member in children.get(ancestor, ())]
    for member in found:
        found += children.get(member.id.pid, ())
    return found


def _children() -> _Children:
    """Return all living processes by the pids of their parents."""
    children: dict[int, list[Member]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(*_GONE):
            # the name, in brackets, may hold any bytes
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in b"ZX":
                process = ProcessId(int(entry.name), int(fields[_STARTED]))
                parent = int(fields[_PARENT])
                children[parent].append(Member(process, parent))
    return children
