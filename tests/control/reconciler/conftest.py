"""Control on fakes that forgets, or loads again, what Triton has lost."""

import pytest_asyncio

from tests.control.reconciler.steps import MIB, QUICK
from tests.control.virtual import pytest_asyncio_loop_factories, virtual_time  # noqa: F401
from tests.fakes.house import House


@pytest_asyncio.fixture
async def house():
    house = await House(1000 * MIB, QUICK).open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def reloading():
    """What Triton has lost is loaded again."""
    house = await House(1000 * MIB, QUICK, loads_again=True).open()
    yield house
    await house.close()
