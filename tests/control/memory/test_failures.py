"""What is said of a failure for lack of memory."""

import pytest

from adapter.core.memory import HOST
from adapter.errors import (
    MemoryFigures,
    OutOfMemory,
)
from tests.control.memory.steps import MIB, M, declare, sample
from tests.fakes.house import House


async def test_out_of_memory_is_told_with_what_ledger_and_reader_know(house):
    await house.load("n")
    house.packages.declared["/m"] = 500 * MIB
    cause = ValueError("grpc")
    text = "DefaultCPUAllocator: not enough memory"
    failure = OutOfMemory(text, model_id="m", matched=text, pattern="torch")
    failure.__cause__ = cause
    house.steps.fail("load m", failure)
    with pytest.raises(OutOfMemory) as caught:
        await house.load("m")
    assert caught.value.figures == MemoryFigures(500 * MIB, 300 * MIB, 1000 * MIB, HOST)
    assert caught.value.matched == text
    assert caught.value.__cause__ is cause
    assert sample(house, "triton_adapter_oom_patterns_total", phase="load", pattern="torch") == 1
    house.check("n")


async def test_figures_that_the_failure_itself_named_are_kept(house):
    failure = OutOfMemory("full", figures=MemoryFigures(7, 8, 9, "GPU-1"))
    found = await house.control.memory.readings.judged(failure, M)
    assert found.figures == MemoryFigures(7, 8, 9, "GPU-1")


async def test_a_failure_that_says_zero_bytes_are_free_is_believed(house):
    failure = OutOfMemory("full", figures=MemoryFigures(free_bytes=0))
    found = await house.control.memory.readings.judged(failure, M)
    assert found.figures == MemoryFigures(None, 0, 1000 * MIB, HOST)


async def test_where_nothing_is_known_the_figures_say_so():
    house = await House().open()
    found = await house.control.memory.readings.judged(OutOfMemory("full"), M)
    assert found.figures == MemoryFigures()
    assert await house.control.memory.readings.read() is None
    await house.close()


async def test_a_model_of_before_memory_could_be_read_is_unloaded_once_it_can():
    house = House(memory_limit=1000 * MIB)
    declare(house, m=300, n=200)
    await house.open()
    await house.load("m")
    assert house.held("m") == 300 * MIB
    house.memory.limit_bytes = 2000 * MIB
    await house.unload("m")
    await house.load("n")
    house.check("n")
    await house.close()
