"""Control on fakes, with and without memory to read."""

import pytest_asyncio

from adapter.control.ports import TimeLimits
from tests.control.models.steps import MIB
from tests.control.virtual import pytest_asyncio_loop_factories, virtual_time  # noqa: F401
from tests.fakes.house import House


@pytest_asyncio.fixture
async def house():
    house = await House().open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def measured():
    """1000 MiB, and a reader that sees who takes them."""
    house = await House(limit=1000 * MIB).open()
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    yield house
    await house.close()


@pytest_asyncio.fixture
async def hasty():
    """Short time limits; callers wait one second more."""
    house = await House(limits=TimeLimits(load=0.6, unload=0, stall=0)).open()
    yield house
    await house.close()
