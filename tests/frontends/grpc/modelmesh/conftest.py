"""A mesh's ModelRuntime, and the control plane behind it."""

from typing import Any

import pytest

from adapter.core.memory import HOST, Device
from tests.fakes.house import House
from tests.frontends.grpc.modelmesh.front import Front


@pytest.fixture
async def open_house():
    """Open a house with a setting or more of its own, which is closed after the test."""
    houses = []

    async def open_one(others: int = 0, device: Device = HOST, **settings: Any) -> House:
        house = House(**settings)
        house.others = others
        house.memory.device = device
        houses.append(house)
        return await house.open()

    yield open_one
    for house in houses:
        await house.close()


@pytest.fixture
async def house(open_house):
    return await open_house(limit=10**9)


@pytest.fixture
def front(house, tmp_path):
    return Front(house, tmp_path)
