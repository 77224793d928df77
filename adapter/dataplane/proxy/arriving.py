"""How requests come in and go on: straight to Triton, or to the server beside us."""

from functools import partial

from adapter.dataplane.proxy.exchange import Exchange, Stage
from adapter.dataplane.proxy.outcomes import Outcomes
from adapter.dataplane.proxy.routing import Call
from adapter.dataplane.proxy.upstream import Upstream
from adapter.errors import InvalidRequest, MessageTooLarge, Overloaded
from adapter.protocols.http2.frames import Code
from adapter.protocols.http2.states import AFTER_PEERS_END
from adapter.protocols.http2.transport import Piece
from adapter.protocols.protobuf import (
    PREFIX_BYTES,
    NameScanner,
    Peek,
    first_name,
    length_of,
    plain_name,
)

_NAME_AT_MOST = 2**11  # bytes in which the name is found, if it is
# of a message that goes on when all of it is here; larger ones go on as they come
_GATHERED_BYTES = 2**18


class Arriving(Outcomes):
    def upstream(self, *, is_triton: bool) -> Upstream:
        """One that takes more streams, to Triton or to the server beside us."""
        raise NotImplementedError

    # -- requests ---------------------------------------------------------------------------

    def begin(self, stream_id: int, call: Call, *, end: bool) -> None:
        downstream, seconds = self.downstream, self.context.timeout_seconds
        if call.seconds is not None:
            seconds = min(seconds, call.seconds)
        exchange = Exchange(stream_id, downstream.initial_window, call, self.clock() + seconds)
        if end:
            exchange.near.state = AFTER_PEERS_END[exchange.near.state]
        downstream.streams[stream_id] = exchange.near
        if end and call.length:
            downstream.refuse(stream_id, Code.PROTOCOL_ERROR)
        elif call.http_status is not None:
            self.discard(exchange, b"", end=end)
        elif call.refusal is not None:
            self.refuse_request(exchange, InvalidRequest(call.refusal))
        elif end or (call.direct is None and call.most_bytes is None):
            self._begin_beside(exchange, end=end)

    def request_data(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        exchange.came += len(piece)
        if end and exchange.came == len(piece) and self._goes_whole(exchange, piece):
            return
        length = exchange.call.length
        if length is not None and (exchange.came > length or (end and exchange.came < length)):
            self.downstream.refuse(exchange.near.id, Code.PROTOCOL_ERROR)  # RFC 9113, 8.1.1
        elif exchange.call.http_status is not None:
            self.discard(exchange, piece, end=end)
        elif exchange.stage is Stage.ARRIVING:
            self._arrive(exchange, piece, end=end)
        elif exchange.stage is Stage.WAITING:
            self._hold(exchange, piece)
        elif exchange.stage is Stage.SENDING:
            self._go_on(exchange, piece, end=end)
        else:
            self.downstream.credit(exchange.near, len(piece))

    def _goes_whole(self, exchange: Exchange, piece: Piece) -> bool:
        """The usual small request: all of it in one frame, and straight to Triton. False, and
        nothing done, for whatever else it is.
        """
        call = exchange.call
        if call.direct is None or call.length is not None or not isinstance(piece, bytes):
            return False
        name = plain_name(piece, self.context.max_message_bytes)
        if name is None:
            return False
        upstream = self.upstream(is_triton=True)
        if not upstream.has_room_for(len(piece)) or not call.direct_start:
            return False
        exchange.direct_call = self.context.policy.admit(name, call.mesh_id)
        if exchange.direct_call is None:
            return False
        upstream.open_whole(exchange, piece)
        return True

    def _arrive(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        if exchange.held or not end:
            self._hold(exchange, piece)
            if len(exchange.held) < exchange.wanted and not end:
                return
        name = self._name_in(exchange, exchange.held or piece)
        if end or not self._waits(exchange, name):
            self._start(exchange, name, bytes(exchange.held) or piece, end=end)

    def _hold(self, exchange: Exchange, piece: Piece) -> None:
        if not isinstance(exchange.held, bytearray):
            exchange.held = bytearray()
        exchange.held += piece
        self.downstream.hold(len(piece))

    def _name_in(self, exchange: Exchange, start: Piece | bytearray) -> bytes | Peek:
        if exchange.call.direct is None and len(start) >= PREFIX_BYTES:
            return Peek.NO
        return first_name(bytes(start[:_NAME_AT_MOST]), self.context.max_message_bytes)

    def _waits(self, exchange: Exchange, name: bytes | Peek) -> bool:
        """Whether more of it has to come, or may, before it goes on."""
        here = len(exchange.held)
        if name is Peek.MORE:
            exchange.wanted = here + 1
            return True
        size = PREFIX_BYTES + length_of(exchange.held)
        if name is Peek.NO or size < here or size > _GATHERED_BYTES or self.downstream.is_pressed:
            return False
        exchange.wanted = size + 1
        return True

    def begin_all(self) -> None:
        """What is gathered goes on, for it keeps out what it waits for. What waits for its turn
        cannot, and may keep out what would make room.
        """
        for stream in list(self.downstream.streams.values()):
            exchange = stream.owner
            if exchange.stage is Stage.ARRIVING and exchange.held:
                name = self._name_in(exchange, exchange.held)
                if name is not Peek.MORE:
                    self._start(exchange, name, bytes(exchange.held), end=False)
            elif exchange.stage is Stage.WAITING:
                error = Overloaded("too much is on its way to Triton", delivered=False)
                self.refuse_request(exchange, error)

    def _start(self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool) -> None:
        """Unless it is large, and has to wait for its turn."""
        inflight, size = self.context.inflight, length_of(piece)
        if size <= _GATHERED_BYTES:
            self._go(exchange, name, piece, end=end)
        elif inflight.has_room_for(size):
            exchange.claim = inflight.claim(size, _at_once)
            self._go(exchange, name, piece, end=end)
        else:
            if not exchange.held:
                self._hold(exchange, piece)
            exchange.to(Stage.WAITING)
            exchange.claim = inflight.claim(size, partial(self._take_turn, exchange))

    def _take_turn(self, exchange: Exchange) -> None:
        piece = bytes(exchange.held)
        self._go(exchange, self._name_in(exchange, piece), piece, end=exchange.near.is_ended)
        self.flush()

    def _go(self, exchange: Exchange, name: bytes | Peek, piece: Piece, *, end: bool) -> None:
        self.let_go_of_held(exchange)
        block = exchange.call.direct
        if block is not None and self._admits(exchange, name, piece, end=end):
            self._open(exchange, block, is_triton=True, end=False)
            self._send(exchange, piece, end=end)
        elif (error := self._too_large(exchange, length_of(piece))) is not None:
            why = self.context.policy.why_not(name) if isinstance(name, bytes) else None
            self.refuse_request(exchange, why or error)
        else:
            self._begin_beside(exchange, end=False)
            self._go_on(exchange, piece, end=end)

    def _too_large(self, exchange: Exchange, size: int) -> MessageTooLarge | None:
        most, direct = exchange.call.most_bytes, self.context.max_message_bytes
        if exchange.call.direct is not None and size > direct:
            most = direct
        if most is None or size <= most:
            return None
        return MessageTooLarge(f"message larger than max ({size} vs. {most})")

    def _admits(self, exchange: Exchange, name: bytes | Peek, start: Piece, *, end: bool) -> bool:
        if not isinstance(name, bytes):
            return False
        watch = NameScanner(length_of(start))
        try:
            watch.feed(start[PREFIX_BYTES:])
            if end:
                watch.end()
            exchange.direct_call = self.context.policy.admit(name, exchange.call.mesh_id)
        except InvalidRequest:
            return False  # told beside us
        if exchange.direct_call is None:
            return False
        exchange.watch = watch
        if not end:
            exchange.direct_call.when_model_goes(partial(self.model_goes, exchange))
        exchange.left = PREFIX_BYTES + length_of(start)
        return True

    def _begin_beside(self, exchange: Exchange, *, end: bool) -> None:
        self._open(exchange, exchange.call.served, is_triton=False, end=end)

    def _open(self, exchange: Exchange, block: bytes, *, is_triton: bool, end: bool) -> None:
        upstream = exchange.upstream = self.upstream(is_triton=is_triton)
        exchange.to(Stage.SENDING)
        exchange.far = upstream.open(exchange, block, end=end)
        if end:
            upstream.finished(exchange.far)

    def _go_on(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        watch = exchange.watch
        if watch is not None:
            try:
                watch.feed(piece)
                if end:
                    watch.end()
            except InvalidRequest as error:
                self.downstream.credit(exchange.near, len(piece))
                self.fail(exchange, error)
                return
        self._send(exchange, piece, end=end)

    def _send(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        upstream, far = exchange.upstream, exchange.far
        if upstream is None or far is None:
            return
        if exchange.watch is not None:
            exchange.left -= len(piece)
            if end:
                piece = exchange.last or piece
            elif not exchange.left and piece:
                piece, exchange.last = piece[:-1], bytes(piece[-1:])
        upstream.send(far, piece, end=end)


def _at_once() -> None:
    """There was room."""
