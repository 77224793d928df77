"""Plain inferences, from the caller's connection to Triton's and back, by callbacks alone.

A small body is gathered before anything else is taken; a larger one goes on as it comes. What
cannot be begun here goes to aiohttp; what is refused without a wait is answered here. The JSON of a
request is scanned for what would end Triton (adapter/dataplane/json_limits.py), and of the answer
only the head is parsed.
"""

import asyncio
from collections.abc import Mapping
from enum import IntEnum, auto
from typing import TYPE_CHECKING

from adapter.control.door import Lease
from adapter.core.calls import Check, FastDataPlane, RawHeaders, Upstream
from adapter.errors import AdapterError, BackendError, CapacityError, NotJson
from adapter.frontends.http.application import SKIPPED_BYTES, ClientConnection
from adapter.frontends.http.content_types import explained
from adapter.frontends.http.head import Head, headers_of
from adapter.frontends.http.instrumentation import (
    Clock,
    Instrumentation,
    Refusal,
    begin_of_head,
    given_back,
    refusal_answer,
)
from adapter.frontends.http.streamed_answer import JOINED_BYTES, StreamedAnswer
from adapter.runtime import clock
from adapter.runtime.byte_budget import ByteBudget, Holding

if TYPE_CHECKING:
    from adapter.frontends.http.contracts import Contract

# Bodies up to this size are gathered; others are passed on.
GATHERED_BYTES = 256 * 2**10

_OK, _CHUNKED = 200, b"Transfer-Encoding: chunked\r\n"


class Stage(IntEnum):
    NONE = auto()
    GATHERING, CONNECTING, SENDING = auto(), auto(), auto()
    WAITING = auto()  # Triton has the request
    ANSWERING = auto()
    REFUSING = auto()
    SKIPPING = auto()  # it is refused, and the rest of its body dropped


_NONE, _GATHERING, _CONNECTING, _SENDING, _WAITING, _ANSWERING, _REFUSING, _SKIPPING = map(
    int, Stage
)


class FastPath:
    """Holds what all plain inferences share. `accepts_requests`: a connection may send another."""

    def __init__(
        self,
        dataplane: FastDataPlane,
        instrumentation: Instrumentation,
        clock: Clock,
        budget: ByteBudget,
        *,
        shares_memory: bool = False,  # inferences may name regions of shared memory
    ) -> None:
        self.shares_memory = shares_memory
        self.dataplane = dataplane
        self.instrumentation, self.clock, self.budget = instrumentation, clock, budget
        self.accepts_requests = True


class Inference:
    """The plain inference that a connection has in hand, one after the other. It is what both
    connections tell of: the caller's by `begin`, `feed` and `left`, Triton's as its Receiver.

    `was_found` and `was_sent`: as in Attempt. `_is_blocked`: Triton does not take what is written.
    """

    def __init__(self, client: ClientConnection, path: FastPath) -> None:
        self._client = client
        self._path = path
        self._stage = _NONE
        self._head: Head
        self._contract: Contract
        self._upstream: Upstream | None = None
        self._lease: Lease | None = None
        self._holding: Holding | None = None
        self._check: Check | None = None
        self._task: asyncio.Task[None] | asyncio.Handle | None = None
        self._pieces: list[bytes] = []
        self._body: bytes | None = None  # until the request is over, for a second try
        self._answer: StreamedAnswer | None = None
        self._is_blocked = self.was_found = self.was_sent = False

    # -- the caller's side ------------------------------------------------------------------

    def begin(self, head: Head, raw: bytes, body: bytes) -> bool:
        """Take the request, of whose body some is there; False: it is not for here."""
        contract, length = head.contract, head.length
        if contract is None or not self._path.accepts_requests:
            return False
        self._head, self._contract, self._raw = head, contract, raw
        self._begun = clock.monotonic()
        self._waited: float | None = None
        self._callers, self._status = 0.0, 0
        self._is_whole = len(body) == length
        self._check = None
        self._is_blocked = self.was_found = self.was_sent = False
        self._stage = _GATHERING
        head.operation.served.in_flight.count += 1
        is_taken = self._serve(body) if self._is_whole else self._begin_body(body, length)
        if not is_taken:
            self._over()
        return is_taken

    def feed(self, piece: bytes, *, is_last: bool) -> None:
        self._is_whole = is_last
        self._take(len(piece))
        if self._stage == _SENDING:
            self._pass_on(piece)
        elif self._stage in {_GATHERING, _CONNECTING}:
            self._pieces.append(piece)
            if is_last and self._stage == _GATHERING:
                self._gathered()
        elif is_last and self._stage == _SKIPPING and self._status:
            self._done(is_last=False)

    def left(self) -> None:
        """The caller has left; Triton goes on with what it works on."""
        if self._stage != _NONE:
            self._release(None)
            self._over()

    def caller_is_full(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def caller_takes_more(self) -> None:
        if self._upstream is not None:
            self._upstream.resume_reading()

    # -- to Triton --------------------------------------------------------------------------

    def _hold(self, body: bytes) -> None:
        self._holding = self._path.budget.hold(self, self._head.length)
        if body:
            self._take(len(body))

    def _take(self, size: int) -> None:
        if self._holding is not None and not self._holding.take(size):
            self._client.transport.pause_reading()

    def _begin_body(self, body: bytes, length: int) -> bool:
        is_large = length > GATHERED_BYTES
        if not self._contract.sends_again:
            try:
                if (lease := self._find_lease()) is None:
                    return False
            except AdapterError as error:
                return self._refuse_at_once(error)
            if is_large:
                self._stream(lease, body, length)
        elif is_large:
            return False
        if not is_large:
            self._hold(body)
            self._pieces = [body]
        return True

    def _gathered(self) -> None:
        self._callers = clock.monotonic() - self._begun
        body, self._pieces = b"".join(self._pieces), []
        self._end_holding()
        self._serve_or_pass(body)

    def _serve_or_pass(self, body: bytes) -> None:
        if not self._serve(body):
            self._over()
            self._client.serve_by_application(self._raw + body)

    def _serve(self, body: bytes) -> bool:
        dataplane = self._path.dataplane
        if self._contract.sends_again and not self.was_sent:
            self._body = body
        try:
            if (lease := self._find_lease()) is None:
                return False
            self._lease = lease
            lease.begin(self._begun)
            shares_memory = self._path.shares_memory
            dataplane.check(body, self._head.json_bytes, lease.record, shares_memory=shares_memory)
        except AdapterError as error:
            return self._refuse_at_once(error)
        if (upstream := dataplane.idle()) is None:
            self._to_triton(body)
        else:
            self._send(upstream, body)
        return True

    def _stream(self, lease: Lease, body: bytes, length: int) -> None:
        self._lease = lease
        lease.begin()
        lease.arrives(lambda: self._client.refuse("the model is being unloaded"))
        path = self._path
        self._check = path.dataplane.checking(
            self._head.json_bytes, length, lease.record, shares_memory=path.shares_memory
        )
        self._hold(body)
        self._to_triton(body)

    def _to_triton(self, body: bytes) -> None:
        upstream = self._path.dataplane.idle()
        if upstream is None:
            self._stage = _CONNECTING
            self._pieces = [body]
            if not self._is_whole:
                self._client.transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._send(upstream, body)

    def _find_lease(self) -> Lease | None:
        head = self._head
        lease = self._contract.lease(head.model_id, head.is_typed)
        self.was_found = lease is not None
        return lease

    async def _connect(self) -> None:
        try:
            upstream = await self._path.dataplane.connected(self._head.model_id)
            self._task, body, self._pieces = None, b"".join(self._pieces), []
            self._send(upstream, body)
            self.resume()
        except AdapterError as error:
            self.failed(error)
        except Exception as error:  # noqa: BLE001 - a bug
            self.bug(error)

    def _send(self, upstream: Upstream, body: bytes) -> None:
        assert self._lease is not None  # noqa: S101 - it is taken before
        self._upstream = upstream
        upstream.begin(self, self._lease.record)
        self._asked = clock.monotonic()
        if self._check is None:
            self._stage = _WAITING
            upstream.send(self._head.upstream_head, body)
        else:
            self._stage = _SENDING
            upstream.write(self._head.upstream_head)
            self._pass_on(body)

    def _pass_on(self, piece: bytes) -> None:
        assert self._check is not None  # noqa: S101 - it is a stream
        assert self._upstream is not None  # noqa: S101
        try:
            self._check.feed(piece)
        except AdapterError as error:
            self.failed(error)
            return
        self._upstream.write(piece)
        if self._is_whole:
            self._stage = _WAITING
            self._end_holding()
            self._upstream.sent()

    # -- Receiver ---------------------------------------------------------------------------

    def answered_whole(self, body: bytes) -> None:
        try:
            assert self._upstream is not None  # noqa: S101 - it tells this
            headers, contract = self._upstream.headers, self._contract
            if contract.renames:
                headers, body = contract.renamed(headers, body)
            head = self._begin_answer(headers, len(body))
            self._status = _OK
            if len(body) <= JOINED_BYTES:
                self._client.transport.write(head + body)
            else:
                self._client.transport.writelines((head, body))
            lease, self._lease, self._upstream = self._lease, None, None
            if lease is not None:  # nothing else is left of a request that went on to its end
                lease.end(None, self._heard)
            self._over()
            self._client.answered(self._is_last)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def answered(self) -> None:
        try:
            assert self._upstream is not None  # noqa: S101 - it tells this
            if not self._contract.renames:  # else it is gathered first
                length = self._upstream.length
                head = self._begin_answer(self._upstream.headers, length)
                self._answer = StreamedAnswer(self._client, self._path.budget, head, length)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def _begin_answer(self, headers: RawHeaders, length: int | None) -> bytes:
        """The head of the answer; `headers`: Triton's; `length` of its body, None for chunks."""
        self._heard = clock.monotonic()
        # the times of a second try say nothing of ours
        self._waited = None if self.was_sent else self._heard - self._asked
        self._stage = _ANSWERING
        self._is_last = not (self._is_whole and self._path.accepts_requests)
        operation, lines = self._head.operation, self._path.clock
        if operation.answered is not headers or operation.length != length:
            operation.answered, operation.length = headers, length
            frame = _CHUNKED if length is None else b"Content-Length: %d\r\n" % length
            fields = given_back(headers, is_v2=operation.is_v2)
            operation.answer = begin_of_head(_OK, fields) + frame
        end = lines.last if self._is_last else lines.line
        return operation.answer + self._head.echoed + self._contract.answer_line() + end

    def received(self, piece: bytes) -> None:
        try:
            if self._answer is None:
                self._pieces.append(piece)
            elif self._answer.add(piece):
                self._status = _OK
                if self._client.is_full:
                    self.caller_is_full()
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def ended(self) -> None:
        try:
            if self._answer is None:
                body, self._pieces = b"".join(self._pieces), []
                self.answered_whole(body)
                return
            if self._status and self._waited is not None:  # it was passed on as it came
                self._callers += clock.monotonic() - self._asked - self._waited
            self._answer.end()
            self._status = _OK
            self._release(None)
            self._done(is_last=self._is_last)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def failed(self, error: AdapterError) -> None:
        """By Triton, or by a body that will not come."""
        try:
            if self._stage in {_NONE, _REFUSING}:
                return
            if self._status:
                self._client.abort()  # that is all that can be said of an answer that broke off
                return
            lease = self._lease
            reported = self._release(error)
            error = reported if isinstance(reported, AdapterError) else error
            self._stage = _REFUSING
            if lease is not None and isinstance(error, BackendError | CapacityError):
                self._task = asyncio.get_running_loop().create_task(self._judge(lease, error))
            else:
                self._refuse(error)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def pause_writing(self) -> None:
        self._is_blocked = True
        if self._stage == _SENDING:
            self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_blocked = False
        self.resume()

    # -- for the budget ---------------------------------------------------------------------

    def is_reading(self) -> bool:
        return self._client.transport.is_reading()

    def resume(self) -> None:
        holding = self._holding
        is_held = self._is_blocked or (holding is not None and holding.since is not None)
        if not is_held and self._stage in {_SENDING, _GATHERING, _SKIPPING}:
            self._client.transport.resume_reading()

    def cut(self, error: AdapterError) -> None:
        self.failed(error)

    # -- how it ends ------------------------------------------------------------------------

    def _refuse_at_once(self, error: AdapterError) -> bool:
        """Return False where much of the body is to come."""
        if self._client.left > SKIPPED_BYTES:
            return False
        if self._lease is not None:
            self._release(error)
        self._stage = _SKIPPING
        if self._client.ahead:  # the requests behind would be answered within this call
            self._task = asyncio.get_running_loop().call_soon(self._refuse_later, error)
        else:
            self._refuse(error)
        return True

    async def _judge(self, lease: Lease, error: AdapterError) -> None:
        body = self._body
        try:
            judged = await lease.judge(error)
            if (
                body is not None
                and isinstance(judged, CapacityError)
                and await self._contract.frees_memory(judged)
            ):
                self._again(body)
            else:
                self._refuse(judged)
        except Exception as bug:  # noqa: BLE001 - all of them
            self.bug(bug)

    def _again(self, body: bytes) -> None:
        """The last time: nothing is kept for another one."""
        self._stage, self._task, self._body, self.was_sent = _GATHERING, None, None, True
        self._serve_or_pass(body)

    def _refuse(self, error: AdapterError) -> None:
        self._task, head, instrumentation = None, self._head, self._path.instrumentation
        if head.is_typed and isinstance(error, NotJson):
            error = explained(error, self._request()[2], None)
        refusal = self._contract.refusal(error, head.model_id, self)
        kind, more = (head.operation.name, head.model_id), refusal.logged
        instrumentation.refused(error, self._request, *kind, more=more)
        self._say(refusal)

    def _refuse_later(self, error: AdapterError) -> None:
        try:
            self._refuse(error)
        except Exception as bug:  # noqa: BLE001 - all of them
            self.bug(bug)

    def _request(self) -> tuple[str, str, Mapping[str, str]]:
        return ("POST", *headers_of(self._raw))

    def authorization(self) -> str:
        return self._request()[2].get("Authorization", "")

    def _say(self, refusal: Refusal) -> None:
        self._status = refusal.status
        may_go_on = self._is_whole or self._stage == _SKIPPING
        is_last = not (may_go_on and self._path.accepts_requests)
        echoed = b"" if self._contract.sends_again else self._head.echoed
        clock = self._path.clock
        self._client.transport.write(refusal_answer(refusal, clock, echoed=echoed, is_last=is_last))
        if is_last or self._is_whole:
            self._done(is_last=is_last)

    def bug(self, error: Exception) -> None:
        """An error that nobody expected: 500, or where an answer has begun its end."""
        instrumentation, request, model_id = self._path.instrumentation, ("", ""), None
        if self._stage != _NONE:
            request, model_id = ("POST", headers_of(self._raw)[0]), self._head.model_id
        instrumentation.bug(error, request, model_id)
        try:
            upstream = self._upstream
            if upstream is not None:
                upstream.leave(self, None)
                upstream.abort()
            self._release(None)
            if self._stage == _NONE or self._status:
                self._client.abort()
            else:
                self._say(self._contract.refusal(None, self._head.model_id, self))
        except Exception as another:  # noqa: BLE001 - it is logged, and the caller cut off
            instrumentation.bug(another, request, model_id)
            self._client.abort()

    def _end_holding(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.end()

    def _release(self, error: AdapterError | None) -> BaseException | None:
        """Of all that the request has. Returns what its caller is told of `error`."""
        reported: BaseException | None = error
        upstream, self._upstream = self._upstream, None
        lease, self._lease = self._lease, None
        if lease is not None:
            if upstream is not None:
                upstream.leave(self, lease)
            if lease.is_held():
                reported = lease.end(error)
        if self._answer is not None:
            self._answer.release()
            self._answer = None
        self._end_holding()
        self._pieces = []
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        return reported

    def _done(self, *, is_last: bool) -> None:
        self._over()
        self._client.answered(is_last)

    def _over(self) -> None:
        head, status, self._stage = self._head, self._status, _NONE
        self._body = None
        served = head.operation.served
        served.in_flight.count -= 1
        if status:
            seconds = clock.monotonic() - self._begun
            served.fast += 1
            served.count(status, seconds, self._waited, self._callers, head.model_id)
