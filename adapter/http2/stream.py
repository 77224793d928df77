"""One relayed request: its two streams, how far it has come, and its place in the byte budget."""

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from adapter.http2.endpoint import Endpoint
from adapter.http2.flow_control import Stream
from adapter.http2.policy import Call, CallerLimits, DirectCall
from adapter.http2.protobuf import COMPRESSED, PREFIX_BYTES, NameScanner
from adapter.http2.transport import Piece
from adapter.runtime.byte_budget import ByteBudget

if TYPE_CHECKING:
    import asyncio


class Stage(Enum):
    """How far a request has come. A look-up by a member costs a hash: `follows` is its row of
    `FOLLOWS`; `receives` whether the client's part is not all forwarded, `is_answered` whether the
    client waits for nothing more of the upstream.
    """

    follows: tuple["Stage", ...]
    receives: bool
    is_answered: bool

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


class Outbound(Stream):
    """The stream of an upstream connection that a request was forwarded to."""

    __slots__ = ("exchange", "upstream")

    # set by the connection: a call of another __init__ takes longer
    exchange: "Exchange"
    upstream: Endpoint["Outbound"]


class Exchange(Stream):
    """One relayed request: the stream of the client's connection. `outbound` is that of `upstream`.

    `direct_call` is set when the upstream is Triton. `deadline` is by the event loop's clock.

    `buffered` holds what was received while ARRIVING or WAITING; with less than `needed_bytes` of
    it there is nothing to decide. `wait` waits for the model. `body` counts a large message in the
    byte budget. Once it is forwarded `remaining_bytes` of its message are still to come.
    `last_byte` goes together with END_STREAM, so that Triton never executes a request whose end was
    not received. `received_bytes` of the request came in `waited_seconds`; `taken_bytes` of the
    response were sent. `unread_mark` and `hurry_mark` are a time and the `taken_bytes` of that
    time: of the last progress, and of when the model or the adapter began to wait for this
    response.
    """

    __slots__ = (
        "body",
        "buffered",
        "call",
        "deadline",
        "direct_call",
        "has_data",
        "has_headers",
        "hurry_mark",
        "is_answered",
        "last_byte",
        "needed_bytes",
        "outbound",
        "received_bytes",
        "remaining_bytes",
        "scanner",
        "stage",
        "taken_bytes",
        "unread_mark",
        "upstream",
        "wait",
        "waited_seconds",
    )

    def __init__(self, stream_id: int, send_window: int, call: Call, deadline: float) -> None:
        super().__init__(stream_id, send_window)
        self.call = call
        self.deadline = deadline
        self.stage = _ARRIVING
        self.is_answered = False
        self.outbound: Outbound | None = None
        self.upstream: Endpoint[Outbound] | None = None
        self.direct_call: DirectCall | None = None
        self.scanner: NameScanner | None = None
        self.body: LargeBody | None = None
        self.wait: asyncio.Task[None] | None = None
        self.buffered: bytearray | bytes = b""
        self.needed_bytes = PREFIX_BYTES + 2
        self.remaining_bytes = 0
        self.last_byte: bytes | memoryview = b""
        self.received_bytes = self.taken_bytes = 0
        self.waited_seconds = 0.0
        self.unread_mark: tuple[float, int] | None = None
        self.hurry_mark: tuple[float, int] | None = None
        self.has_headers = self.has_data = False  # of the response, forwarded to the client

    @property
    def is_arriving(self) -> bool:
        """Whether this is a unary inference whose client has not sent END_STREAM."""
        return self.stage.receives and not self.is_ended and self.call.direct is not None

    def counted_in(self, budget: ByteBudget) -> Exception | None:
        """Count a stream, which may stay open for long, until its caller's end is forgotten; return
        why there is no room for it.
        """
        if self.call.max_bytes is not None:
            return None
        error = budget.begin_stream()
        self.is_counted = error is None
        return error

    def has_odd_flag(self, piece: Piece) -> bool:
        """Return whether the request begins with `piece`, whose compressed flag gRPC does not know.

        The fallback server would take an empty message for it.
        """
        is_first = self.received_bytes == len(piece) > 0
        return is_first and piece[0] > COMPRESSED and not self.is_answered

    def breaks_off(self, piece: Piece, *, end: bool) -> bool:
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
            self.hurry_mark = (now, self.taken_bytes)

    def is_stuck(self, now: float, limits: CallerLimits) -> bool:
        """Return whether the client has not read enough of a response that is queued."""
        taken, is_stuck = self.taken_bytes, False
        if self.unread_mark is None or self.unread_mark[1] != taken:
            self.unread_mark = (now, taken)
        if self.direct_call is not None:
            is_stuck = now - self.unread_mark[0] > limits.answer
        if self.hurry_mark is not None:
            seconds, so_far = now - self.hurry_mark[0], taken - self.hurry_mark[1]
            is_stuck |= seconds > limits.drain and so_far < seconds * limits.rate
        return is_stuck

    def to(self, stage: Stage) -> None:
        if stage not in self.stage.follows:
            raise RuntimeError(f"{self.stage.name} is not followed by {stage.name}")
        self.stage, self.is_answered = stage, stage.is_answered
        if not stage.receives:
            if self.body is not None:
                self.body.end()
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
        if not self._holding.take(size):
            self._downstream.hold_back(self._exchange, size)

    def end(self) -> None:
        self._downstream.let_on(self._exchange)
        self._holding.end()

    # -- for the budget ---------------------------------------------------------------------

    def is_reading(self) -> bool:
        outbound = self._exchange.outbound
        is_taken = outbound is None or not outbound.queue
        return is_taken and self._downstream.may_send(self._exchange)

    def resume(self) -> None:
        self._downstream.let_on(self._exchange)
        self._downstream.flush_all()

    def cut(self, error: Exception) -> None:
        self._refuse(self._exchange, error)
        self._downstream.flush_all()
