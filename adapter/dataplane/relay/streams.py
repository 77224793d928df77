"""The caller's connection: how streams begin and end."""

from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange
from adapter.dataplane.relay.frames import Code, ConnectionFault, StreamFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.windows import HEADER_BYTES, MAX_STREAMS, CallerWindows

if TYPE_CHECKING:
    from adapter.dataplane.relay.message import MessageWatch
    from adapter.dataplane.relay.relay import Relay

_RESETS_KEPT = 1000
_CHORES_OF_A_FAULT = 10


class CallerStreams(CallerWindows):
    """`watches`: of requests that go straight and are not complete."""

    def __init__(self, relay: "Relay") -> None:
        super().__init__(HeaderReader(relay.site.calls, HEADER_BYTES))
        self.relay = relay
        self.watches: dict[int, MessageWatch] = {}
        self.is_taking = True
        self._last_id = self._last_taken = 0
        self._resets: dict[int, None] = {}

    def last_stream(self) -> int:
        return self._last_taken

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        if stream_id % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream of the caller's")
        is_new = stream_id > self._last_id
        self._last_id = max(stream_id, self._last_id)
        try:
            call = self.reader.read(block)
            if not is_new and stream_id not in self.exchanges:
                self.check_closed(stream_id)
                return
            self._check_block(stream_id, is_new=is_new)
        except StreamFault as fault:
            self.refuse(stream_id, fault.code)
            return
        self._last_taken = stream_id
        self.relay.begin(stream_id, call, end=bool(flags & frames.END_STREAM))

    def _check_block(self, stream_id: int, *, is_new: bool) -> None:
        if not is_new:
            is_asked = self.exchanges[stream_id].is_asked
            code = Code.STREAM_CLOSED if is_asked else Code.PROTOCOL_ERROR
            raise StreamFault(code, "gRPC has no trailers of requests")
        if not self.is_taking or len(self.exchanges) >= MAX_STREAMS:
            raise StreamFault(Code.REFUSED_STREAM, "no more at once")

    def check_closed(self, stream_id: int) -> None:
        """Of a stream that is not there: of what we have reset, more may be in flight."""
        self._must_have_been(stream_id)
        if stream_id not in self._resets:
            raise ConnectionFault(Code.STREAM_CLOSED, "a frame of a stream that has ended")
        self.chore()

    def _must_have_been(self, stream_id: int) -> None:
        if stream_id % 2 == 0 or stream_id > self._last_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that never was")

    def refuse(self, stream_id: int, code: int) -> None:
        """For what the caller did."""
        self.end_stream(stream_id, code)
        exchange = self.exchanges.get(stream_id)
        if exchange is not None:
            self.relay.drop(exchange, code)
        self.chore(_CHORES_OF_A_FAULT)

    def end_stream(self, stream_id: int, code: int) -> None:
        self.control(frames.reset(stream_id, code))
        self.note_reset(stream_id)

    def note_reset(self, stream_id: int) -> None:
        self._resets[stream_id] = None
        if len(self._resets) > _RESETS_KEPT:
            del self._resets[next(iter(self._resets))]

    def forget(self, exchange: Exchange) -> None:
        self.exchanges.pop(exchange.id, None)
        self.watches.pop(exchange.id, None)

    def was_reset(self, stream_id: int, code: int) -> None:
        self._must_have_been(stream_id)
        exchange = self.exchanges.get(stream_id)
        if exchange is not None:
            self.note_reset(stream_id)
            self.unsend(stream_id)
            self.relay.drop(exchange, code)

    def window_update(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self.connection_window_update(increment)
            return
        self._must_have_been(stream_id)
        exchange = self.exchanges.get(stream_id)
        if exchange is None:
            return
        exchange.room += increment
        if not increment or exchange.room > frames.MAX_WINDOW:
            self.refuse(stream_id, Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR)
        elif exchange.link is None:
            exchange.granted += increment
        else:
            exchange.link.control(frames.window_update(stream_id, increment))
