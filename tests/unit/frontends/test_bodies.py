"""Messages of loads over gRPC, which may bring files, count with all other callers' bytes."""

import asyncio

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.errors import SourceMissing
from adapter.frontends.access import Access
from adapter.frontends.bodies import HeldBody
from adapter.frontends.grpc.calls import LOAD, GrpcCall, GrpcCalls, MessageLimits
from adapter.frontends.grpc.v2 import GrpcRepository
from adapter.frontends.repository import Repository
from adapter.runtime.byte_budget import ByteBudget
from tests.fakes.control import ControlOnFakes


async def test_grpc_load_waits_for_room_and_releases() -> None:
    adapter, budget = await ControlOnFakes().open(), ByteBudget(100)
    repository = GrpcRepository(Repository(adapter.control, no_versions, []), budget)
    calls = GrpcCalls(adapter.metrics, Access("grpc"), MessageLimits())
    message = pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()
    with HeldBody(budget, 200) as other:
        await other.take(100)
        loading = asyncio.create_task(repository.load(GrpcCall(calls, LOAD, Context(), message)))
        await asyncio.sleep(0)
        assert (budget.held, budget.waiting) == (100 + len(message), 1)
    with pytest.raises(SourceMissing):
        await loading
    assert (budget.held, budget.waiting) == (0, 0)
    await adapter.close()


async def no_versions() -> dict[str, list[str]]:
    return {}


class Context:
    """Of a call without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()
