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

_POLL_FIRST_SECONDS, _POLL_LAST_SECONDS = 0.01, 0.25


@dataclass(slots=True, eq=False)
class Process:
    """Stands for what a model computes in: a python process, or a part of tritonserver."""

    name: str
    key: str  # of its bytes in the truth
    id: ProcessId
    is_real: bool  # False for a part of tritonserver
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Processes:
    def __init__(self, truth: Truth, draws: Draws) -> None:
        self._truth = truth
        self._random = draws.of("processes")
        self._numbers = count(100)
        self.all: list[Process] = []  # running ones

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


class SimServer:
    """The embedded tritonserver, and its processes: two ports of adapter/control/ports.py.
    `triton` has its models, `restart` ends it and starts another.
    """

    are_seen = True

    def __init__(self, triton: object, draws: Draws, restart: Callable[[str], None]) -> None:
        self._triton = triton
        self._random = draws.of("server")
        self._restart = restart

    @property
    def _processes(self) -> Processes:
        return self._triton.processes

    @property
    def pid(self) -> int | None:
        return self._triton.life.number if self._triton.life else None

    @property
    def exit_reason(self) -> str:
        return "was killed by SIGKILL"

    async def restart(self, reason: str) -> None:
        self._restart(reason)

    async def models(self) -> frozenset[str]:
        await self._wait_turns()
        return frozenset(each.name for each in self._processes.all if each.is_real)

    async def instances(self, names: Collection[str]) -> dict[str, list[str | None]]:
        self._check_life()
        found = {}
        for name in names:
            held = self._triton.held(name)
            if held is not None and held.spec.is_python:
                found[name] = [f"{each.name}_0_0" for each in self._processes.of(name)]
        return found

    async def claim(self, names: Collection[str]) -> frozenset[ProcessId]:
        await self._wait_turns()
        return frozenset(each.id for each in self._processes.of(*names))

    async def abandoned(self) -> frozenset[ProcessId]:
        return frozenset()

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        await turns(self._random)
        killed = [each for each in self._processes.all if each.id in processes]
        for each in killed:
            self._processes.end(each)
        return frozenset(each.id for each in killed)

    async def kill_models(self, names: Collection[str]) -> None:
        for each in self._processes.of(*names):
            self._processes.end(each)

    async def end_loads(self, names: Collection[str]) -> bool:
        found = self._processes.of(*names)
        await self.kill_models(names)
        return bool(found)

    async def free_regions(self, names: Collection[str]) -> int:
        return 0

    async def wait(
        self,
        names: Collection[str],
        processes: Collection[ProcessId],
        limit_seconds: float,
    ) -> frozenset[ProcessId]:
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + limit_seconds, _POLL_FIRST_SECONDS
        living = frozenset(processes)
        while living := await self._living(names, living):
            if loop.time() + pause > end:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, _POLL_LAST_SECONDS)
        return living

    async def _living(
        self, names: Collection[str], known: frozenset[ProcessId]
    ) -> frozenset[ProcessId]:
        try:
            claimed = await self.claim(names)
        except BackendUnavailable:
            return known
        if known:
            await turns(self._random)
        return claimed | {each.id for each in self._processes.all if each.id in known}

    async def _wait_turns(self) -> None:
        await turns(self._random)
        self._check_life()

    def _check_life(self) -> None:
        if self._triton.life is None:
            raise BackendUnavailable("there is no tritonserver", delivered=False)
