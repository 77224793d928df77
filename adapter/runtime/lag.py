"""Measures how late the event loop comes to what is due.

A loop that is short of CPU, or held up by one long callback, shows it nowhere else: the time for
which a request is not looked at counts as Triton's or the caller's.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from adapter.runtime import clock

_SECONDS = 0.1


async def measure(observe: Callable[[float], object]) -> NoReturn:
    """Observe the delay of a timer, in seconds, ten times a second."""
    while True:
        due = clock.monotonic() + _SECONDS
        await asyncio.sleep(_SECONDS)
        observe(max(0.0, clock.monotonic() - due))
