"""Requests of one client: received, then forwarded to Triton directly or to the fallback server."""

import asyncio
from functools import partial
from typing import Protocol

from adapter.http2.bodies import LargeBody
from adapter.http2.context import ProxyContext
from adapter.http2.downstream import Downstream
from adapter.http2.frames import Code
from adapter.http2.policy import Call, Reason, Refused, RelayError
from adapter.http2.protobuf import (
    PREFIX_BYTES,
    Malformed,
    NameScanner,
    Peek,
    first_name,
    length_of,
    plain_name,
)
from adapter.http2.responses import Responses
from adapter.http2.states import AFTER_PEERS_END
from adapter.http2.stream import Exchange, Stage, Wait
from adapter.http2.time_limits import TimeLimits
from adapter.http2.transport import Piece
from adapter.http2.upstream import Upstream

_NAME_PREFIX_BYTES = 2**11  # the name ends within them, where the message begins with one
# smaller messages are forwarded when they are complete, larger ones as they are received
_BUFFERED_MESSAGE_BYTES = 2**18
# looking up a member of an enumeration is slow in Python 3.11
_ARRIVING, _WAITING, _SENDING = Stage.ARRIVING, Stage.WAITING, Stage.SENDING


class FindUpstream(Protocol):
    def __call__(self, *, is_triton: bool) -> Upstream: ...


class Requests:
    def __init__(
        self,
        context: ProxyContext,
        downstream: Downstream,
        upstream: FindUpstream,
        responses: Responses,
        time_limits: TimeLimits,
    ) -> None:
        self._context = context
        self._downstream = downstream
        self._upstream = upstream
        self._responses = responses
        self._time_limits = time_limits
        self._clock = asyncio.get_running_loop().time

    def begin(self, stream_id: int, call: Call, *, end: bool) -> None:
        downstream, seconds = self._downstream, self._context.timeout_seconds
        if call.seconds is not None:
            seconds = min(seconds, call.seconds)
        exchange = Exchange(stream_id, downstream.initial_window, call, self._clock() + seconds)
        if end:
            exchange.inbound.state = AFTER_PEERS_END[exchange.inbound.state]
        downstream.streams[stream_id] = exchange.inbound
        if end and call.length:
            downstream.refuse(stream_id, Code.PROTOCOL_ERROR)
        elif call.http_status is not None:
            self._responses.discard(exchange, b"", end=end)
        elif call.refusal is not None:
            self._responses.refuse(exchange, call.refusal)
        elif call.max_bytes is None:
            self._open_fallback(exchange, end=end)
        elif end:
            self._refuse_incomplete(exchange)

    def data(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        exchange.received_bytes += len(piece)
        if end and exchange.received_bytes == len(piece) and self._goes_whole(exchange, piece):
            return
        length, received = exchange.call.length, exchange.received_bytes
        if length is not None and (received > length or (end and received < length)):
            self._downstream.refuse(
                exchange.inbound.id, Code.PROTOCOL_ERROR
            )  # RFC 9113 section 8.1.1
        elif exchange.call.http_status is not None:
            self._responses.discard(exchange, piece, end=end)
        elif exchange.stage is _SENDING:
            if exchange.body is not None:
                exchange.body.take(len(piece))
            self._forward(exchange, piece, end=end)
        elif exchange.stage is _ARRIVING:
            self._arrive(exchange, piece, end=end)
        elif exchange.stage is _WAITING:
            self._buffer(exchange, piece)
        else:
            self._downstream.credit(exchange.inbound, len(piece))

    def _goes_whole(self, exchange: Exchange, piece: Piece) -> bool:
        """Forward a complete request of one DATA frame to Triton, as most small requests are, or
        refuse it. False, with nothing done, where it is anything else.
        """
        call = exchange.call
        if call.direct is None or call.length is not None or not isinstance(piece, bytes):
            return False
        name = plain_name(piece, self._context.max_message_bytes)
        if name is None:
            return False
        upstream = self._upstream(is_triton=True)
        if not upstream.fits_whole(len(piece)) or not call.direct_start:
            return False
        try:
            exchange.direct_call = self._context.policy.admit(name, call.metadata_name)
        except Refused as refused:
            self._responses.refuse(exchange, refused.error)
            return True
        if exchange.direct_call is None:
            return False
        upstream.open_whole(exchange, piece)
        return True

    # -- buffering --------------------------------------------------------------------------

    def _arrive(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        start: Piece | bytearray = piece
        if exchange.buffered:
            self._buffer(exchange, piece)
            start = exchange.buffered
            if len(start) < exchange.needed_bytes and not end:
                return
        name = self._name_in(exchange, start)
        if end or not self._needs_more(exchange, name, start):
            self._hold_and_route(exchange, name, bytes(exchange.buffered) or piece, end=end)
        elif start is piece:
            self._buffer(exchange, piece)

    def _buffer(self, exchange: Exchange, piece: Piece) -> None:
        if not isinstance(exchange.buffered, bytearray):
            exchange.buffered = bytearray()
        exchange.buffered += piece
        self._downstream.add_buffered(len(piece))

    def _name_in(self, exchange: Exchange, start: Piece | bytearray) -> bytes | Peek:
        if exchange.call.direct is None and len(start) >= PREFIX_BYTES:
            return Peek.NO
        return first_name(bytes(start[:_NAME_PREFIX_BYTES]), self._context.max_message_bytes)

    def _needs_more(self, exchange: Exchange, name: bytes | Peek, start: Piece | bytearray) -> bool:
        """Whether to wait for more of the message, of which this is there, before it is routed."""
        here = len(start)
        if name is Peek.MORE:
            exchange.needed_bytes = here + 1
            return True
        size = PREFIX_BYTES + length_of(start)
        is_large = size < here or size > _BUFFERED_MESSAGE_BYTES
        if name is Peek.NO or is_large or self._downstream.is_over_budget:
            return False
        exchange.needed_bytes = size + 1
        return True

    def drain_buffers(self) -> None:
        """Route requests that are being buffered: they keep out the bytes that would complete them.
        Refuse those that wait for their model, since they may keep out what others need.
        """
        for stream in list(self._downstream.streams.values()):
            exchange = stream.owner
            if exchange.stage is Stage.ARRIVING and exchange.buffered:
                name = self._name_in(exchange, exchange.buffered)
                if name is not Peek.MORE:
                    self._hold_and_route(exchange, name, bytes(exchange.buffered), end=False)
            elif exchange.stage is Stage.WAITING:
                self._responses.refuse(exchange, _overloaded())

    def refuse_held_back(self) -> None:
        """Refuse the latest request that waits for room, if another one, which need not wait,
        cannot come because of it.
        """
        arriving = [stream for stream in self._downstream.streams.values() if not stream.is_ended]
        if any(not stream.is_held_back for stream in arriving):
            last = next(stream for stream in reversed(arriving) if stream.is_held_back)
            self._responses.refuse(last.owner, _overloaded())

    # -- routing ----------------------------------------------------------------------------

    def _hold_and_route(
        self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool
    ) -> None:
        """The bytes of a large message count until they have been forwarded."""
        size = length_of(piece)
        if size > _BUFFERED_MESSAGE_BYTES:
            self._responses.release_buffer(exchange)
            exchange.body = LargeBody(
                *(exchange, self._downstream, self._responses, self._context.budget),
                PREFIX_BYTES + size,
            )
            exchange.body.take(len(piece))
        self._route(exchange, name, piece, end=end)

    def _route(self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool) -> None:
        self._responses.release_buffer(exchange)
        block = exchange.call.direct
        exchange.remaining_bytes = PREFIX_BYTES + length_of(piece)
        if self._breaks_off(exchange, piece, end=end):
            self._refuse_incomplete(exchange)
        elif block is not None and self._admits(exchange, name, piece, end=end):
            self._open(exchange, block, is_triton=True, end=False)
            self._send(exchange, piece, end=end)
        elif exchange.is_answered:
            return  # it was refused
        elif (error := self._too_large(exchange, length_of(piece))) is not None:
            if block is None or not isinstance(name, bytes):
                self._responses.refuse(exchange, error)
            elif self._may_wait(exchange, name, length_of(piece)):
                self._wait_for_model(exchange, name, piece)
            else:
                known = self._context.policy.error_of(name, exchange.call.metadata_name)
                self._responses.refuse(exchange, known or error)
        else:
            self._open_fallback(exchange, end=False)
            self._forward(exchange, piece, end=end)

    def _may_wait(self, exchange: Exchange, name: bytes, size: int) -> bool:
        is_too_large = size > self._context.max_message_bytes
        return not is_too_large and self._context.policy.may_wait(name, exchange.call.metadata_name)

    def _wait_for_model(self, exchange: Exchange, name: bytes, piece: Piece) -> None:
        """Keep back a message that is too large for the fallback server until its model takes
        inferences, and it can go to Triton directly. The stream's window bounds what comes of it
        meanwhile, which counts as buffered.
        """
        if exchange.body is not None:
            exchange.body.end()
            exchange.body = None
        self._buffer(exchange, piece)
        exchange.to(Stage.WAITING)
        exchange.wait = Wait(self._context.begin(self._route_ready(exchange, name)))

    async def _route_ready(self, exchange: Exchange, name: bytes) -> None:
        error = await self._context.policy.ready(name, exchange.call.metadata_name)
        exchange.wait = None
        if error is not None:
            self._responses.refuse(exchange, error)
        else:
            piece = bytes(exchange.buffered)
            self._hold_and_route(exchange, name, piece, end=exchange.inbound.is_ended)
        self._responses.flush()

    def _too_large(self, exchange: Exchange, size: int) -> RelayError | None:
        most, direct = exchange.call.max_bytes, self._context.max_message_bytes
        if exchange.call.direct is not None and size > direct:
            most = direct
        if most is None or size <= most:
            return None
        return RelayError(Reason.TOO_LARGE, f"message larger than max ({size} vs. {most})")

    def _admits(self, exchange: Exchange, name: bytes | Peek, start: Piece, *, end: bool) -> bool:
        if not isinstance(name, bytes):
            return False
        scanner = NameScanner(length_of(start))
        try:
            scanner.feed(start[PREFIX_BYTES:])
            if end:
                scanner.end()
        except Malformed:
            return False  # the fallback server answers with the error
        try:
            exchange.direct_call = self._context.policy.admit(name, exchange.call.metadata_name)
        except Refused as refused:
            if end:
                self._responses.refuse(exchange, refused.error)
            return False
        if exchange.direct_call is None:
            return False
        exchange.scanner = scanner
        if not end:
            exchange.direct_call.on_unload(partial(self._time_limits.model_unloads, exchange))
        return True

    def _breaks_off(self, exchange: Exchange, piece: Piece, *, end: bool) -> bool:
        """Whether the request ends with this piece, and its message does not: the fallback server
        would never begin with it.
        """
        is_unary = exchange.call.max_bytes is not None
        return end and is_unary and len(piece) < exchange.remaining_bytes

    def _refuse_incomplete(self, exchange: Exchange) -> None:
        count = exchange.received_bytes
        why = f"the request ended after {count} bytes, before its message was complete"
        self._responses.refuse(exchange, RelayError(Reason.INCOMPLETE, why))

    # -- forwarding -------------------------------------------------------------------------

    def _open_fallback(self, exchange: Exchange, *, end: bool) -> None:
        self._open(exchange, exchange.call.fallback, is_triton=False, end=end)

    def _open(self, exchange: Exchange, block: bytes, *, is_triton: bool, end: bool) -> None:
        upstream = exchange.upstream = self._upstream(is_triton=is_triton)
        exchange.to(Stage.SENDING)
        exchange.outbound = upstream.open(exchange, block, end=end)
        if end:
            upstream.finished(exchange.outbound)

    def _forward(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        scanner = exchange.scanner
        if self._breaks_off(exchange, piece, end=end):
            self._downstream.credit(exchange.inbound, len(piece))
            self._refuse_incomplete(exchange)
            return
        if scanner is not None:
            try:
                scanner.feed(piece)
                if end:
                    scanner.end()
            except Malformed as error:
                self._downstream.credit(exchange.inbound, len(piece))
                self._responses.fail(exchange, RelayError(Reason.INVALID, str(error)))
                return
        self._send(exchange, piece, end=end)

    def _send(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        upstream, outbound = exchange.upstream, exchange.outbound
        if upstream is None or outbound is None:
            return
        exchange.remaining_bytes -= len(piece)
        if exchange.scanner is not None:
            if end:
                piece = exchange.last_byte or piece
            elif not exchange.remaining_bytes and piece:
                piece, exchange.last_byte = piece[:-1], bytes(piece[-1:])
        upstream.send(outbound, piece, end=end)


def _overloaded() -> RelayError:
    return RelayError(Reason.OVERLOADED, "too much is on its way to Triton")
