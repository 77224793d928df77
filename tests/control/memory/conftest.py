"""A thousand MiB, and a reader that sees who takes them. Time is virtual: what stands still does so
however slow the machine is.
"""

import asyncio

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.runtime import clock
from adapter.runtime.threads import Threads
from tests.control.memory.steps import room
from tests.simulation.loop import Draws, VirtualLoop
from tests.simulation.threads import as_thread


def pytest_asyncio_loop_factories(item):
    return {"virtual": lambda: VirtualLoop(Draws(0))}


@pytest_asyncio.fixture(autouse=True)
async def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, random = asyncio.get_running_loop(), Draws(0).of("thread")
    monkeypatch.setattr(clock, "monotonic", loop.time)
    monkeypatch.setattr(Threads, "submit", lambda _, done, act: as_thread(loop, random, done, act))


@pytest_asyncio.fixture
async def house():
    house = await room().open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def hasty():
    """Nobody waits for long."""
    house = await room(TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=0.4)).open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def patient():
    """An unload waits for its memory for longer than these tests do."""
    house = await room(TimeLimits(load=10, unload=10, stall=5, recovery=60, alone=5)).open()
    yield house
    await house.close()
