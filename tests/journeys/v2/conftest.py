"""Callers of adapters: with an embedded Triton, and one that uploads to another."""

from collections.abc import Iterator

import pytest

from tests.journeys.v2.calls import Repository, uploading_adapter
from tests.journeys.v2.kept import kept
from tests.processes import triton_client
from tests.running import Client, RunningAdapter, unload_all

__all__ = ["kept"]  # a fixture


@pytest.fixture(params=["grpc", "grpc_data"])
def listener(request) -> str:
    """Inferences are the same at both listeners of gRPC."""
    return request.param


@pytest.fixture
def repository(client) -> Repository:
    return Repository(client)


@pytest.fixture(scope="module")
def shared_uploading(triton, model_root) -> Iterator[RunningAdapter]:
    adapter = uploading_adapter(triton, model_root)
    yield adapter
    assert adapter.stop() == 0, adapter.errors
    assert not adapter.repository.exists(), "the private folder is still there"


@pytest.fixture
def uploading(shared_uploading) -> Iterator[Repository]:
    """Calls at an adapter that uploads; what the test loaded is unloaded after it."""
    with shared_uploading.client() as client:
        yield Repository(client)
    unload_all(shared_uploading)


@pytest.fixture
def raw_triton(triton) -> Iterator[Client]:
    """The Triton behind the adapter that uploads, asked directly."""
    with triton_client(triton) as client:
        yield client
