"""A double of a lease does what a real one does: both are asked.

Doubles of Triton and its processes are held to real ones in test_triton.py and test_processes.py.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from adapter.control.door import Lease
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.errors import InferenceFailed
from tests.fakes.control import ControlOnFakes
from tests.fakes.lease import FakeLease

NAME, ID = TritonName("m"), ModelId("the model")
both = pytest.mark.parametrize("kind", ["fake", "real"])


@pytest_asyncio.fixture
async def lease(kind: str) -> AsyncIterator[Lease]:
    if kind == "fake":
        yield FakeLease(ModelRecord(ID, NAME, ModelSource("/m"), LoadedFor.PLATFORM))
        return
    fakes = await ControlOnFakes().open()
    await fakes.load("m")
    yield fakes.control.lease(ModelId("m"))
    await fakes.close()


@both
async def test_a_lease_counts_from_begin_to_end(lease: Lease) -> None:
    usage = lease.record.usage
    lease.begin()
    assert (lease.is_held(), lease.is_lost(), usage.in_flight) == (True, False, 1)
    lease.abandon()
    assert (lease.is_held(), usage.in_flight, usage.abandoned) == (False, 1, 1)
    assert lease.end() is None
    assert (usage.in_flight, usage.abandoned) == (0, 0)
    assert lease.end() is None
    assert usage.in_flight == 0


@both
async def test_a_lease_returns_the_error_to_send(lease: Lease) -> None:
    error = InferenceFailed("no")
    with pytest.raises(InferenceFailed), lease:
        raise error
    assert lease.record.usage.in_flight == 0
    assert lease.end(error) is error
    assert lease.note_failure(error) is error
    assert await lease.judge(error) is error
