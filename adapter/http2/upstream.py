"""The client end of a connection to Triton or to the fallback server."""

from collections.abc import Callable

from adapter.http2 import frames
from adapter.http2.downstream import Downstream
from adapter.http2.endpoint import Endpoint
from adapter.http2.flow_control import Stream
from adapter.http2.frames import Code, ConnectionFault, StreamFault
from adapter.http2.headers import HeaderReader
from adapter.http2.policy import Answer, RelayContext
from adapter.http2.states import AFTER_OUR_END, AFTER_PEERS_END
from adapter.http2.stream import Exchange, Stage
from adapter.http2.transport import Piece

_HEADER_BYTES = 4 * 2**20  # texts of Triton's errors may be long
_LAST_ID = frames.MAX_STREAM - 2
_SENDING, _SENT = Stage.SENDING, Stage.SENT  # looking up a member is slow in Python 3.11


class Upstream(Endpoint[Exchange]):
    """The client end of a connection to Triton or to the fallback server.

    A request that Triton has received completely is neither reset nor its connection closed,
    since Triton 2.51 may crash of that; the response is read and dropped.
    """

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
        self._next_id = 1
        self.out.append(frames.PREFACE)
        self.send_settings({frames.ENABLE_PUSH: 0})

    @property
    def accepts_streams(self) -> bool:
        is_full = len(self.streams) >= self.max_streams or self._next_id > _LAST_ID
        return not (self.has_goaway or self.is_lost or is_full)

    # -- the connection ---------------------------------------------------------------------

    def flush_all(self) -> None:
        self._downstream.flush_all()

    def lost(self) -> None:
        self._on_lost(self)

    def gone(self) -> None:
        self._downstream.gone()

    def last_stream(self) -> int:
        return 0

    def goaway_received(self, last_stream_id: int) -> None:
        """Fail the streams that the server did not process; the others continue."""
        self.has_goaway = True
        for stream in [one for one in self.streams.values() if one.id > last_stream_id]:
            self.forget(stream)
            self._downstream.upstream_failed(stream.owner, "Triton is going away", delivered=False)
        self.close_if_done()

    def close_if_done(self) -> None:
        if not self.streams and (self.has_goaway or self._downstream.is_lost):
            self.close()

    # -- requests ---------------------------------------------------------------------------

    def open(self, exchange: Exchange, block: bytes, *, end: bool) -> Stream[Exchange]:
        stream = Stream(self._next_id, exchange, self.initial_window)
        self.streams[stream.id] = stream
        self._next_id += 2
        self.out.append(frames.header_block(stream.id, block, end=end))
        return stream

    def fits_whole(self, size: int) -> bool:
        """Return whether a complete request of a new stream can be sent in one frame now."""
        fits_windows = size <= self.send_window and size <= self.initial_window
        return fits_windows and size <= self.max_frame_size and not self.is_paused

    def open_whole(self, exchange: Exchange, message: bytes) -> None:
        """Send a complete request, for which `fits_whole` was true."""
        size, call = len(message), exchange.call
        stream = Stream(self._next_id, exchange, self.initial_window - size)
        self.streams[stream.id] = exchange.outbound = stream
        exchange.upstream = self
        self._next_id += 2
        self.send_window -= size
        start, data = call.direct_start, frames.data_start(size, frames.END_STREAM)
        self.out += (start, stream.number, call.direct or b"", data, stream.number, message)
        self.finished(stream)

    def reset(self, stream: Stream[Exchange], code: int) -> None:
        """Reset an incomplete request, or one at the fallback server."""
        self.forget(stream)
        self.out.append(frames.reset(stream.id, code))
        self.close_if_done()

    def forget(self, stream: Stream[Exchange]) -> None:
        super().forget(stream)
        stream.owner.outbound = None

    def sent(self, stream: Stream[Exchange], size: int) -> None:
        self._downstream.credit(stream.owner.inbound, size)

    def finished(self, stream: Stream[Exchange]) -> None:
        stream.state = AFTER_OUR_END[stream.state]
        stream.owner.to(_SENT)

    def receiver_of(self, stream: Stream[Exchange]) -> Downstream | None:
        """Return None for a large message, which the byte budget counts."""
        return self._downstream if stream.owner.body is None else None

    # -- responses --------------------------------------------------------------------------

    def data(self, stream: Stream[Exchange], piece: Piece, *, end: bool) -> None:
        exchange = stream.owner
        if end:
            self._ended(stream)
            self._downstream.malformed(exchange, "it has no trailers")
        elif exchange.is_answered:
            self.credit(stream, len(piece))
        else:
            self._downstream.forward_data(exchange, piece)

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        stream = self.streams.get(stream_id)
        answer: Answer | None
        try:
            answer = self.reader.read(block)
        except StreamFault as fault:
            answer, why = None, str(fault)
        else:
            why = ""
        if stream is None:
            self.frame_without_stream(stream_id, frames.HEADERS)
            return
        end = bool(flags & frames.END_STREAM)
        if end:
            self._ended(stream)
        if answer is None:
            self._downstream.malformed(stream.owner, why)
        else:
            self._downstream.forward_headers(stream.owner, answer, end=end)

    def _ended(self, stream: Stream[Exchange]) -> None:
        """Close a stream whose response is complete; the rest of the request is not needed."""
        stream.state = AFTER_PEERS_END[stream.state]
        if stream.owner.stage is _SENDING:
            self.out.append(frames.reset(stream.id, Code.NO_ERROR))
        self.forget(stream)
        self.close_if_done()

    def frame_without_stream(self, stream_id: int, _: int) -> None:
        """Ignore a frame of a stream that was reset: the server may not have received the reset."""
        if stream_id % 2 == 0 or stream_id >= self._next_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that never was")
        self.glitch()

    def was_reset(self, stream: Stream[Exchange], code: int) -> None:
        self._downstream.upstream_reset(stream.owner, code)
        self.close_if_done()

    def stream_fault(self, stream: Stream[Exchange], code: Code) -> None:
        self.forget(stream)
        self.out.append(frames.reset(stream.id, code))
        self._downstream.malformed(stream.owner, f"HTTP/2: {code.name}")
        self.close_if_done()
