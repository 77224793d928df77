"""The tests of one file share a folder of packages, and `running`, their adapter."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import Client, RunningAdapter, unload_all


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def adapter(running) -> Iterator[RunningAdapter]:
    """Whatever the test loaded is unloaded after it."""
    yield running
    unload_all(running)


@pytest.fixture
def client(adapter) -> Iterator[Client]:
    with closing(adapter.client()) as client:
        yield client
