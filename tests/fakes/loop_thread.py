"""An event loop in a thread of its own, in which fakes serve tests that wait."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def loop_in_thread() -> Iterator[Run]:
    """Start the loop; yield what runs a coroutine in it and returns its result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
