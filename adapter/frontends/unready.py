"""Ends the connections of clients while the adapter is not ready for long.

A load balancer stops choosing an adapter that is not ready, but only for new connections: a client
that keeps one open, as gRPC clients do, would go on failing for as long as it lasts. So after some
seconds each listener asks its clients to connect anew, and does so again while the adapter stays
not ready, since the load balancer may not have noticed yet. Nothing is done before the adapter was
ready for the first time.
"""

from collections.abc import Callable

from adapter.runtime import clock

UNREADY_SECONDS = 5.0  # shorter than a restart of Triton, longer than a probe that failed once


class UnreadyConnections:
    """Calls the listeners when their clients should connect to another adapter."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._end_connections: list[Callable[[], None]] = []
        self._due_at: float | None = None  # None until the adapter was ready once

    def add(self, end_connections: Callable[[], None]) -> None:
        """Call `end_connections` each time the adapter has been not ready for some seconds."""
        self._end_connections.append(end_connections)

    async def poll(self) -> None:
        """End connections if the adapter has been not ready for long. Called once a second."""
        now = clock.monotonic()
        if self._is_ready():
            self._due_at = now + UNREADY_SECONDS
        elif self._due_at is not None and now >= self._due_at:
            self._due_at = now + UNREADY_SECONDS
            for end_connections in self._end_connections:
                end_connections()
