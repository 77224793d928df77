"""What becomes of requests that have gone on: answers, failures, links and callers that go."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from adapter.dataplane.proxy.context import ProxyContext
from adapter.dataplane.proxy.exchange import Exchange, Stage
from adapter.dataplane.proxy.routing import Answer, DirectCall
from adapter.dataplane.proxy.upstream import Upstream
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    NotStarted,
    SlowBody,
)
from adapter.protocols.http2 import frames
from adapter.protocols.http2.frames import Code
from adapter.protocols.http2.headers import plain_block, status_block
from adapter.protocols.http2.transport import Piece
from adapter.protocols.protobuf import length_of

if TYPE_CHECKING:
    from adapter.dataplane.proxy.downstream import Downstream

_UNAVAILABLE, _DEADLINE_EXCEEDED, _INTERNAL, _UNKNOWN = 14, 4, 13, 2
_LATE = "BackendTimeout"
_NOT_GRPC = b"gRPC only\n"


class Outcomes:
    def __init__(self, context: ProxyContext) -> None:
        self.context = context
        self.upstreams: list[Upstream] = []
        self.downstream: Downstream
        self.clock = asyncio.get_running_loop().time

    def flush(self) -> None:
        raise NotImplementedError

    # -- answers ----------------------------------------------------------------------------

    def answer_head(self, exchange: Exchange, answer: Answer, *, end: bool) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        elif answer.is_alone == exchange.has_head:
            self.odd_answer(exchange, "a head out of place")
        elif end:
            self._answered(exchange, answer)
        else:
            exchange.has_head = True
            near, start = exchange.near, answer.head_start
            if start:
                self.downstream.out += (start, near.number, answer.block)
            else:
                self.downstream.out.append(frames.header_block(near.id, answer.block, end=False))

    def _answered(self, exchange: Exchange, answer: Answer) -> None:
        direct_call = exchange.direct_call
        if direct_call is not None and answer.status != 0:
            status = _UNKNOWN if answer.status is None else answer.status
            self.fail(exchange, direct_call.fault(status, answer.text))
            return
        exchange.to(Stage.OVER)
        if direct_call is not None:
            direct_call.answered()
        near, start = exchange.near, answer.end_start
        if start and not near.queue:
            self.downstream.out += (start, near.number, answer.block)
            self.downstream.finished(near)
        else:
            self.downstream.end(near, frames.header_block(near.id, answer.block, end=True))

    def answer_data(self, exchange: Exchange, piece: Piece) -> None:
        if exchange.direct_call is not None and not exchange.has_data:
            most = self.context.max_message_bytes
            if length_of(piece) > most:
                text = f"Triton's answer is too large: {length_of(piece)} vs. {most} bytes"
                self._not_taken(exchange, piece, text)
                return
        if exchange.has_head:
            exchange.has_data = True
            self.downstream.send(exchange.near, piece)
            if exchange.near.queue and exchange.direct_call is not None and exchange.stuck is None:
                exchange.stuck = (self.clock(), exchange.taken)
                exchange.direct_call.when_model_goes(partial(self.model_goes, exchange))
        else:
            self._not_taken(exchange, piece, "Triton's answer is odd: it has no head")

    def _not_taken(self, exchange: Exchange, piece: Piece, why: str) -> None:
        self.fail(exchange, InferenceFailed(why))
        if exchange.upstream is not None and exchange.far is not None:
            exchange.upstream.credit(exchange.far, len(piece))

    def odd_answer(self, exchange: Exchange, why: str) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        else:
            self.fail(exchange, InferenceFailed(f"Triton's answer is odd: {why}"))

    def _ran_out(self, exchange: Exchange) -> None:
        """Something came of what nobody waits for; perhaps its end."""
        if exchange.stage is Stage.ABANDONED and exchange.far is None:
            exchange.to(Stage.OVER)
            if exchange.direct_call is not None:
                exchange.direct_call.ended()

    # -- ends -------------------------------------------------------------------------------

    def fail(self, exchange: Exchange, error: AdapterError) -> None:
        """The caller is told once it is known what the error is called."""
        self._leave(exchange)
        direct_call = exchange.direct_call
        if direct_call is not None:
            self.context.begin(self._tell(exchange, direct_call, error))
        else:
            self._refuse(exchange, _INTERNAL, f"InternalError: {error}")

    async def _tell(self, exchange: Exchange, direct_call: DirectCall, error: AdapterError) -> None:
        is_over = exchange.stage is Stage.OVER
        status, text = await direct_call.failed(error, is_over=is_over)
        if self.downstream.streams.get(exchange.near.id) is exchange.near:
            self._refuse(exchange, status, text)
            self.flush()

    def _refuse(self, exchange: Exchange, status: int, text: str) -> None:
        """The answer ends so, whatever of it waits."""
        near = exchange.near
        self.downstream.unqueue(near)
        block = status_block(status, text, alone=not exchange.has_head)
        self.downstream.end(near, frames.header_block(near.id, block, end=True))

    def discard(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Of what is not gRPC, and is told so at its end."""
        self.downstream.credit(exchange.near, len(piece))
        if end:
            self._tell_http(exchange)

    def _tell_http(self, exchange: Exchange) -> None:
        exchange.to(Stage.OVER)
        near, block = exchange.near, plain_block(exchange.call.http_status or 0)
        self.downstream.out.append(frames.header_block(near.id, block, end=False))
        self.downstream.send(near, _NOT_GRPC, end=True)

    def drop(self, exchange: Exchange) -> None:
        """The caller wants it no more, and its stream is forgotten."""
        if exchange.is_told:
            return
        self._leave(exchange)
        direct_call = exchange.direct_call
        if direct_call is not None:
            direct_call.cancelled()
            if exchange.stage is Stage.OVER:
                direct_call.ended()

    def _leave(self, exchange: Exchange) -> None:
        """Nobody waits for the link any more. Triton goes on with what it has wholly."""
        self.let_go_of_held(exchange)
        self.downstream.unqueue(exchange.near)
        upstream, far = exchange.upstream, exchange.far
        if upstream is None or far is None:
            exchange.to(Stage.OVER)
        elif upstream.is_triton and exchange.stage is Stage.ASKED:
            exchange.to(Stage.ABANDONED)
            if exchange.direct_call is not None:
                exchange.direct_call.abandoned()
        else:
            exchange.to(Stage.OVER)
            upstream.cancel(far)

    def let_go_of_held(self, exchange: Exchange) -> None:
        size = len(exchange.held)
        if size:
            exchange.held = b""
            self.downstream.hold(-size)

    # -- links that go ----------------------------------------------------------------------

    def upstream_lost(self, upstream: Upstream) -> None:
        self.upstreams.remove(upstream)
        why = (
            "the connection to Triton broke"
            if upstream.was_connected
            else "Triton cannot be reached"
        )
        for stream in list(upstream.streams.values()):
            upstream.forget(stream)
            self.upstream_gave_up(stream.owner, why, delivered=upstream.was_connected)

    def upstream_gave_up(self, exchange: Exchange, why: str, *, delivered: bool) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        elif exchange.direct_call is not None:
            self.fail(exchange, BackendUnavailable(why, delivered=delivered))
        else:
            self._leave(exchange)
            self._refuse(exchange, _UNAVAILABLE, f"BackendUnavailable: {why}")

    def upstream_reset(self, exchange: Exchange, code: int) -> None:
        if exchange.is_told:
            self._ran_out(exchange)
        elif exchange.direct_call is None:
            self._leave(exchange)
            self.downstream.reset(exchange.near, code)
        elif code == Code.REFUSED_STREAM:
            self.fail(exchange, BackendUnavailable("Triton refused the stream", delivered=False))
        else:
            self.fail(exchange, InferenceFailed(f"Triton gave the request up (HTTP/2: {code})"))

    # -- callers who take their time ---------------------------------------------------------

    def model_goes(self, exchange: Exchange) -> None:
        if exchange.is_arriving:
            self.refuse_arriving(exchange, "the model is being unloaded")
            self.flush()
        elif exchange.hurried is None:
            exchange.hurried = (self.clock(), exchange.taken)

    def look_at_arriving(self, exchange: Exchange, seconds: float) -> None:
        """`seconds`: since it was last looked at."""
        if self.context.is_leaving:
            self.refuse_arriving(exchange, "the adapter is stopping")
        elif self.downstream.may_send(exchange.near) and exchange.stage is not Stage.WAITING:
            exchange.waited += seconds
            caller_limits, waited = self.context.caller_limits, exchange.waited
            if waited > caller_limits.slow and exchange.came < waited * caller_limits.rate:
                rate = caller_limits.rate / 2**10
                self.refuse_request(exchange, SlowBody(f"it comes at less than {rate:g} KiB/s"))

    def look_at_unread(self, exchange: Exchange, now: float) -> None:
        """Some of the answer waits for its caller."""
        caller_limits, taken = self.context.caller_limits, exchange.taken
        if self.context.is_leaving and exchange.hurried is None:
            exchange.hurried = (now, taken)
        if exchange.stuck is None or exchange.stuck[1] != taken:
            exchange.stuck = (now, taken)
        is_stuck = (
            exchange.direct_call is not None and now - exchange.stuck[0] > caller_limits.answer
        )
        if exchange.hurried is not None:
            seconds = now - exchange.hurried[0]
            so_far = taken - exchange.hurried[1]
            is_stuck |= seconds > caller_limits.hurry and so_far < seconds * caller_limits.rate
        if is_stuck:
            self.downstream.reset(exchange.near, Code.CANCEL)
            self.drop(exchange)

    def refuse_arriving(self, exchange: Exchange, why: str) -> None:
        error = NotStarted(f"{why}; this request had not wholly come yet")
        self.refuse_request(exchange, error)

    def refuse_request(self, exchange: Exchange, error: AdapterError) -> None:
        if exchange.direct_call is not None:
            self.fail(exchange, error)
            return
        status, text = self.context.policy.refused(exchange.call.path, error)
        self._leave(exchange)
        self._refuse(exchange, status, text)

    def too_late(self, exchange: Exchange) -> None:
        if exchange.stage in {Stage.ARRIVING, Stage.WAITING}:
            self._leave(exchange)
            self._refuse(exchange, _DEADLINE_EXCEEDED, f"{_LATE}: the request did not come in time")
        elif exchange.direct_call is None:
            return  # the server beside us has that limit too
        elif not exchange.is_told:
            text, seconds = "Triton did not answer in time", exchange.call.seconds
            if seconds is not None and seconds < self.context.timeout_seconds:
                text = "the caller's deadline has passed"
            self.fail(exchange, BackendTimeout(text))
        elif exchange.near.queue:
            self._refuse(exchange, _DEADLINE_EXCEEDED, f"{_LATE}: the answer was not read in time")
