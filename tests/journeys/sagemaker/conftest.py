"""Shared here. `echo` stays loaded for a whole module: a load takes 1.5 s."""

from collections.abc import Iterator

import pytest

from tests.processes import triton_client
from tests.running import EXAMPLES, Client, RunningAdapter, unload_all


@pytest.fixture(scope="module")
def served(shared_adapter) -> Iterator[RunningAdapter]:
    """The shared adapter with `echo` loaded. A module takes either this or `adapter`."""
    with shared_adapter.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
        yield shared_adapter
        unload_all(shared_adapter)


@pytest.fixture
def caller(served) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def raw_triton(served) -> Iterator[Client]:
    """The Triton behind the adapter, asked directly."""
    with triton_client(served) as client:
        yield client
