"""One client's HTTP/2 connection, and the upstream connections of its requests.

A request goes to Triton directly when the routing policy admits it, and else to the fallback server
of this process. Each connection is an HTTP/2 connection in its own right: an upstream that is lost
fails its requests, and the next request gets a new one. An upstream outlives its client while
Triton works on abandoned requests.
"""

import asyncio
from functools import partial

from adapter.relay.downstream import Downstream
from adapter.relay.endpoint import LEAST_BYTES
from adapter.relay.frames import Code
from adapter.relay.policy import Call, Reason, RelayContext, RelayError
from adapter.relay.protobuf import (
    PREFIX_BYTES,
    Malformed,
    NameScanner,
    Peek,
    decompress,
    first_name,
    length_of,
    plain_name,
)
from adapter.relay.stream import Exchange, FallbackMessages, LargeBody, Stage
from adapter.relay.transport import Heard, Piece, State, with_own_code
from adapter.relay.upstream import Upstream

_SETTINGS_SECONDS = 15.0  # until the client has acknowledged our settings
_SILENT_SECONDS = 60.0  # after this a silent client gets a PING
_PING_SECONDS = 20.0  # until it has answered
_IDLE_SECONDS = 3600.0  # without a request; then the connection is shut down
_POLL_SECONDS = 0.05
_MAX_TICK_SECONDS = 0.5  # after a longer pause it was the event loop that was slow, not the clients
_FEW_BYTES = 2**10
_GLITCHES_OF_SMALL_DATA = 4
_NAME_PREFIX_BYTES = 2**11  # the name ends within them, where the message begins with one
# smaller messages are forwarded when they are complete, larger ones as they are received
_BUFFERED_MESSAGE_BYTES = 2**18
# looking up a member of an enumeration is slow in Python 3.11
_ARRIVING = Stage.ARRIVING
_WAITING = Stage.WAITING
_SENDING = Stage.SENDING


@with_own_code
class RelaySession(Downstream):
    """One client's connection, its requests, and the upstream connections they use."""

    __slots__ = ("_begun", "_busy_at", "_checked", "_clock", "_received_at", "ended", "upstreams")

    def __init__(self, context: RelayContext) -> None:
        super().__init__(context)
        self.upstreams: list[Upstream] = []
        self.ended = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._begun = self._received_at = self._busy_at = self._checked = self._clock()

    def flush_all(self) -> None:
        """Write the queued frames of the client's connection and of all upstream ones."""
        self.flush()
        for upstream in self.upstreams:
            upstream.flush()

    # -- upstream connections ---------------------------------------------------------------

    def upstream(self, *, is_triton: bool) -> Upstream:
        """Return a connection that accepts more streams; open one if there is none."""
        for upstream in self.upstreams:
            is_full = upstream.is_ending or len(upstream.streams) >= upstream.max_streams
            if upstream.is_triton is is_triton and not is_full:
                return upstream
        upstream = Upstream(self.context, self, self._handle_lost_upstream, is_triton=is_triton)
        self.upstreams.append(upstream)
        self.context.begin(self._connect(upstream))
        return upstream

    async def _connect(self, upstream: Upstream) -> None:
        """Connect the upstream; on failure close it, which fails the requests that wait for it."""
        context = self.context
        connect = context.connect_triton if upstream.is_triton else context.connect_fallback
        try:
            await connect(upstream)
        except OSError:
            upstream.close()
            self.flush_all()

    def _handle_lost_upstream(self, upstream: Upstream) -> None:
        """Remove an upstream whose connection was lost, or never made, and fail its requests."""
        self.upstreams.remove(upstream)
        reason = Reason.UNREACHABLE
        text = "Triton cannot be reached"
        if upstream.was_open:
            reason = Reason.BROKEN
            text = "the connection to Triton broke"
        for stream in list(upstream.streams.values()):
            upstream.forget(stream)
            self.end_unanswered(stream.exchange, reason, text)

    # -- the session ------------------------------------------------------------------------

    def handle_lost(self) -> None:
        """Cancel the client's requests, and close the upstream connections that work on none."""
        super().handle_lost()
        for upstream in list(self.upstreams):
            upstream.close_if_done()

    def handle_closed(self) -> None:
        """End if the client and all upstreams have gone."""
        if self.state is State.CLOSED and not self.upstreams:
            self.ended.set()

    @property
    def is_done(self) -> bool:
        """Whether the client has left, and no model works on its requests."""
        return self.state is State.CLOSED and all(
            stream.exchange.direct_call is not None and stream.exchange.direct_call.is_lost
            for upstream in self.upstreams
            for stream in upstream.streams.values()
        )

    async def wait_until_done(self) -> None:
        """Wait until the client has left and no model works on its requests."""
        while not self.is_done:  # noqa: ASYNC110 - no event says that a model is gone
            await asyncio.sleep(_POLL_SECONDS)

    def close_all(self) -> None:
        """Close every connection at once, whatever is in flight."""
        self.close(Code.CANCEL)
        for upstream in list(self.upstreams):
            upstream.close()

    def check_requests(self) -> None:
        """Apply time limits and the limit of buffered bytes; called ten times a second."""
        self._check_time_limits()
        if self.is_over_budget:
            self._drain_buffers()
        elif self.is_stalled:
            self._refuse_held_back()
        self.flush_all()

    def check_connection(self) -> None:
        """Detect dead and idle peers, and refill the budget of glitches; called once a second."""
        now = self._clock()
        self.start_second()
        for upstream in self.upstreams:
            upstream.start_second()
        if self.streams:
            self._busy_at = now
        if self.heard is Heard.SOMETHING:
            self._received_at = now
            self.heard = Heard.NOTHING
        if not self.is_acknowledged and now - self._begun > _SETTINGS_SECONDS:
            self.close(Code.SETTINGS_TIMEOUT)
        elif now - self._received_at > _SILENT_SECONDS + _PING_SECONDS:
            self.close()
        elif now - self._received_at > _SILENT_SECONDS and self.heard is Heard.NOTHING:
            self.ping()
        elif now - self._busy_at > _IDLE_SECONDS:
            self.shut_down()
        self.flush_all()

    # -- requests ---------------------------------------------------------------------------

    def begin(self, stream_id: int, call: Call, *, end: bool) -> None:
        """Store a new request, with its deadline. Handle it at once if no message is to be
        gathered: the client has ended it, or its method is a stream or unknown.
        """
        seconds = self.context.timeout_seconds
        if call.seconds is not None and call.seconds < seconds:
            seconds = call.seconds
        exchange = self.streams[stream_id] = Exchange(
            stream_id, self.initial_window, call=call, deadline=self._clock() + seconds
        )
        if end or call.max_bytes is None:
            self._begin_at_once(exchange, end=end)

    def _begin_at_once(self, exchange: Exchange, *, end: bool) -> None:
        """Handle a request as its headers arrive, because no message is to be gathered. A stream or
        an unknown method goes to the fallback server; a request that has ended without a message is
        refused, and so is one that its headers forbid.
        """
        exchange.is_ended = end
        call = exchange.call
        if end and call.length:
            self.reset_faulty(exchange.id, Code.PROTOCOL_ERROR)
        elif call.http_status is not None:
            self.discard(exchange, b"", end=end)
        elif (error := call.refusal or self.count_stream(exchange)) is not None:
            self.refuse(exchange, error)
        elif call.max_bytes is None:
            self._route_to_fallback(exchange, b"", end=end)
        else:
            self._refuse_incomplete(exchange)

    def handle_data(self, stream: Exchange, piece: Piece, end: bool) -> None:
        """Count small frames of a request, and forward its DATA, or buffer them until the request
        can be routed.
        """
        size = len(piece)
        stream.received_bytes += size
        if size < LEAST_BYTES and not end:
            self.count_small_frame(_GLITCHES_OF_SMALL_DATA)
        elif self.small_frames:
            self.forgive_small_frames(1)
        if LEAST_BYTES <= size < _FEW_BYTES and not end:
            self.count_glitch()
        if not (end and stream.received_bytes == size and self._forward_whole(stream, piece)):
            self._take(stream, piece, end=end)

    def _take(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Handle DATA by the stage of its request: forward it, buffer it, or drop it with its
        credit. Reset the stream if its length differs from Content-Length.
        """
        length = exchange.call.length
        received = exchange.received_bytes
        is_too_long = length is not None and received > length
        is_too_short = length is not None and end and received < length
        if is_too_long or is_too_short:
            self.reset_faulty(exchange.id, Code.PROTOCOL_ERROR)  # RFC 9113 section 8.1.1
        elif exchange.call.http_status is not None:
            self.discard(exchange, piece, end=end)
        elif exchange.stage is _SENDING:
            if exchange.body is not None:
                exchange.body.take(len(piece))
            self._forward(exchange, piece, end=end)
        elif exchange.stage is _ARRIVING:
            self._gather(exchange, piece, end=end)
        elif exchange.stage is _WAITING:
            self._buffer(exchange, piece)
        else:
            self.credit(exchange, len(piece))

    def _forward_whole(self, exchange: Exchange, piece: Piece) -> bool:
        """Forward a request that is complete in one DATA frame, as most small ones are, to Triton,
        or refuse it. Return whether the request was handled; if not, nothing was done.
        """
        call = exchange.call
        size = len(piece)
        block = call.direct
        if block is None or call.length not in {None, size} or not isinstance(piece, bytes):
            return False
        name = plain_name(piece, self.context.max_message_bytes)
        if name is None:
            return False
        admitted = self.context.policy.admit(name, call.metadata_name, piece[PREFIX_BYTES:])
        if admitted is None:
            return False
        if isinstance(admitted, Exception):
            self.refuse(exchange, admitted)
            return True
        exchange.direct_call = admitted
        upstream = self.upstream(is_triton=True)
        upstream.send(upstream.open_stream(exchange, block, end=False), piece, end=True)
        return True

    # -- buffering --------------------------------------------------------------------------

    def _gather(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Buffer DATA of a request until its model's name, or all of a small message, is there;
        then route the request.
        """
        if self.refuse_odd_flag(exchange, piece):
            return
        start: Piece | bytearray = piece
        if exchange.buffered:
            self._buffer(exchange, piece)
            start = exchange.buffered
            if len(start) < exchange.needed_bytes and not end:
                return
        name = self._read_name(exchange, start)
        if end and name is Peek.COMPRESSED:
            self._route_compressed(exchange, bytes(start))
        elif end or not self._needs_more(exchange, name, start):
            self._count_and_route(exchange, name, bytes(exchange.buffered) or piece, end=end)
        elif start is piece:
            self._buffer(exchange, piece)

    def _buffer(self, exchange: Exchange, piece: Piece) -> None:
        """Append DATA to the request's buffer, and count the bytes against the byte budget."""
        if not isinstance(exchange.buffered, bytearray):
            exchange.buffered = bytearray()
        exchange.buffered += piece
        self.add_buffered(len(piece))

    def _read_name(self, exchange: Exchange, start: Piece | bytearray) -> bytes | Peek:
        """Return the model's name in the start of a message; a Peek says why there is none."""
        if exchange.call.direct is None and len(start) >= PREFIX_BYTES:
            return Peek.NO
        return first_name(bytes(start[:_NAME_PREFIX_BYTES]), self.context.max_message_bytes)

    def _needs_more(self, exchange: Exchange, name: bytes | Peek, start: Piece | bytearray) -> bool:
        """Return whether to wait for more of the message, of which `start` is here, to route it."""
        here = len(start)
        if name is Peek.MORE:
            exchange.needed_bytes = here + 1
            return True
        size = PREFIX_BYTES + length_of(start)
        is_large = size < here or size > _BUFFERED_MESSAGE_BYTES
        if name is Peek.NO or is_large or self.is_over_budget:
            return False
        exchange.needed_bytes = size + 1
        return True

    def _drain_buffers(self) -> None:
        """Free buffers while their bytes exceed the budget: route each request whose message's
        start is enough, and refuse those that wait for their model or the fallback server, as they
        keep others out.
        """
        for exchange in list(self.streams.values()):
            if exchange.stage is Stage.ARRIVING and exchange.buffered:
                name = self._read_name(exchange, exchange.buffered)
                if name is not Peek.MORE:
                    self._count_and_route(exchange, name, bytes(exchange.buffered), end=False)
            elif exchange.stage is Stage.WAITING:
                self.refuse(exchange, _overloaded())

    def _refuse_held_back(self) -> None:
        """Refuse the latest request that waits for room, if another one, which need not wait,
        cannot come because of it.
        """
        arriving = [stream for stream in self.streams.values() if not stream.is_ended]
        if any(not stream.is_held_back for stream in arriving):
            last = next(stream for stream in reversed(arriving) if stream.is_held_back)
            self.refuse(last, _overloaded())

    # -- routing ----------------------------------------------------------------------------

    def _count_and_route(
        self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool
    ) -> None:
        """Route a message; the bytes of a large one count until they have been forwarded."""
        size = length_of(piece)
        if size > _BUFFERED_MESSAGE_BYTES:
            self.release_buffer(exchange)
            exchange.body = LargeBody(exchange, self, self.refuse, PREFIX_BYTES + size)
            exchange.body.take(len(piece))
        self._route(exchange, name, piece, end=end)

    def _route_compressed(self, exchange: Exchange, message: bytes) -> None:
        """Route a complete message that is compressed. Most are small, and are decompressed here:
        the fallback server, which decompresses the others, takes several times as long.
        """
        plain = decompress(message, exchange.call.encoding, _BUFFERED_MESSAGE_BYTES)
        if plain is not None:
            message = plain
        name = self._read_name(exchange, message)
        self._count_and_route(exchange, name, message, end=True)

    def _route(self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool) -> None:
        """Forward a request to Triton if the policy admits it, and to the fallback server if not;
        or refuse it, as incomplete or too large.
        """
        self.release_buffer(exchange)
        block = exchange.call.direct
        size = length_of(piece)
        exchange.remaining_bytes = PREFIX_BYTES + size
        if exchange.is_cut_off(piece, end=end):
            self._refuse_incomplete(exchange)
        elif block is not None and self._admit(exchange, name, piece, end=end):
            self._open(exchange, block, is_triton=True, end=False)
            self._send(exchange, piece, end=end)
        elif exchange.is_answered:
            return  # `_admit` has refused the request
        elif (error := self._find_excess(exchange, size)) is not None:
            self._handle_too_large(exchange, name, piece, error)
        else:
            self._route_to_fallback(exchange, piece, end=end)

    def _handle_too_large(
        self, exchange: Exchange, name: bytes | Peek, piece: Piece, error: RelayError
    ) -> None:
        """Refuse a message that is too large for the fallback server, unless its model may take it
        directly later: then wait once for the model.
        """
        model = exchange.call.metadata_name
        is_of_another = model is not None and model.encode() != name
        has_waited = exchange.stage is _WAITING
        may_wait = exchange.call.direct is not None and not is_of_another and not has_waited
        if may_wait and isinstance(name, bytes):
            self._wait_for_model(exchange, name, piece)
        else:
            self.refuse(exchange, error)

    def _wait_for_model(self, exchange: Exchange, name: bytes, piece: Piece) -> None:
        """Keep back a message that is too large for the fallback server until its model takes
        inferences, and it can go to Triton directly. The stream's window bounds what comes of it
        meanwhile, which counts as buffered.
        """
        if exchange.body is not None:
            exchange.body.end()
            exchange.body = None
        self._buffer(exchange, piece)
        exchange.enter(Stage.WAITING)
        exchange.wait = self.context.begin(self._route_ready(exchange, name))

    async def _route_ready(self, exchange: Exchange, name: bytes) -> None:
        """Wait until the model of a large message takes inferences, then route the message, or
        refuse it with the reason why the model does not.
        """
        error = await self.context.policy.wait_until_ready(name, exchange.call.metadata_name)
        exchange.wait = None
        if error is not None:
            self.refuse(exchange, error)
        else:
            piece = bytes(exchange.buffered)
            self._count_and_route(exchange, name, piece, end=exchange.is_ended)
        self.flush_all()

    def _find_excess(self, exchange: Exchange, size: int) -> RelayError | None:
        """Return the error of a message that is larger than its method allows, None for a smaller
        one.
        """
        limit = exchange.call.max_bytes
        direct = self.context.max_message_bytes
        if exchange.call.direct is not None and size > direct:
            limit = direct
        if limit is None or size <= limit:
            return None
        return RelayError(Reason.TOO_LARGE, f"message larger than max ({size} vs. {limit})")

    def _admit(self, exchange: Exchange, name: bytes | Peek, start: Piece, *, end: bool) -> bool:
        """Lease the model of a request to Triton, and note the lease at the exchange. Return False
        for one that goes to the fallback server, and for one that was refused here.
        """
        if not isinstance(name, bytes):
            return False
        scanner = NameScanner(length_of(start))
        try:
            scanner.feed(start[PREFIX_BYTES:])
            if end:
                scanner.end()
        except Malformed:
            return False  # the fallback server answers with the error
        message = bytes(start[PREFIX_BYTES:]) if end else b""
        admitted = self.context.policy.admit(name, exchange.call.metadata_name, message)
        if admitted is None:
            return False
        if isinstance(admitted, Exception):
            if end:
                self.refuse(exchange, admitted)
            return False
        exchange.direct_call = admitted
        exchange.scanner = scanner
        if not end:
            scanner.check = admitted.check_fields
            admitted.on_unload(partial(self._handle_unload, exchange))
        return True

    def _refuse_incomplete(self, exchange: Exchange) -> None:
        """Refuse a request whose stream has ended before its message was complete."""
        count = exchange.received_bytes
        text = f"the request ended after {count} bytes, before its message was complete"
        self.refuse(exchange, RelayError(Reason.INCOMPLETE, text))

    # -- forwarding -------------------------------------------------------------------------

    def _route_to_fallback(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Send a call to the fallback server; a small one in its turn."""
        if self.context.fallback_queue.has_room or exchange.body is not None:
            self._send_fallback(exchange, piece, end=end)
            return
        self._buffer(exchange, piece)
        exchange.enter(_WAITING)
        self.context.fallback_queue.wait(self, partial(self._send_waiting, exchange))

    def _send_waiting(self, exchange: Exchange) -> None:
        """Send a buffered call to the fallback server, whose turn has come, unless the call has
        ended meanwhile.
        """
        if exchange.stage is _WAITING:
            piece = bytes(exchange.buffered)
            self.release_buffer(exchange)
            self._send_fallback(exchange, piece, end=exchange.is_ended)
            self.flush_all()

    def _send_fallback(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Send the headers and the first bytes of a call to the fallback server."""
        self.context.fallback_queue.count_sent()
        if exchange.body is None:
            exchange.messages = FallbackMessages(exchange, self, self.refuse)
        self._open(exchange, exchange.call.fallback, is_triton=False, end=end and not piece)
        if piece:
            self._forward(exchange, piece, end=end)

    def _open(self, exchange: Exchange, block: bytes, *, is_triton: bool, end: bool) -> None:
        """Open an upstream stream with these headers for a request, and mark the request as being
        sent.
        """
        upstream = self.upstream(is_triton=is_triton)
        exchange.enter(Stage.SENDING)
        outbound = upstream.open_stream(exchange, block, end=end)
        if end:
            upstream.on_finished(outbound)

    def _forward(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Check DATA of a request that is being sent upstream, and forward it. A malformed or
        incomplete message ends the request.
        """
        scanner = exchange.scanner
        if self.refuse_odd_flag(exchange, piece):
            return
        if exchange.is_cut_off(piece, end=end):
            self.credit(exchange, len(piece))
            self._refuse_incomplete(exchange)
            return
        if scanner is not None:
            try:
                scanner.feed(piece)
                if end:
                    scanner.end()
            except Malformed as error:
                self.credit(exchange, len(piece))
                self.fail(exchange, RelayError(Reason.INVALID, str(error)))
                return
        self._send(exchange, piece, end=end)

    def _send(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Send DATA upstream. The last byte of a message to Triton waits for the end of the stream,
        so that Triton never executes a request whose end was not received.
        """
        if (outbound := exchange.outbound) is None:
            return
        if exchange.messages is not None:
            exchange.messages.take(piece)
        exchange.remaining_bytes -= len(piece)
        if exchange.scanner is not None:
            if end:
                piece = exchange.last_byte or piece
            elif not exchange.remaining_bytes and piece:
                piece, exchange.last_byte = piece[:-1], bytes(piece[-1:])
        outbound.upstream.send(outbound, piece, end=end)

    # -- time limits ------------------------------------------------------------------------

    def _check_time_limits(self) -> None:
        """End requests whose deadline has passed, that arrive too slowly, or whose response is not
        read.
        """
        now = self._clock()
        seconds, self._checked = min(now - self._checked, _MAX_TICK_SECONDS), now
        for exchange in list(self.streams.values()):
            if now > exchange.deadline:
                self.handle_deadline(exchange)
            elif exchange.is_arriving:
                self._check_arriving(exchange, seconds)
            elif exchange.queue:
                self._check_unread(exchange, now)

    def _handle_unload(self, exchange: Exchange) -> None:
        """Refuse a request that is still arriving; expect the response to be read fast."""
        if exchange.is_arriving:
            self._refuse_arriving(exchange, "the model is being unloaded")
            self.flush_all()
        else:
            exchange.hurry(self._clock())

    def _check_arriving(self, exchange: Exchange, seconds: float) -> None:
        """Refuse a request that arrives too slowly; `seconds` have passed since the last check."""
        limits = self.context.caller_limits
        if self.context.is_stopping:
            self._refuse_arriving(exchange, "the adapter is stopping")
        elif exchange.stage is Stage.WAITING:
            return  # its caller is not the one that is waited for
        elif self.is_peer_due(exchange) and exchange.is_slow(seconds, limits):
            text = f"it comes at less than {limits.rate / 2**10:g} KiB/s"
            self.refuse(exchange, RelayError(Reason.SLOW, text))

    def _refuse_arriving(self, exchange: Exchange, text: str) -> None:
        """Refuse a request that has not arrived completely; its client may retry."""
        error = RelayError(Reason.NOT_STARTED, f"{text}; this request had not wholly come yet")
        self.refuse(exchange, error)

    def _check_unread(self, exchange: Exchange, now: float) -> None:
        """Reset a stream whose client does not read; part of its response is queued."""
        if self.context.is_stopping:
            exchange.hurry(now)
        if exchange.unread_mark is None and exchange.direct_call is not None:
            exchange.direct_call.on_unload(partial(self._handle_unload, exchange))
        if exchange.is_stuck(now, self.context.caller_limits):
            self.reset(exchange, Code.CANCEL)
            self.handle_cancel(exchange)


def _overloaded() -> RelayError:
    """Return the error of a request that the byte budget has no room for."""
    return RelayError(Reason.OVERLOADED, "too much is on its way to Triton")
