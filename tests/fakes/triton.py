"""Triton's control plane in this process."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from adapter.core.model import ModelId, ProcessId, TritonName
from adapter.core.triton_input import Unclassified
from adapter.errors import BackendUnavailable, OutOfMemory
from adapter.runtime import clock
from adapter.runtime.threads import PROCESSES
from tests.fakes.calls import Calls

_POLL_SECONDS = 0.01


class FakeControlTriton:
    """`models` is what it has in memory, `loading` what it never ends loading. The unload of a
    name in `stuck` never ends, as with a python process that died, until the same name is loaded
    again. `along[ensemble]` are the names that come and go with it. The load of a name in `deadly`
    ends it, and sets `ended`. A load for which `has_room` returns False runs out of memory.
    `not_warmed[name]` is why that model is not warmed up. `version` is what it reports, `reports`
    what it says that models take of each GPU.
    """

    def __init__(self, calls: Calls) -> None:
        self.live, self.lives = True, 1
        self.version = "2.51.0"
        self.models: set[str] = set()
        self.stuck: set[str] = set()
        self.loading: set[str] = set()
        self.along: dict[str, set[str]] = {}
        self.deadly: set[str] = set()
        self.has_room: Callable[[str], bool] = lambda _: True
        self.not_warmed: dict[str, str] = {}
        self.ended = asyncio.Event()
        self.server: FakeServer | None = None
        self.waited: list[float] = []
        self.reports: dict[str, dict[int, int]] = {}
        self._calls = calls

    async def gpu_bytes(self, name: TritonName) -> dict[int, int]:
        await self._calls.take("gpu_bytes", name)
        return self.reports.get(name, {})

    async def unclassified(self, _: TritonName) -> Unclassified:
        return Unclassified(frozenset(), frozenset())

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        """It goes on when its caller cancels."""
        await asyncio.shield(asyncio.ensure_future(self._load(name)))

    async def _load(self, name: TritonName) -> None:
        await self._calls.take("load", name)
        if name in self.deadly:
            self.end()
            raise BackendUnavailable("the connection to Triton broke", delivered=True)
        if not self.has_room(name):
            raise OutOfMemory("CUDA out of memory")
        self.models |= self._with_steps(name)
        self.stuck.discard(name)

    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        await self._calls.take("warm_up", name)
        return self.not_warmed.get(name)

    def end(self) -> None:
        self.models.clear()
        if self.server is not None:
            self.server.pid = None
        self.ended.set()

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        await self._calls.take("unload", name)
        self.models -= self._with_steps(name) - self.stuck

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        await self._calls.take("wait_gone", " ".join(sorted(names)))
        self.waited.append(seconds)
        return self.models & set(names)

    async def being_loaded(self) -> set[str]:
        await self._calls.take("being_loaded")
        return set(self.loading)

    async def ready(self) -> set[str]:
        found = set(self.models)  # an answer may be old by the time it arrives
        await self._calls.take("ready")
        return found

    async def present(self) -> set[str]:
        await self._calls.take("present")
        return self.models | self.loading

    def _with_steps(self, name: str) -> set[str]:
        return {name, *self.along.get(name, ())}


class FakeServer:
    """The server and the processes below it: Server and Processes of control.

    It knows of no process unless told: `live["m"] = False`, or of one that has only been seen when
    it is in `dies`. `endable` are those whose load ends with their processes. `stubs["m"]` are the
    names of the instances that run. `ended` are the models whose processes were killed. `processes`
    are those of each model, loaded or not; those in `unkillable` stay when they are killed;
    `orphans` are those whose model has no python process. `restarts`
    are the reasons given, `looks` counts how often a process was looked for.
    """

    are_seen = True

    def __init__(self) -> None:
        self.pid: int | None = 1
        self.exit_reason = "was killed by SIGKILL"
        self.live: dict[str, bool] = {}
        self.dies: set[str] = set()
        self.processes: dict[TritonName, set[ProcessId]] = {}
        self.unkillable: set[ProcessId] = set()
        self.orphans: set[ProcessId] = set()
        self.killed: list[ProcessId] = []
        self.stubs: dict[str, set[str]] = {}
        self.ended: list[str] = []
        self.endable: set[str] = set()
        self.restarts: list[str] = []
        self.looks = 0
        self.restarted = asyncio.Event()

    async def restart(self, reason: str) -> None:
        self.restarts.append(reason)
        self.restarted.set()

    async def models(self) -> frozenset[TritonName]:
        if self.pid is None:
            return frozenset()
        return frozenset(name for name, processes in self.processes.items() if processes)

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        self.looks += 1
        await PROCESSES.run(bool)  # a look takes a thread, and some time
        if self.pid is None:
            raise BackendUnavailable("there is no tritonserver", delivered=False)
        found = {name: instances for name in names if (instances := self._living(name)) is not None}
        self.live |= dict.fromkeys(self.dies.intersection(names), False)
        return found

    def _living(self, name: TritonName) -> list[str | None] | None:
        if name in self.stubs:
            return [*self.stubs[name]]
        alive = self.live.get(name)
        return None if alive is None else [None] * alive

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        if self.pid is None:
            return frozenset()
        return frozenset().union(*(self.processes.get(name, ()) for name in names))

    async def abandoned(self) -> frozenset[ProcessId]:
        return frozenset(self.orphans) & frozenset().union(*self.processes.values())

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        killed = frozenset().union(*self.processes.values()) & frozenset(processes)
        self.killed += killed
        for name in self.processes:
            self.processes[name] -= killed - self.unkillable
            if not self.processes[name] and name in self.stubs:
                self.stubs[name].clear()
        return killed

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        """The load of a name in `endable` fails, as it does when its processes are killed."""
        ended = [name for name in names if name in self.endable and name not in self.ended]
        self.ended += ended
        return bool(ended)

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
