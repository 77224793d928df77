"""Responses to the client: what the upstream answers, and a gRPC status for what fails."""

from collections.abc import Callable

from adapter.http2 import frames
from adapter.http2.context import ProxyContext
from adapter.http2.downstream import Downstream
from adapter.http2.frames import Code
from adapter.http2.headers import Headers, plain_block, status_block
from adapter.http2.policy import HTTP_431, Answer, DirectCall, Reason, RelayError
from adapter.http2.protobuf import PREFIX_BYTES, SHORT_BYTES, has_no_outputs, length_of
from adapter.http2.stream import Exchange, Stage
from adapter.http2.transport import Piece

_UNKNOWN = 2  # of gRPC's statuses
_OVER = Stage.OVER  # looking up a member is slow in Python 3.11
_NOT_GRPC = b"gRPC only\n"


class Responses:
    """Ends the requests of one session. `flush` writes what its connections have queued."""

    def __init__(
        self, context: ProxyContext, downstream: Downstream, flush: Callable[[], None]
    ) -> None:
        self.flush = flush
        self._context = context
        self._downstream = downstream

    # -- from the upstream ------------------------------------------------------------------

    def headers(self, exchange: Exchange, answer: Answer, *, end: bool) -> None:
        if exchange.is_answered:
            self._abandoned_ended(exchange)
        elif answer.is_first == exchange.has_headers:
            self.malformed(exchange, "a head out of place")
        elif end:
            self._ended(exchange, answer)
        else:
            exchange.has_headers = True
            inbound, start = exchange.inbound, answer.head_start
            if start:
                self._downstream.out += (start, inbound.number, answer.block)
            else:
                block = frames.header_block(inbound.id, answer.block, end=False)
                self._downstream.out.append(block)

    def _ended(self, exchange: Exchange, answer: Answer) -> None:
        direct_call = exchange.direct_call
        if direct_call is not None and answer.status != 0:
            status = _UNKNOWN if answer.status is None else answer.status
            self._fail_direct(exchange, direct_call, direct_call.fault(status, answer.text))
            return
        exchange.to(_OVER)
        if direct_call is not None:
            direct_call.answered()
        inbound, start = exchange.inbound, answer.end_start
        if start and not inbound.queue:
            self._downstream.out += (start, inbound.number, answer.block)
            self._downstream.finished(inbound)
        else:
            self._downstream.end(inbound, frames.header_block(inbound.id, answer.block, end=True))

    def data(self, exchange: Exchange, piece: Piece) -> None:
        if exchange.direct_call is not None and not exchange.has_data:
            length, most = length_of(piece), self._context.max_message_bytes
            if length > most:
                text = f"Triton's answer is too large: {length} vs. {most} bytes"
                self._reject_data(exchange, piece, text)
                return
            is_short = length < SHORT_BYTES and len(piece) == PREFIX_BYTES + length
            if is_short and has_no_outputs(piece, PREFIX_BYTES):
                exchange.direct_call.answered_nothing()
        if exchange.has_headers:
            exchange.has_data = True
            self._downstream.send(exchange.inbound, piece)
        else:
            self._reject_data(exchange, piece, "Triton's answer is odd: it has no head")

    def _reject_data(self, exchange: Exchange, piece: Piece, why: str) -> None:
        self.fail(exchange, RelayError(Reason.ODD_ANSWER, why))
        if exchange.upstream is not None and exchange.outbound is not None:
            exchange.upstream.credit(exchange.outbound, len(piece))

    def malformed(self, exchange: Exchange, why: str) -> None:
        if exchange.is_answered:
            self._abandoned_ended(exchange)
        else:
            self.fail(exchange, RelayError(Reason.ODD_ANSWER, f"Triton's answer is odd: {why}"))

    def upstream_failed(self, exchange: Exchange, why: str, *, delivered: bool) -> None:
        if exchange.is_answered:
            self._abandoned_ended(exchange)
        else:
            self.fail(exchange, RelayError(Reason.BROKEN if delivered else Reason.UNREACHABLE, why))

    def upstream_reset(self, exchange: Exchange, code: int) -> None:
        if exchange.is_answered:
            self._abandoned_ended(exchange)
        elif exchange.direct_call is None:
            self._detach(exchange)
            self._downstream.reset(exchange.inbound, code)
        elif code == Code.REFUSED_STREAM:
            self.fail(exchange, RelayError(Reason.UNREACHABLE, "Triton refused the stream"))
        else:
            why = f"Triton gave the request up (HTTP/2: {code})"
            self.fail(exchange, RelayError(Reason.ODD_ANSWER, why))

    def _abandoned_ended(self, exchange: Exchange) -> None:
        """Release the model once the upstream stream of an abandoned request has closed."""
        if exchange.stage is Stage.ABANDONED and exchange.outbound is None:
            exchange.to(Stage.OVER)
            if exchange.direct_call is not None:
                exchange.direct_call.ended()

    # -- failures ---------------------------------------------------------------------------

    def fail(self, exchange: Exchange, error: RelayError) -> None:
        """End the response with `error`, which the policy may replace by one that knows more."""
        if exchange.direct_call is not None:
            self._fail_direct(exchange, exchange.direct_call, error)
        else:
            self._detach(exchange)
            self._end(exchange, *self._context.policy.worded(error))

    def _fail_direct(self, exchange: Exchange, call: DirectCall, error: Exception) -> None:
        self._detach(exchange)
        self._context.begin(self._end_failed(exchange, call, error))

    async def _end_failed(
        self, exchange: Exchange, direct_call: DirectCall, error: Exception
    ) -> None:
        is_over = exchange.stage is Stage.OVER
        status, text, more = await direct_call.failed(error, is_over=is_over)
        if self._downstream.streams.get(exchange.inbound.id) is exchange.inbound:
            self._end(exchange, status, text, more)
            self.flush()

    def _end(self, exchange: Exchange, status: int, text: str, more: Headers = ()) -> None:
        """Send trailers, with `more`; queued DATA is dropped."""
        inbound = exchange.inbound
        self._downstream.unqueue(inbound)
        block = status_block(status, text, more, alone=not exchange.has_headers)
        self._downstream.end(inbound, frames.header_block(inbound.id, block, end=True))

    def refuse(self, exchange: Exchange, error: Exception) -> None:
        if exchange.direct_call is not None:
            self._fail_direct(exchange, exchange.direct_call, error)
            return
        call = exchange.call
        policy = self._context.policy
        status, text, more = policy.refused(call.path, error, call.metadata_name, call.headers)
        self._detach(exchange)
        self._end(exchange, status, text, more)

    def deadline_exceeded(self, exchange: Exchange) -> None:
        is_handed_on = exchange.stage not in {Stage.ARRIVING, Stage.WAITING}
        is_message = exchange.direct_call is None and exchange.call.max_bytes is not None
        if not is_handed_on or (is_message and exchange.stage is Stage.SENDING):
            self._detach(exchange)
            late = RelayError(Reason.LATE, "the request did not come in time")
            self._end(exchange, *self._context.policy.worded(late))
        elif exchange.direct_call is None:
            return  # the fallback server, which has begun with it, has limits of its own
        elif not exchange.is_answered:
            text, seconds = "Triton did not answer in time", exchange.call.seconds
            if seconds is not None and seconds < self._context.timeout_seconds:
                text = "the caller's deadline has passed"
            self.fail(exchange, RelayError(Reason.LATE, text))
        elif exchange.inbound.queue:
            late = RelayError(Reason.LATE, "the answer was not read in time")
            self._end(exchange, *self._context.policy.worded(late))

    def discard(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Drop DATA of a request that is not gRPC; answer when the request ends."""
        self._downstream.credit(exchange.inbound, len(piece))
        if end:
            exchange.to(Stage.OVER)
            inbound, call = exchange.inbound, exchange.call
            block = plain_block(call.http_status or 0)
            text = f"{call.refusal}\n".encode() if call.http_status == HTTP_431 else _NOT_GRPC
            self._downstream.out.append(frames.header_block(inbound.id, block, end=False))
            self._downstream.send(inbound, text, end=True)

    def client_cancelled(self, exchange: Exchange) -> None:
        """The inbound stream is closed already."""
        if exchange.is_answered:
            return
        self._detach(exchange)
        direct_call = exchange.direct_call
        if direct_call is not None:
            direct_call.cancelled()
            if exchange.stage is Stage.OVER:
                direct_call.ended()

    def _detach(self, exchange: Exchange) -> None:
        """Stop waiting for the upstream. Triton finishes what it has received completely."""
        self.release_buffer(exchange)
        self._downstream.unqueue(exchange.inbound)
        upstream, outbound = exchange.upstream, exchange.outbound
        if upstream is None or outbound is None:
            exchange.to(Stage.OVER)
        elif upstream.is_triton and exchange.stage is Stage.SENT:
            exchange.to(Stage.ABANDONED)
            if exchange.direct_call is not None:
                exchange.direct_call.abandoned()
        else:
            exchange.to(Stage.OVER)
            upstream.cancel(outbound)

    def release_buffer(self, exchange: Exchange) -> None:
        size = len(exchange.buffered)
        if size:
            exchange.buffered = b""
            self._downstream.add_buffered(-size)
