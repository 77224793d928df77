"""The caller's connection: requests, and how it comes to an end."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange, data_frame
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.inbound import Sink
from adapter.dataplane.relay.message import MessageWatch
from adapter.dataplane.relay.streams import CallerStreams
from adapter.dataplane.relay.wire import Piece, part
from adapter.errors import InvalidRequest

if TYPE_CHECKING:
    from adapter.dataplane.relay.link import Link
    from adapter.dataplane.relay.relay import Relay

_SMALL = frames.FRAME_BYTES
_LAST_CALL, _LAST_CALL_SECONDS = b"lastcall", 1.0


class Caller(CallerStreams):
    def __init__(self, relay: "Relay") -> None:
        super().__init__(relay)
        self._preface = frames.PREFACE
        self._last_call: asyncio.TimerHandle | None = None

    # -- of the connection ------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        if self._preface:
            size = min(len(data), len(self._preface))
            if data[:size] != self._preface[:size]:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "not HTTP/2")
            self._preface, data = self._preface[size:], data[size:]
        super().received(data)

    def connected(self) -> None:
        """It is the caller who begins."""

    def flush_all(self) -> None:
        self.relay.flush()

    def lost(self) -> None:
        if self._last_call is not None:
            self._last_call.cancel()
        self.relay.caller_lost()

    def gone(self) -> None:
        self.relay.ended.set()

    def paused(self) -> None:
        for link in self.links():
            link.read_on(is_wanted=not self.is_paused)

    def links(self) -> "list[Link]":
        return self.relay.links

    def triton_window(self, increment: int) -> None:
        if self.relay.triton is not None:
            self.relay.triton.control(frames.window_update(0, increment))

    def all_sent(self) -> None:
        self.relay.close_if_done()

    def going(self, last_stream_id: int) -> None:
        """It sends no new ones; what is open goes on."""

    # -- its end ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Section 6.8: what the caller sent before it heard of that is still taken. It closes when
        all that was taken has ended.
        """
        if self._last_call is None and self.is_open:
            loop = asyncio.get_running_loop()
            self._last_call = loop.call_later(_LAST_CALL_SECONDS, self._take_no_more)
            self.control(frames.goaway(frames.MAX_STREAM, Code.NO_ERROR))
            self.control(frames.ping(_LAST_CALL))
            self.relay.flush()

    def pong(self, payload: bytes) -> None:
        super().pong(payload)
        if payload == _LAST_CALL and self._last_call is not None:
            self._take_no_more()

    def _take_no_more(self) -> None:
        if self.is_taking and self.is_open:
            self.is_taking = False
            self.say_goodbye()
            self.relay.flush()
            self.relay.close_if_done()

    # -- requests ---------------------------------------------------------------------------

    def walk(self, data: bytes, at: int) -> None:
        """DATA within a value passes in runs of as many frames as are here."""
        watches, start, end, passed = self.watches, at, len(data), 0
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.read_head(data, at)
            size = high << 8 | low
            after = at + frames.HEAD_BYTES + size
            if after > end:
                break
            watch = None
            if kind == frames.DATA and not flags and self.is_plain:
                watch = watches.get(stream_id)
            if watch is not None and 0 < size <= watch.skip:
                watch.skip -= size
                passed += size
            else:
                if start < at:
                    self._straight(part(data, start, at))
                start = after
                self._stop_at(kind, flags, stream_id, data[at + frames.HEAD_BYTES : after])
            at = after
        if start < at:
            self._straight(part(data, start, at))
        self.chores -= passed >> 13
        self.use(passed)
        if at < end:
            self.keep(data, at)

    def _stop_at(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """The short way for what a small request is made of."""
        if not self.is_plain or kind > frames.HEADERS:
            self.frame(kind, flags, stream_id, payload)
        elif kind == frames.HEADERS and flags == frames.END_HEADERS:
            self.block(flags, stream_id, payload)
        elif kind == frames.DATA and flags == frames.END_STREAM and len(payload) <= _SMALL:
            self.data(flags, stream_id, len(payload), payload)
        else:
            self.frame(kind, flags, stream_id, payload)

    def _straight(self, piece: Piece) -> None:
        if self.relay.triton is not None:
            self.relay.triton.out.append(piece)

    def data(self, flags: int, stream_id: int, size: int, piece: Piece) -> None:
        self.use(size)
        exchange = self.exchanges.get(stream_id)
        if exchange is None:
            self.check_closed(stream_id)
            self.credit(len(piece))
        elif exchange.is_asked:
            self.credit(len(piece))
            self.refuse(stream_id, Code.STREAM_CLOSED)
        elif exchange.is_over:
            self._more(exchange, flags, piece, len(piece) == size)
        elif exchange.link is None:
            self._hold(exchange, flags, size, piece)
        elif exchange.watch is not None:
            head = frames.head(size, frames.DATA, flags, stream_id)
            is_last = len(piece) == size
            self._pass(exchange, exchange.watch, head, piece, end=bool(flags), is_last=is_last)
        else:
            self._more(exchange, flags, piece, len(piece) == size)

    def rest(self, flags: int, stream_id: int) -> Sink:
        exchange = self.exchanges.get(stream_id)
        return self._drop if exchange is None else partial(self._more, exchange, flags)

    def _hold(self, exchange: Exchange, flags: int, size: int, piece: Piece) -> None:
        """Until it is known which model is meant."""
        held, is_last = exchange.held, len(piece) == size
        whole = held + piece if held else piece
        exchange.held = b""
        if len(whole) > self.stream_window:
            self.credit(len(whole))
            self.refuse(exchange.id, Code.FLOW_CONTROL_ERROR)
            return
        goes_straight = self.relay.decide(exchange, whole, end=bool(flags) and is_last)
        if goes_straight is None:
            exchange.held = bytes(whole)
        elif not goes_straight:
            self._more(exchange, flags, whole, is_last)
        else:
            if held:
                self._straight(data_frame(exchange.id, held, end=False))
            head = frames.head(size, frames.DATA, flags, exchange.id)
            self._begin(head, piece, is_last=is_last)
            exchange.is_asked = bool(flags) and is_last

    def _pass(
        self,
        exchange: Exchange,
        watch: MessageWatch,
        head: bytes,
        piece: Piece,
        *,
        end: bool,
        is_last: bool,
    ) -> None:
        if self._is_good(exchange, watch, piece, end=end and is_last):
            self._begin(head, piece, is_last=is_last)
        else:
            self.credit(len(piece))

    def _begin(self, head: bytes, piece: Piece, *, is_last: bool) -> None:
        triton = self.relay.triton
        if triton is not None:
            triton.out += (head, piece)
            triton.is_within = not is_last

    def _is_good(self, exchange: Exchange, watch: MessageWatch, piece: Piece, *, end: bool) -> bool:
        try:
            watch.feed(piece)
            if end:
                watch.end()
        except InvalidRequest as error:
            self.relay.fail(exchange, error)
            return False
        if end:
            exchange.is_asked = True
            self.watches.pop(exchange.id, None)
        return True

    def _more(self, exchange: Exchange, flags: int, piece: Piece, is_last: bool) -> None:
        """Of a frame whose first piece is on its way already."""
        end, triton = bool(flags) and is_last, self.relay.triton
        if triton is not None and triton.is_within:
            if exchange.watch is not None and not exchange.is_over:
                self._is_good(exchange, exchange.watch, piece, end=end)
            # Triton has the frame's head. Zeros are no field: it cannot take them for a request
            triton.go_on(bytes(len(piece)) if exchange.is_over else piece, is_last=is_last)
        elif exchange.is_over or exchange.link is None or exchange.upload is None:
            self.credit(len(piece))
        else:
            exchange.link.upload(exchange, exchange.upload, piece, end=end)
        exchange.is_asked = exchange.is_asked or end

    def _drop(self, piece: Piece, _: bool) -> None:
        self.credit(len(piece))

    def padding(self, stream_id: int, size: int) -> None:
        self.use(size)
        self.credit(size)
        if stream_id in self.exchanges:
            self.control(frames.window_update(stream_id, size))
