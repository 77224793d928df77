"""`python -m adapter`, with a probe of its event loop: `python -m tests.nightly.probed serve ...`.

A task asks for a turn each millisecond. What it waits beyond that, the loop was kept from its work:
by callbacks, by threads that held Python's lock, or because the machine had no CPU for one of them.
The last is the machine's, and the kernel tells how long it was: it is taken off, of all threads,
since any may have held the lock meanwhile.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from adapter.cli import serve
from adapter.cli.main import main
from adapter.settings import Loaded

FIGURES = "LOOP_PROBE"  # names the file that gets, a line each, when and for how long: seconds
_TURN_SECONDS = 0.001
_TOLD_SECONDS = 0.002


def cpu_waits() -> float:
    """Seconds that the threads of Python were ready to run and had no CPU, ever."""
    found = 0.0
    for thread in threading.enumerate():
        with suppress(OSError):  # it has ended
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found += int(stat.read_bytes().split()[1]) / 1e9
    return found


async def probe(path: Path) -> None:
    with path.open("w", buffering=1) as file:
        while True:
            waits, asked = cpu_waits(), time.monotonic()
            await asyncio.sleep(_TURN_SECONDS)
            late = time.monotonic() - asked - _TURN_SECONDS
            if late > _TOLD_SECONDS and (held := late - (cpu_waits() - waits)) > _TOLD_SECONDS:
                file.write(f"{asked} {held}\n")


def with_probe(run: Callable[..., int], loaded: Loaded, _: object) -> int:
    tasks = []
    path = Path(os.environ[FIGURES])
    return run(loaded, lambda _: tasks.append(asyncio.create_task(probe(path))))


if __name__ == "__main__":
    serve.run = partial(with_probe, serve.run)
    sys.exit(main(sys.argv[1:], os.environ))
