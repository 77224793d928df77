"""The client end of a connection to Triton or to the fallback server."""

from collections.abc import Callable

from adapter.http2 import frames
from adapter.http2.downstream import ODD, Downstream
from adapter.http2.endpoint import Endpoint
from adapter.http2.frames import Code, ConnectionFault, StreamFault
from adapter.http2.headers import HeaderReader
from adapter.http2.policy import Reason, RelayContext
from adapter.http2.stream import Exchange, Outbound, Stage
from adapter.http2.transport import Piece, with_own_code

_HEADER_BYTES = 4 * 2**20  # texts of Triton's errors may be long
_LAST_ID = frames.MAX_STREAM - 2
_END_STREAM = frames.END_STREAM
_SENDING, _SENT = Stage.SENDING, Stage.SENT  # looking up a member is slow in Python 3.11


@with_own_code
class Upstream(Endpoint[Outbound]):
    """The client end of a connection to Triton or to the fallback server.

    A request that Triton has received completely is neither reset nor its connection closed,
    since Triton 2.51 may crash of that; the response is read and dropped.
    """

    __slots__ = ("_downstream", "_next_id", "_on_lost", "has_goaway", "is_ending", "is_triton")

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
        self.has_goaway = False
        self.is_ending = False  # accepts no more streams
        self._next_id = 1
        self.out.append(frames.PREFACE)
        self.send_settings({frames.ENABLE_PUSH: 0})

    # -- the connection ---------------------------------------------------------------------

    def flush_all(self) -> None:
        self._downstream.flush_all()

    def lost(self) -> None:
        self.is_ending = True
        self._on_lost(self)

    def gone(self) -> None:
        self._downstream.gone()

    def goaway_received(self, last_stream_id: int) -> None:
        """Fail the streams that the server did not process; the others continue."""
        self.has_goaway = self.is_ending = True
        for stream in [one for one in self.streams.values() if one.id > last_stream_id]:
            self.forget(stream)
            self._downstream.answer_failed(
                stream.exchange, Reason.UNREACHABLE, "Triton is going away"
            )
        self.close_if_done()

    def close_if_done(self) -> None:
        if not self.streams and (self.has_goaway or self._downstream.is_lost):
            self.close()

    # -- requests ---------------------------------------------------------------------------

    def open(self, exchange: Exchange, block: bytes, *, end: bool) -> Outbound:
        stream = self._new_stream(exchange)
        self.out.append(frames.header_block(stream.id, block, end=end))
        return stream

    def _new_stream(self, exchange: Exchange) -> Outbound:
        stream_id = self._next_id
        stream = self.streams[stream_id] = Outbound(stream_id, self.initial_window)
        stream.exchange, exchange.outbound = exchange, stream
        stream.upstream = exchange.upstream = self
        self._next_id += 2
        if stream_id >= _LAST_ID:
            self.is_ending = True
        return stream

    def fits_whole(self, size: int) -> bool:
        """Return whether a complete request of a new stream can be sent in one frame now."""
        fits_windows = size <= self.send_window and size <= self.initial_window
        return fits_windows and size <= self.max_frame_size and not self.is_paused

    def open_whole(self, exchange: Exchange, message: bytes) -> None:
        """Send a complete request, for which `fits_whole` was true."""
        size, call, stream = len(message), exchange.call, self._new_stream(exchange)
        stream.send_window -= size
        self.send_window -= size
        head = frames.head(size, frames.DATA, frames.END_STREAM, stream.id)
        self.out += (call.direct_start, stream.number, call.direct or b"", head, message)
        exchange.to(_SENT)

    def reset(self, stream: Outbound, code: int) -> None:
        """Reset an incomplete request, or one at the fallback server."""
        self.forget(stream)
        self.out.append(frames.reset(stream.id, code))
        self.close_if_done()

    def forget(self, stream: Outbound) -> None:
        if stream.queue:
            self.unqueue(stream)
        self.streams.pop(stream.id, None)
        stream.exchange.outbound = None

    def sent(self, stream: Outbound, size: int) -> None:
        self._downstream.credit(stream.exchange, size)

    def finished(self, stream: Outbound) -> None:
        stream.exchange.to(_SENT)

    def count_queued(self, stream: Outbound, size: int) -> None:
        """Not those of a large message, which the byte budget counts."""
        if stream.exchange.body is None:
            self._downstream.add_buffered(size)

    # -- responses --------------------------------------------------------------------------

    def data(self, stream: Outbound, piece: Piece, end: bool) -> None:
        exchange = stream.exchange
        if end:
            self._ended(stream)
            self._odd(exchange, "it has no trailers")
        elif exchange.is_answered:
            self.credit(stream, len(piece))
        else:
            self._downstream.forward_data(exchange, piece)

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        stream, answer, why = self.streams.get(stream_id), None, ""
        try:
            answer = self.reader.kept(block) or self.reader.read(block)
        except StreamFault as fault:
            why = str(fault)
        if stream is None:
            self.frame_without_stream(stream_id, frames.HEADERS)
            return
        end = flags & _END_STREAM == _END_STREAM
        if end:
            self._ended(stream)
        if answer is None:
            self._odd(stream.exchange, why)
        else:
            self._downstream.forward_headers(stream.exchange, answer, end=end)

    def _odd(self, exchange: Exchange, why: str) -> None:
        self._downstream.answer_failed(exchange, Reason.ODD_ANSWER, f"{ODD}: {why}")

    def _ended(self, stream: Outbound) -> None:
        """Close a stream whose response is complete; the rest of the request is not needed."""
        if stream.exchange.stage is _SENDING:
            self.out.append(frames.reset(stream.id, Code.NO_ERROR))
        self.forget(stream)
        if not self.streams:
            self.close_if_done()

    def frame_without_stream(self, stream_id: int, _: int) -> None:
        """Ignore a frame of a stream that was reset: the server may not have received the reset."""
        if stream_id % 2 == 0 or stream_id >= self._next_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that never was")
        self.glitch()

    def was_reset(self, stream: Outbound, code: int) -> None:
        self._downstream.upstream_reset(stream.exchange, code)
        self.close_if_done()

    def stream_fault(self, stream: Outbound, code: Code) -> None:
        self.forget(stream)
        self.out.append(frames.reset(stream.id, code))
        self._odd(stream.exchange, f"HTTP/2: {code.name}")
        self.close_if_done()
