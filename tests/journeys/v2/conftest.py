"""Callers of adapters: with an embedded Triton, and one that uploads to another."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.v2.calls import Repository, uploading_adapter
from tests.journeys.v2.kept import kept
from tests.processes import triton_client
from tests.running import Client, RunningAdapter, unload_all

__all__ = ["kept"]  # a fixture


@pytest.fixture(params=["grpc", "grpc_data"])
def listener(request: pytest.FixtureRequest) -> str:
    """Inferences are the same at both listeners of gRPC."""
    return request.param


@pytest.fixture
def repository(client: Client) -> Repository:
    return Repository(client)


@pytest.fixture(scope="module")
def shared_uploading(triton: RunningAdapter, model_root: Path) -> Iterator[RunningAdapter]:
    adapter = uploading_adapter(triton, model_root)
    yield adapter
    assert adapter.stop() == 0, adapter.errors
    assert not adapter.repository.exists(), "the private folder is still there"


@pytest.fixture
def uploading(shared_uploading: RunningAdapter) -> Iterator[Repository]:
    """Calls at an adapter that uploads; what the test loaded is unloaded after it."""
    with shared_uploading.client() as client:
        yield Repository(client)
    unload_all(shared_uploading)


@pytest.fixture
def raw_triton(triton: RunningAdapter) -> Iterator[Client]:
    """The Triton behind the adapter that uploads, asked directly."""
    with triton_client(triton) as client:
        yield client
