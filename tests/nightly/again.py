"""Property tests, played again and again."""

import itertools
import time
from collections.abc import Callable, Iterable

import hypothesis


def play_until(seconds: float, seed: int, tests: Iterable[Callable[[], None]]) -> None:
    """Each in turn, in rounds whose examples follow from the seed; a round that has begun ends."""
    end = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() >= end:
            return
        for test in tests:
            hypothesis.seed(seed + number)(test)()
