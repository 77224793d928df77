"""The tests of one file share a folder of packages, and `running`, their adapter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import RunningAdapter, unload_all


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def adapter(running: RunningAdapter) -> Iterator[RunningAdapter]:
    """Whatever the test loaded is unloaded after it."""
    yield running
    unload_all(running)
