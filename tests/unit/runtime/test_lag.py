"""How late the event loop is."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from adapter.runtime import background


async def observed(count: int, work: Coroutine[Any, Any, None]) -> list[float]:
    """So many delays, while `work` goes on."""
    delays = list[float]()
    done = asyncio.Event()

    def observe(seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == count:
            done.set()

    measuring, working = (
        asyncio.create_task(background.measure_lag(observe)),
        asyncio.create_task(work),
    )
    await done.wait()
    measuring.cancel()
    with suppress(asyncio.CancelledError):
        await measuring
    await working
    return delays


async def test_blocked_event_loop_shows_as_delay():
    async def hold_up() -> None:
        await asyncio.sleep(0)  # the timer is set
        time.sleep(0.5)  # noqa: ASYNC251 - on purpose

    [delay] = await observed(1, hold_up())
    assert delay > 0.3
