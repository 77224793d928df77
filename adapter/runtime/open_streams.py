"""Bounds the streams that are open at once, and shares them fairly among connections.

A stream may stay open for hours, and takes memory though it sends nothing. When there are as many
as may be, a connection gets another one if a second connection has more: the one with the most
then loses its latest stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from adapter.errors import TooManyStreams

# A stream takes so much besides its bytes: 62 KB over gRPC, 27 KB with generate_stream.
STREAM_BYTES = 2**16
# Python keeps half of what more streams had taken.
_MAX_BYTES = 2**27
_WHOSE = f"one 8th of max_inflight_body_bytes, and at most {_MAX_BYTES}"


class Connection(Protocol):
    """A connection with open streams."""

    def end_latest_stream(self, error: TooManyStreams) -> None:
        """End the stream that was opened last with `error`, and stop counting it."""


class _OneStream:
    """A connection that has one stream at a time: no other can have fewer."""

    def end_latest_stream(self, error: TooManyStreams) -> None:
        """Raise the error, as no connection with one stream has the most."""
        raise error


class OpenStreams:
    """Counts the open streams of all connections."""

    def __init__(
        self,
        limit_bytes: int,  # of all streams
        count_bytes: Callable[[int], None],  # negative when a stream ends
    ) -> None:
        self._limit_bytes = min(limit_bytes, _MAX_BYTES)
        self._count_bytes = count_bytes
        self._counts: dict[Connection, int] = {}
        self._bytes = 0

    def begin(self, connection: Connection) -> TooManyStreams | None:
        """Count a stream until `end`, however little it sends; return why there is no room for
        it.
        """
        if self._bytes + STREAM_BYTES > self._limit_bytes:
            text = (
                f"{self._bytes // STREAM_BYTES} open streams hold {self._bytes} of"
                f" {self._limit_bytes} bytes ({_WHOSE})"
            )
            largest = max(self._counts, key=self._counts.__getitem__, default=connection)
            most = self._counts.get(largest, 0)
            if most <= self._counts.get(connection, 0) + 1:
                return TooManyStreams(f"{text}; try again later")
            text = f"{text}, most of them, {most}, on this connection: the latest was ended"
            largest.end_latest_stream(TooManyStreams(text, has_begun=True))
        self._add(connection, 1)
        return None

    def end(self, connection: Connection) -> None:
        """Stop counting a stream."""
        self._add(connection, -1)

    @contextmanager
    def open_one(self) -> Iterator[None]:
        """Count the only stream of a connection while the context lasts; raise TooManyStreams if
        there is no room for it.
        """
        connection = _OneStream()
        if (error := self.begin(connection)) is not None:
            raise error
        try:
            yield
        finally:
            self.end(connection)

    def _add(self, connection: Connection, count: int) -> None:
        """Add to the streams of a connection, and to the bytes of all."""
        total = self._counts.get(connection, 0) + count
        if total:
            self._counts[connection] = total
        else:
            del self._counts[connection]
        self._bytes += count * STREAM_BYTES
        self._count_bytes(count * STREAM_BYTES)
