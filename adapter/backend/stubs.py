"""The python processes below a tritonserver, and whose they are.

Triton runs each instance of a python model in a process of its own, a stub. It carries the path of
its model.py as an argument, and further on the name of its instance (`m_0_1`); the one that only
completes the configuration carries the model's name there.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adapter.backend.process import arguments_of, family


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
    found: dict[int, str | None] = {server: None}
    for pid, parent in family(server):
        stub = stub_at(pid, repository)
        found[pid] = stub.model if stub else found.get(parent)
    return found


def stubs(server: int, repository: Path, model: str) -> list[Stub]:
    """Those of one model."""
    seen = (stub_at(pid, repository) for pid, _ in family(server))
    return [stub for stub in seen if stub is not None and stub.model == model]


def kill(found: list[Stub]) -> None:
    for stub in found:
        with suppress(ProcessLookupError):
            os.kill(stub.pid, signal.SIGKILL)
