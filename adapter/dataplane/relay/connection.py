"""One caller's connection, and the two it is served by: Triton's, and that of the server beside us.

A call goes to Triton as it is when the gate lets it through, and else to the server beside us.
Stream numbers are the same on all three. Each connection has windows of its own: what has left one
side is what the other side may send again, so memory is bounded by the windows.
"""

import asyncio
from typing import Any

from adapter.dataplane.relay.exchange import Exchange
from adapter.dataplane.relay.frames import Code
from adapter.dataplane.relay.headers import HeaderReader, status_block
from adapter.dataplane.relay.links import Links, Site
from adapter.dataplane.relay.message import Peek, first_name
from adapter.dataplane.relay.peer import Peer
from adapter.dataplane.relay.ports import Answer, Call
from adapter.dataplane.relay.streams import Stream
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
)

_CALLERS_HEADER_BYTES = 2**17
_GREETING_SECONDS, _SILENT_SECONDS, _PONG_SECONDS, _IDLE_SECONDS = 15.0, 60.0, 20.0, 3600.0
_UNAVAILABLE, _DEADLINE_EXCEEDED = 14, 4


class Relay:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._clock = asyncio.get_running_loop().time
        reader = HeaderReader(site.calls, _CALLERS_HEADER_BYTES)
        self.caller = Peer(self, reader, is_server=True, max_header_bytes=_CALLERS_HEADER_BYTES)
        self._links = Links(site, self)
        self._exchanges: dict[Stream, Exchange] = {}
        self._begun = self._heard = self._busy = self._clock()
        self._is_draining = False
        self.ended = asyncio.Event()

    # -- what the peers tell ----------------------------------------------------------------

    def head(self, stream: Stream, head: Any, *, end: bool) -> None:
        exchange: Exchange | None = stream.use
        if stream.peer is not self.caller:
            if exchange is not None:
                self._answer_head(exchange, head, end=end)
        else:
            self._request(stream, head, end=end)

    def data(self, stream: Stream, piece: bytes, *, end: bool) -> None:
        exchange: Exchange | None = stream.use
        if exchange is None or exchange.is_over:
            stream.peer.credit(stream, len(piece))
        elif stream.peer is not self.caller:
            self._answer_data(exchange, piece, end=end)
        elif exchange.up is None:
            exchange.held.append(piece)
            self._decide(exchange, end=end)
        else:
            self._request_data(exchange, exchange.up, piece, end=end)

    def reset(self, stream: Stream, code: int) -> None:
        exchange: Exchange | None = stream.use
        if exchange is None or exchange.is_over:
            return
        if stream.peer is self.caller:
            self._drop(exchange, code)
        elif exchange.passage is None:
            self.caller.end_stream(exchange.caller, code)
        elif code == Code.REFUSED_STREAM:
            self._fail(exchange, BackendUnavailable("Triton refused the stream", delivered=False))
        else:
            self._fail(exchange, InferenceFailed(f"Triton gave the request up (HTTP/2: {code})"))

    def closed(self, stream: Stream) -> None:
        if stream.peer is self.caller and stream.use is not None:
            self._end(stream.use)

    def going(self, peer: Peer, last_stream_id: int) -> None:
        """GOAWAY. Of the caller: it sends no new ones, and what is open goes on."""
        if peer is self.caller:
            return
        self._links.leave(peer)
        for stream in [s for s in peer.sender.streams.values() if s.id > last_stream_id]:
            self._unserved(stream, "Triton is going away", delivered=False)
        self._links.tidy()

    def lost(self, peer: Peer) -> None:
        if peer is self.caller:
            for exchange in list(self._exchanges.values()):
                self._drop(exchange, Code.CANCEL)
            self._links.close()
            self.ended.set()
            return
        self._links.gone(peer)
        for stream in list(peer.sender.streams.values()):
            why = "the connection to Triton broke" if peer.is_connected else None
            self._unserved(stream, why or "Triton cannot be reached", delivered=peer.is_connected)
            peer.sender.forget(stream)

    def flush(self) -> None:
        self.caller.sender.flush()
        self._links.flush()

    # -- requests ---------------------------------------------------------------------------

    def _request(self, stream: Stream, call: Call, *, end: bool) -> None:
        if self._is_draining:
            self.caller.end_stream(stream, Code.REFUSED_STREAM)
            return
        exchange = Exchange(stream, call, self._clock() + self._site.timeout_seconds)
        stream.use = self._exchanges[stream] = exchange
        if call.direct is None or end:
            self._go_slow(exchange, end=end)

    def _decide(self, exchange: Exchange, *, end: bool) -> None:
        start = exchange.held[0] if len(exchange.held) == 1 else b"".join(exchange.held)
        name = first_name(start, self._site.max_message_bytes)
        if name is Peek.MORE and not end:
            return
        if isinstance(name, bytes) and exchange.call.direct is not None:
            try:
                exchange.start(start, end=end)
                exchange.passage = self._site.gate.admit(name, exchange.call.mesh_id)
            except InvalidRequest:
                pass  # told on the slow way
        if exchange.passage is None:
            self._go_slow(exchange, end=end)
            return
        assert exchange.call.direct is not None  # noqa: S101
        self._go(exchange, self._links.triton(), exchange.call.direct, end=end)

    def _go_slow(self, exchange: Exchange, *, end: bool) -> None:
        self._go(exchange, self._links.server(), exchange.call.served, end=end)

    def _go(self, exchange: Exchange, peer: Peer, block: bytes, *, end: bool) -> None:
        if len(peer.sender.streams) >= peer.max_streams:
            self._drop(exchange, Code.CANCEL)
            self.caller.end_stream(exchange.caller, Code.REFUSED_STREAM)
            return
        up = exchange.up = peer.open_stream(exchange.caller.id)
        up.use = exchange
        up.source, exchange.caller.source = exchange.caller, up
        held, exchange.held = exchange.held, []
        peer.sender.headers(up, block, end=end and not held)
        for piece in held:
            peer.sender.data(up, piece, end=end and piece is held[-1])

    def _request_data(self, exchange: Exchange, up: Stream, piece: bytes, *, end: bool) -> None:
        try:
            exchange.check_request(piece, end=end)
        except InvalidRequest as error:
            self.caller.credit(exchange.caller, len(piece))
            self._fail(exchange, error)
            return
        if up.sent_end or up.peer.sender.streams.get(up.id) is not up:
            self.caller.credit(exchange.caller, len(piece))
            return
        up.peer.sender.data(up, piece, end=end)

    # -- answers ----------------------------------------------------------------------------

    def _answer_head(self, exchange: Exchange, answer: Answer, *, end: bool) -> None:
        if exchange.is_over:
            return
        if end and exchange.passage is not None:
            if answer.status != 0:
                status = 2 if answer.status is None else answer.status
                self._fail(exchange, exchange.passage.fault(status, answer.text))
                return
            self._answered(exchange)
        exchange.has_head = True
        if end:
            exchange.deadline = self._clock() + self._site.timeout_seconds
        self.caller.sender.headers(exchange.caller, answer.block, end=end)

    def _answer_data(self, exchange: Exchange, piece: bytes, *, end: bool) -> None:
        up = exchange.up
        assert up is not None  # noqa: S101
        try:
            exchange.check_answer(piece, self._site.max_message_bytes)
        except InferenceFailed as error:
            up.peer.credit(up, len(piece))
            self._fail(exchange, error)
            return
        if end and exchange.passage is not None:
            self._fail(exchange, InferenceFailed("Triton's answer has no trailers"))
            return
        self.caller.sender.data(exchange.caller, piece, end=end)

    def _answered(self, exchange: Exchange) -> None:
        if exchange.passage is not None:
            exchange.passage.answered()
            exchange.passage = None

    def _fail(self, exchange: Exchange, error: AdapterError) -> None:
        """The caller is told once it is known what the error is called."""
        exchange.is_over = True
        self._release(exchange)
        if exchange.passage is not None:
            self._site.begin(self._tell(exchange, error))

    async def _tell(self, exchange: Exchange, error: AdapterError) -> None:
        assert exchange.passage is not None  # noqa: S101
        status, text = await exchange.passage.failed(error)
        self._refuse(exchange, status, text)
        self.flush()

    def _refuse(self, exchange: Exchange, status: int, text: str) -> None:
        block = status_block(status, text, alone=not exchange.has_head)
        self.caller.sender.headers(exchange.caller, block, end=True)

    def _unserved(self, stream: Stream, why: str, *, delivered: bool) -> None:
        exchange: Exchange | None = stream.use
        if exchange is None or exchange.is_over:
            return
        if exchange.passage is not None:
            self._fail(exchange, BackendUnavailable(why, delivered=delivered))
            return
        if stream.got_end:  # all is here
            return
        exchange.is_over = True
        self._refuse(exchange, _UNAVAILABLE, f"BackendUnavailable: {why}")

    # -- ends -------------------------------------------------------------------------------

    def _drop(self, exchange: Exchange, code: int) -> None:
        """The caller wants it no more."""
        if not exchange.is_over:
            exchange.is_over = True
            self._release(exchange, code)
            if exchange.passage is not None:
                exchange.passage.cancelled()
        self._exchanges.pop(exchange.caller, None)

    def _release(self, exchange: Exchange, code: int = Code.CANCEL) -> None:
        """Triton is told when it still works for it; what was held counts as read."""
        held, exchange.held = exchange.held, []
        for piece in held:
            self.caller.credit(exchange.caller, len(piece))
        up = exchange.up
        if up is not None and not (up.got_end and up.sent_end):
            up.peer.end_stream(up, code)

    def _end(self, exchange: Exchange) -> None:
        """The caller's stream is closed, by whomever."""
        self._busy = self._clock()
        self._drop(exchange, Code.CANCEL)
        self._links.tidy()
        if self._is_draining and not self._exchanges:
            asyncio.get_running_loop().call_soon(self.caller.close)

    def drain(self) -> None:
        """Take nothing new; close when what is open has ended."""
        self._is_draining = True
        if not self._exchanges:
            self.caller.close()
        else:
            self.caller.say_goodbye()
            self.flush()

    def look(self) -> None:
        """Once a second: what takes too long?"""
        now = self._clock()
        self.caller.chores = 0
        self._links.new_second()
        self._look_at_caller(now)
        for exchange in [x for x in self._exchanges.values() if x.deadline < now]:
            self._too_late(exchange)
        self.flush()

    def _look_at_caller(self, now: float) -> None:
        caller = self.caller
        if caller.heard:
            caller.heard, self._heard = False, now
            caller.has_pong = True
        if not caller.is_acknowledged and now - self._begun > _GREETING_SECONDS:
            caller.close(Code.SETTINGS_TIMEOUT)
        elif now - self._heard > _SILENT_SECONDS + _PONG_SECONDS:
            caller.close()
        elif now - self._heard > _SILENT_SECONDS and caller.has_pong:
            caller.ping()
        elif not self._exchanges and now - self._busy > _IDLE_SECONDS:
            caller.close()

    def _too_late(self, exchange: Exchange) -> None:
        if exchange.is_over:
            return
        if exchange.passage is not None:
            self._fail(exchange, BackendTimeout("Triton did not answer in time"))
        elif exchange.up is None:
            exchange.is_over = True
            self._release(exchange)
            self._refuse(exchange, _DEADLINE_EXCEEDED, "the request did not come in time")
        elif exchange.up.got_end and exchange.caller.queue:
            self.caller.end_stream(exchange.caller, Code.CANCEL)
