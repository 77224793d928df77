"""ModelControl with fakes all around it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from adapter.control.models import ModelControl
from adapter.control.ports import NoProcesses, Options, Ports, TimeLimits
from adapter.control.state import State
from adapter.control.triton_status import Phase
from adapter.core.ledger import Ledger
from adapter.core.memory import total
from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.residency.placement import PLACINGS
from adapter.core.sizing import Sizes
from adapter.core.state import ModelState
from adapter.telemetry.metrics import Metrics
from tests.fakes.memory import FakeMemory
from tests.fakes.packages import FakePackages, FakeStore
from tests.fakes.steps import Steps
from tests.fakes.triton import FakeControlTriton, FakeServer

QUICK = TimeLimits(load=30, unload=10, stall=5, recovery=1, alone=5)


_TURNS = 1000


class House:
    """`sizes[name]` is what a model takes in the fake Triton, beside `others` bytes of strangers;
    `loading[name]` is what one takes that is being loaded.

    With a limit, memory is read; without one, nothing is known of memory. Triton has two threads
    for loads. `gpus`: bytes by number of GPUs that models are put on, where most is free.
    """

    def __init__(
        self,
        limit: int | None = None,
        limits: TimeLimits = QUICK,
        *,
        embedded: bool = True,
        loads_again: bool | None = False,
        memory_limit: int | None = None,
        headroom: int = 0,
        gpus: dict[int, int] | None = None,
    ) -> None:
        self.steps = Steps()
        self.triton = FakeControlTriton(self.steps)
        self.packages = FakePackages(self.steps)
        self.triton.server = self.server = FakeServer()
        self.store = FakeStore(self.steps)
        self.metrics = Metrics()
        self.sizes: dict[str, int] = {}
        self.loading: dict[str, int] = {}
        self.others = 0
        self.memory = FakeMemory(self.steps, self._used, self._of_models)
        self.memory.limit_bytes = limit
        self.control = ModelControl(
            Ports(
                self.triton,
                self.packages,
                self.memory,
                server=self.server if embedded else None,
                sizes=self.store,
                processes=self.server if embedded else NoProcesses(),
            ),
            Ledger(memory_limit, lambda _: headroom),
            Sizes(),
            self.metrics,
            Options(
                limits=limits,
                loads_again=loads_again,
                load_threads=2,
                placing=PLACINGS["triton" if gpus is None else "most_free"],
            ),
        )
        self.control_state = State(self.control, None)
        if gpus is not None:
            self.memory.gpus, self.memory.used_on = gpus, self._used_on
        self._tasks: set[asyncio.Task[Any]] = set()

    def _used_on(self, number: int) -> int:
        """Return what is taken of a GPU: a model takes the same of each that it may use."""
        gpu_of, held = self.packages.gpu_of, self._of_models()
        return sum(count for name, count in held.items() if gpu_of.get(name) in {number, None})

    def _used(self) -> int:
        return self.others + sum(self._of_models().values())

    def _of_models(self) -> dict[str, int]:
        held = {name: self.sizes.get(name, 0) for name in self.triton.models}
        alive = {n: count for n, count in self.loading.items() if n not in self.server.ended}
        return held | alive

    async def open(self) -> "House":
        await self.control.open()
        self.steps.seen.clear()
        return self

    def start_again(self) -> None:
        """Know nothing of Triton's models any more, as before `open`."""
        self.control.triton_status.phase = Phase.STARTING

    def reopen(self) -> None:
        self.control.triton_status.phase = Phase.OPEN

    def load_lost_again(self) -> None:
        """Have models that Triton loses loaded again."""
        self.control.triton_status._loads_again = True

    async def close(self) -> None:
        await self.control.drain(10)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def load(self, name: str) -> ModelRecord:
        return await self.control.load(ModelId(name), ModelSource(f"/{name}"))

    async def unload(self, name: str) -> None:
        await self.control.unload(ModelId(name))

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A caller of its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def until_state(self, name: str, state: ModelState | None) -> None:
        """Bounded: the fakes need a few turns of the loop for each step, a look at processes a
        thread.
        """
        for turn in range(2000):
            if self.state(name) is state:
                return
            await asyncio.sleep(0 if turn < _TURNS else 0.01)
        raise AssertionError(f"{name} is {self.state(name)} and not {state}")

    async def turns(self, count: int = 60) -> None:
        """Time for whoever could go on to do so."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def quiet(self) -> None:
        """No operation is under way any more."""
        await self.turns()
        phase = self.control.triton_status.phase
        self.control.close()
        await self.ended()
        self.control.triton_status.phase = phase

    async def ended(self) -> None:
        """Wait for the end of all operations; one may begin another."""
        await self.turns()
        async with asyncio.timeout(10):
            while self.control.operations.in_flight:
                await self.control.operations.drain(10)

    def placement(self, name: str) -> Placement:
        """What Triton has of this model when it is up."""
        return self.packages.placements.get(f"/{name}", Placement((TritonName(name),)))

    def listed(self) -> list[str]:
        return [record.id for record in self.control.registry.page(None, 100)[0]]

    def state(self, name: str) -> ModelState | None:
        record = self.control.registry.get(ModelId(name))
        return record.state if record else None

    def held(self, name: str) -> int:
        record = self.control.registry.get(ModelId(name))
        return total(self.control.memory.ledger.of(record.name if record else TritonName(name)))

    def check(self, *names: str) -> None:
        """These models are up, by every book; and nothing else is anywhere."""
        expected = sorted(names)
        self.check_registry(*names)
        assert sorted(self.packages.folders) == expected
        assert self.triton.models == {n for name in names for n in self.placement(name).names}
        book = self.control.memory.ledger.snapshot()
        assert (book.models, book.reserved_bytes) == (len(expected), 0)
        if not expected:
            assert book.held_bytes == 0

    def check_registry(self, *names: str) -> None:
        """These models are served, and no other is known."""
        assert self.listed() == sorted(names)
        assert sorted(record.id for record in self.control.registry.records()) == sorted(names)
