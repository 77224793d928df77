"""A coroutine that is stepped by hand waits for its connection alone, and delegates the rest."""

import asyncio
from collections.abc import Awaitable, Callable

from adapter.frontends.http.stepping import Stepper, wait_for_news
from tests.frontends.http.listener import until


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


async def test_future_awaited_by_hand_raises_runtime_error():
    async def work(_: Stepper) -> None:
        await asyncio.sleep(1)

    driven = Driven(work)
    driven.stepper.step()
    (error,) = driven.errors
    assert isinstance(error, RuntimeError)
    assert "use delegate" in str(error)
    assert driven.has_ended


async def test_bare_yield_of_asyncio_raises_runtime_error():
    async def work(_: Stepper) -> None:
        await asyncio.sleep(0)

    driven = Driven(work)
    driven.stepper.step()
    assert [type(error) for error in driven.errors] == [RuntimeError]


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


async def test_step_after_the_end_does_nothing():
    async def work(_: Stepper) -> None:
        return

    driven = Driven(work)
    driven.stepper.step()
    driven.stepper.step()
    driven.stepper.cancel()
    assert driven.errors == []


async def test_delegate_returns_the_result_of_a_task():
    results: list[int] = []

    async def slow() -> int:
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        assert asyncio.current_task() is not None
        return 7

    async def work(stepper: Stepper) -> None:
        results.append(await stepper.delegate(slow()))

    driven = Driven(work)
    driven.stepper.step()
    await until(lambda: driven.has_ended)
    assert (results, driven.errors) == ([7], [])


async def test_delegate_raises_the_error_of_its_task():
    async def failing() -> None:
        raise KeyError("x")

    async def work(stepper: Stepper) -> None:
        await stepper.delegate(failing())

    driven = Driven(work)
    driven.stepper.step()
    await until(lambda: driven.has_ended)
    assert [type(error) for error in driven.errors] == [KeyError]


async def test_cancel_ends_the_coroutine_and_its_task():
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("task")

    async def work(stepper: Stepper) -> None:
        try:
            await stepper.delegate(endless())
        finally:
            ended.append("coroutine")

    driven = Driven(work)
    driven.stepper.step()
    await asyncio.sleep(0)
    driven.stepper.cancel()
    await until(lambda: len(ended) == 2)
    assert ended == ["coroutine", "task"]
    assert [type(error) for error in driven.errors] == [asyncio.CancelledError]
