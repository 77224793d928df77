"""What becomes of a load whose model is warmed up before it is answered."""

import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    LoadFailed,
    OutOfMemory,
    Overloaded,
    StubDied,
)
from tests.fakes.house import House

MIB = 2**20
WARMING = TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=5, warm_up=5)


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    house = House(1000 * MIB, WARMING)
    house.sizes |= {"m": 300 * MIB}
    await house.open()
    yield house
    await house.close()


async def test_a_model_is_warmed_up_after_it_was_loaded(house: House) -> None:
    await house.load("m")
    assert [s for s in house.steps.seen if s in {"load m", "warm_up m"}] == ["load m", "warm_up m"]


async def test_without_a_time_for_it_nothing_is_warmed_up() -> None:
    house = await House(1000 * MIB).open()
    await house.load("m")
    assert "warm_up m" not in house.steps.seen
    await house.close()


@pytest.mark.parametrize(
    "error",
    [
        InferenceFailed("no zeros please"),
        BackendTimeout("Triton did not answer in time"),
        Overloaded("its queue is full", delivered=True),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_warm_up_that_fails_is_a_warning_and_the_model_is_served(
    house: House, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    house.steps.fail("warm_up m", error)
    await house.load("m")
    assert house.listed() == ["m"]
    (failed,) = [r for r in caplog.records if r.message == "model.warm_up_failed"]
    assert failed.__dict__["reason"] == str(error)
    assert failed.levelno == logging.WARNING


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OutOfMemory("CUDA out of memory", model_id="m", pattern="torch"), OutOfMemory),
        (StubDied("Stub process 'm' is not healthy."), LoadFailed),
        (BackendUnavailable("the connection to Triton broke", delivered=True), BackendUnavailable),
    ],
    ids=lambda case: case.__name__ if isinstance(case, type) else "",
)
async def test_a_warm_up_after_which_nothing_could_be_served_fails_the_load(
    house: House, error: Exception, raised: type[Exception]
) -> None:
    house.steps.fail("warm_up m", error)
    with pytest.raises(raised):
        await house.load("m")
    house.check()


async def test_a_warm_up_that_fails_while_memory_is_low_is_out_of_memory(house: House) -> None:
    house.others = 680 * MIB  # 20 MiB are left beside the model
    house.steps.fail("warm_up m", InferenceFailed("unable to enqueue", suspected="enqueue"))
    with pytest.raises(OutOfMemory, match="memory was low"):
        await house.load("m")
    house.check()
