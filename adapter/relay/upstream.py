"""The client end of a connection to Triton or to the fallback server."""

from collections.abc import Callable

from adapter.relay import frames
from adapter.relay.downstream import ODD, Downstream
from adapter.relay.endpoint import Endpoint
from adapter.relay.frames import Code, ConnectionFault, StreamFault
from adapter.relay.headers import HeaderReader
from adapter.relay.policy import Reason, RelayContext
from adapter.relay.stream import Exchange, Outbound, Stage
from adapter.relay.transport import Piece, State, with_own_code

_HEADER_BYTES = 4 * 2**20  # texts of Triton's errors may be long
_LAST_ID = frames.MAX_STREAM - 2
_END_STREAM = frames.END_STREAM
# looking up a member is slow in Python 3.11
_SENDING = Stage.SENDING
_SENT = Stage.SENT


@with_own_code
class Upstream(Endpoint[Outbound]):
    """The client end of a connection to Triton or to the fallback server.

    A request that Triton has received completely is neither reset nor its connection closed,
    since Triton 2.51 may crash of that; the response is read and dropped.
    """

    __slots__ = ("_downstream", "_next_id", "_on_lost", "is_ending", "is_triton")

    def __init__(
        self,
        context: RelayContext,
        downstream: Downstream,
        on_lost: Callable[["Upstream"], None],
        *,
        is_triton: bool,
    ) -> None:
        reader = HeaderReader(context.answers, _HEADER_BYTES)
        super().__init__(context.budget, context.turns, reader, _HEADER_BYTES)
        self._downstream = downstream
        self._on_lost = on_lost
        self.is_triton = is_triton
        self.is_ending = False  # accepts no more streams, and closes with the last one
        self._next_id = 1
        self.out.append(frames.PREFACE)
        self.send_settings({frames.ENABLE_PUSH: 0})

    # -- the connection ---------------------------------------------------------------------

    def flush_all(self) -> None:
        """Write the queued frames of all connections of the client's session."""
        self._downstream.flush_all()

    def handle_lost(self) -> None:
        """Tell the session that this connection is lost, which fails its requests."""
        self.is_ending = True
        self._on_lost(self)

    def handle_closed(self) -> None:
        """End the session if this was its last connection."""
        self._downstream.handle_closed()

    def handle_goaway(self, last_stream_id: int) -> None:
        """Fail the streams that the server did not process; the others continue."""
        self.is_ending = True
        for stream in [one for one in self.streams.values() if one.id > last_stream_id]:
            self.forget(stream)
            self._downstream.end_unanswered(
                stream.exchange, Reason.UNREACHABLE, "Triton is going away"
            )
        self.close_if_done()

    def close_if_done(self) -> None:
        """Close if no request is left, and none will come."""
        if not self.streams and (self.is_ending or self._downstream.state >= State.CLOSING):
            self.close()

    # -- requests ---------------------------------------------------------------------------

    def open_stream(self, exchange: Exchange, block: bytes, *, end: bool) -> Outbound:
        """Send the headers of a request on a new stream."""
        stream_id = self._next_id
        stream = self.streams[stream_id] = Outbound(stream_id, self.initial_window)
        stream.exchange = exchange
        exchange.outbound = stream
        stream.upstream = exchange.upstream = self
        self._next_id += 2
        if stream_id >= _LAST_ID:
            self.is_ending = True
        self.out.append(frames.header_block(stream_id, block, end=end))
        return stream

    def reset(self, stream: Outbound, code: int) -> None:
        """Reset an incomplete request, or one at the fallback server."""
        self.forget(stream)
        self.out.append(frames.reset(stream.id, code))
        self.close_if_done()

    def forget(self, stream: Outbound) -> None:
        """Remove a stream from the connection and from its request."""
        if stream.queue:
            self.drop_queue(stream)
        self.streams.pop(stream.id, None)
        stream.exchange.outbound = None

    def on_sent(self, stream: Outbound, size: int) -> None:
        """Credit the client for `size` bytes of a request that were written."""
        self._downstream.credit(stream.exchange, size)

    def on_finished(self, stream: Outbound) -> None:
        """Mark the request as sent."""
        stream.exchange.enter(_SENT)

    def count_queued(self, stream: Outbound, size: int) -> None:
        """Count queued bytes of a request, except of a large one, which the byte budget counts."""
        if stream.exchange.body is None:
            self._downstream.add_buffered(size)

    # -- responses --------------------------------------------------------------------------

    def handle_data(self, stream: Outbound, piece: Piece, end: bool) -> None:
        """Forward DATA of a response; drop it where nobody waits for it."""
        exchange = stream.exchange
        if end:
            self._close_stream(stream)
            self._fail_odd(exchange, "it has no trailers")
        elif exchange.is_answered:
            self.credit(stream, len(piece))
        else:
            self._downstream.forward_data(exchange, piece)

    def handle_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        """Forward the headers or trailers of a response."""
        stream = self.streams.get(stream_id)
        answer = None
        text = ""
        try:
            answer = self.reader.cached(block) or self.reader.read(block)
        except StreamFault as fault:
            text = str(fault)
        if stream is None:
            self.handle_closed_stream(stream_id, frames.HEADERS)
            return
        end = flags & _END_STREAM == _END_STREAM
        if end:
            self._close_stream(stream)
        if answer is None:
            self._fail_odd(stream.exchange, text)
        else:
            self._downstream.forward_headers(stream.exchange, answer, end=end)

    def _fail_odd(self, exchange: Exchange, text: str) -> None:
        """Fail the request for a response that breaks the protocol."""
        self._downstream.end_unanswered(exchange, Reason.ODD_ANSWER, f"{ODD}: {text}")

    def _close_stream(self, stream: Outbound) -> None:
        """Close a stream whose response is complete; the rest of the request is not needed."""
        if stream.exchange.stage is _SENDING:
            self.out.append(frames.reset(stream.id, Code.NO_ERROR))
        self.forget(stream)
        if not self.streams:
            self.close_if_done()

    def handle_closed_stream(self, stream_id: int, _: int) -> None:
        """Ignore a frame of a stream that was reset: the server may not have received the reset."""
        if stream_id % 2 == 0 or stream_id >= self._next_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that never was")
        self.count_glitch()

    def handle_reset(self, stream: Outbound, code: int) -> None:
        """End the request of a stream that the server has reset."""
        self._downstream.handle_upstream_reset(stream.exchange, code)
        self.close_if_done()

    def handle_stream_error(self, stream: Outbound, code: Code) -> None:
        """Reset a stream whose server broke the protocol, and end its request."""
        self.forget(stream)
        self.out.append(frames.reset(stream.id, code))
        self._fail_odd(stream.exchange, f"HTTP/2: {code.name}")
        self.close_if_done()
