"""Time limits of a connection, and of the body that arrives on it."""

from dataclasses import dataclass

from adapter.errors import BrokenBody, InvalidRequest, SlowBody


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


class Arrival:
    """Of one body: time in which its caller is held back does not count."""

    __slots__ = ("_limits", "_looked", "_quiet", "_seconds", "_seen", "received")

    def __init__(self, limits: Limits, now: float) -> None:
        self.received = 0
        self._seen = 0
        self._limits = limits
        self._looked = now
        self._seconds = self._quiet = 0.0

    def look(self, now: float, *, is_reading: bool) -> InvalidRequest | None:
        """What is wrong with it, if anything is."""
        seconds, self._looked = now - self._looked, now
        if not is_reading:
            return None
        self._seconds += seconds
        self._quiet = 0.0 if self.received != self._seen else self._quiet + seconds
        self._seen = self.received
        limits = self._limits
        if self._quiet >= limits.body:
            return BrokenBody(f"nothing came of the body for {limits.body:g} s")
        if self._seconds > limits.slow and self.received < self._seconds * limits.rate:
            return SlowBody(f"the body comes at less than {limits.rate / 2**10:g} KiB/s")
        return None
