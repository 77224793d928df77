"""A thousand MiB, and a reader that sees who takes them."""

import pytest_asyncio

from adapter.control.ports import TimeLimits
from tests.control.memory.steps import room
from tests.control.virtual import pytest_asyncio_loop_factories, virtual_time  # noqa: F401


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
