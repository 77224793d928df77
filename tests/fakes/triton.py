"""Triton's control plane in this process."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from adapter.core.model import ModelId, ProcessId, TritonName
from adapter.core.triton_input import Unclassified
from adapter.errors import BackendUnavailable
from adapter.runtime import clock
from adapter.runtime.threads import PROCESSES
from tests.fakes.calls import Calls

_POLL_SECONDS = 0.01


class FakeControlTriton:
    """`models` is what it has in memory. `along[ensemble]` are the names that come and go with it.
    `version` is what it reports.
    """

    def __init__(self, calls: Calls) -> None:
        self.live, self.lives = True, 1
        self.version = "2.51.0"
        self.models: set[str] = set()
        self.along: dict[str, set[str]] = {}
        self._calls = calls

    async def gpu_bytes(self, name: TritonName) -> dict[int, int]:
        await self._calls.take("gpu_bytes", name)
        return {}

    async def unclassified(self, _: TritonName) -> Unclassified:
        return Unclassified(frozenset(), frozenset())

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        """It goes on when its caller cancels."""
        await asyncio.shield(asyncio.ensure_future(self._load(name)))

    async def _load(self, name: TritonName) -> None:
        await self._calls.take("load", name)
        self.models |= self._with_steps(name)

    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        await self._calls.take("warm_up", name)
        return None

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        await self._calls.take("unload", name)
        self.models -= self._with_steps(name)

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        await self._calls.take("wait_gone", " ".join(sorted(names)))
        return self.models & set(names)

    async def being_loaded(self) -> set[str]:
        await self._calls.take("being_loaded")
        return set()

    async def ready(self) -> set[str]:
        found = set(self.models)  # an answer may be old by the time it arrives
        await self._calls.take("ready")
        return found

    async def present(self) -> set[str]:
        await self._calls.take("present")
        return set(self.models)

    def _with_steps(self, name: str) -> set[str]:
        return {name, *self.along.get(name, ())}


class FakeServer:
    """The server and the processes below it: Server and Processes of control.

    `processes` are those of each model, loaded or not, and `stubs["m"]` the names of the instances
    that run. It knows of no process unless told.
    """

    are_seen = True
    exit_reason = "was killed by SIGKILL"

    def __init__(self) -> None:
        self.pid: int | None = 1
        self.processes: dict[TritonName, set[ProcessId]] = {}
        self.stubs: dict[str, set[str]] = {}

    async def restart(self, reason: str) -> None:
        """Do nothing: no test lets it hang."""

    async def models(self) -> frozenset[TritonName]:
        if self.pid is None:
            return frozenset()
        return frozenset(name for name, processes in self.processes.items() if processes)

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        await PROCESSES.run(bool)  # a look takes a thread, and some time
        if self.pid is None:
            raise BackendUnavailable("there is no tritonserver", delivered=False)
        return {name: [*self.stubs[name]] for name in names if name in self.stubs}

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        if self.pid is None:
            return frozenset()
        return frozenset().union(*(self.processes.get(name, ()) for name in names))

    async def abandoned(self) -> frozenset[ProcessId]:
        return frozenset()

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        killed = frozenset().union(*self.processes.values()) & frozenset(processes)
        for name in self.processes:
            self.processes[name] -= killed
            if not self.processes[name] and name in self.stubs:
                self.stubs[name].clear()
        return killed

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        return False

    async def free_regions(self, names: Collection[TritonName]) -> int:
        return 0

    async def wait(
        self,
        names: Collection[TritonName],
        processes: Collection[ProcessId],
        limit_seconds: float,
    ) -> frozenset[ProcessId]:
        end = clock.monotonic() + limit_seconds
        if self.pid is None:
            return frozenset()
        while living := await self._left(names, processes):
            if clock.monotonic() > end:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return living

    async def _left(
        self, names: Collection[TritonName], processes: Collection[ProcessId]
    ) -> frozenset[ProcessId]:
        everything = frozenset().union(*self.processes.values())
        return await self.claim(names) | (everything & frozenset(processes))
