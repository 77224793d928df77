"""A TritonControl on a real Triton."""

import pytest_asyncio

from tests.contract.shelf import Shelf, made


@pytest_asyncio.fixture
async def shelf(triton):
    control = made(triton.grpc_address)
    shelf = Shelf(control, triton.repository, triton.http_address)
    yield shelf
    await shelf.clear()
    await control.close()


# -- what the fake of the service tests has in common with the real one -------------------------
