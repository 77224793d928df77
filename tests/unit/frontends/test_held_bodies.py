"""Bodies that are held: while models are fetched, and those of loads."""

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.errors import SourceMissing, TooManyWaiting
from adapter.frontends.bodies import HeldBodies
from adapter.frontends.grpc.v2 import GrpcRepository
from adapter.frontends.model_repository import Repository
from tests.fakes.house import House


def test_bodies_are_held_up_to_the_limit_and_no_further() -> None:
    bodies = HeldBodies(limit=10)
    with bodies.hold(6) as take:
        take(6)
        with bodies.hold(4) as take_more:
            take_more(4)
            with pytest.raises(TooManyWaiting, match="10 bytes of bodies are held"):
                bodies.hold(1).__enter__()
            with pytest.raises(TooManyWaiting, match="10 bytes of bodies are held"):
                take_more(1)
        assert bodies.held == 6
    assert bodies.held == 0


def test_what_is_announced_and_does_not_come_keeps_nobody_out() -> None:
    bodies = HeldBodies(limit=10)
    with bodies.hold(10) as take, bodies.hold(10) as take_more:
        take(1)
        take_more(9)
        assert bodies.held == 10


def test_256_MiB_are_held_in_all() -> None:  # noqa: N802 - the unit
    assert HeldBodies().limit == 256 * 2**20


async def test_loads_over_grpc_hold_theirs_within_the_bound_as_well() -> None:
    house, bodies = await House().open(), HeldBodies(limit=100)
    calls = GrpcRepository(Repository(house.control, no_versions, []), bodies)
    request = pb.RepositoryModelLoadRequest(model_name="m")
    with bodies.hold(0) as take:
        take(90)
        with pytest.raises(TooManyWaiting):
            await calls.load(request.SerializeToString() * 4, Context())
        with pytest.raises(SourceMissing):
            await calls.load(request.SerializeToString(), Context())
    assert bodies.held == 0
    await house.close()


async def no_versions() -> dict[str, list[str]]:
    return {}


class Context:
    """Of a call without metadata."""

    def invocation_metadata(self) -> tuple[()]:
        return ()
