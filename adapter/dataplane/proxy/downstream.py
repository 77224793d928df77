"""The caller's end: how its requests begin, and how its connection comes to an end."""

import asyncio
from typing import Protocol

from adapter.dataplane.proxy.context import ProxyContext
from adapter.dataplane.proxy.exchange import Exchange
from adapter.dataplane.proxy.routing import Call
from adapter.protocols.http2 import frames
from adapter.protocols.http2.connection import Endpoint
from adapter.protocols.http2.flow_control import Receiver, Stream
from adapter.protocols.http2.frames import Code, ConnectionFault, StreamFault
from adapter.protocols.http2.headers import HeaderReader
from adapter.protocols.http2.states import AFTER_PEERS_END, FAULTS, TAKES, State
from adapter.protocols.http2.transport import Piece

MAX_STREAMS = 1000
_HEADER_BYTES = 2**16  # of a request: a mesh sends the headers of its own callers along
_GLITCHES_OF_A_FAULT = 10
_KEPT_RESETS = 2**12
_LAST_CALL, _LAST_CALL_SECONDS = b"lastcall", 1.0


class Requests(Protocol):
    """What becomes of the requests that come in on a downstream connection."""

    def begin(self, stream_id: int, call: Call, *, end: bool) -> None: ...
    def request_data(self, exchange: Exchange, piece: Piece, *, end: bool) -> None: ...
    def drop(self, exchange: Exchange) -> None: ...
    def flush(self) -> None: ...
    def downstream_lost(self) -> None: ...
    def end_if_done(self) -> None: ...


class Downstream(Endpoint[Exchange]):
    def __init__(self, session: Requests, context: ProxyContext) -> None:
        super().__init__(context.held, HeaderReader(context.calls, _HEADER_BYTES), _HEADER_BYTES)
        self.session = session
        self.is_taking, self.is_gone = True, False
        self._leaves_at_once = False  # where it is accepted while the listener closes
        self._preface = frames.PREFACE
        self._last_call: asyncio.TimerHandle | None = None
        self._last_id = self._last_taken = 0
        self._reset: dict[int, None] = {}  # the last streams that we closed before their peer did
        self.greet({frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS})

    # -- of the connection ------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        if self._preface:
            size = min(len(data), len(self._preface))
            if data[:size] != self._preface[:size]:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "not HTTP/2")
            self._preface, data = self._preface[size:], data[size:]
        super().received(data)

    def connected(self) -> None:
        """It is the caller who begins, unless the listener closes already."""
        if self._leaves_at_once:
            self.leave()

    def flush_all(self) -> None:
        self.session.flush()

    def lost(self) -> None:
        if self._last_call is not None:
            self._last_call.cancel()
        self.session.downstream_lost()

    def gone(self) -> None:
        self.is_gone = True
        self.session.end_if_done()

    def going(self, last_stream_id: int) -> None:
        """It sends no new ones; what is open goes on."""

    def last_stream(self) -> int:
        return self._last_taken

    # -- its end ----------------------------------------------------------------------------

    def leave(self) -> None:
        """RFC 9113 section 6.8: what the caller sent before it heard of that is still taken. It
        closes when all that was taken has ended.
        """
        self._leaves_at_once = True
        if self._last_call is None and self.is_open:
            loop = asyncio.get_running_loop()
            self._last_call = loop.call_later(_LAST_CALL_SECONDS, self._take_no_more)
            goodbye = frames.goaway(frames.MAX_STREAM, Code.NO_ERROR)
            self.out += (goodbye, frames.ping(_LAST_CALL))
            self.flush()

    def pong(self, payload: bytes) -> None:
        super().pong(payload)
        if payload == _LAST_CALL and self._last_call is not None:
            self._take_no_more()

    def _take_no_more(self) -> None:
        if self.is_taking and self.is_open:
            self.is_taking = False
            self.say_goodbye()
            self.flush()
            self._close_if_done()

    def _close_if_done(self) -> None:
        if not (self.is_taking or self.streams):
            asyncio.get_running_loop().call_soon(self.close)

    # -- requests ---------------------------------------------------------------------------

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        if stream_id % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream of the caller's")
        stream = self.streams.get(stream_id)
        is_new = stream_id > self._last_id
        self._last_id = max(stream_id, self._last_id)
        try:
            call = self.reader.read(block)
            if not is_new and stream is None:
                self.no_stream(stream_id, frames.HEADERS)
                return
            self._check_block(stream)
        except StreamFault as fault:
            if flags & frames.END_STREAM and stream is not None and self._takes_trailers(stream):
                stream.state = AFTER_PEERS_END[stream.state]
                self.session.request_data(stream.owner, b"", end=True)
                return
            self.refuse(stream_id, fault.code, is_ended=bool(flags & frames.END_STREAM))
            return
        self._last_taken = stream_id
        self.session.begin(stream_id, call, end=bool(flags & frames.END_STREAM))

    def _takes_trailers(self, stream: Stream[Exchange]) -> bool:
        """What is not gRPC may have some; RFC 9113 section 8.1."""
        return not stream.is_ended and stream.owner.call.http_status is not None

    def _check_block(self, stream: Stream[Exchange] | None) -> None:
        if stream is not None:
            code = Code.STREAM_CLOSED if stream.is_ended else Code.PROTOCOL_ERROR
            raise StreamFault(code, "gRPC has no trailers of requests")
        if not self.is_taking or len(self.streams) >= MAX_STREAMS:
            raise StreamFault(Code.REFUSED_STREAM, "no more at once")

    def data(self, stream: Stream[Exchange], piece: Piece, *, end: bool) -> None:
        self.session.request_data(stream.owner, piece, end=end)

    def no_stream(self, stream_id: int, kind: int) -> None:
        state = self._state_of(stream_id)
        if kind not in TAKES[state]:
            raise ConnectionFault(FAULTS[state], f"a frame {kind} of a stream that is {state.name}")
        self.glitch()

    def _state_of(self, stream_id: int) -> State:
        """Of one that is not open."""
        if stream_id % 2 == 0 or stream_id > self._last_id:
            return State.IDLE
        return State.RESET if stream_id in self._reset else State.CLOSED

    def _note_reset(self, stream_id: int) -> None:
        """Of what was closed here though its peer had more to send."""
        if len(self._reset) >= _KEPT_RESETS:
            del self._reset[next(iter(self._reset))]
        self._reset[stream_id] = None

    def was_reset(self, stream: Stream[Exchange], _: int) -> None:
        self.session.drop(stream.owner)
        self._close_if_done()

    def stream_fault(self, stream: Stream[Exchange], code: Code) -> None:
        self.refuse(stream.id, code)

    def refuse(self, stream_id: int, code: int, *, is_ended: bool = False) -> None:
        """For what the caller did."""
        stream = self.streams.get(stream_id)
        if stream is None:
            self.out.append(frames.reset(stream_id, code))
            if not is_ended:
                self._note_reset(stream_id)
        else:
            self.reset(stream, code)
            self.session.drop(stream.owner)
        self.glitch(_GLITCHES_OF_A_FAULT)

    # -- answers ----------------------------------------------------------------------------

    def sent(self, stream: Stream[Exchange], size: int) -> None:
        exchange = stream.owner
        exchange.taken += size
        if exchange.upstream is not None and exchange.far is not None:
            exchange.upstream.credit(exchange.far, size)

    def finished(self, stream: Stream[Exchange]) -> None:
        """RFC 9113 section 8.1: of a request that has been answered the rest is not needed."""
        if not stream.is_ended:
            self.out.append(frames.reset(stream.id, Code.NO_ERROR))
            self._note_reset(stream.id)
        self.forget(stream)
        self._close_if_done()

    def reset(self, stream: Stream[Exchange], code: int) -> None:
        self.out.append(frames.reset(stream.id, code))
        if not stream.is_ended:
            self._note_reset(stream.id)
        self.forget(stream)
        self._close_if_done()

    def other(self, stream: Stream[Exchange]) -> Receiver | None:
        return stream.owner.upstream
