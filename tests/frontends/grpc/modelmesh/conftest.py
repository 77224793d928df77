"""A mesh's ModelRuntime, and the control plane behind it."""

import pytest

from tests.fakes.house import House
from tests.frontends.grpc.modelmesh.front import Front


@pytest.fixture
async def house():
    made = await House(limit=10**9).open()
    yield made
    await made.close()


@pytest.fixture
def front(house, tmp_path):
    return Front(house, tmp_path)
