"""How long callers may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `idle`: between two requests, longer than proxies keep theirs, so that they close
    first. `head`: from its first byte to its last. `body` and `answer`: without any progress.
    `gone`: how long work goes on for a caller who has ended its side, which one that only waits
    for its answer does as well as one that has left. `linger`: for a caller who still sends what
    nobody reads, to see its answer before the connection is reset.
    """

    idle: float = 3630
    head: float = 30
    body: float = 60
    answer: float = 60
    gone: float = 2
    linger: float = 5
