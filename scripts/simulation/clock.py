"""Simulated time: what happens when, and what waits for a slot."""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

Then = Callable[[], object]


class Clock:
    """`now` is in seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = count()  # of two events at one time the older comes first

    def after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let things happen until it is over, or nothing is left to happen."""
        while self._events and not is_over():
            self.now, _, then = heapq.heappop(self._events)
            then()


class Slots:
    """So many at a time; further ones wait in order of arrival."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[Then] = deque()

    def take(self, then: Then) -> None:
        if self._free:
            self._free -= 1
            then()
        else:
            self._waiting.append(then)

    def give(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1
