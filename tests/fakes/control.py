"""Control with fakes all around it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from adapter.app.parts import Control, build_control
from adapter.control.ports import MemorySettings, NoProcesses, Settings, TimeLimits, World
from adapter.control.triton import Phase
from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.record import ModelRecord, OnExit
from adapter.core.sizes import Sizes
from adapter.core.states import ModelState
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics
from tests.fakes.calls import Calls
from tests.fakes.memory import FakeMemory
from tests.fakes.packages import FakePackages, FakeStore
from tests.fakes.triton import FakeControlTriton, FakeServer

QUICK = TimeLimits(load=30, unload=10)
MESH_DEFAULT_BYTES = 1_000_000  # of the setting modelmesh_default_size


_TURNS = 1000
_BACK_SECONDS = 10.0
_LOOKS = {"ready", "present", "read"}


class ControlOnFakes:
    """Control, whose verbs are `control`, its state `control_state`, and all its parts `parts`.

    `sizes[name]` is what a model takes in the fake Triton, beside `others` bytes of strangers.
    With a limit, memory is read; without one, nothing is known of memory. Triton has two threads
    for loads.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        is_embedded: bool = True,  # False for a Triton in another container
        on_exit: OnExit | None = OnExit.FORGET,
        memory_limit: int | None = None,
        headroom_bytes: int = 0,
    ) -> None:
        self.calls = Calls()
        self.triton = FakeControlTriton(self.calls)
        self.packages = FakePackages(self.calls)
        self.server = FakeServer()
        self.store = FakeStore(self.calls)
        self.metrics = Metrics()
        self.sizes: dict[str, int] = {}
        self.others = 0
        self.memory = FakeMemory(self.calls, self._used)
        self.memory.limit_bytes = limit
        world = World(
            triton=self.triton,
            packages=self.packages,
            memory=self.memory,
            server=self.server if is_embedded else None,
            processes=self.server if is_embedded else NoProcesses(),
            sizes=self.store,
        )
        settings = Settings(
            limits=QUICK,
            memory=MemorySettings(
                limit_bytes=memory_limit,
                headroom_of=lambda _: headroom_bytes,
                mesh_default_bytes=MESH_DEFAULT_BYTES,
            ),
            on_exit=on_exit,
            load_threads=2,
        )
        self.parts: Control = build_control(world, self.metrics, settings, Sizes())
        self.control = self.parts.models
        self.control_state = self.parts.state
        self._tasks: set[asyncio.Task[Any]] = set()

    def _used(self) -> int:
        return self.others + sum(self.sizes.get(name, 0) for name in self.triton.models)

    async def open(self) -> "ControlOnFakes":
        await self.parts.open()
        self.calls.seen.clear()
        return self

    def start_again(self) -> None:
        """Know nothing of Triton's models any more, as before `open`."""
        self.parts.status.phase = Phase.STARTING

    def reopen(self) -> None:
        self.parts.status.phase = Phase.OPEN

    def load_lost_again(self) -> None:
        """Have models that Triton loses loaded again."""
        self.parts.status.on_exit_setting = OnExit.RELOAD

    async def come_back(self) -> None:
        """Have Triton answer in another life, and wait until the registry matches what it has."""
        self.triton.lives += 1
        self.server.pid = self.triton.lives
        self.triton.live = True
        await self.parts.status.wait_until_up(clock.monotonic() + _BACK_SECONDS)

    def list_acts(self) -> list[str]:
        """Return the calls that were taken, but for the watcher's looks at Triton."""
        return [call for call in self.calls.seen if call not in _LOOKS]

    async def close(self) -> None:
        await self.parts.drain(10)
        await self.parts.stop()
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
        """Bounded: the fakes need a few turns of the loop for each call, a look at processes a
        thread.
        """
        for turn in range(2000):
            if self.state(name) is state:
                return
            await asyncio.sleep(0 if turn < _TURNS else 0.01)
        raise AssertionError(f"{name} is {self.state(name)} and not {state}")

    async def until_free(self, name: str) -> None:
        """Wait until nothing is left of the model, as of a stuck one that the watcher frees."""
        async with asyncio.timeout(_BACK_SECONDS):
            while self.control.registry.records_of(ModelId(name)):
                await self.parts.changes.wait(0.05)

    def placement(self, name: str) -> Placement:
        """What Triton has of this model when it is up."""
        return self.packages.placements.get(f"/{name}", Placement((TritonName(name),)))

    def listed(self) -> list[str]:
        return [record.id for record in self.control.registry.page(None, 100)[0]]

    def state(self, name: str) -> ModelState | None:
        record = self.control.registry.get(ModelId(name))
        return record.state if record else None

    def check(self, *names: str) -> None:
        """These models are up, by every book; and nothing else is anywhere."""
        expected = sorted(names)
        assert self.listed() == expected
        assert sorted(record.id for record in self.control.registry.records()) == expected
        assert sorted(self.packages.folders) == expected
        assert self.triton.models == {n for name in names for n in self.placement(name).names}
        ledger = self.parts.ledger
        assert sorted(ledger.models) == expected
        assert not ledger.loads
