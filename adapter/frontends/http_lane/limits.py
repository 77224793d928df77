"""How long callers may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `idle`: between two requests, longer than proxies keep theirs, so that they close
    first. `head`: from its first byte to its last. `body` and `answer`: without any progress.
    `slow`: after which a body has to come at `rate` bytes a second, averaged.
    `gone`: how long work goes on for a caller who has ended its side, which one that only waits
    for its answer does as well as one that has left. `linger`: for a caller who still sends what
    nobody reads, to see its answer before the connection is reset; `hurry`: the same amid a drain.
    """

    idle: float = 3630
    head: float = 30
    body: float = 60
    answer: float = 60
    gone: float = 2
    linger: float = 5
    hurry: float = 0.5
    slow: float = 10
    rate: float = 64 * 2**10


class Pace:
    """Of one body: time in which its caller is held back does not count."""

    __slots__ = ("_limits", "_seconds", "_since")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds = 0.0
        self._since: float | None = None

    def go_on(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def stop(self, now: float) -> None:
        if self._since is not None:
            self._seconds += now - self._since
            self._since = None

    def is_slow(self, received: int, now: float) -> bool:
        if self._since is None:
            return False
        seconds = self._seconds + now - self._since
        return seconds > self._limits.slow and received < seconds * self._limits.rate
