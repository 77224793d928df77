"""One relayed request: its two streams, how far it has come, and its place in the byte budget."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from adapter.relay.endpoint import Endpoint
from adapter.relay.flow_control import Stream
from adapter.relay.policy import Call, CallerLimits, DirectCall
from adapter.relay.protobuf import COMPRESSED, PREFIX_BYTES, NameScanner
from adapter.relay.transport import Piece
from adapter.runtime.open_streams import STREAM_BYTES

if TYPE_CHECKING:
    import asyncio


class Stage(Enum):
    """Says how far a request has come."""

    # attributes of each stage, since looking a stage up in a table costs a hash
    follows: tuple["Stage", ...]  # the stages that may follow
    receives: bool  # the client's part is not all forwarded
    is_answered: bool  # the client waits for nothing more of the upstream

    ARRIVING = "nothing has been forwarded; what was received is buffered"
    WAITING = "as ARRIVING, while the model is loaded"
    SENDING = "its headers have been forwarded, its end has not"
    SENT = "all of it has been forwarded"
    ABANDONED = "as SENT, and nobody waits for the response, which is not complete"
    OVER = "the client has the end of the response, or it is queued; the upstream sends no more"


FOLLOWS = {
    Stage.ARRIVING: {Stage.WAITING, Stage.SENDING, Stage.SENT, Stage.OVER},
    Stage.WAITING: {Stage.WAITING, Stage.SENDING, Stage.OVER},
    Stage.SENDING: {Stage.SENT, Stage.OVER},
    Stage.SENT: {Stage.ABANDONED, Stage.OVER},
    Stage.ABANDONED: {Stage.OVER},
    Stage.OVER: {Stage.OVER},
}


_ARRIVING, _WAITING, _SENDING, _SENT, _ABANDONED, _OVER = Stage
for _stage in Stage:
    _stage.follows = tuple(FOLLOWS[_stage])
    _stage.receives = _stage in {_ARRIVING, _WAITING, _SENDING}
    _stage.is_answered = _stage in {_ABANDONED, _OVER}


@dataclass(slots=True, eq=False)
class Outbound(Stream):
    """The stream of an upstream connection that a request was forwarded to."""

    # set by the connection
    exchange: "Exchange" = field(init=False)
    upstream: Endpoint["Outbound"] = field(init=False)


@dataclass(slots=True, eq=False)
class Exchange(Stream):
    """One relayed request: the stream of the client's connection."""

    call: Call = field(kw_only=True)
    deadline: float = field(kw_only=True)  # by the event loop's clock
    stage: Stage = _ARRIVING
    is_counted: bool = False  # among the open streams
    is_answered: bool = False
    outbound: Outbound | None = None  # of `upstream`
    upstream: Endpoint[Outbound] | None = None
    direct_call: DirectCall | None = None  # set when the upstream is Triton
    scanner: NameScanner | None = None
    body: "LargeBody | None" = None  # counts a large message in the byte budget
    messages: "FallbackMessages | None" = None  # at the fallback server, if there is no `body`
    wait: "asyncio.Task[None] | None" = None  # waits for the model
    # received while ARRIVING or WAITING; with less than so many bytes there is nothing to decide
    buffered: bytearray | bytes = b""
    needed_bytes: int = PREFIX_BYTES + 2
    remaining_bytes: int = 0  # of the message, still to come once it is forwarded
    # goes together with END_STREAM, so that Triton never executes a request whose end was not
    # received
    last_byte: bytes | memoryview = b""
    received_bytes: int = 0  # of the request, in `waited_seconds`
    waited_seconds: float = 0.0
    has_headers: bool = False  # of the response, forwarded to the client
    has_data: bool = False
    sent_bytes: int = 0  # of the response, sent
    # a time and the `sent_bytes` of that time: of the last progress, and of when the model or the
    # adapter began to wait for this response
    unread_mark: tuple[float, int] | None = None
    hurry_mark: tuple[float, int] | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether this is a unary inference whose client has not sent END_STREAM."""
        return self.stage.receives and not self.is_ended and self.call.direct is not None

    def has_odd_flag(self, piece: Piece) -> bool:
        """Return whether the request begins with `piece`, whose compressed flag gRPC does not know.

        The fallback server would take an empty message for it.
        """
        is_first = self.received_bytes == len(piece) > 0
        return is_first and piece[0] > COMPRESSED and not self.is_answered

    def is_cut_off(self, piece: Piece, *, end: bool) -> bool:
        """Return whether the request ends with this piece, before its message is complete: the
        fallback server would never begin with it.
        """
        is_unary = self.call.max_bytes is not None
        return end and is_unary and len(piece) < self.remaining_bytes

    def is_slow(self, seconds: float, limits: CallerLimits) -> bool:
        """Return whether the request arrives too slowly; so many seconds have passed since the last
        call, in which the client could send.
        """
        self.waited_seconds += seconds
        waited = self.waited_seconds
        return waited > limits.slow and self.received_bytes < waited * limits.rate

    def hurry(self, now: float) -> None:
        """Expect the response to be read fast from now on."""
        if self.hurry_mark is None:
            self.hurry_mark = (now, self.sent_bytes)

    def is_stuck(self, now: float, limits: CallerLimits) -> bool:
        """Return whether the client has not read enough of a response that is queued."""
        taken = self.sent_bytes
        is_stuck = False
        if self.unread_mark is None or self.unread_mark[1] != taken:
            self.unread_mark = (now, taken)
        if self.direct_call is not None:
            is_stuck = now - self.unread_mark[0] > limits.answer
        if self.hurry_mark is not None:
            seconds = now - self.hurry_mark[0]
            so_far = taken - self.hurry_mark[1]
            is_stuck |= seconds > limits.drain and so_far < seconds * limits.rate
        return is_stuck

    def enter(self, stage: Stage) -> None:
        """Go on to another stage. Raise RuntimeError for one that may not follow."""
        if stage not in self.stage.follows:
            raise RuntimeError(f"{self.stage.name} is not followed by {stage.name}")
        self.stage = stage
        self.is_answered = stage.is_answered
        if not stage.receives:
            if self.body is not None:
                self.body.end()
            if self.messages is not None:
                self.messages.end()
            if self.wait is not None:
                self.wait.cancel()


class LargeBody:
    """A large message in the byte budget, where it counts until all of it has been forwarded. While
    it waits for room, its client gets no credit to send more.
    """

    def __init__(
        self,
        exchange: Exchange,
        downstream: Endpoint[Exchange],
        refuse: Callable[[Exchange, Exception], None],
        size: int,
    ) -> None:
        self._exchange = exchange
        self._downstream = downstream
        self._refuse = refuse
        self._holding = downstream.shared.hold(self, size)

    def take(self, size: int) -> None:
        """Count `size` bytes that have arrived; without room for them, hold the stream's credit
        back.
        """
        if not self._holding.take(size):
            self._downstream.hold_back(self._exchange, size)

    def end(self) -> None:
        """Stop counting the message."""
        self._downstream.release_credit(self._exchange)
        self._holding.end()

    # -- for the budget ---------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Return whether the client may send, and the upstream takes what comes."""
        outbound = self._exchange.outbound
        is_taken = outbound is None or not outbound.queue
        return is_taken and self._downstream.is_peer_due(self._exchange)

    def resume(self) -> None:
        """Give the client credit again."""
        self._downstream.release_credit(self._exchange)
        self._downstream.flush_all()

    def cut(self, error: Exception) -> None:
        """Refuse the request with `error`."""
        self._refuse(self._exchange, error)
        self._downstream.flush_all()


class FallbackMessages:
    """Counts an incomplete message of a stream or another call in the byte budget.

    The fallback server keeps what it has received of a message until it has the last byte, so the
    bytes count until that byte is forwarded. The lengths in the prefixes say where each message of
    a stream ends: a DATA frame may have several messages, or a part of one, or of a prefix.

    A message of at most `STREAM_BYTES` does not count in a stream: incomplete ones of all streams
    together take no more than is counted for open streams. Other calls have no such bound.
    """

    __slots__ = ("_begin_body", "_body", "_free_bytes", "_missing_bytes", "_prefix")

    def __init__(
        self,
        exchange: Exchange,
        downstream: Endpoint[Exchange],
        refuse: Callable[[Exchange, Exception], None],
    ) -> None:
        self._begin_body = partial(LargeBody, exchange, downstream, refuse)
        self._free_bytes = STREAM_BYTES if exchange.is_counted else 0
        self._body: LargeBody | None = None  # of the incomplete message, if that is large
        self._missing_bytes = 0  # of the incomplete message
        self._prefix = b""  # the start of a prefix that is incomplete itself

    def take(self, piece: Piece) -> None:
        """Follow the messages through the next DATA, and count the bytes of an incomplete one."""
        if self._prefix:
            piece = self._prefix + piece
        size = len(piece)
        at = self._continue_message(size) if self._missing_bytes else 0
        while size - at >= PREFIX_BYTES:
            start = at
            at += PREFIX_BYTES + int.from_bytes(piece[start + 1 : start + PREFIX_BYTES])
            if at > size:
                self._begin_message(at - start, size - start)
        self._prefix = bytes(piece[at:])

    def _begin_message(self, size: int, received: int) -> None:
        """Begin with a message of which `received` bytes are here."""
        self._missing_bytes = size - received
        if size > self._free_bytes:
            self._body = self._begin_body(size)
            self._body.take(received)

    def _continue_message(self, size: int) -> int:
        """Count those of `size` bytes that are of the incomplete message; return how many are."""
        size = min(size, self._missing_bytes)
        self._missing_bytes -= size
        if self._body is not None:
            self._body.take(size)
        if not self._missing_bytes:
            self.end()
        return size

    def end(self) -> None:
        """Stop counting the incomplete message."""
        if self._body is not None:
            self._body.end()
            self._body = None
