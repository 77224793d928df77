"""One request in hand: its head, what is known of it, and its body for those who await it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from multidict import CIMultiDict

from adapter.core.model import ModelId
from adapter.errors import AdapterError, PayloadTooLarge
from adapter.frontends.endpoint.errors import CallInfo
from adapter.frontends.http.exchange import Exchange
from adapter.frontends.http.head import CHUNKED, read_head
from adapter.frontends.http.parts import Parts
from adapter.frontends.http.plans import Head
from adapter.frontends.routes import Match
from adapter.telemetry.log import ids_of_headers
from adapter.telemetry.traffic import WAITED

T = TypeVar("T")


class RequestConnection(Protocol):
    """The connection that a request came on, as far as the request and its handlers need it."""

    transport: asyncio.Transport
    exchange: Exchange  # with Triton
    body_error: AdapterError | None  # why the body will never be complete
    is_whole: bool  # the body is there, to its last byte

    parts: Parts

    def send_continue(self) -> None:
        """Tell a client that waits for it to send the body."""

    def take_body(self) -> bytes:
        """Return the bytes of the body that have come and that nobody has taken."""

    async def wait_for_body(self) -> None:
        """Wait for more of the body, its end, or its failure."""

    def hold_body(self, senders: Iterable[str] = ()) -> None:
        """Count the body in the budget, as it comes and until `end_holding`."""

    def end_holding(self) -> None:
        """Count the body no longer."""

    def refuse_body(self, reason: str) -> None:
        """Fail the body, because nobody wants the rest of it."""

    def note_progress(self) -> None:
        """Note that bytes of the answer were written."""

    async def drain(self) -> None:
        """Wait until the client has taken most of what was sent."""

    def verify_sender(self) -> None:
        """Take the body out of the shares of senders that nobody knows."""

    async def delegate(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` as a task, and return its result."""

    def can_be_kept(self) -> bool:
        """Return whether another request may follow on the connection behind the present answer."""

    def abort(self) -> None:
        """Close the connection at once."""


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

    def __init__(self, connection: RequestConnection, head: Head, raw: bytes) -> None:
        self.connection = connection
        self.head = head
        self._raw = raw
        self.method = head.method
        self.raw_path = head.target
        self._headers: CIMultiDict[str] | None = None

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
