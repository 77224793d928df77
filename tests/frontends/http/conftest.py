"""What several tests of the http listener are given."""

from collections.abc import AsyncIterator

import pytest

from tests.frontends.http.listener import LONG, Caller, Listener, opened


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    """A listener before a Triton that answers `{}`, without time limits to speak of."""
    async with opened(limits=LONG) as listener:
        yield listener


@pytest.fixture
async def caller(listener: Listener) -> Caller:
    return await listener.connect()
