"""Lists, kills and awaits processes with their descendants, and attributes Triton's to models.

Triton runs each instance of a python model in a process of its own, a stub. The path of model.py is
among its arguments, followed by its region of shared memory and, later, by the name of the instance
(`m_0_1`); a stub that only completes the configuration has the model's name there.
"""

import asyncio
import logging
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from adapter.core.model import ProcessId, TritonName
from adapter.errors import BackendUnavailable
from adapter.runtime import clock
from adapter.runtime.threads import PROCESSES
from adapter.triton.server import cleanup

_log = logging.getLogger("adapter.triton")

# Errors of /proc for a process that has just ended or may not be read. Any other error, such as a
# lack of descriptors, means that the state of the process is unknown.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Places of fields in the stat of a process, behind the name.
_PARENT = 1
_STARTED = 19
_OTHERS_SECONDS = 2.0
# The library that a stub imports first when Triton asks it to initialize its model.
_NUMPY = b"_multiarray_umath"
_POLL_FIRST_SECONDS = 0.01
_POLL_LAST_SECONDS = 0.25

_Seen = TypeVar("_Seen")


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
        """Return the descendants of these processes, parents first."""
        members = [
            self._member(child, ancestor)
            for ancestor in ancestors
            for child in self._children_of(ancestor)
        ]
        for member in members:
            pid = member.id.pid
            members += [self._member(child, pid) for child in self._children_of(pid)]
        return members

    def outside(self, ancestor: int, others: Collection[int]) -> list[int]:
        """Return the pids that descend from pid 0 or from one of `others`, and not from `ancestor`.

        `others` are the pids that an earlier call returned, which this table may lack. A process
        whose parent has just ended is returned by neither `below` nor `outside`.
        """
        pids = [0, *others]
        for parent in pids:
            pids += [pid for pid in self._children_of(parent) if pid != ancestor]
        return pids[1 + len(others) :]

    def _children_of(self, parent: int) -> Sequence[int]:
        return self.children.get(parent, ())

    def _member(self, pid: int, parent: int) -> Member:
        return Member(ProcessId(pid, self.started[pid]), parent)


def family(
    ancestor: int,
    others: set[int],  # pids of processes that were seen to be no descendants; more are added
) -> list[Member]:
    """Return the living descendants of a process, parents first, without zombies.

    Processes in `others` are not read. Raises OSError if the processes cannot be listed.
    """
    table = _list_all(others)
    others.update(table.outside(ancestor, others))
    return table.below([ancestor])


def list_living(processes: Collection[ProcessId]) -> frozenset[ProcessId]:
    """Return those processes that live, and their descendants; all of them if that is unknown."""
    try:
        table = _list_all()
    except OSError:
        return frozenset(processes)
    alive = {process for process in processes if table.started.get(process.pid) == process.started}
    below = table.below([process.pid for process in alive])
    return frozenset([*alive, *(member.id for member in below)])


def kill(processes: Collection[ProcessId]) -> frozenset[ProcessId]:
    """Kill those processes that live, and their descendants; return what was killed."""
    victims = list_living(processes)
    for process in victims:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return victims


def arguments_of(pid: int) -> list[bytes]:
    """Return the arguments of a process; none if it has ended. Raises OSError if unknown."""
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


def _list_all(skipped: Collection[int] = ()) -> _Table:
    """List all processes but those with the pids of `skipped`. Raises OSError.

    An adapter does this dozens of times for each load, beside hundreds of processes of others: the
    stat of the first thread says the same as that of the process, for a quarter of the CPU, as the
    kernel need not add up all threads (7 us against 35 in Python 3.11, with pathlib).
    """
    started: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes as long as all the rest
        if not name.isdecimal():
            continue
        pid = int(name)
        if pid in skipped:
            continue
        with suppress(*_GONE):
            # the name of the program, in brackets before the fields, may hold any bytes
            fields = _read(f"/proc/{name}/task/{name}/stat").rpartition(b")")[2].split()
            if fields[0] not in b"ZX":
                started[pid] = int(fields[_STARTED])
                children[int(fields[_PARENT])].append(pid)
    return _Table(started, children)


def _read(path: str) -> bytes:
    """Return the beginning of a small file, at less cost than pathlib. Raises OSError."""
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
            later = [word.decode(errors="replace") for word in arguments[place + 1 :]]
            instances = [word for word in later if word.startswith(f"{model}_")]
            instance = instances[-1] if instances else None
            return Stub(pid, model, instance, region=later[0] if later else "")
    return None


class ModelProcesses:
    """Lists the current processes of one run of tritonserver with their models. Thread-safe.

    A process started by a stub belongs to the stub's model. That is remembered, as an orphan, such
    as a daemon, is a child of the keeper and no longer shows its origin. An orphan that was never
    listed before is identified by the arguments that it inherited from its stub. One that has
    executed another program may belong to each model that had processes before it began, or to
    Triton if there were none.

    All methods raise OSError when the processes cannot be listed.
    """

    def __init__(
        self,
        keeper: int,  # pid of the ancestor of all
        server: int,  # pid of tritonserver
        repository: Path,
        # called once, with the folder in which Triton unpacks environments of models
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
        # stubs that were checked for an environment; None once its folder is known
        self._checked: set[ProcessId] | None = set()
        self._since: dict[str, int] = {}  # when the first process of each model began
        self._others: set[int] = set()  # pids of processes that are not below the keeper
        self._others_at = clock.monotonic()

    def owners(self) -> Mapping[int, str | None]:
        """Return each process by its pid, the server included, with its model; None if it belongs
        to no model, or may belong to several.
        """
        return {
            id_.pid: next(iter(process.models)) if len(process.models) == 1 else None
            for id_, process in self._scan().items()
        }

    def stubs(self, model: str) -> list[Stub]:
        """Return the stubs of one model that Triton started, without forked copies of them."""
        stubs = [process.stub for process in self._scan().values() if process.is_stub]
        return [stub for stub in stubs if stub is not None and stub.model == model]

    def take_regions(self, models: Collection[TritonName]) -> frozenset[str]:
        """Return the shared regions of these models' dead stubs, and forget them."""
        with self._lock:
            stubs = [process.stub for process in self._scan().values()]
            used = {stub.region for stub in stubs if stub is not None}
            regions = {region for region, model in self._regions.items() if model in models} - used
            for region in regions:
                del self._regions[region]
        return frozenset(regions)

    def claim(self, models: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the processes of models that are being unloaded. A process that may also belong to
        another model with stubs is attributed to that one from now on.
        """
        with self._lock:
            current = self._scan()
            others = _find_served(current) - {*models}
            claimed = set()
            for id_, process in [*current.items()]:
                if process.models.isdisjoint(models):
                    continue
                if process.models.isdisjoint(others):
                    claimed.add(id_)
                else:
                    self._known[id_] = replace(process, models=process.models - {*models})
        return frozenset(claimed)

    def abandoned(self) -> frozenset[ProcessId]:
        """Return orphans whose model has no stub any more."""
        current = self._scan()
        served = _find_served(current)
        return frozenset(
            id_
            for id_, process in current.items()
            if process.is_orphan and process.models and process.models.isdisjoint(served)
        )

    def _scan(self) -> Mapping[ProcessId, "_Process"]:
        """List the processes, attribute each, and remember the result."""
        with self._lock:
            inside, orphans = self._split(self._list_family())
            current: dict[int, _Process] = {}
            for member in inside:
                parent = current.get(member.parent)
                current[member.id.pid] = self._attribute(member, parent)
            since = _find_starts(current.values(), self._since)
            starts = self._since | since
            for member in orphans:
                parent = current.get(member.parent)
                candidates = frozenset(m for m, at in starts.items() if at <= member.id.started)
                current[member.id.pid] = self._attribute(member, parent, candidates)
            self._since = since
            self._known = {process.id: process for process in current.values()}
            stubs = [process.stub for process in current.values() if process.stub is not None]
            self._find_environment()
            self._regions |= {stub.region: stub.model for stub in stubs if stub.region}
            return self._known

    def _list_family(self) -> list[Member]:
        """Return the descendants of the keeper. Processes of others, which may be hundreds, are
        read once in two seconds: they never become descendants, and their pids are not given out
        again so soon.
        """
        now = clock.monotonic()
        if now - self._others_at > _OTHERS_SECONDS:
            self._others = set()
            self._others_at = now
        return family(self._keeper, self._others)

    def _find_environment(self) -> None:
        """Report the folder of the models' environments, once a stub was started in it."""
        if self._checked is None:
            return
        stubs = {id_ for id_, process in self._known.items() if process.is_stub}
        for process in stubs - self._checked:
            if not b"".join(arguments_of(process.pid)[:1]).endswith(b"_stub"):
                continue  # `env` is about to execute the stub
            if (place := cleanup.find_environment(process.pid, self._began)) is not None:
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

    def _attribute(
        self,
        member: Member,
        parent: "_Process | None",
        # the models that an orphan may belong to; None for a process below the server
        candidates: frozenset[str] | None = None,
    ) -> "_Process":
        """Return a process with the models that it may belong to."""
        stub = stub_at(member.id.pid, self._repository)
        before = self._known.get(member.id)
        if stub is not None:
            models = frozenset([stub.model])
        elif before is not None and (before.models or parent is None):
            # a stub that is about to end keeps its model: it may hold memory without arguments
            models = before.models
        elif parent is not None:
            models = parent.models
        else:
            models = candidates or frozenset()
        is_orphan = candidates is not None
        is_copy = parent is not None and parent.stub is not None  # forked by a stub
        is_stub = stub is not None and not is_orphan and not is_copy
        return _Process(member.id, models, stub, is_stub=is_stub, is_orphan=is_orphan)


@dataclass(frozen=True, slots=True)
class _Process:
    """Describes a process below Triton, with the models that it may belong to."""

    id: ProcessId
    models: frozenset[str]
    stub: Stub | None  # from its arguments, which a forked copy of a stub shares with the stub
    is_stub: bool
    is_orphan: bool


def _find_served(current: Mapping[ProcessId, _Process]) -> set[str]:
    """Return the models that have stubs."""
    return {model for process in current.values() if process.is_stub for model in process.models}


def _find_starts(current: Iterable[_Process], before: Mapping[str, int]) -> dict[str, int]:
    """Return when the first process of each model began, in ticks of the kernel.

    A model keeps its start of `before` as long as it has any process.
    """
    starts: dict[str, int] = {}
    for process in current:
        for model in process.models:
            started = min(process.id.started, before.get(model, process.id.started))
            starts[model] = min(starts.get(model, started), started)
    return starts


class TritonProcesses:
    """Lists, kills and awaits the processes of models below an embedded Triton, for control.

    It is the Processes of adapter/control/ports.py. The processes are read in a thread, as that
    takes milliseconds on a busy machine.
    """

    are_seen = True

    def __init__(
        self,
        find_current: Callable[[], ModelProcesses | None],  # None while the server is down
        repository: Path,
        *,
        region_prefix: str,  # of the shared memory of this Triton's processes
    ) -> None:
        self._find_current = find_current
        self._repository = repository
        self._region_prefix = region_prefix

    # -- list -------------------------------------------------------------------------------

    async def models(self) -> frozenset[TritonName]:
        """Return the models with a process, loaded or not; none while the server is down."""
        owners: Mapping[int, str | None] = await self._read(ModelProcesses.owners, {})
        return frozenset(TritonName(name) for name in owners.values() if name is not None)

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        """Return the instances of each model whose python processes live.

        Triton does not start another process when one dies, and still calls the model ready.
        Raises BackendUnavailable while the server is down.
        """
        instances = await self._read(lambda current: self._list_instances(current, names), None)
        if instances is None:
            raise BackendUnavailable("Triton is down, and its processes with it", delivered=False)
        return instances

    def _list_instances(
        self, current: ModelProcesses, names: Collection[TritonName]
    ) -> dict[TritonName, list[str | None]] | None:
        """Return the instances of each model, and none of a python model without a process."""
        living = {name: [stub.instance for stub in current.stubs(name)] for name in names}
        return {
            name: instances
            for name, instances in living.items()
            if instances or self._is_python(name)
        }

    def _is_python(self, name: TritonName) -> bool:
        """Return whether a placed model has python code."""
        with suppress(OSError):
            return any((self._repository / name).glob("*/model.py"))
        return False

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the processes of models that are being unloaded, and all that those started."""
        return await self._read(lambda current: current.claim(names), frozenset())

    async def abandoned(self) -> frozenset[ProcessId]:
        """Return processes started by models that have no python process any more."""
        return await self._read(ModelProcesses.abandoned, frozenset())

    async def _read(self, read: Callable[[ModelProcesses], _Seen], default: _Seen) -> _Seen:
        """Return what `read` finds below the running server; the default while it is down.

        Raises BackendUnavailable if the processes cannot be listed.
        """
        current = self._find_current()
        if current is None:
            return default
        try:
            return await PROCESSES.run(read, current)
        except OSError as error:
            raise BackendUnavailable(
                f"the processes of Triton cannot be seen: {error}", delivered=False
            ) from error

    # -- kill -------------------------------------------------------------------------------

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Kill these processes and all that they started; return those that lived."""
        return await PROCESSES.run(kill, processes)

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        """Kill the python processes in which these models are initialized; return whether any were.

        While one completes the configuration of its model, or starts up, all of that model are left
        alone: Triton would never answer that load (docs/design/triton.md).
        """
        return await self._read(lambda current: _end_loads(current, names), False)  # noqa: FBT003

    async def free_regions(self, names: Collection[TritonName]) -> int:
        """Free the shared memory of python processes that have died; return the bytes.

        Triton keeps it until it ends (docs/design/triton.md).
        """
        regions: frozenset[str] = await self._read(
            lambda current: current.take_regions(names), frozenset()
        )
        freed_bytes = 0
        for region in filter(self._is_own_region, regions):
            try:
                freed_bytes += await PROCESSES.run(
                    cleanup.free_region, cleanup.SHARED_MEMORY / region
                )
            except OSError as error:
                _log.warning("triton.region_left", extra={"reason": str(error)})
        return freed_bytes

    def _is_own_region(self, name: str) -> bool:
        return name.startswith(self._region_prefix) and "/" not in name

    # -- wait -------------------------------------------------------------------------------

    async def wait(
        self,
        names: Collection[TritonName],
        processes: Collection[ProcessId],
        limit_seconds: float,
    ) -> frozenset[ProcessId]:
        """Wait until these processes, and all others of these models, have ended.

        Return those that still live after `limit_seconds`.
        """
        deadline = clock.monotonic() + limit_seconds
        pause = _POLL_FIRST_SECONDS
        living: frozenset[ProcessId] = frozenset(processes)
        while living := await self._list_living(names, living):
            if clock.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, _POLL_LAST_SECONDS)
        return living

    async def _list_living(
        self, names: Collection[TritonName], processes: frozenset[ProcessId]
    ) -> frozenset[ProcessId]:
        """Return those processes that live, with their descendants and all others of these models.

        Return `processes` as they are if the processes cannot be listed.
        """
        try:
            claimed = await self.claim(names)
        except BackendUnavailable:
            return processes
        if not processes:
            return claimed
        return claimed | await PROCESSES.run(list_living, processes)


def _end_loads(current: ModelProcesses, names: Collection[TritonName]) -> bool:
    """Kill the processes of models whose every stub is initializing; return whether any were."""
    has_killed = False
    for name in names:
        with suppress(OSError):
            stubs = current.stubs(name)
            if stubs and all(map(_is_initializing, stubs)):
                kill(current.claim([name]))
                has_killed = True
    return has_killed


def _is_initializing(stub: Stub) -> bool:
    """Return whether a stub has begun to run the code of its model."""
    return stub.instance is not None and maps(stub.pid, _NUMPY)
