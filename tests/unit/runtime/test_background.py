"""Tasks that must not end."""

import asyncio
import logging

import pytest

from adapter.runtime import background


class Steps:
    """Fails where `errors` has something, and says when it was called so often."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0
        self.awaited = asyncio.Condition()

    async def __call__(self):
        async with self.awaited:
            self.calls += 1
            self.awaited.notify_all()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error

    async def called(self, times):
        async with asyncio.timeout(5), self.awaited:
            await self.awaited.wait_for(lambda: self.calls >= times)


async def test_step_that_fails_is_logged_and_next_follows(caplog):
    step = Steps(ValueError("odd"))
    task = background.begin("looks", background.forever(step, seconds=0))
    await step.called(3)
    background.end(task)
    (failed,) = [r for r in caplog.records if r.message == "task.failed"]
    assert (failed.task, failed.exc_info[0]) == ("looks", ValueError)


async def test_same_failure_again_and_again_is_one_line(caplog):
    step = Steps(*[OSError(24, "Too many open files")] * 50, ValueError("another"))
    task = background.begin("looks", background.forever(step, seconds=0))
    await step.called(52)
    background.end(task)
    assert len([r for r in caplog.records if r.message == "task.failed"]) == 2


async def test_one_step_does_not_hold_up_the_others():
    bad, good = Steps(*[ValueError("odd")] * 9), Steps()
    task = background.begin("looks", background.forever(bad, good, seconds=0))
    await good.called(5)
    background.end(task)


async def test_unexpected_end_is_reported_with_reason(caplog):
    task = background.begin("looks", background.forever(Steps(), seconds=9))
    assert background.find_ended_task() is None
    task.cancel()
    await asyncio.wait([task])
    try:
        assert background.find_ended_task() == "the task looks has ended: cancelled"
        assert [(r.message, r.levelno) for r in caplog.records] == [
            ("task.ended", logging.CRITICAL)
        ]
    finally:
        background.end(task)
    assert background.find_ended_task() is None


async def test_ended_task_is_no_fault(caplog):
    task = background.begin("looks", background.forever(Steps(), seconds=9))
    background.end(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (background.find_ended_task(), caplog.records) == (None, [])
