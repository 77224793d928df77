"""Counts the requests of a model: what each of them writes in its record."""

from collections import deque

_LATENCIES = 200  # 7 KB of a model that is in use


class Usage:
    """`in_flight`: requests that Triton works on, those for readiness and metadata included;
    `abandoned`: those of them that nobody waits for. `lost`: requests that no unload waits for,
    since they can never be answered; not in flight. `served` counts the model's inferences.
    `latencies` are the seconds of the latest ones that went well, the wait for their callers
    included; of a stream they are those of the whole stream; `answered_at` is when the last of them
    ended. `used_at` is when the last inference began (time.monotonic), or the load ended; it
    outlives the end of Triton. `busy_since` is when a request last began with no other in flight.
    """

    __slots__ = (
        *("abandoned", "answered_at", "busy_since"),
        *("in_flight", "latencies", "lost", "served", "used_at"),
    )

    def __init__(self) -> None:
        self.in_flight = self.abandoned = self.lost = self.served = 0
        self.answered_at = self.busy_since = self.used_at = 0.0
        self.latencies: deque[float] = deque(maxlen=_LATENCIES)
