"""Lists, kills and awaits the processes of models below an embedded Triton, for control.

It is the Processes of adapter/control/ports.py. Processes are visited in a thread, as that takes
milliseconds on a busy machine.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from adapter.core.model import ProcessId, TritonName
from adapter.errors import BackendUnavailable
from adapter.runtime import clock
from adapter.runtime.threads import PROCESSES
from adapter.triton.server import cleanup, processes
from adapter.triton.server.processes import ModelProcesses, Stub

_log = logging.getLogger("adapter.triton")

# What a stub imports first when Triton asks it to initialize its model.
_NUMPY = b"_multiarray_umath"

_POLL_FIRST_SECONDS = 0.01
_POLL_LAST_SECONDS = 0.25

_Seen = TypeVar("_Seen")


class TritonProcesses:
    """Sees the processes of the server that runs now; none while there is no server."""

    are_seen = True

    def __init__(
        self,
        running: Callable[[], ModelProcesses | None],  # None while the server is down
        repository: Path,
        *,
        region_prefix: str,  # of the shared memory of this Triton's processes
    ) -> None:
        self._running = running
        self._repository = repository
        self._region_prefix = region_prefix

    # -- list -------------------------------------------------------------------------------

    async def models(self) -> frozenset[TritonName]:
        """Return the models with a process, loaded or not; none while the server is down."""
        if (running := self._running()) is None:
            return frozenset()
        owners = await self._see(running.owners)
        return frozenset(TritonName(name) for name in owners.values() if name is not None)

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        """Return the instances of each model whose python processes live.

        Triton does not start another process when one dies, and still calls the model ready.
        """
        if (running := self._running()) is None:
            raise BackendUnavailable("Triton is down, and its processes with it", delivered=False)
        return await self._see(self._instances, running, names)

    def _instances(
        self, running: ModelProcesses, names: Collection[TritonName]
    ) -> dict[TritonName, list[str | None]]:
        living = {name: [stub.instance for stub in running.stubs(name)] for name in names}
        return {name: found for name, found in living.items() if found or self._is_python(name)}

    def _is_python(self, name: TritonName) -> bool:
        with suppress(OSError):
            return any((self._repository / name).glob("*/model.py"))
        return False

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        """Return the processes of models that are being unloaded, and all that those started."""
        running = self._running()
        return frozenset() if running is None else await self._see(running.of_unloaded, names)

    async def abandoned(self) -> frozenset[ProcessId]:
        """Return processes started by models that have no python process any more."""
        running = self._running()
        return frozenset() if running is None else await self._see(running.abandoned)

    async def _see(self, look: Callable[..., _Seen], *args: object) -> _Seen:
        try:
            return await PROCESSES.run(look, *args)
        except OSError as error:
            raise BackendUnavailable(
                f"the processes of Triton cannot be seen: {error}", delivered=False
            ) from error

    # -- kill -------------------------------------------------------------------------------

    async def kill(self, known: Collection[ProcessId]) -> frozenset[ProcessId]:
        """Kill these processes and all that they started; return those that lived."""
        return await PROCESSES.run(processes.kill, known)

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        """Kill the python processes in which these models are initialized; return whether any were.

        While one completes the configuration of its model, or starts up, all of that model are left
        alone: Triton would never answer that load (docs/design/triton.md).
        """
        if (running := self._running()) is None:
            return False
        return await PROCESSES.run(_end_loads, running, names)

    async def free_regions(self, names: Collection[TritonName]) -> int:
        """Free the shared memory of python processes that have died; return the bytes.

        Triton keeps it until it ends (docs/design/triton.md).
        """
        if (running := self._running()) is None:
            return 0
        regions = await self._see(running.take_regions, names)
        freed_bytes = 0
        for region in filter(self._is_own_region, regions):
            try:
                freed_bytes += await PROCESSES.run(
                    cleanup.free_region, cleanup.SHARED_MEMORY / region
                )
            except OSError as error:
                _log.warning("triton.region_left", extra={"reason": str(error)})
        return freed_bytes

    def _is_own_region(self, name: str) -> bool:
        return name.startswith(self._region_prefix) and "/" not in name

    # -- wait -------------------------------------------------------------------------------

    async def wait(
        self,
        names: Collection[TritonName],
        known: Collection[ProcessId],
        limit_seconds: float,
    ) -> frozenset[ProcessId]:
        """Wait until these processes, and all others of these models, have ended.

        Return those that still live after `limit_seconds`.
        """
        end = clock.monotonic() + limit_seconds
        pause = _POLL_FIRST_SECONDS
        living = frozenset(known)
        while living := await self._living(names, living):
            if clock.monotonic() + pause > end:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, _POLL_LAST_SECONDS)
        return living

    async def _living(
        self, names: Collection[TritonName], known: frozenset[ProcessId]
    ) -> frozenset[ProcessId]:
        """Return the processes that live, and daemons that the models have started since."""
        try:
            others = await self.claim(names)
        except BackendUnavailable:
            return known
        return others | (await PROCESSES.run(processes.living, known) if known else known)


def _end_loads(running: ModelProcesses, names: Collection[TritonName]) -> bool:
    has_killed = False
    for name in names:
        with suppress(OSError):
            stubs = running.stubs(name)
            if stubs and all(map(_is_initializing, stubs)):
                processes.kill(running.of_unloaded([name]))
                has_killed = True
    return has_killed


def _is_initializing(stub: Stub) -> bool:
    return stub.instance is not None and processes.maps(stub.pid, _NUMPY)
