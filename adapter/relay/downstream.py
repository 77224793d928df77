"""The server end of a client's connection: new streams, responses, and graceful shutdown."""

import asyncio
import math
from abc import abstractmethod
from enum import Enum, auto

from adapter.relay import frames
from adapter.relay.endpoint import Endpoint
from adapter.relay.frames import Code, ConnectionFault, StreamFault
from adapter.relay.headers import HeaderReader, Headers, HeadersTooLarge, plain_block, status_block
from adapter.relay.policy import (
    HTTP_431,
    Answer,
    Call,
    DirectCall,
    Reason,
    RelayContext,
    RelayError,
    too_large_call,
)
from adapter.relay.protobuf import PREFIX_BYTES, SHORT_BYTES, has_no_outputs, length_of
from adapter.relay.stream import Exchange, Stage
from adapter.relay.transport import Piece, State

MAX_STREAMS = 1000
# of a request: ModelMesh forwards the headers of its own clients
_HEADER_BYTES = 2**15
_BLOCK_BYTES = 2**16
# beyond useful frames, however long they take; each stream may begin with one
_MAX_SMALL_FRAMES = MAX_STREAMS + 500
_SMALL_FRAMES_A_SECOND = 10
_SMALL_FRAMES_OF_A_PIECE = 4  # of an answer, which its caller may acknowledge with several
_GLITCHES_OF_A_FAULT = 10
_GLITCHES_OF_AN_ANSWER = 64
_KEPT_RESETS = 2**12
# frames of a closed stream that tell its peer nothing new: they are not answered by RST_STREAM
_UNANSWERED = frozenset({frames.RST_STREAM, frames.WINDOW_UPDATE})
_UNKNOWN = 2  # of gRPC's statuses
_END_STREAM = frames.END_STREAM
_OVER = Stage.OVER  # looking up a member is slow in Python 3.11
ODD = "Triton's answer is odd"
_NOT_GRPC = b"gRPC only\n"
_SHUTDOWN_PING = b"lastcall"
_SHUTDOWN_PING_SECONDS = 1.0


class Shutdown(Enum):
    """The progress of the graceful shutdown of RFC 9113 section 6.8."""

    NOT_BEGUN = auto()
    ANNOUNCED = auto()  # streams that cross the first GOAWAY are accepted
    LAST_ACCEPTED = auto()  # no more streams; the connection closes with the last one


_LAST_ACCEPTED = Shutdown.LAST_ACCEPTED  # looking up a member is slow in Python 3.11


class Downstream(Endpoint[Exchange]):
    """The server end of a client's connection: what is sent to the client. The session, its
    subclass, handles what the client sends.

    `small_frames` counts frames that cost much for their few bytes, less some for useful bytes
    either way. No second resets it: many connections slow each other down, so each handles few
    frames in a second, and many in all.
    """

    __slots__ = (
        "_last_id", "_reset", "_shutdown", "_shutdown_timer",
        "context", "small_frames",
    )  # fmt: skip

    def __init__(self, context: RelayContext) -> None:
        reader = HeaderReader(context.calls, _HEADER_BYTES)
        super().__init__(context.budget, context.turns, reader, _BLOCK_BYTES)
        self.context = context
        self._shutdown = Shutdown.NOT_BEGUN
        self.preface = frames.PREFACE
        self._shutdown_timer: asyncio.TimerHandle | None = None
        self._last_id = self.small_frames = 0
        # the latest streams that we reset: RFC 9113 section 5.4.2 wants one RST_STREAM of each
        self._reset: dict[int, None] = {}
        limits = {frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS}
        self.send_settings({**limits, frames.MAX_HEADER_LIST_SIZE: _HEADER_BYTES})

    # -- the connection ---------------------------------------------------------------------

    def handle_lost(self) -> None:
        """Forget all streams: the client cannot be answered any more."""
        if self._shutdown_timer is not None:
            self._shutdown_timer.cancel()
        for exchange in list(self.streams.values()):
            self.forget(exchange)
            self.handle_cancel(exchange)

    def close(self, code: int = Code.NO_ERROR, text: str = "") -> None:
        """Send GOAWAY with `code`, and close. Report a flood of frames as shed."""
        if code == Code.ENHANCE_YOUR_CALM:
            self.context.on_shed("flood")
        super().close(code, text)

    # -- shutdown ---------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Shut down gracefully (RFC 9113 section 6.8): streams opened before the client received
        GOAWAY are accepted. The connection closes when its last stream has ended.
        """
        if self.state is State.CONNECTING:
            self.close()
        elif self.state is State.OPEN and self._shutdown is Shutdown.NOT_BEGUN:
            self._shutdown = Shutdown.ANNOUNCED
            loop = asyncio.get_running_loop()
            self._shutdown_timer = loop.call_later(_SHUTDOWN_PING_SECONDS, self._refuse_new_streams)
            goaway = frames.goaway(frames.MAX_STREAM, Code.NO_ERROR)
            self.out += (goaway, frames.ping(_SHUTDOWN_PING))
            self.flush()

    def handle_ping_ack(self, payload: bytes) -> None:
        """Refuse new streams once the client has answered the PING behind the first GOAWAY."""
        if payload == _SHUTDOWN_PING:
            self._refuse_new_streams()

    def _refuse_new_streams(self) -> None:
        """Send the second GOAWAY of the shutdown, with the last stream that was accepted; close the
        connection if no stream is open.
        """
        if self._shutdown is Shutdown.ANNOUNCED and self.state is State.OPEN:
            self._shutdown = Shutdown.LAST_ACCEPTED
            self.send_goaway()
            self.flush()
            self._close_if_done()

    def _close_if_done(self) -> None:
        """Close the connection soon if it shuts down and its last stream has ended."""
        if self._shutdown is _LAST_ACCEPTED and not self.streams:
            asyncio.get_running_loop().call_soon(self.close)

    # -- requests ---------------------------------------------------------------------------

    def handle_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        """Begin with a request, or handle the trailers of one."""
        if stream_id % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream of the caller's")
        end = flags & _END_STREAM == _END_STREAM
        if stream_id <= self._last_id:
            self._handle_later_headers(stream_id, block, end=end)
            return
        self._last_id = stream_id
        try:
            call = self.reader.cached(block) or self._read_call(block)
        except StreamFault as fault:
            self.reset_faulty(stream_id, fault.code)
            return
        is_full = len(self.streams) >= MAX_STREAMS
        if is_full:
            self.context.on_shed("streams")
        if is_full or self._shutdown is _LAST_ACCEPTED:
            self.reset_faulty(stream_id, Code.REFUSED_STREAM)
            return
        self.last_accepted = stream_id
        self.begin(stream_id, call, end=end)

    @abstractmethod
    def begin(self, stream_id: int, call: Call, *, end: bool) -> None:
        """Begin with a request."""

    def _read_call(self, block: bytes) -> Call:
        """Decode a header block; return the call. Headers over the limit make a call that is
        refused.
        """
        try:
            call: Call = self.reader.read(block)
        except HeadersTooLarge as fault:
            call = too_large_call(fault.headers, str(fault))
        finally:
            self.count_glitch(self.reader.work)
        return call

    def _handle_later_headers(self, stream_id: int, block: bytes, *, end: bool) -> None:
        """Handle HEADERS behind the first ones of a stream. Trailers end a call that is not gRPC
        (RFC 9113 section 8.1); anything else resets the stream, as gRPC requests have no trailers.
        """
        may_be_trailers = False
        try:
            self._read_call(block)
        except StreamFault:
            may_be_trailers = end
        exchange = self.streams.get(stream_id)
        if exchange is None:
            self.handle_closed_stream(stream_id, frames.HEADERS)
        elif exchange.is_ended:
            self.reset_faulty(stream_id, Code.STREAM_CLOSED)
        elif may_be_trailers and exchange.call.http_status is not None:
            exchange.is_ended = True
            self.handle_data(exchange, b"", end=True)
        else:
            self.reset_faulty(stream_id, Code.PROTOCOL_ERROR)

    def count_stream(self, exchange: Exchange) -> Exception | None:
        """Count a stream, which may stay open for long, until it is forgotten; return why there is
        no room for it. A call with one message is no stream.
        """
        if exchange.call.max_bytes is not None:
            return None
        error = self.shared.streams.begin(self)
        exchange.is_counted = error is None
        return error

    def end_latest_stream(self, error: Exception) -> None:
        """End the stream that the client opened last, since another connection has fewer."""
        latest = next(one for one in reversed(self.streams.values()) if one.is_counted)
        self.refuse(latest, error)
        self.flush_all()

    def count_small_frame(self, glitches: int = 1) -> None:
        """Count a frame that costs much for its few bytes, and so many `glitches`. Raise
        ConnectionFault for a flood of such frames.
        """
        self.count_glitch(glitches)
        self.small_frames += 1
        if self.small_frames > _MAX_SMALL_FRAMES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames of few bytes")

    def forgive_small_frames(self, count: int) -> None:
        """Take `count` small frames off the budget, for useful bytes that were sent or received."""
        if self.small_frames:
            self.small_frames = max(0, self.small_frames - count)

    def start_second(self) -> None:
        """Begin a new second of the budgets of glitches and small frames."""
        super().start_second()
        self.forgive_small_frames(_SMALL_FRAMES_A_SECOND)

    def handle_closed_stream(self, stream_id: int, kind: int) -> None:
        """Answer a frame of a closed stream with one RST_STREAM, or only count it as a glitch.

        The peer may have sent it before it learned of the end, and grpc-java sends DATA behind its
        own RST_STREAM: so the other calls of the connection go on, unless there are too many such
        frames. Raises ConnectionFault for a stream that never began.
        """
        if stream_id % 2 == 0 or stream_id > self._last_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame {kind} of a stream that is idle")
        if kind in _UNANSWERED or stream_id in self._reset:
            self.count_glitch()
        else:
            self.reset_faulty(stream_id, Code.STREAM_CLOSED)

    def _remember_reset(self, stream_id: int) -> None:
        """Remember that frames of this stream need no RST_STREAM any more."""
        if len(self._reset) >= _KEPT_RESETS:
            del self._reset[next(iter(self._reset))]
        self._reset[stream_id] = None

    def handle_reset(self, stream: Exchange, _: int) -> None:
        """Handle the client's RST_STREAM as a cancel."""
        self.handle_cancel(stream)
        self._close_if_done()

    def handle_stream_error(self, stream: Exchange, code: Code) -> None:
        """Reset a stream whose client broke the protocol."""
        self.reset_faulty(stream.id, code)

    def reset_faulty(self, stream_id: int, code: int) -> None:
        """Reset the stream because the client broke the protocol."""
        exchange = self.streams.get(stream_id)
        if exchange is None:
            self.out.append(frames.reset(stream_id, code))
            self._remember_reset(stream_id)
        else:
            self.reset(exchange, code)
            self.handle_cancel(exchange)
        self.count_glitch(_GLITCHES_OF_A_FAULT)

    def forget(self, stream: Exchange) -> None:
        """Remove a stream, with its queue and what counts for it."""
        super().forget(stream)
        if stream.is_counted:
            stream.is_counted = False
            self.shared.streams.end(self)

    # -- frames to the client ---------------------------------------------------------------

    def on_sent(self, stream: Exchange, size: int) -> None:
        """Credit the upstream for `size` bytes of a response that were written, and forgive small
        frames for them.
        """
        stream.sent_bytes += size
        self.glitches -= 1
        if self.small_frames:
            self.forgive_small_frames(size >> 10)
        if (outbound := stream.outbound) is not None:
            outbound.upstream.credit(outbound, size)

    def on_finished(self, stream: Exchange) -> None:
        """Forget a stream whose response was sent. Reset one that the client has not ended, as the
        rest of the request is not needed (RFC 9113 section 8.1).
        """
        if not stream.is_ended:
            self.out.append(frames.reset(stream.id, Code.NO_ERROR))
            self._remember_reset(stream.id)
        if stream.call.refusal is None:
            self.glitches -= _GLITCHES_OF_AN_ANSWER
            self.forgive_small_frames(_SMALL_FRAMES_OF_A_PIECE)
        self.forget(stream)
        if self._shutdown is _LAST_ACCEPTED:
            self._close_if_done()

    def reset(self, stream: Exchange, code: int) -> None:
        """Send RST_STREAM, and forget the stream."""
        self.out.append(frames.reset(stream.id, code))
        self._remember_reset(stream.id)
        self.forget(stream)
        self._close_if_done()

    def count_queued(self, stream: Exchange, size: int) -> None:
        """Count queued bytes of a response as buffered at the upstream that they came from."""
        if stream.upstream is not None:
            stream.upstream.add_buffered(size)

    # -- from the upstream ------------------------------------------------------------------

    def forward_headers(self, exchange: Exchange, answer: Answer, *, end: bool) -> None:
        """Send the headers or the trailers of the upstream's response to the client; with `end`
        they end the response. Headers out of order fail the request.
        """
        if exchange.is_answered:
            self._release_abandoned(exchange)
        elif answer.is_first == exchange.has_headers:
            self.end_unanswered(exchange, Reason.ODD_ANSWER, f"{ODD}: a head out of place")
        elif end:
            self._forward_end(exchange, answer)
        else:
            exchange.has_headers = True
            self.out.append(frames.header_block(exchange.id, answer.block, end=False))

    def _forward_end(self, exchange: Exchange, answer: Answer) -> None:
        """Send the trailers of the upstream's response, and end the call. An error status of Triton
        is replaced by the status of the adapter's error.
        """
        direct_call = exchange.direct_call
        if direct_call is not None and answer.status != 0:
            status = _UNKNOWN if answer.status is None else answer.status
            self._fail_direct(exchange, direct_call, direct_call.make_error(status, answer.text))
            return
        exchange.enter(_OVER)
        if direct_call is not None:
            direct_call.answered()
        self.end(exchange, frames.header_block(exchange.id, answer.block, end=True))

    def forward_data(self, exchange: Exchange, piece: Piece) -> None:
        """Send DATA of the upstream's response to the client, unless the first piece is faulty."""
        if not exchange.has_data and not self._check_first_data(exchange, piece):
            return
        if self.small_frames:
            self.forgive_small_frames(_SMALL_FRAMES_OF_A_PIECE)
        self.send(exchange, piece)

    def _check_first_data(self, exchange: Exchange, piece: Piece) -> bool:
        """Check the first DATA of a response: a response without headers, or one over the limit of
        message size, fails. Record an answer that has no outputs. Return whether to forward the
        DATA.
        """
        direct_call = exchange.direct_call
        if not exchange.has_headers:
            self._reject_data(exchange, piece, f"{ODD}: it has no head")
            return False
        exchange.has_data = True
        if direct_call is None:
            return True
        length = length_of(piece)
        limit = self.context.max_message_bytes
        if length > limit:
            text = f"Triton's answer is too large: {length} vs. {limit} bytes"
            self._reject_data(exchange, piece, text)
            return False
        is_short = length < SHORT_BYTES and len(piece) == PREFIX_BYTES + length
        if is_short and has_no_outputs(piece, PREFIX_BYTES):
            direct_call.note_missing_outputs()
        return True

    def _reject_data(self, exchange: Exchange, piece: Piece, text: str) -> None:
        """Fail the request for a faulty response, and credit the upstream for the dropped DATA."""
        self.fail(exchange, RelayError(Reason.ODD_ANSWER, text))
        if (outbound := exchange.outbound) is not None:
            outbound.upstream.credit(outbound, len(piece))

    def end_unanswered(self, exchange: Exchange, reason: Reason, text: str) -> None:
        """Fail a request whose upstream will send no more of the response. If the request was
        answered already, release its model if it was abandoned.
        """
        error = RelayError(reason, text)
        if exchange.is_answered:
            self._release_abandoned(exchange, error)
        else:
            self.fail(exchange, error)

    def handle_upstream_reset(self, exchange: Exchange, code: int) -> None:
        """End the request whose upstream stream was reset: pass a reset by the fallback server on,
        and answer one by Triton with an error.
        """
        if exchange.direct_call is None and not exchange.is_answered:
            self._detach(exchange)
            self.reset(exchange, code)
        elif code == Code.REFUSED_STREAM:
            self.end_unanswered(exchange, Reason.UNREACHABLE, "Triton refused the stream")
        else:
            text = f"Triton gave the request up (HTTP/2: {code})"
            self.end_unanswered(exchange, Reason.ODD_ANSWER, text)

    def _release_abandoned(self, exchange: Exchange, error: RelayError | None = None) -> None:
        """Release the model once the upstream stream of an abandoned request has closed: because
        Triton has finished the request, or by `error`.
        """
        if exchange.stage is Stage.ABANDONED and exchange.outbound is None:
            exchange.enter(Stage.OVER)
            if exchange.direct_call is not None:
                exchange.direct_call.ended(error)

    # -- failures ---------------------------------------------------------------------------

    def fail(self, exchange: Exchange, error: RelayError) -> None:
        """End a request with an error that is not counted here. A direct call counts and logs the
        error itself, and may replace it by one that knows more.
        """
        if exchange.direct_call is not None:
            self._fail_direct(exchange, exchange.direct_call, error)
        else:
            self._detach(exchange)
            self._end_with(exchange, *self.context.policy.word_error(error))

    def _fail_direct(self, exchange: Exchange, call: DirectCall, error: Exception) -> None:
        """Stop waiting for Triton, and answer in a task: the policy may have to ask for Triton's
        state.
        """
        self._detach(exchange)
        self.context.begin(self._end_failed(exchange, call, error))

    async def _end_failed(
        self, exchange: Exchange, direct_call: DirectCall, error: Exception
    ) -> None:
        """Answer a failed direct call with the status that the policy finds for the error."""
        is_over = exchange.stage is Stage.OVER
        status, text, more = await direct_call.failed(error, is_over=is_over)
        if self.streams.get(exchange.id) is exchange:
            self._end_with(exchange, status, text, more)
            self.flush_all()

    def _end_with(self, exchange: Exchange, status: int, text: str, more: Headers = ()) -> None:
        """Send trailers with a gRPC status, and `more` headers; drop queued DATA."""
        self.drop_queue(exchange)
        block = status_block(status, text, more, alone=not exchange.has_headers)
        self.end(exchange, frames.header_block(exchange.id, block, end=True))

    def refuse(self, exchange: Exchange, error: Exception) -> None:
        """End a request with an error before it was routed or received completely: log and count it
        here, unless it is a direct call, which does that itself.
        """
        if exchange.direct_call is not None:
            self._fail_direct(exchange, exchange.direct_call, error)
            return
        call = exchange.call
        policy = self.context.policy
        status, text, more = policy.report_refusal(
            call.path, error, call.metadata_name, call.headers
        )
        self._detach(exchange)
        self._end_with(exchange, status, text, more)

    def refuse_odd_flag(self, exchange: Exchange, piece: Piece) -> bool:
        """Refuse a request whose first message has a compressed flag that gRPC does not know.
        Return whether it was refused.
        """
        if not exchange.has_odd_flag(piece):
            return False
        self.credit(exchange, len(piece))
        error = RelayError(Reason.ENCODING, f"compressed flag {piece[0]}; 0 and 1 are understood")
        if exchange.stage is Stage.SENDING:
            self.fail(exchange, error)
        else:
            self.refuse(exchange, error)
        return True

    def handle_deadline(self, exchange: Exchange) -> None:
        """End a request whose deadline has passed: with an error if it did not arrive or Triton did
        not answer in time, and with trailers in place of the queued DATA if its client did not read
        in time. The fallback server ends the calls that it has begun itself.
        """
        is_buffered = exchange.stage in {Stage.ARRIVING, Stage.WAITING}
        is_unary_at_fallback = exchange.direct_call is None and exchange.call.max_bytes is not None
        is_incomplete = is_unary_at_fallback and exchange.stage is Stage.SENDING
        if is_buffered or is_incomplete:
            self.fail(exchange, RelayError(Reason.LATE, "the request did not come in time"))
        elif exchange.direct_call is None:
            # the fallback server has begun with the call, and has time limits of its own
            exchange.deadline = math.inf
        elif not exchange.is_answered:
            seconds = exchange.call.seconds
            limit = self.context.timeout_seconds
            text = f"no answer from Triton within {limit:g} s"
            if seconds is not None and seconds < limit:
                text = "the caller's deadline has passed"
            self.fail(exchange, RelayError(Reason.LATE, text))
        elif exchange.queue:
            late = RelayError(Reason.LATE, "the answer was not read in time")
            self._end_with(exchange, *self.context.policy.word_error(late))

    def discard(self, exchange: Exchange, piece: Piece, *, end: bool) -> None:
        """Drop DATA of a request that is not gRPC; answer when the request ends."""
        self.credit(exchange, len(piece))
        if end:
            exchange.enter(Stage.OVER)
            call = exchange.call
            block = plain_block(call.http_status or 0)
            text = f"{call.refusal}\n".encode() if call.http_status == HTTP_431 else _NOT_GRPC
            self.out.append(frames.header_block(exchange.id, block, end=False))
            self.send(exchange, text, end=True)

    def handle_cancel(self, exchange: Exchange) -> None:
        """Stop waiting for the response; the inbound stream is closed already."""
        if exchange.is_answered:
            return
        direct_call = exchange.direct_call
        self._detach(exchange, cancels=direct_call is not None and direct_call.is_cancellable)
        if direct_call is not None:
            direct_call.cancelled()
            if exchange.stage is Stage.OVER:
                direct_call.ended()

    def _detach(self, exchange: Exchange, *, cancels: bool = False) -> None:
        """Stop waiting for the upstream. Triton finishes what it has received completely, unless
        that `cancels`.
        """
        self.release_buffer(exchange)
        self.drop_queue(exchange)
        outbound = exchange.outbound
        if outbound is None:
            exchange.enter(Stage.OVER)
        elif exchange.direct_call is not None and exchange.stage is Stage.SENT and not cancels:
            exchange.enter(Stage.ABANDONED)
            exchange.direct_call.abandoned()
        else:
            exchange.enter(Stage.OVER)
            outbound.upstream.reset(outbound, Code.CANCEL)

    def release_buffer(self, exchange: Exchange) -> None:
        """Drop the bytes of the request that are buffered."""
        size = len(exchange.buffered)
        if size:
            exchange.buffered = b""
            self.add_buffered(-size)
