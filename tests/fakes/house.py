"""ModelControl with fakes all around it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from adapter.control import ModelControl, TimeLimits
from adapter.core.ledger import Ledger
from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.sizing import Sizes
from adapter.core.state import ModelState
from adapter.metrics import Metrics
from tests.fakes.memory import FakeMemory
from tests.fakes.packages import FakePackages
from tests.fakes.steps import Steps
from tests.fakes.triton import FakeControlTriton, FakeProcesses

QUICK = TimeLimits(load=10, unload=10, stall=5)


class House:
    """`sizes[name]` is what a model takes in the fake Triton, beside `others` bytes of strangers.

    With a limit, memory is read; without one, nothing is known of memory.
    """

    def __init__(self, limit: int | None = None, limits: TimeLimits = QUICK) -> None:
        self.steps = Steps()
        self.triton = FakeControlTriton(self.steps)
        self.packages = FakePackages(self.steps)
        self.processes = FakeProcesses()
        self.metrics = Metrics()
        self.sizes: dict[str, int] = {}
        self.others = 0
        self.memory = FakeMemory(self.steps, self._used)
        self.memory.limit_bytes = limit
        self.control = ModelControl(
            registry=Registry(),
            ledger=Ledger(limit),
            sizes=Sizes(),
            triton=self.triton,
            packages=self.packages,
            memory=self.memory,
            metrics=self.metrics,
            limits=limits,
            processes=self.processes,
        )
        self._tasks: set[asyncio.Task[Any]] = set()

    def _used(self) -> int:
        return self.others + sum(self.sizes.get(name, 0) for name in self.triton.models)

    async def open(self) -> "House":
        await self.control.purge()
        self.steps.seen.clear()
        return self

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
        """Bounded in loop turns: the fakes need a few for each step."""
        for _ in range(1000):
            if self.state(name) is state:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{name} is {self.state(name)} and not {state}")

    async def quiet(self) -> None:
        """No operation is under way any more."""
        opened = self.control.is_open
        await self.control.drain(10)
        self.control.is_open = opened

    def placement(self, name: str) -> Placement:
        """What Triton has of this model when it is up."""
        return self.packages.placements.get(f"/{name}", Placement((TritonName(name),)))

    def listed(self) -> list[str]:
        return [record.id for record in self.control.registry.page(None, 100)[0]]

    def state(self, name: str) -> ModelState | None:
        record = self.control.registry.get(ModelId(name))
        return record.state if record else None

    def held(self, name: str) -> int:
        return self.control.ledger.of(ModelId(name))

    def check(self, *names: str) -> None:
        """These models are up, by every book; and nothing else is anywhere."""
        expected = sorted(names)
        assert self.listed() == expected
        assert sorted(record.id for record in self.control.registry.records()) == expected
        assert sorted(self.packages.folders) == expected
        assert self.triton.models == {n for name in names for n in self.placement(name).names}
        book = self.control.ledger.snapshot()
        assert (book.models, book.reserved_bytes) == (len(expected), 0)
        if not expected:
            assert book.held_bytes == 0
