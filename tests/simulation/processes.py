"""The processes below the simulated Triton, and the embedded server as control sees it."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from adapter.core.model import ProcessId
from adapter.errors import BackendUnavailable
from tests.simulation.loop import Draws, turns
from tests.simulation.memory import Truth
from tests.simulation.models import Spec


@dataclass(slots=True, eq=False)
class Process:
    """What a model computes in: a python process, or, not `is_real`, a part of tritonserver.
    `key` names its bytes in the truth.
    """

    name: str
    key: str
    id: ProcessId
    is_real: bool
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Processes:
    def __init__(self, truth: Truth, draws: Draws) -> None:
        self._truth = truth
        self._random = draws.of("processes")
        self._numbers = count(100)
        self.all: list[Process] = []  # those that run
        self.killed_for_memory = 0

    def start(self, name: str, spec: Spec) -> Process:
        number = next(self._numbers)
        process = Process(name, f"{name}#{number}", ProcessId(number, number), spec.is_python)
        self.all.append(process)
        return process

    def end(self, process: Process, *, late: float = 0.0) -> None:
        """End it; its bytes are free `late` seconds later."""
        if process.over.is_set():
            return
        process.over.set()
        self.all = [each for each in self.all if each is not process]
        held = self._truth.held.get(process.key, 0)
        self._truth.set(process.key, 0)
        if late and held:
            key = f"late {process.key}"
            self._truth.gpu_of[key] = self._truth.gpu_of.get(process.key, 0)
            self._truth.set(key, held)
            asyncio.get_running_loop().call_later(late, self._truth.set, key, 0)

    def end_all(self) -> None:
        for process in [*self.all]:
            self.end(process)

    def of(self, *names: str) -> list[Process]:
        return [each for each in self.all if each.is_real and each.name in names]

    def bytes_apart(self) -> dict[str, int]:
        """Return the bytes in processes of one model alone, by its name in Triton."""
        found: dict[str, int] = {}
        for each in self.all:
            if each.is_real:
                held = self._truth.held.get(each.key, 0)
                found[each.name] = found.get(each.name, 0) + held
        return found


class SimServer:
    """The embedded tritonserver: the Server of adapter/control/ports.py. `triton` has its models,
    `restart` ends it and starts another.
    """

    def __init__(
        self, triton: object, draws: Draws, restart: Callable[[str], None], load_threads: int
    ) -> None:
        self._triton = triton
        self._random = draws.of("server")
        self._restart = restart
        self.load_threads = load_threads

    @property
    def _processes(self) -> Processes:
        return self._triton.processes

    @property
    def pid(self) -> int | None:
        return self._triton.life.number if self._triton.life else None

    def has_live_stub(self, name: str) -> bool | None:
        held = self._triton.held(name)
        if held is None or not held.spec.is_python:
            return None
        return bool(self._processes.of(name))

    def live_instances(self, name: str) -> frozenset[str] | None:
        return frozenset(f"{each.name}_0_0" for each in self._processes.of(name))

    def end_stubs(self, name: str) -> None:
        for each in self._processes.of(name):
            self._processes.end(each)

    def end_instances(self, name: str) -> bool:
        found = self._processes.of(name)
        self.end_stubs(name)
        return bool(found)

    async def running_models(self) -> frozenset[str]:
        await self._look()
        return frozenset(each.name for each in self._processes.all if each.is_real)

    async def resident_bytes(self) -> dict[str, int]:
        return self._processes.bytes_apart()

    async def processes_of(self, names: Collection[str]) -> frozenset[ProcessId]:
        await self._look()
        return frozenset(each.id for each in self._processes.of(*names))

    async def abandoned(self) -> frozenset[ProcessId]:
        return frozenset()

    async def living(self, known: Collection[ProcessId]) -> frozenset[ProcessId]:
        await turns(self._random)
        return frozenset(each.id for each in self._processes.all if each.id in known)

    async def kill(self, known: Collection[ProcessId]) -> None:
        await turns(self._random)
        for each in [each for each in self._processes.all if each.id in known]:
            self._processes.end(each)

    async def free_regions(self, names: Collection[str]) -> int:
        return 0

    async def restart(self, reason: str) -> None:
        self._restart(reason)

    async def _look(self) -> None:
        await turns(self._random)
        if self._triton.life is None:
            raise BackendUnavailable("there is no tritonserver", delivered=False)
