"""Whose a process is, by what was seen of it, also after it has lost its parent."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adapter.core.model import ProcessId
from adapter.triton.server.processes import Member, ModelProcesses

REPOSITORY = Path("/repository")
KEEPER, SERVER = 10, 11


@dataclass
class Machine:
    """Processes by pid: their parents, and the models whose stubs their arguments speak of."""

    parents: dict[int, int] = field(default_factory=dict)
    says: dict[int, str] = field(default_factory=dict)

    def start(self, pid: int, parent: int, model: str | None = None) -> ProcessId:
        self.parents[pid] = parent
        if model is not None:
            self.says[pid] = model
        return ProcessId(pid, pid)

    def end(self, pid: int) -> None:
        del self.parents[pid]
        self.parents |= {child: KEEPER for child, parent in self.parents.items() if parent == pid}

    def family(self, ancestor: int, others: set[int]) -> list[Member]:
        found = [Member(ProcessId(p, p), of) for p, of in self.parents.items() if of == ancestor]
        return found + [below for each in found for below in self.family(each.id.pid, others)]

    def arguments(self, pid: int) -> list[bytes]:
        if (model := self.says.get(pid)) is None:
            return [b"some program"]
        if model == "":  # its memory is being taken down
            return [b""]
        return [b"stub", f"{REPOSITORY}/{model}/1/model.py".encode(), f"{model}_0".encode()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A server with stubs of `a` (20) and `b` (30)."""
    machine = Machine()
    monkeypatch.setattr("adapter.triton.server.processes.family", machine.family)
    monkeypatch.setattr("adapter.triton.server.processes.arguments_of", machine.arguments)
    machine.start(SERVER, KEEPER)
    machine.start(20, SERVER, "a")
    machine.start(30, SERVER, "b")
    return machine


@pytest.fixture
def processes(machine: Machine) -> ModelProcesses:
    return ModelProcesses(KEEPER, SERVER, REPOSITORY)


def test_stubs_children_are_of_its_model(machine, processes):
    """The server is of none."""
    machine.start(40, 20)
    machine.start(50, 40)
    assert processes.owners() == {SERVER: None, 20: "a", 30: "b", 40: "a", 50: "a"}


def test_ending_stub_stays_of_its_model(machine, processes):
    stub = ProcessId(20, 20)
    assert processes.owners()[20] == "a"
    machine.says[20] = ""
    assert processes.owners()[20] == "a"
    assert processes.stubs("a") == []
    assert stub in processes.claim(["a"])


def test_reused_pid_is_another_process(machine, processes):
    machine.start(40, 20)
    machine.start(50, 40)
    processes.owners()
    machine.end(40)
    machine.end(50)
    processes.owners()
    machine.start(50, KEEPER)
    assert processes.owners()[50] is None


def test_shared_process_is_abandoned_without_both_stubs(machine, processes):
    unknown = machine.start(50, KEEPER)
    processes.owners()
    machine.end(20)
    assert processes.abandoned() == frozenset()
    machine.end(30)
    assert processes.abandoned() == {unknown}


def test_model_with_ended_stub_counts_too(machine, processes):
    processes.owners()
    unknown = machine.start(50, KEEPER)
    machine.end(20)
    machine.end(30)
    assert processes.abandoned() == {unknown}


def test_processes_before_all_models_are_the_servers(machine, processes):
    machine.start(15, KEEPER)
    assert processes.owners()[15] is None
    machine.end(20)
    machine.end(30)
    assert processes.abandoned() == frozenset()
    assert processes.claim(["a", "b"]) == frozenset()


def test_processes_below_a_launcher_are_seen(machine, processes):
    machine.start(12, SERVER)
    machine.start(40, 12, "c")
    assert [stub.pid for stub in processes.stubs("c")] == [40]
