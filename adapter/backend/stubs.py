"""The python processes below a tritonserver, and whose they are.

Triton runs each instance of a python model in a process of its own, a stub. It carries the path of
its model.py as an argument, and further on the name of its instance (`m_0_1`); the one that only
completes the configuration carries the model's name there.
"""

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from adapter.backend.processes import Member, arguments_of, family
from adapter.core.model import ProcessId, TritonName


@dataclass(frozen=True, slots=True)
class Stub:
    """`model` is its name in Triton. `instance` is None while the configuration is completed."""

    pid: int
    model: str
    instance: str | None


def stub_at(pid: int, repository: Path) -> Stub | None:
    """None for a process that is none, or has ended."""
    mark = f"{repository}/".encode()
    arguments = arguments_of(pid)
    for place, argument in enumerate(arguments):
        if argument.startswith(mark):
            model = argument.removeprefix(mark).split(b"/")[0].decode(errors="replace")
            later = [each.decode(errors="replace") for each in arguments[place + 1 :]]
            named = [each for each in later if each.startswith(f"{model}_")]
            return Stub(pid, model, named[-1] if named else None)
    return None


class ModelProcesses:
    """The processes of one run of tritonserver, now, and whose they are; for many threads.

    What a stub has started is of its model. That is remembered, as who has lost its parent, like a
    daemon, is a child of the keeper and shows no more where it is from. One that nobody had seen
    before is known by the arguments that it has from its stub. If it has executed something else,
    it may be of each model that had processes before it began; if there were none, it is Triton's.

    All methods raise OSError when the processes cannot be seen.
    """

    def __init__(self, keeper: int, server: int, repository: Path) -> None:
        self._keeper = keeper
        self._server = server
        self._repository = repository
        self._lock = threading.RLock()
        self._known: dict[ProcessId, _Seen] = {}
        self._since: dict[str, int] = {}  # the models then, and when their first process began

    def owners(self) -> Mapping[int, str | None]:
        """The server and all others, each with the model that it is of; None where it is of no
        single one.
        """
        return {
            process.pid: next(iter(seen.models)) if len(seen.models) == 1 else None
            for process, seen in self._look().items()
        }

    def stubs(self, model: str) -> list[Stub]:
        """Those of one model that Triton started: no copies that these have made of themselves."""
        found = [seen.stub for seen in self._look().values() if seen.is_stub]
        return [stub for stub in found if stub is not None and stub.model == model]

    def of_unloaded(self, models: Collection[TritonName]) -> frozenset[ProcessId]:
        """Those of models that are being unloaded. What may be of another one that has stubs is
        left to that, for good.
        """
        with self._lock:
            found = self._look()
            others = _served(found) - {*models}
            mine = {p: s for p, s in found.items() if not s.models.isdisjoint(models)}
            left = {p: s for p, s in mine.items() if not s.models.isdisjoint(others)}
            self._known |= {p: replace(s, models=s.models - {*models}) for p, s in left.items()}
        return frozenset(mine.keys() - left.keys())

    def abandoned(self) -> frozenset[ProcessId]:
        """Those that have lost their parent and whose model has no stub any more."""
        found = self._look()
        served = _served(found)
        return frozenset(
            process
            for process, seen in found.items()
            if seen.is_orphan and seen.models and seen.models.isdisjoint(served)
        )

    def _look(self) -> Mapping[ProcessId, "_Seen"]:
        with self._lock:
            inside, orphans = self._split(family(self._keeper))
            found: dict[int, _Seen] = {}
            for member in inside:
                found[member.id.pid] = self._seen(member, found.get(member.parent))
            since = _since(found.values(), self._since)
            for member in orphans:
                begun = self._since | since
                unknown = frozenset(m for m, ticks in begun.items() if ticks <= member.id.started)
                found[member.id.pid] = self._seen(member, found.get(member.parent), unknown)
            self._since = since
            self._known = {seen.id: seen for seen in found.values()}
            return self._known

    def _split(self, members: Iterable[Member]) -> tuple[list[Member], list[Member]]:
        """The server and all below it; and the others."""
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

    def _seen(
        self, member: Member, parent: "_Seen | None", unknown: frozenset[str] | None = None
    ) -> "_Seen":
        """`unknown` are the models of an orphan of which nothing else tells."""
        stub = stub_at(member.id.pid, self._repository)
        if stub is not None:
            models = frozenset([stub.model])
        elif parent is not None:
            models = parent.models
        elif member.id in self._known:
            models = self._known[member.id].models
        else:
            models = unknown or frozenset()
        is_orphan = unknown is not None
        is_stub = stub is not None and not is_orphan and (parent is None or parent.stub is None)
        return _Seen(member.id, models, stub, is_stub=is_stub, is_orphan=is_orphan)


@dataclass(frozen=True, slots=True)
class _Seen:
    """`models`: those that it may be of. `stub`: what its arguments say, its own or those that it
    has from the stub that it is a copy of.
    """

    id: ProcessId
    models: frozenset[str]
    stub: Stub | None
    is_stub: bool
    is_orphan: bool


def _served(found: Mapping[ProcessId, _Seen]) -> set[str]:
    """Models that have stubs."""
    return {model for seen in found.values() if seen.is_stub for model in seen.models}


def _since(found: Iterable[_Seen], before: Mapping[str, int]) -> dict[str, int]:
    since: dict[str, int] = {}
    for seen in found:
        for model in seen.models:
            ticks = min(seen.id.started, before.get(model, seen.id.started))
            since[model] = min(since.get(model, ticks), ticks)
    return since
