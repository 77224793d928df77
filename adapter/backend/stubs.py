"""The python processes below a tritonserver, and whose they are.

Triton runs each instance of a python model in a process of its own, a stub. It carries the path of
its model.py as an argument, and further on the name of its instance (`m_0_1`); the one that only
completes the configuration carries the model's name there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter.backend.processes import arguments_of, family
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


def owners(server: int, repository: Path) -> Mapping[int, str | None]:
    """The server and all its descendants, each with the model that it is of; None where it is of
    no single one. What a stub has started is of its model too.
    """
    return {server: None} | {p.pid: model for p, model in _owned(server, repository).items()}


def processes_of(
    server: int, repository: Path, models: Collection[TritonName]
) -> frozenset[ProcessId]:
    """The stubs of these models, and what they have started."""
    owned = _owned(server, repository)
    return frozenset(process for process, model in owned.items() if model in models)


def stubs(server: int, repository: Path, model: str) -> list[Stub]:
    """Those of one model."""
    seen = (stub_at(member.id.pid, repository) for member in family(server))
    return [stub for stub in seen if stub is not None and stub.model == model]


def _owned(server: int, repository: Path) -> Mapping[ProcessId, str | None]:
    found: dict[ProcessId, str | None] = {}
    models: dict[int, str | None] = {}
    for member in family(server):
        stub = stub_at(member.id.pid, repository)
        model = stub.model if stub else models.get(member.parent)
        found[member.id] = models[member.id.pid] = model
    return found
