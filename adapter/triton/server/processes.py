"""Lists and kills processes with their descendants, and attributes those of Triton to models.

Triton runs each instance of a python model in a process of its own, a stub. The path of model.py is
among its arguments, followed by its region of shared memory and, later, by the name of the instance
(`m_0_1`); a stub that only completes the configuration has the model's name there.
"""

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from adapter.core.model import ProcessId, TritonName
from adapter.runtime import clock
from adapter.triton.server.cleanup import environment_of

# Errors of /proc for a process that has just ended or may not be read. Any other error, such as a
# lack of descriptors, means that the state of the process is unknown.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PARENT, _STARTED = 1, 19  # of the fields behind the name in the stat of a process
_OTHERS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Counts of resident pages, and of those that belong to files or shared regions."""

    resident: int
    shared: int


@dataclass(frozen=True, slots=True)
class Member:
    """A process with the pid of its parent."""

    id: ProcessId
    parent: int


@dataclass(frozen=True, slots=True)
class _Table:
    """Lists all living processes: when each began, and the pids of its children."""

    started: Mapping[int, int]
    children: Mapping[int, Sequence[int]]

    def below(self, ancestors: Iterable[int]) -> list[Member]:
        found = [self._member(pid, each) for each in ancestors for pid in self._of(each)]
        for member in found:
            found += [self._member(pid, member.id.pid) for pid in self._of(member.id.pid)]
        return found

    def outside(self, ancestor: int, known: Collection[int]) -> list[int]:
        """Return those that are not below `ancestor`, as far as all their ancestors are in the
        table or `known` to be outside. One whose parent has just ended is neither.
        """
        found = [0, *known]
        for each in found:
            found += [pid for pid in self._of(each) if pid != ancestor]
        return found[1 + len(known) :]

    def _of(self, parent: int) -> Sequence[int]:
        return self.children.get(parent, ())

    def _member(self, pid: int, parent: int) -> Member:
        return Member(ProcessId(pid, self.started[pid]), parent)


def family(ancestor: int, others: set[int]) -> list[Member]:
    """Return the living descendants, parents first, without zombies. OSError if they cannot be
    listed. Processes with the pids of `others` are not read, as they were seen to be no
    descendants; those that are seen now are added.
    """
    table = _table(others)
    others.update(table.outside(ancestor, others))
    return table.below([ancestor])


def living(known: Collection[ProcessId]) -> frozenset[ProcessId]:
    """Return those that live and their descendants; all of `known` if none can be listed."""
    try:
        table = _table()
    except OSError:
        return frozenset(known)
    alive = {each for each in known if table.started.get(each.pid) == each.started}
    below = table.below([process.pid for process in alive])
    return frozenset([*alive, *(member.id for member in below)])


def kill(known: Collection[ProcessId]) -> frozenset[ProcessId]:
    """Kill those that live, and their descendants; return them."""
    found = living(known)
    for process in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return found


def arguments_of(pid: int) -> list[bytes]:
    """Return the arguments of a process, empty if it has ended. OSError if unknown."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except _GONE:
        return []


def page_counts(process: Path) -> PageCounts | None:
    """Return the page counts of the process with this folder in /proc; None when it has ended."""
    try:
        _, resident, shared, *_ = (process / "statm").read_text().split()
    except (*_GONE, NotADirectoryError, ValueError):
        return None
    return PageCounts(int(resident), int(shared)) if int(resident) else None  # a zombie has none


def resident_bytes(process: Path) -> int:
    """Return the resident memory of the process with this folder in /proc; 0 when it has ended."""
    pages = page_counts(process)
    return pages.resident * _PAGE_BYTES if pages else 0


def maps(pid: int, library: bytes) -> bool:
    """Return whether a process has mapped a file with this in its path; False if unknown."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def _table(skipped: Collection[int] = ()) -> _Table:
    """List all processes but those with the pids of `skipped`. An adapter does this dozens of times
    for each load, beside hundreds of processes of others: the stat of the first thread says the
    same as that of the process, for a quarter of the CPU, as the kernel need not add up all threads
    (7 us against 35 in Python 3.11, with pathlib).
    """
    started: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes as long as all the rest
        if not name.isdecimal() or (pid := int(name)) in skipped:
            continue
        with suppress(*_GONE):
            # the name, in brackets, may hold any bytes
            fields = _read(f"/proc/{name}/task/{name}/stat").rpartition(b")")[2].split()
            if fields[0] not in b"ZX":
                started[pid] = int(fields[_STARTED])
                children[int(fields[_PARENT])].append(pid)
    return _Table(started, children)


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Stub:
    """A process in which Triton runs one instance of a python model."""

    pid: int
    model: str
    instance: str | None  # None if it completes the configuration
    region: str = ""  # a file name in /dev/shm


def stub_at(pid: int, repository: Path) -> Stub | None:
    """Return the stub with this pid; None if the process has ended or is not a stub."""
    mark = f"{repository}/".encode()
    arguments = arguments_of(pid)
    for place, argument in enumerate(arguments):
        if argument.startswith(mark):
            model = argument.removeprefix(mark).split(b"/")[0].decode(errors="replace")
            later = [each.decode(errors="replace") for each in arguments[place + 1 :]]
            named = [each for each in later if each.startswith(f"{model}_")]
            return Stub(pid, model, named[-1] if named else None, later[0] if later else "")
    return None


class ModelProcesses:
    """Lists the current processes of one run of tritonserver with their models. Thread-safe. Calls
    `on_environment` with the folder in which Triton unpacks their environments, once it is seen.

    A process started by a stub belongs to the stub's model. That is remembered, as an orphan, such
    as a daemon, is a child of the keeper and no longer shows its origin. An orphan that was never
    listed before is identified by the arguments that it inherited from its stub. One that has
    executed another program may belong to each model that had processes before it began, or to
    Triton if there were none.

    All methods raise OSError when the processes cannot be listed.
    """

    def __init__(
        self,
        keeper: int,
        server: int,
        repository: Path,
        on_environment: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._keeper = keeper
        self._server = server
        self._repository = repository
        self._lock = threading.RLock()
        self._known: dict[ProcessId, _Process] = {}
        self._regions: dict[str, str] = {}  # of all stubs ever seen, with their models
        self._began = clock.wall()
        self._on_environment = on_environment
        self._checked: set[ProcessId] | None = set()  # for an environment; None once it is known
        self._since: dict[str, int] = {}  # the models then, and when their first process began
        self._others: set[int] = set()  # pids of processes that are not below the keeper
        self._others_at = clock.monotonic()

    def owners(self) -> Mapping[int, str | None]:
        """Return each process, the server included, with its model; None if not of a single one."""
        return {
            process.pid: next(iter(each.models)) if len(each.models) == 1 else None
            for process, each in self._scan().items()
        }

    def stubs(self, model: str) -> list[Stub]:
        """Return the stubs of one model that Triton started, without forked copies of them."""
        found = [each.stub for each in self._scan().values() if each.is_stub]
        return [stub for stub in found if stub is not None and stub.model == model]

    def take_regions(self, models: Collection[TritonName]) -> frozenset[str]:
        """Return the regions of these models' stubs that no living process has, and forget them."""
        with self._lock:
            found = self._scan().values()
            used = {each.stub.region for each in found if each.stub is not None}
            mine = {region for region, model in self._regions.items() if model in models}
            self._regions = {r: m for r, m in self._regions.items() if r not in mine - used}
        return frozenset(mine - used)

    def of_unloaded(self, models: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the processes of models that are being unloaded. A process that may also belong to
        another model with stubs is attributed to that one from now on.
        """
        with self._lock:
            found = self._scan()
            others = _served(found) - {*models}
            mine = {p: s for p, s in found.items() if not s.models.isdisjoint(models)}
            left = {p: s for p, s in mine.items() if not s.models.isdisjoint(others)}
            self._known |= {p: replace(s, models=s.models - {*models}) for p, s in left.items()}
        return frozenset(mine.keys() - left.keys())

    def abandoned(self) -> frozenset[ProcessId]:
        """Return orphans whose model has no stub any more."""
        found = self._scan()
        served = _served(found)
        return frozenset(
            process
            for process, each in found.items()
            if each.is_orphan and each.models and each.models.isdisjoint(served)
        )

    def _scan(self) -> Mapping[ProcessId, "_Process"]:
        with self._lock:
            inside, orphans = self._split(self._family())
            found: dict[int, _Process] = {}
            for member in inside:
                found[member.id.pid] = self._attributed(member, found.get(member.parent))
            since = _since(found.values(), self._since)
            for member in orphans:
                begun = self._since | since
                unknown = frozenset(m for m, ticks in begun.items() if ticks <= member.id.started)
                found[member.id.pid] = self._attributed(member, found.get(member.parent), unknown)
            self._since = since
            self._known = {each.id: each for each in found.values()}
            stubs = [each.stub for each in found.values() if each.stub is not None]
            self._look_for_environment()
            self._regions |= {stub.region: stub.model for stub in stubs if stub.region}
            return self._known

    def _family(self) -> list[Member]:
        """Return the descendants of the keeper. Processes of others, which may be hundreds, are
        read once in two seconds: they never become descendants, and their pids are not given out
        again so soon.
        """
        if (now := clock.monotonic()) - self._others_at > _OTHERS_SECONDS:
            self._others, self._others_at = set(), now
        return family(self._keeper, self._others)

    def _look_for_environment(self) -> None:
        if self._checked is None:
            return
        stubs = {id_ for id_, each in self._known.items() if each.is_stub}
        for process in stubs - self._checked:
            if not b"".join(arguments_of(process.pid)[:1]).endswith(b"_stub"):
                continue  # it is `env`, which is about to execute the stub
            if (place := environment_of(process.pid, self._began)) is not None:
                self._on_environment(place)
                self._checked = None
                return
            self._checked.add(process)
        self._checked &= stubs

    def _split(self, members: Iterable[Member]) -> tuple[list[Member], list[Member]]:
        """Split into the server with its descendants, and the orphans."""
        inside: list[Member] = []
        orphans: list[Member] = []
        pids = {self._server}
        for member in members:
            if member.id.pid == self._server or member.parent in pids:
                pids.add(member.id.pid)
                inside.append(member)
            else:
                orphans.append(member)
        return inside, orphans

    def _attributed(
        self, member: Member, parent: "_Process | None", unknown: frozenset[str] | None = None
    ) -> "_Process":
        """Attribute one process. `unknown`: the possible models of an unidentified orphan."""
        stub = stub_at(member.id.pid, self._repository)
        known = self._known.get(member.id)
        if stub is not None:
            models = frozenset([stub.model])
        elif known is not None and (known.models or parent is None):
            # so too a stub that is about to end: it has lost its arguments, perhaps no memory yet
            models = known.models
        elif parent is not None:
            models = parent.models
        else:
            models = unknown or frozenset()
        is_orphan = unknown is not None
        is_stub = stub is not None and not is_orphan and (parent is None or parent.stub is None)
        return _Process(member.id, models, stub, is_stub=is_stub, is_orphan=is_orphan)


@dataclass(frozen=True, slots=True)
class _Process:
    """A process below Triton, and the models that it may belong to."""

    id: ProcessId
    models: frozenset[str]
    stub: Stub | None  # from its arguments, which a forked copy of a stub shares with the stub
    is_stub: bool
    is_orphan: bool


def _served(found: Mapping[ProcessId, _Process]) -> set[str]:
    """Return the models that have stubs."""
    return {model for each in found.values() if each.is_stub for model in each.models}


def _since(found: Iterable[_Process], before: Mapping[str, int]) -> dict[str, int]:
    since: dict[str, int] = {}
    for each in found:
        for model in each.models:
            ticks = min(each.id.started, before.get(model, each.id.started))
            since[model] = min(since.get(model, ticks), ticks)
    return since
