"""The processes below an embedded Triton: a real one and the double of the control tests are asked
the same.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from adapter.control.ports import NoProcesses, Processes
from adapter.core.model import ProcessId, TritonName
from adapter.errors import BackendUnavailable
from tests.contract.test_embedded import load, running
from tests.fakes.triton import FakeServer
from tests.trees import CONFIG, write_python_model

M, IDLE, UNKNOWN = TritonName("m"), TritonName("idle"), TritonName("unknown")
SECONDS = 30.0

either = pytest.mark.parametrize("kind", ["fake", pytest.param("real", marks=pytest.mark.triton)])


@dataclass(frozen=True)
class World:
    """A python model `m` that is loaded, and `idle`, which is not."""

    processes: Processes
    end_server: Callable[[], Awaitable[None]]


@asynccontextmanager
async def world_of(kind: str) -> AsyncIterator[World]:
    if kind == "fake":
        server = FakeServer()
        server.processes = {M: {ProcessId(11, 1)}}
        server.stubs = {M: {"m_0_0"}, IDLE: set()}

        async def end() -> None:
            server.pid = None

        yield World(server, end)
        return
    async with running() as triton:
        for name in (M, IDLE):
            config = CONFIG + "instance_group [{ kind: KIND_CPU }]\n"
            write_python_model(triton.repository / name, config=config)
        await load(triton, M)

        async def kill() -> None:
            await triton.restart("a test ends it")
            async with asyncio.timeout(SECONDS):
                while triton.pid is not None:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)

        yield World(triton.processes, kill)


@either
async def test_processes_are_listed_killed_and_waited_for(kind: str) -> None:
    async with world_of(kind) as world:
        processes = world.processes
        assert processes.are_seen
        assert await processes.models() == {M}
        too_long = TritonName("x" * 300)  # for the name of a file
        found = await processes.instances([M, IDLE, UNKNOWN, too_long])
        assert found == {M: ["m_0_0"], IDLE: []}
        assert await processes.abandoned() == frozenset()
        assert not await processes.end_loads([IDLE, UNKNOWN])
        assert await processes.claim([UNKNOWN]) == frozenset()

        claimed = await processes.claim([M])
        assert len(claimed) == 1
        assert await processes.wait([M], claimed, 0.05) == claimed
        assert await processes.kill(claimed) == claimed
        assert await processes.wait([M], claimed, SECONDS) == frozenset()
        assert await processes.kill(claimed) == frozenset()
        assert await processes.models() == frozenset()
        assert await processes.instances([M]) == {M: []}


@either
async def test_an_ended_server_has_no_processes(kind: str) -> None:
    async with world_of(kind) as world:
        claimed = await world.processes.claim([M])
        await world.end_server()
        with pytest.raises(BackendUnavailable):
            await world.processes.instances([M])
        assert await world.processes.models() == frozenset()
        assert await world.processes.claim([M]) == frozenset()
        assert not await world.processes.end_loads([M])
        assert await world.processes.wait([M], claimed, SECONDS) == frozenset()


async def test_beside_an_external_triton_no_process_is_seen() -> None:
    processes: Processes = NoProcesses()
    assert not processes.are_seen
    assert await processes.models() == await processes.claim([M]) == frozenset()
    assert await processes.instances([M]) == {}
    assert await processes.wait([M], (), SECONDS) == frozenset()
