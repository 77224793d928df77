"""A mesh's ModelRuntime, and the control plane behind it."""

from typing import Any

import pytest

from adapter.core.memory import HOST, Device
from tests.fakes.control import ControlOnFakes
from tests.frontends.grpc.modelmesh.front import Front


@pytest.fixture
async def open_fakes():
    """Open a control on fakes with a setting or more of its own, which is closed after the test."""
    opened = []

    async def open_one(others: int = 0, device: Device = HOST, **settings: Any) -> ControlOnFakes:
        fakes = ControlOnFakes(**settings)
        fakes.others = others
        fakes.memory.device = device
        opened.append(fakes)
        return await fakes.open()

    yield open_one
    for fakes in opened:
        await fakes.close()


@pytest.fixture
async def fakes(open_fakes):
    return await open_fakes(limit=10**9)


@pytest.fixture
def front(fakes, tmp_path):
    return Front(fakes, tmp_path)
