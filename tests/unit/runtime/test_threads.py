"""Threads for what may take long."""

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from adapter.errors import BackendUnavailable
from adapter.runtime.threads import Threads


async def test_work_beyond_the_limit_waits():
    threads, go = Threads("test", 3), threading.Event()
    begun, all_in = [], threading.Barrier(4)

    def work(number):
        begun.append(number)
        if number < 3:
            all_in.wait(5)
            go.wait(5)
        return threading.current_thread().name

    tasks = [asyncio.create_task(threads.run(work, number)) for number in range(9)]
    await asyncio.to_thread(all_in.wait, 5)
    assert sorted(begun) == [0, 1, 2]
    go.set()
    names = set(await asyncio.gather(*tasks))
    assert names <= {"test-0", "test-1", "test-2"}
    assert begun[3:] == [3, 4, 5, 6, 7, 8]


async def test_nobody_waits_beside_unstarted_threads():
    """Whatever the threads are doing as work comes in; each round begins with other threads."""
    for _ in range(200):
        threads, all_in = Threads("test", 4), threading.Barrier(4)
        tasks = [asyncio.create_task(threads.run(all_in.wait, 10)) for _ in range(4)]
        assert sorted(await asyncio.gather(*tasks)) == [0, 1, 2, 3]


async def test_cancelled_call_waits_only_for_begun_work():
    threads, begun, go = Threads("test", 1), threading.Event(), threading.Event()
    ran = []

    def work(number):
        begun.set()
        go.wait(5)
        ran.append(number)

    first, second = (asyncio.create_task(threads.run_to_end(work, number)) for number in (1, 2))
    await asyncio.to_thread(begun.wait, 5)
    for task in (first, second):
        task.cancel()
    await asyncio.wait({second})
    assert second.cancelled()
    assert not first.done()
    go.set()
    await asyncio.wait({first})
    assert first.cancelled()
    assert await threads.run(lambda: ran) == [1]


async def test_second_cancellation_waits_for_the_work_too():
    """A cancelled caller removes what was written, so nothing may be written after that."""
    threads = Threads("test", 1)
    go = threading.Event()
    begun = threading.Event()

    def work():
        begun.set()
        go.wait(5)

    task = asyncio.create_task(threads.run_to_end(work))
    await asyncio.to_thread(begun.wait, 5)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_thread_that_is_free_is_used_again():
    threads = Threads("test", 8)
    names = {await threads.run(lambda: threading.current_thread().name) for _ in range(20)}
    assert len(names) <= 2


async def test_caller_may_return_when_no_thread_starts(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    threads = Threads("test", 2)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendUnavailable, match="can't start new thread") as refused:
            await threads.run(divmod, 7, 2)
    assert not refused.value.delivered
    assert await threads.run(divmod, 7, 2) == (3, 1)


async def test_unbegun_work_of_departed_is_dropped():
    threads, go, done = Threads("test", 1), threading.Event(), []
    first = asyncio.create_task(threads.run(go.wait, 5))
    second = asyncio.create_task(threads.run(done.append, "second"))
    await asyncio.sleep(0)
    second.cancel()
    third = asyncio.create_task(threads.run(done.append, "third"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, third)
    assert done == ["third"]


async def test_context_variables_go_along():
    word = contextvars.ContextVar("word")
    word.set("span")
    assert await Threads("test", 1).run(word.get) == "span"


def test_thread_that_never_ends_does_not_keep_process():
    code = (
        "import asyncio, threading\n"
        "from adapter.runtime.threads import Threads\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    def hang():\n"
        "        begun.set(); threading.Event().wait()\n"
        "    task = asyncio.create_task(Threads('t', 1).run(hang))\n"
        "    while not begun.is_set(): await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
