"""One adapter for a file of tests, with the memory that NVML shows."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import Client, RunningAdapter, embedded_adapter, unload_all


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[RunningAdapter]:
    flags = ("--memory-source=nvml", "--memory-reserve=0", f"--model-roots={root}")
    with embedded_adapter(*flags, "--triton-args=--disable-auto-complete-config") as adapter:
        yield adapter


@pytest.fixture
def adapter(running: RunningAdapter) -> Iterator[RunningAdapter]:
    yield running
    unload_all(running)


@pytest.fixture
def client(adapter: RunningAdapter) -> Iterator[Client]:
    with closing(adapter.client(300)) as client:
        yield client
