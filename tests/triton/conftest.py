"""Sources of memory, for the tests of which one is believed."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.memory_place import Place


@pytest_asyncio.fixture
async def place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Place]:
    caplog.set_level(logging.INFO)
    place = Place(tmp_path)
    await place.endpoint.start()
    yield place
    await place.close()
