"""Models of load_at_start that cannot be loaded yet."""

import asyncio
import itertools

from adapter.core.model import ModelId, ModelSource
from adapter.errors import BackendError
from adapter.runtime import clock

M = ModelId("m")


async def test_a_load_that_fails_is_tried_after_twice_as_long_each_time_up_to_a_minute(house):
    tries = []
    house.control.desired.want({M: ModelSource("/m")})
    for _ in range(8):
        gate = house.steps.hold("prepare /m")
        house.steps.fail("prepare /m", BackendError("disk full"))
        await gate.reached.wait()
        tries.append(clock.monotonic())
        gate.open()
    await house.turns()
    pauses = [round(later - before) for before, later in itertools.pairwise(tries)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    await asyncio.sleep(60)
    await house.quiet()
    house.check("m")
