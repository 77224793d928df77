"""A coroutine that is stepped by hand waits for its connection alone, and delegates the rest."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from adapter.frontends.http.stepping import Stepper, wait_for_news


class Driven:
    """A stepper with what became of its coroutine."""

    def __init__(self, work: Callable[[Stepper], Awaitable[None]]) -> None:
        self.errors: list[BaseException] = []
        self.seen: list[object] = []
        self.stepper = Stepper(self._run(work), self.errors.append)
        self.has_ended = False

    async def _run(self, work: Callable[[Stepper], Awaitable[None]]) -> None:
        try:
            await work(self.stepper)
        finally:
            self.has_ended = True


@pytest.mark.parametrize("seconds", [1, 0], ids=["a future", "a bare yield"])
async def test_future_awaited_by_hand_raises_runtime_error(seconds):
    async def work(_: Stepper) -> None:
        await asyncio.sleep(seconds)

    driven = Driven(work)
    driven.stepper.step()
    (error,) = driven.errors
    assert isinstance(error, RuntimeError)
    assert "use delegate" in str(error)
    assert driven.has_ended


async def test_coroutine_goes_on_after_the_refused_future():
    """The error is raised where the future is awaited, so that it can be handled there."""
    seen: list[str] = []

    async def work(_: Stepper) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except RuntimeError:
            seen.append("refused")
        await wait_for_news()
        seen.append("stepped")

    driven = Driven(work)
    driven.stepper.step()
    assert seen == ["refused"]
    driven.stepper.step()
    assert seen == ["refused", "stepped"]
    assert driven.errors == []


async def test_news_within_a_step_is_not_lost():
    count = 0

    async def work(stepper: Stepper) -> None:
        nonlocal count
        for _ in range(3):
            stepper.step()
            await wait_for_news()
            count += 1

    driven = Driven(work)
    driven.stepper.step()
    assert (count, driven.has_ended, driven.errors) == (3, True, [])
