"""Reads the time for all other modules, so that a simulation can let it jump.

They call `clock.monotonic()`. A name that is bound at import, as by `from`, would go on with the
real time; so would a default argument: whatever takes a function gets `now`.
"""

import time

monotonic = time.monotonic
wall = time.time  # since 1970
sleep = time.sleep  # of a thread


def now() -> float:
    """Return `monotonic()`."""
    return monotonic()
