"""A TritonControl on a real Triton."""

import pytest_asyncio

from tests.contract.controlled import ControlledTriton, made


@pytest_asyncio.fixture
async def controlled(triton):
    control = made(triton.grpc_address)
    controlled = ControlledTriton(control, triton.repository, triton.http_address)
    yield controlled
    await controlled.clear()
    await control.close()
