"""One connection of a client: its requests one after the other, and where each of them ends.

The bytes of the request in hand are its body; what comes behind it waits in `ahead`. A coroutine
(serve.py) reads the next request, takes its body, and writes the answer. This file wakes it when
bytes have come, and reads no further from the client while

- a long read waits for its turn of the event loop,
- much has come behind the request in hand,
- much of the body has come that nobody has taken,
- the budget of callers' bytes has no room for more of the body.
"""

import asyncio
import math
import re
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto
from typing import Protocol, cast

from multidict import CIMultiDict

from adapter.core.calls import FastDataPlane
from adapter.core.model import ModelId
from adapter.errors import AdapterError, BrokenBody, NotStarted, PayloadTooLarge
from adapter.frontends.access import SitePolicy
from adapter.frontends.bodies import Arrival, Limits
from adapter.frontends.endpoint.errors import CallInfo
from adapter.frontends.http.chunks import ChunkDecoder, MalformedChunks
from adapter.frontends.http.exchange import Exchange
from adapter.frontends.http.head import CHUNKED, END, MAX_HEAD_BYTES, MisreadHead, read_head
from adapter.frontends.http.instrumentation import Clock, Instrumentation
from adapter.frontends.http.plans import Head, Heads
from adapter.frontends.http.stepping import Stepper, wait_for_news
from adapter.frontends.routes import Match
from adapter.runtime.byte_budget import ByteBudget, Holding
from adapter.runtime.turns import Turns
from adapter.telemetry.log import ids_of_headers
from adapter.telemetry.tracing import Tracing
from adapter.telemetry.traffic import WAITED

# Bytes behind the request in hand from which on the client is read no further.
_AHEAD_BYTES = 64 * 2**10
# Bytes of a body that nobody has taken from which on the client is read no further.
_UNTAKEN_BYTES = 128 * 2**10
# A longer read waits for a turn of the event loop that has time left; so much of a chunked body is
# decoded in one turn.
_SHORT_BYTES = 16 * 2**10
# What is left of a body that nobody wants: up to this it is read, beyond it the connection closes.
SKIPPED_BYTES = 64 * 2**10
_END_BYTES = len(END)
_LINE_BREAKS = b"\r\n"
_EMPTY_LINES = re.compile(rb"(?:\r\n)+")
_BARE_LF = re.compile(rb"(?<!\r)\n")
# What a request, or the empty lines before it, may begin with. Anything else is refused at once.
_METHOD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class State(IntEnum):
    """The states of a connection."""

    IDLE = auto()
    HEAD = auto()  # some of the next head is there
    REQUEST = auto()  # a request is in hand
    LINGERING = auto()  # the answer is written, and bytes that still come are dropped
    CLOSING = auto()  # the connection closes once all is written


# A connection holds the int: to look a member of an enumeration up takes Python 3.11 long.
_IDLE, _HEAD, _REQUEST, _LINGERING, _CLOSING = map(int, State)


class Pause(IntFlag):
    """The reasons for which a client is read no further."""

    LATE = auto()  # a read waits for its turn
    AHEAD = auto()  # much has come behind the request
    UNTAKEN = auto()  # much of the body is not taken
    BUDGET = auto()  # there is no room for more of the body


_LATE, _AHEAD, _UNTAKEN, _BUDGET = map(int, Pause)


@dataclass(slots=True)
class Parts:
    """Holds the parts that all connections and inferences of a listener share."""

    dataplane: FastDataPlane
    instrumentation: Instrumentation
    clock: Clock
    budget: ByteBudget
    sites: SitePolicy
    max_body_bytes: int
    shares_memory: bool = False  # inferences may name regions of shared memory
    tracing: Tracing | None = None
    accepts_requests: bool = True  # a connection may send another request


class Listener(Protocol):
    """The listener that accepted a connection."""

    limits: Limits
    heads: Heads
    turns: Turns

    @property
    def parts(self) -> Parts:
        """Return the parts that its connections share."""

    @property
    def linger_seconds(self) -> float:
        """Return how long a client may go on sending bytes that nobody reads."""

    def serve(self, connection: "Connection") -> Coroutine[object, None, None]:
        """Return the coroutine that serves a connection."""

    def add(self, connection: "Connection") -> None:
        """Note that a connection is open."""

    def remove(self, connection: "Connection") -> None:
        """Note that a connection is lost."""

    def count_crowded(self) -> None:
        """Count a connection that ends early: what came behind its request has no room."""

    def word_misread(self, reason: str) -> bytes:
        """Return the answer to what is no request of HTTP."""


class Request:
    """A request that a connection serves, until its answer is out."""

    # facts that are learned while the request is served
    model_id: ModelId | None = None
    frontend = "sagemaker"  # label of its metrics
    operation = "other"  # label of its metrics
    path_template = ""  # of its route; "" without one
    call_info: CallInfo | None = None  # of a call of an endpoint, for its answer
    caller = ""  # access key of a signed call
    body: bytes | None = None  # where it was read whole before its handler
    has_lease = False
    was_waited_for = False  # its model was not loaded when it came
    was_sent = False  # Triton ran out of memory with it before
    # its answer
    status = 0  # of the answer; 0 until that has begun
    is_answered = False  # to the last byte of the answer; what comes behind it is a new request
    lines = b""  # lines of its head for Triton that differ from request to request
    is_last = False  # the connection closes behind the answer
    upstream_seconds: float | None = None  # how long it waited for Triton
    callers_seconds = 0.0  # how long it waited for its caller
    _headers: CIMultiDict[str] | None = None  # read when they are asked for

    def __init__(self, connection: "Connection", head: Head, raw: bytes) -> None:
        self.connection = connection
        self.head = head
        self._raw = raw

    @property
    def method(self) -> str:
        """The method of its first line."""
        return self.head.method

    @property
    def raw_path(self) -> str:
        """The target of its first line."""
        return self.head.target

    @property
    def headers(self) -> CIMultiDict[str]:
        """The fields of its head, also those that differ from request to request."""
        head = self.head
        if self._raw == head.raw:
            return head.headers
        if self._headers is None:
            self._headers = read_head(self._raw).headers
        return self._headers

    @property
    def echoed_lines(self) -> bytes:
        """The header lines of its head that the answer repeats."""
        return self.head.echoed

    @property
    def match(self) -> Match:
        """Its route. Only for a request that has one."""
        assert self.head.match is not None  # noqa: S101 - its handler was found by it
        return self.head.match

    @property
    def content_length(self) -> int | None:
        """The length of its body; None if only its chunks say where it ends."""
        return None if self.head.length == CHUNKED else self.head.length

    @property
    def remote(self) -> str:
        """The address of its peer; "" at a socket of unix."""
        peer = self.connection.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def read_authorization(self) -> str:
        """Return its Authorization header, or an empty string."""
        return self.headers.get("Authorization", "")

    def describe_for_log(self) -> tuple[str, str, Mapping[str, str]]:
        """Return its method, target and headers."""
        return self.method, self.raw_path, self.headers

    def ids(self) -> dict[str, str]:
        """Return the ids of its headers, as fields of log lines."""
        return ids_of_headers(self.headers)

    # -- its body, for a task ---------------------------------------------------------------

    def iterate_body(self, limit: int) -> AsyncIterator[bytes]:
        """Return the pieces of the body as they come.

        Raises PayloadTooLarge at once for a length above the limit; for other bodies an iteration
        raises it, or the error of a body that fails.
        """
        length = self.content_length
        if length is not None and length > limit:
            raise PayloadTooLarge(f"the body has {length} bytes; at most {limit} are accepted")
        return self._iterate_body(limit)

    async def _iterate_body(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive. Raises PayloadTooLarge over the limit, and
        the error of a body that fails.
        """
        connection = self.connection
        connection.send_continue()
        size = 0
        while True:
            if connection.body_error is not None:
                raise connection.body_error
            piece = connection.take_body()
            if piece:
                size += len(piece)
                if size > limit:
                    raise PayloadTooLarge(f"the body has more than {limit} bytes")
                yield piece
                await asyncio.sleep(0)  # there may be more at once, and others have their turns
            elif connection.is_whole:
                return
            else:
                await connection.wait_for_body()

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body. Raises PayloadTooLarge, and the error of a body that fails."""
        return b"".join([piece async for piece in self.iterate_body(limit)])

    @contextmanager
    def hold_body(self, senders: Iterable[str] = ()) -> Iterator[None]:
        """Count the body in the budget of callers' bytes while the context lasts."""
        self.connection.hold_body(senders)
        try:
            yield
        finally:
            self.connection.end_holding()

    def count_stream(self) -> AbstractContextManager[None]:
        """Count an open stream; raises TooManyStreams if there is no room for it."""
        return self.connection.parts.budget.streams.open_one()

    def note_waited(self) -> None:
        """Take over how long its task has waited for Triton and its caller."""
        waited = WAITED.get()
        if waited is not None:
            self.upstream_seconds = waited.seconds
            self.callers_seconds += waited.callers_seconds


class Connection:
    """One client's connection. The methods of asyncio.Protocol are called by the event loop, those
    of Holder by the byte budget.
    """

    def __init__(self, listener: Listener) -> None:
        self.transport: asyncio.Transport
        self.state = _IDLE
        self.is_full = False  # the client does not take what is written
        self.has_ended = False  # the client has ended its side
        self.had_request = False
        self.should_renew = False  # the next answer says that the connection closes behind it
        self.parts = listener.parts
        self.ahead = b""  # bytes behind the request in hand, or of the next head
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()  # in this state
        self._write_due = math.inf
        self._gone_due = math.inf
        self._counted_ahead = 0  # bytes of `ahead` in the budget
        self._is_crowded = False  # bytes behind a request had no room
        self._late: bytes | None = None  # a read that waits for its turn
        self._pauses = 0
        self._known = listener.heads.known
        self._stepper = Stepper(listener.serve(self), self._end_after)
        self.step = self._stepper.step
        self.delegate = self._stepper.delegate
        self.exchange = Exchange(self.step)
        self._drained: asyncio.Future[None] | None = None  # of a task that waits for the client
        # the request in hand, and its body
        self.request: Request | None = None
        self.left = 0  # bytes of a body of known length that have not come
        self.is_whole = True  # the body is there, to its last byte
        self.body_error: AdapterError | None = None
        self._pieces: list[bytes] = []
        self._untaken = 0  # bytes of the pieces
        self._decoder: ChunkDecoder | None = None
        self._holding: Holding | None = None
        self._arrival: Arrival | None = None
        self._is_told_to_continue = False
        self._body_news: asyncio.Future[None] | None = None  # of a task that waits for the body

    def is_idle(self) -> bool:
        """Return whether it has no whole head of a request."""
        return self.state in {_IDLE, _HEAD}

    def can_make_room(self) -> bool:
        """Return whether the connection may be closed to make room for a new one: it is idle, or
        its client may have disconnected.
        """
        return self.is_idle() or self._has_disconnected()

    def _has_disconnected(self) -> bool:
        """Return whether the client has ended its side, and has taken all that was written. Most
        such clients have disconnected; few wait for more.
        """
        has_request = self.state == _REQUEST
        return self.has_ended and has_request and not self.transport.get_write_buffer_size()

    def note_progress(self) -> None:
        """Note that bytes of the answer were written or taken: the next bytes reset the connection
        of a client that has disconnected, and one that only ended its side may wait for them.
        """
        if self.has_ended:
            self._gone_due = self._loop.time() + self._listener.limits.gone

    def worth(self) -> tuple[bool, bool, float]:
        """Return what orders connections that can make room: those whose client has ended its side
        end first, then those that never had a request, then those idle for longest.
        """
        return not self.has_ended, self.had_request, self._since

    def make_room(self) -> None:
        """Close the connection because a new one takes its place. Triton goes on with a request
        that it has received.
        """
        if self.is_idle():
            self.close()
        else:
            self.abort()

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve the client."""
        self.transport = cast("asyncio.Transport", transport)
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._listener.add(self)
        self.step()

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent, or put a long read off to a later turn."""
        is_next = self.state == _IDLE and not self.ahead and not self.is_full
        if is_next and len(data) <= _SHORT_BYTES and self._late is None:
            self.ahead = data
            self.step()
            return
        is_late = self._late is not None
        if not is_late and len(data) > _SHORT_BYTES:
            is_late = self._decoder is not None or not self._listener.turns.has_time()
        if not (is_late and self._put_off(data)):
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Append received bytes to the head, to the body, or to those behind the request in hand,
        and resume the coroutine that serves the connection.
        """
        try:
            if self.request is None:
                if self.state >= _LINGERING:
                    return
                if self.is_full:
                    self._put_ahead(data)
                else:
                    self.ahead = self.ahead + data if self.ahead else data
            elif self.is_whole:
                self._put_ahead(data)
                return
            else:
                behind = self._feed_body(data)
                if behind:
                    self._put_ahead(behind)
            self.step()
            if self._untaken > _UNTAKEN_BYTES and not self.is_whole:
                self.pause(_UNTAKEN)  # the coroutine has not taken it
        except Exception as error:  # noqa: BLE001 - any error ends this connection alone
            self._end_after(error)

    def _put_off(self, data: bytes, *, is_older: bool = False) -> bool:
        """Keep the data for a later turn of the event loop; return False if there is no room."""
        late = self._late
        budget = self.parts.budget
        if late is None and not budget.has_buffer_for(len(data)):
            return False
        budget.buffer(len(data))
        # older data came before what is kept already
        self._late = data + (late or b"") if is_older else (late or b"") + data
        self.pause(_LATE)
        if late is None:
            self._listener.turns.wait(self._read_late)
        return True

    def _read_late(self) -> None:
        """Read what was put off; of a chunked body only as much as one turn may decode."""
        data = self._late
        if data is None:
            return
        rest = b""
        if self._decoder is not None and self.state != _CLOSING:
            rest = data[_SHORT_BYTES:]
            data = data[:_SHORT_BYTES]
        self._late = rest or None
        self.parts.budget.buffer(-len(data))
        if rest:
            self._listener.turns.wait(self._read_late)
        else:
            self.unpause(_LATE)
        self._receive(data)
        if self.has_ended and not rest:
            self.fail(BrokenBody("the body broke off"))

    def eof_received(self) -> bool:
        """Note that the client has ended its side; return True, as it may still read.

        Nothing waits for its turn: the client is read no further until that has come.
        """
        self.has_ended = True
        self._gone_due = self._loop.time() + self._listener.limits.gone
        try:
            if self.request is not None:
                self.fail(BrokenBody("the body broke off"))
            elif self.state == _HEAD and self.ahead.strip(_LINE_BREAKS):
                self.refuse_head("the head of the request broke off")
            self.step()
        except Exception as error:  # noqa: BLE001 - any error ends this connection alone
            self._end_after(error)
        return self.state in {_HEAD, _REQUEST} or (self.state == _IDLE and bool(self.ahead))

    def connection_lost(self, _: Exception | None) -> None:
        """Drop the request in hand, cancel the coroutine that serves the connection, and release
        the bytes that count in the budget.
        """
        self.state = _CLOSING
        try:
            self._stepper.cancel()
            self._read_late()
            self._take_ahead()
            self._forget_body()
        except Exception as error:  # noqa: BLE001 - any error ends this connection alone
            self._end_after(error)
        self._listener.remove(self)

    def pause_writing(self) -> None:
        """Mark the connection as full: the client does not read. The time limit for that begins."""
        self.is_full = True
        self._write_due = self._loop.time() + self._listener.limits.answer

    def resume_writing(self) -> None:
        """Mark the connection as not full any more, and resume what waits to write."""
        self.is_full = False
        self._write_due = math.inf
        self.note_progress()
        _wake(self._drained)
        self.step()

    # -- reading from the client ------------------------------------------------------------

    def pause(self, reason: int) -> None:
        """Read no further from the client, for a reason of Pause."""
        self._pauses |= reason
        self.transport.pause_reading()

    def unpause(self, reason: int) -> None:
        """Remove a reason not to read; read on if it was the last one."""
        if self._pauses & reason:
            self._pauses &= ~reason
            if not self._pauses and not self.transport.is_reading():
                self.transport.resume_reading()

    def _put_ahead(self, behind: bytes) -> None:
        """Keep what came behind the request in hand. Where there is no room for it, the connection
        ends with the answer: what it was the beginning of has not begun.
        """
        budget = self.parts.budget
        size = len(behind)
        if self._is_crowded:
            return
        if budget.has_buffer_for(size):
            budget.buffer(size)
            self._counted_ahead += size
            self.ahead += behind
            if len(self.ahead) > _AHEAD_BYTES:
                self.pause(_AHEAD)
        elif self.request is not None and self.request.is_answered:
            self.ahead += behind  # it is read in a moment, when the task or the body has ended
        else:
            self._is_crowded = True
            self._take_ahead()
            self._listener.count_crowded()
            self.pause(_AHEAD)

    def _take_ahead(self) -> bytes:
        """Return the bytes that were received behind the request in hand, and release them at the
        budget.
        """
        data = self.ahead
        self.ahead = b""
        if self._counted_ahead:
            self.parts.budget.buffer(-self._counted_ahead)
            self._counted_ahead = 0
        return data

    # -- the next request -------------------------------------------------------------------

    async def next_request(self) -> Request | None:
        """Return the next request once its head is there; None if the connection ends."""
        if self.ahead and self.state == _IDLE:
            # others have their turn before a request that came behind another one
            self._loop.call_soon(self.step)
            await wait_for_news()
        while self.state < _LINGERING:
            if self._is_crowded:  # by what came while the client did not take its answer
                self.end(gently=True)
                return None
            if not self.is_full:
                request = self._read_next() if self.ahead else None
                if request is not None:
                    return request
                if self.state >= _LINGERING:
                    return None
                if self.has_ended:
                    self.close()
                    return None
            await wait_for_news()
        return None

    def _read_next(self) -> Request | None:
        """Read a request from what is ahead, and read on from the client as that is taken. Return
        None if its head is not whole, or was refused.
        """
        data = self.ahead
        if self._counted_ahead:
            self._take_ahead()
        self.ahead = b""
        if self._pauses and not self._is_crowded:
            self.unpause(_AHEAD)
        if data[0] in _LINE_BREAKS:
            data = self._skip_empty_lines(data)
        end = data.find(END) + _END_BYTES
        if end < _END_BYTES:
            self._keep_head(data)
            return None
        raw = data[:end]
        head = self._known.get(raw)
        request = self._read_head(raw) if head is None else Request(self, head, raw)
        if request is not None:
            self._begin_request(request, data, end)
        return request

    @staticmethod
    def _skip_empty_lines(data: bytes) -> bytes:
        """Return the bytes behind empty lines, which mean nothing (RFC 9112, section 2.2)."""
        match = _EMPTY_LINES.match(data)
        return data if match is None else data[match.end() :]

    def _begin_request(self, request: Request, data: bytes, end: int) -> None:
        """Take a request in hand, whose head ends at `end`."""
        self.request = request
        self.state = _REQUEST
        self.had_request = True
        length = request.head.length
        if len(data) == end + length:  # most requests have their whole body, and nothing behind it
            self._pieces = [data[end:]] if length else []
        else:
            self._begin_body(data[end:], length)

    def _read_head(self, raw: bytes) -> Request | None:
        """Read a head that is not known; refuse it and return None if it is no good one."""
        if len(raw) > MAX_HEAD_BYTES:
            self._refuse_long_head()
            return None
        try:
            head, lines = self._listener.heads.read(raw)
        except MisreadHead as error:
            self.refuse_head(str(error))
            return None
        request = Request(self, head, raw)
        if lines:
            request.lines = lines
        return request

    def _begin_body(self, data: bytes, length: int) -> None:
        """Begin with a body of which some is to come, or behind which something has come."""
        self._is_told_to_continue = False
        self._arrival = Arrival(self._listener.limits, self._loop.time())
        self._pieces = []
        if length == CHUNKED:
            self._begin_chunks(data)
        else:
            self.left = length
            behind = self._feed_body(data)
            if behind:
                self._put_ahead(behind)
        if self.has_ended and not self.is_whole and self._late is None:
            self.body_error = BrokenBody("the body broke off")

    def _begin_chunks(self, data: bytes) -> None:
        """Begin with a chunked body. Decode the first part of what is there; the rest waits for a
        later turn of the event loop.
        """
        self._decoder = ChunkDecoder()
        self.is_whole = False
        rest = data[_SHORT_BYTES:]
        if rest and self._put_off(rest, is_older=True):
            data = data[:_SHORT_BYTES]
        behind = self._feed_body(data)
        if behind:
            self._put_ahead(behind)

    def _keep_head(self, data: bytes) -> None:
        """Keep the begin of a head, if it may become a good one."""
        if len(data) > MAX_HEAD_BYTES:
            self._refuse_long_head()
        elif not data:
            self._enter(_HEAD)
        elif _BARE_LF.search(data):  # its end would never come
            self.refuse_head("a line of the head of the request ends with LF alone")
        elif data[0] not in _METHOD:
            self.refuse_head("this is not an HTTP request: its first byte begins no method")
        else:
            self.ahead = data
            self._enter(_HEAD)

    # -- the body of the request in hand ----------------------------------------------------

    def _feed_body(self, data: bytes) -> bytes:
        """Add to the body what has come of it; return what lies behind its end."""
        if self.body_error is not None:
            return b""
        decoder = self._decoder
        if decoder is None:
            piece = data[: self.left]
            behind = data[self.left :]
            self.left -= len(piece)
            pieces = [piece]
            self.is_whole = not self.left
        else:
            try:
                pieces = decoder.feed(data)
            except MalformedChunks as error:
                self.fail(BrokenBody(f"the body is malformed: {error}"))
                return b""
            self.is_whole = decoder.is_done
            behind = decoder.behind
        size = sum(map(len, pieces))
        self._pieces += pieces
        self._untaken += size
        if self._arrival is not None:
            self._arrival.received += size if decoder is None else len(data)
        if self._holding is not None:
            self._count_body(size)
        _wake(self._body_news)
        return behind

    def _count_body(self, size: int) -> None:
        """Reserve bytes of the body at the budget, and stop reading while they have no room."""
        assert self._holding is not None  # noqa: S101 - the callers have looked
        if not self._holding.take(size):
            self.pause(_BUDGET)
        if self.is_whole:
            self._holding.arrived()

    def take_body(self) -> bytes:
        """Return what has come of the body and was not taken."""
        pieces = self._pieces
        self._untaken = 0
        if self._pauses:
            self.unpause(_UNTAKEN)
        if len(pieces) == 1:
            return pieces.pop()
        self._pieces = []
        return b"".join(pieces)

    def put_body_back(self, body: bytes) -> None:
        """Put back a body that was taken whole, so that the next `take_body` returns it."""
        self._pieces = [body]

    async def gather_body(self) -> bytes:
        """Return the whole body once it is there. Raises the error of a body that fails."""
        pieces: list[bytes] = []
        while True:
            if self.body_error is not None:
                raise self.body_error
            pieces.append(self.take_body())
            if self.is_whole:
                return b"".join(pieces)
            await wait_for_news()

    async def skip_body(self) -> None:
        """Drop the rest of the body; abort the connection if it does not come."""
        while not self.is_whole:
            if self.body_error is not None:
                self.abort()
                return
            self.take_body()
            await wait_for_news()

    async def wait_for_body(self) -> None:
        """Wait in a task until more of the body has come, or it has failed."""
        self._body_news = self._loop.create_future()
        await self._body_news

    def send_continue(self) -> None:
        """Have a client send its body that waits for leave to do so."""
        if self._awaits_continue():
            self._is_told_to_continue = True
            self.transport.write(_CONTINUE)

    def _awaits_continue(self) -> bool:
        """Return whether the client waits for 100 Continue before it sends the body."""
        request = self.request
        arrival = self._arrival
        if request is None or arrival is None or not request.head.expects_continue:
            return False
        return not self._is_told_to_continue and not arrival.received

    def can_be_kept(self) -> bool:
        """Return whether another request may follow: the rest of the body is there, or small."""
        request = self.request
        if request is None or request.head.wants_close:
            return False
        if self._is_crowded or self.should_renew or not self.parts.accepts_requests:
            return False
        if self.is_whole:
            return True
        if self.body_error is not None or self._decoder is not None:
            return False
        return self.left <= SKIPPED_BYTES and not request.head.expects_continue

    def hold_body(self, senders: Iterable[str] = ()) -> None:
        """Reserve the body's bytes at the budget, as they arrive and until `end_holding`."""
        self.end_holding()
        self._holding = self.parts.budget.hold(self, self._length(), senders)
        if self._untaken or self.is_whole:
            self._count_body(self._untaken or sum(map(len, self._pieces)))

    def _length(self) -> int | None:
        """Return the Content-Length of the request in hand; None for a chunked body, and without a
        request.
        """
        return None if self.request is None else self.request.content_length

    def verify_sender(self) -> None:
        """Mark the sender of the body as known, once its signature was checked: the body counts no
        longer among those of unknown senders, which share less room.
        """
        if self._holding is not None:
            self._holding.verify()

    def end_holding(self) -> None:
        """Release the body's bytes at the budget."""
        holding = self._holding
        self._holding = None
        if holding is not None:
            holding.end()
            self.unpause(_BUDGET)

    def fail(self, error: AdapterError) -> None:
        """Fail the body: its rest will not come, and whoever reads it gets the error. No-op once
        the body is whole.
        """
        if self.request is None or self.is_whole or self.body_error is not None:
            return
        self.body_error = error
        self._pieces = []
        self._untaken = 0
        _wake(self._body_news)
        self.step()

    def refuse_body(self, reason: str) -> None:
        """Refuse the request in hand, if its body has not come yet."""
        if self.state == _REQUEST and not self.is_whole:
            self.fail(NotStarted(f"{reason}; the body of this request had not come yet"))

    # -- Holder -----------------------------------------------------------------------------

    def is_reading(self) -> bool:
        """Return whether the client may send."""
        return self.transport.is_reading()

    def resume(self) -> None:
        """Read on: the budget has room for more of the body. Called by the budget."""
        self.unpause(_BUDGET)

    def cut(self, error: AdapterError) -> None:
        """Fail the body because others need its room. Called by the budget."""
        self.fail(error)

    # -- for the coroutine ------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait in a task until the client takes more of the answer."""
        if self.is_full:
            self._drained = self._loop.create_future()
            await self._drained

    def end_request(self, *, is_last: bool) -> None:
        """Forget the request, whose answer is written, and wait for the next one; or close the
        connection, if the answer `is_last` or the connection cannot be kept.
        """
        accepts_requests = self.parts.accepts_requests and not self._is_crowded
        if is_last or not self.is_whole or not accepts_requests:
            is_gentle = not self.is_whole or bool(self.ahead) or self._is_crowded
            self._forget_body()
            if self.state < _LINGERING:
                self.end(gently=is_gentle)
            return
        if self._arrival is not None or self._pieces:
            self._forget_body()
        self.request = None
        self.state = _IDLE
        self._since = self._loop.time()

    def _forget_body(self) -> None:
        """Drop the request in hand, and what there is of its body."""
        self.end_holding()
        if self.body_error is not None:
            self.body_error.__traceback__ = None
        self.request = None
        self.left = 0
        self.is_whole = True
        self.body_error = None
        self._pieces = []
        self._untaken = 0
        self._decoder = None
        self._arrival = None
        self._body_news = None
        self.unpause(_UNTAKEN)

    # -- time limits ------------------------------------------------------------------------

    def check_time_limits(self, now: float) -> None:
        """Close what has waited for too long; called every now and then."""
        try:
            if self.transport.is_closing() and self.state != _REQUEST:
                self._enter(_CLOSING)
            is_gone = now >= self._gone_due and self._has_disconnected()
            if now >= self._write_due or is_gone:
                self.abort()
            elif self.state == _REQUEST:
                self._check_body(now)
            else:
                self._check_waiting(now - self._since)
        except Exception as error:  # noqa: BLE001 - any error ends this connection alone
            self._end_after(error)

    def _check_waiting(self, seconds: float) -> None:
        """Act on a connection that has been in its state for so long."""
        state = self.state
        limits = self._listener.limits
        has_lingered = state == _LINGERING and seconds >= self._listener.linger_seconds
        is_answer_stalled = state == _CLOSING and seconds >= limits.answer
        if state == _IDLE and seconds >= limits.idle:
            self.close()
        elif state == _HEAD and seconds >= limits.head:
            self.refuse_head(f"the head of the request took longer than {limits.head:g} s")
        elif has_lingered or is_answer_stalled:
            self.abort()

    def _check_body(self, now: float) -> None:
        """Fail the body if it arrives too slowly."""
        if self._arrival is not None and not self.is_whole:
            is_reading = self.transport.is_reading() and not self._awaits_continue()
            error = self._arrival.check_time_limits(now, is_reading=is_reading)
            if error is not None:
                self.fail(error)

    # -- ends -------------------------------------------------------------------------------

    def _refuse_long_head(self) -> None:
        """Refuse a head over the limit of its length."""
        self.refuse_head(f"the head of the request is longer than {MAX_HEAD_BYTES} bytes")

    def refuse_head(self, reason: str) -> None:
        """Refuse what is no request, and end: nobody knows where the next request would begin."""
        self.transport.write(self._listener.word_misread(reason))
        self.end(gently=True)
        self.step()

    def _enter(self, state: int) -> None:
        """Enter a state, and note the time, unless the connection is in that state already."""
        if self.state != state:
            self.state = state
            self._since = self._loop.time()

    def end(self, *, gently: bool) -> None:
        """Close the connection behind what was written.

        Bytes that were not read would reset the connection, maybe before the client has seen the
        answer; gently means that they are read for a while, for nothing.
        """
        if self.has_ended or not gently:
            self.close()
            return
        self._take_ahead()
        self._enter(_LINGERING)
        self.transport.write_eof()
        self._pauses = 0
        self.transport.resume_reading()

    def stop(self) -> None:
        """Close at once if no request is in hand, else behind the answer."""
        if self.is_idle():
            self.close()
            self.step()

    def close(self) -> None:
        """Close once what was written is out."""
        self._enter(_CLOSING)
        self._gone_due = math.inf
        self.transport.close()

    def abort(self) -> None:
        """Close at once; what waits for the client ends once the connection is lost."""
        self._enter(_CLOSING)
        self.transport.abort()

    def _end_after(self, error: BaseException) -> None:
        """Log an error that nobody expected, and end the connection."""
        if isinstance(error, asyncio.CancelledError):
            return  # the connection is lost already
        if isinstance(error, Exception):
            self.parts.instrumentation.record_bug(error, ("", ""))
        self.abort()


def _wake(future: asyncio.Future[None] | None) -> None:
    """Wake the coroutine that waits for a future, if one does."""
    if future is not None and not future.done():
        future.set_result(None)
