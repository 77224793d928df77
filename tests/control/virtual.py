"""Virtual time, for the tests of a folder whose conftest imports both names: what stands still does
so however slow the machine is, and nobody waits.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import pytest_asyncio

from adapter.runtime import clock
from adapter.runtime.threads import Threads
from tests.simulation.loop import Draws, VirtualLoop
from tests.simulation.threads import as_thread


def pytest_asyncio_loop_factories(item):
    return {"virtual": lambda: VirtualLoop(Draws(0))}


@pytest_asyncio.fixture(autouse=True)
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, random = asyncio.get_running_loop(), Draws(0).of("thread")

    def submit(_: Threads, done: Future[Any], act: Callable[[], Any]) -> None:
        as_thread(loop, random, done, act, may_wait=False)

    monkeypatch.setattr(clock, "monotonic", loop.time)
    monkeypatch.setattr(Threads, "submit", submit)
