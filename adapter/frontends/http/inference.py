"""One inference, straight down: the lease of its model, its body, Triton, and the answer.

A small body is gathered before the model is leased, so that nobody waits for a slow caller; a
large one, or one in chunks, goes on as it comes, checked piece by piece. A contract that sends
again keeps the whole body, for a second try once memory was freed.

The coroutine waits by hand for bytes of the client and of Triton. A wait for a load, a new
connection to Triton and a long check are delegated to a task.
"""

from contextvars import copy_context

from adapter.control.door import Lease, ModelRecord
from adapter.core.calls import RawHeaders, Upstream
from adapter.errors import (
    AdapterError,
    BackendError,
    CapacityError,
    InvalidRequest,
    NotJson,
    PayloadTooLarge,
)
from adapter.frontends.http import binary
from adapter.frontends.http.answers import (
    CHUNKED_LINE,
    JOINED_BYTES,
    StreamedAnswer,
    end_of_head,
    first_line,
)
from adapter.frontends.http.chunks import write_chunk
from adapter.frontends.http.connection import Parts, Request
from adapter.frontends.http.content_types import explained
from adapter.frontends.http.head import CHUNKED
from adapter.frontends.http.instrumentation import list_answer_headers
from adapter.frontends.http.plans import Plan
from adapter.frontends.http.stepping import wait_for_news
from adapter.runtime import clock
from adapter.telemetry.traffic import WAITED, Waited

# Bodies up to this size are gathered, others are passed on as they come.
GATHERED_BYTES = 256 * 2**10
# AWS's own limit of a body. Up to this it is gathered where it may be sent to Triton twice.
SENT_AGAIN_BYTES = 6_291_456

_OK = 200
_HEADER_LENGTH = b"inference-header-content-length"
_LAST_CHUNK = b"0\r\n\r\n"


class NeedsHandler(Exception):
    """Raised for a request whose model converts bodies: the handler of its route answers it."""


class Inference:
    """One planned inference, with what it has to release when it ends."""

    __slots__ = (
        "_answer",
        "_begun_at",
        "_connection",
        "_exchange",
        "_heard_at",
        "_lease",
        "_parts",
        "_plan",
        "_request",
        "_sent_at",
    )

    def __init__(
        self,
        request: Request,
        plan: Plan,
        parts: Parts,
        begun_at: float,  # by time.monotonic
    ) -> None:
        self._request = request
        self._plan = plan
        self._connection = request.connection
        self._exchange = request.connection.exchange
        self._parts = parts
        self._begun_at = begun_at
        self._lease: Lease | None = None
        self._answer: StreamedAnswer | None = None
        self._sent_at = 0.0
        self._heard_at = 0.0

    async def serve(self) -> None:
        """Answer the inference. Raises the error to refuse it with, once all it had is released."""
        connection = self._connection
        body: bytes | None = None
        try:
            # a body that is there at once, as most are, needs no wait
            body = connection.take_body() if connection.is_whole else await self._read_body()
            error = await self._try_once(body)
            if isinstance(error, CapacityError) and await self._can_send_again(error, body):
                self._request.was_sent = True
                error = await self._try_once(body)
        except BaseException as ending:
            self._release(ending)
            if body is not None and isinstance(ending, NeedsHandler):
                connection.put_body_back(body)
            raise
        if error is not None:
            raise self._explain(error) if self._plan.is_typed else error

    async def _try_once(self, body: bytes | None) -> AdapterError | None:
        """Send the request to Triton, and answer the client; return the error of what failed."""
        exchange = self._exchange
        try:
            lease = self._lease or self._begin_lease() or await self._wait_for_lease()
            if body is None:
                await self._send_in_pieces(lease)
            else:
                await self._send_whole(lease.record, body)
            while not exchange.is_answered:
                if exchange.error is not None:
                    raise exchange.error
                await wait_for_news()
            if exchange.answer is None or lease.record.is_renamed:
                await self._answer_slowly(lease.record)
            else:
                self._answer_at_once(exchange.answer)
        except AdapterError as error:
            if self._request.status:
                raise  # the answer has begun
            return error if self._lease is None else await self._judge(self._lease, error)
        exchange.upstream = None
        exchange.answer = None
        self._lease = None
        lease.end(None, self._heard_at)
        return None

    async def _judge(self, lease: Lease, error: AdapterError) -> AdapterError:
        """Release all that the request has reserved; return the error to answer, which the lease
        may have replaced by one that knows more. An error that is none of the adapter's is raised.
        """
        reported = self._release(error)
        if not isinstance(reported, AdapterError):
            raise reported
        if not isinstance(reported, BackendError | CapacityError):
            return reported  # no other error is judged, and a task for it would be for nothing
        return await self._connection.delegate(lease.judge(reported))

    # -- the lease, and the body before it ---------------------------------------------------

    async def _read_body(self) -> bytes | None:
        """Return a body that is gathered first, once it is there; None for one to pass on."""
        connection = self._connection
        length = self._request.head.length
        sends_again = self._plan.contract.sends_again
        if length == CHUNKED or length > (SENT_AGAIN_BYTES if sends_again else GATHERED_BYTES):
            return None
        # a request that is refused anyway is refused before its body has come
        if not sends_again and self._find_lease() is None:
            lease = await self._wait_for_lease()
            lease.on_unload(self._refuse_body)
        connection.send_continue()
        connection.hold_body()
        body = await connection.gather_body()
        self._request.callers_seconds = clock.monotonic() - self._begun_at
        return body

    def _find_lease(self) -> Lease | None:
        """Return a lease, None if the model has to be waited for. Raises NeedsHandler."""
        plan = self._plan
        lease = plan.contract.find_lease(plan.model_id)
        if lease is not None:
            self._request.has_lease = True
            if plan.is_typed and lease.record.content_types:
                raise NeedsHandler
        return lease

    def _begin_lease(self) -> Lease | None:
        """Lease the model without a wait, and begin the lease. Return None if the model has to be
        waited for.
        """
        lease = self._find_lease()
        if lease is not None:
            self._lease = lease
            lease.begin(self._begun_at)
        return lease

    async def _wait_for_lease(self) -> Lease:
        """Begin a lease once the model is loaded, and return it. Raises NeedsHandler for a body
        that the model may convert, which is known once it is loaded: the handler waits.
        """
        if self._plan.is_typed:
            raise NeedsHandler
        self._request.was_waited_for = True
        context = copy_context()
        context.run(WAITED.set, Waited())
        return await self._connection.delegate(self._begin_lease_in_task(), context)

    async def _begin_lease_in_task(self) -> Lease:
        """Begin the lease in the task that has waited for it: an unload may come before the next
        step of the coroutine.
        """
        plan = self._plan
        lease = await plan.contract.wait_for_lease(plan.model_id, self._request)
        self._request.has_lease = True
        self._lease = lease
        lease.begin()
        return lease

    def _refuse_body(self) -> None:
        """Refuse the rest of the body: the model is being unloaded."""
        self._connection.refuse_body("the model is being unloaded")

    # -- to Triton ---------------------------------------------------------------------------

    async def _begin_exchange(self, record: ModelRecord) -> Upstream:
        """Begin an exchange, on a new connection to Triton if none is idle."""
        upstream = self._parts.dataplane.take_idle()
        if upstream is not None:
            self._exchange.begin(upstream, record)
            return upstream
        upstream = await self._connection.delegate(self._begin_exchange_in_task(record))
        if self._exchange.error is not None:
            raise self._exchange.error
        return upstream

    async def _begin_exchange_in_task(self, record: ModelRecord) -> Upstream:
        """Begin the exchange in the task that has connected: the connection may break before the
        next step of the coroutine, which the exchange is told then.
        """
        upstream = await self._parts.dataplane.connected(self._plan.model_id)
        self._exchange.begin(upstream, record)
        return upstream

    def _compose_head(self, record: ModelRecord) -> bytes:
        """Return the head for Triton, with the lines that only this request has."""
        plan = self._plan
        head = plan.upstream_head
        if record.name != plan.name:
            head = plan.head_for(str(record.name), is_renamed=record.is_renamed)
        lines = self._request.lines
        return head[:-2] + lines + b"\r\n" if lines else head

    def _send(self, upstream: Upstream, record: ModelRecord, body: bytes) -> None:
        """Send the head and a body that is there, and note the time."""
        self._sent_at = clock.monotonic()
        if self._request.head.length == CHUNKED:
            body = (write_chunk(body) if body else b"") + _LAST_CHUNK
        upstream.send(self._compose_head(record), body)

    async def _send_whole(self, record: ModelRecord, body: bytes) -> None:
        """Check a whole body, in a task if that takes long, and send it. Raises InvalidRequest for
        what Triton must not get.
        """
        plan = self._plan
        parts = self._parts
        if not body and plan.needs_body:
            raise InvalidRequest("a body is needed")
        is_packed = plan.is_packed
        shares_memory = parts.shares_memory
        is_checked = parts.dataplane.check(
            body, plan.json_bytes, record, is_packed=is_packed, shares_memory=shares_memory
        )
        if not is_checked:
            work = parts.dataplane.check_in_turns(
                body, plan.json_bytes, record, is_packed=is_packed, shares_memory=shares_memory
            )
            await self._connection.delegate(work)
        self._send(await self._begin_exchange(record), record, body)

    async def _send_in_pieces(self, lease: Lease) -> None:
        """Pass the body on as it comes, and no faster than Triton takes it."""
        connection = self._connection
        exchange = self._exchange
        record = lease.record
        length = self._request.head.length
        is_chunked = length == CHUNKED
        check = self._parts.dataplane.checking(
            self._plan.json_bytes,
            max(length, 0),
            record,
            shares_memory=self._parts.shares_memory,
        )
        lease.on_unload(self._refuse_body)
        connection.send_continue()
        connection.hold_body()
        upstream = await self._begin_exchange(record)
        self._sent_at = clock.monotonic()
        upstream.write(self._compose_head(record))
        size = 0
        while not exchange.is_answered:
            error = connection.body_error or exchange.error
            if error is not None:
                raise error
            if not exchange.is_blocked:
                piece = connection.take_body()
                if piece:
                    size += len(piece)
                    self._refuse_above_limit(size)
                    check.feed(piece)
                    upstream.write(write_chunk(piece) if is_chunked else piece)
                if connection.is_whole:
                    self._end_body(upstream, size, is_chunked=is_chunked)
                    break
            await wait_for_news()
        connection.end_holding()

    def _refuse_above_limit(self, size: int) -> None:
        """Raise PayloadTooLarge for a body over the limit."""
        limit = self._parts.max_body_bytes
        if size > limit:
            raise PayloadTooLarge(f"the body has more than {limit} bytes")

    def _end_body(self, upstream: Upstream, size: int, *, is_chunked: bool) -> None:
        """End the body that was sent in pieces; raise InvalidRequest for an empty one that is
        needed.
        """
        if not size and self._plan.needs_body:
            raise InvalidRequest("a body is needed")
        if is_chunked:
            upstream.write(_LAST_CHUNK)
        upstream.sent()

    # -- the answer --------------------------------------------------------------------------

    def _answer_at_once(self, body: bytes) -> None:
        """Answer with a body that came whole, and goes to the client as it is."""
        upstream = self._exchange.upstream
        assert upstream is not None  # noqa: S101 - Triton has just answered
        head = self._begin_answer(upstream.headers, len(body))
        self._request.status = _OK
        if len(body) <= JOINED_BYTES:
            self._connection.transport.write(head + body)
        else:
            self._connection.transport.writelines((head, body))

    async def _answer_slowly(self, record: ModelRecord) -> None:
        """Answer with a body that comes in pieces, or under the caller's name of the model."""
        exchange = self._exchange
        upstream = exchange.upstream
        assert upstream is not None  # noqa: S101 - Triton has just answered
        headers = upstream.headers
        length = upstream.length
        if record.is_renamed:
            begin = exchange.answer or await self._gather_begin(record)
            headers, named = self._rename(headers, begin, record)
            if length is not None:
                length += len(named) - len(begin)
            if named:
                exchange.pieces.insert(0, named)
        await self._stream_answer(upstream, headers, length)

    async def _gather_begin(self, record: ModelRecord) -> bytes:
        """Wait for the begin of the answer, which has the model's name; return it. Raises the error
        of an answer that fails.
        """
        exchange = self._exchange
        begin = binary.Begin(record.name)
        while True:
            for piece in exchange.take_pieces():
                begin.add(piece)
            if exchange.has_ended or begin.has_name:
                return begin.join()
            if exchange.error is not None:
                raise exchange.error
            await wait_for_news()

    async def _stream_answer(
        self, upstream: Upstream, headers: RawHeaders, length: int | None
    ) -> None:
        """Pass the answer on as it comes, and no faster than the client takes it."""
        connection = self._connection
        exchange = self._exchange
        request = self._request
        is_chunked = length is None and not request.head.is_http_1_0
        head = self._begin_answer(headers, length)
        answer = StreamedAnswer(connection, head, length, is_chunked=is_chunked)
        self._answer = answer
        while True:
            for piece in exchange.take_pieces():
                if answer.add(piece):
                    request.status = _OK
            if exchange.has_ended:
                break
            if exchange.error is not None:
                raise exchange.error
            if connection.is_full:
                upstream.pause_reading()
            else:
                upstream.resume_reading()
            await wait_for_news()
        if request.status:  # the answer was passed on as it came, at the pace of the client
            request.callers_seconds += clock.monotonic() - self._heard_at
        answer.end()
        request.status = _OK
        answer.release()
        self._answer = None

    @staticmethod
    def _rename(headers: RawHeaders, body: bytes, record: ModelRecord) -> tuple[RawHeaders, bytes]:
        """Put the caller's name of the model back into the headers and the begin of an answer."""
        sizes = [int(value) for name, value in headers if name.lower() == _HEADER_LENGTH]
        size = sizes[0] if sizes else None
        body, size = binary.put_name_back(body, size, record.name, record.asked_for)
        if size is None:
            return headers, body
        kept = [pair for pair in headers if pair[0].lower() != _HEADER_LENGTH]
        return [*kept, (b"Inference-Header-Content-Length", b"%d" % size)], body

    def _begin_answer(self, headers: RawHeaders, length: int | None) -> bytes:
        """Return the head of the answer, with Triton's `headers`; chunks have no length."""
        request = self._request
        plan = self._plan
        connection = self._connection
        self._heard_at = clock.monotonic()
        if not (request.was_sent or request.was_waited_for):
            request.upstream_seconds = self._heard_at - self._sent_at
        is_to_end = length is None and request.head.is_http_1_0  # which knows no chunks
        request.is_last = is_to_end or not connection.can_be_kept()
        operation = plan.operation
        if operation.answered is not headers or operation.length != length:
            operation.answered = headers
            operation.length = length
            frame = CHUNKED_LINE if length is None else b"Content-Length: %d\r\n" % length
            fields = list_answer_headers(headers, is_v2=operation.is_v2)
            lines = [b"%b: %b\r\n" % pair for pair in fields]
            operation.answer = b"".join((first_line(_OK), *lines, frame))
        begin = operation.answer.removesuffix(CHUNKED_LINE) if is_to_end else operation.answer
        end = end_of_head(request)
        return begin + plan.contract.answer_lines(request) + end

    # -- how it fails ------------------------------------------------------------------------

    def _release(self, error: BaseException) -> BaseException:
        """Release the exchange, the lease and the answer. Return the error for the caller, which
        the end of the lease may have replaced.
        """
        lease = self._lease
        self._lease = None
        is_bug = isinstance(error, Exception) and not isinstance(error, AdapterError)
        self._exchange.leave(None if is_bug else lease)
        if lease is not None and lease.is_held():
            error = lease.end(error) or error
        if self._answer is not None:
            self._answer.release()
            self._answer = None
        return error

    async def _can_send_again(self, error: CapacityError, body: bytes | None) -> bool:
        """Free memory for an inference that ran out of it, if its contract has such a request sent
        again. Return whether to send it again.
        """
        contract = self._plan.contract
        if body is None or not contract.sends_again:
            return False
        return await self._connection.delegate(contract.free_memory(error))

    def _explain(self, error: AdapterError) -> AdapterError:
        """Return what is said of a body that is not the JSON for which it was taken."""
        if isinstance(error, NotJson):
            return explained(error, self._request.headers, None)
        return error
