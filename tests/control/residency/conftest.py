"""Models of a store before a memory that has room for two of them."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.residence import Residence


@pytest.fixture
async def residence() -> AsyncIterator[Residence]:
    residence = await Residence(2).open("a", "b", "c")
    yield residence
    await residence.close()
