"""aiohttp's side of a connection: it serves what is not plain, on a transport that is not its own.

What of aiohttp is used here beyond its documentation has a test in
tests/contract/test_aiohttp.py.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn, Protocol

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import InvalidURLError

from adapter.errors import AdapterError, BrokenBody, drop_tracebacks

# As Node.js has it; of the bytes that a caller sends no more are held before they are a request.
HEAD_BYTES = 16 * 2**10

# aiohttp's own timer for idle connections must not end one.
_NEVER_SECONDS = 1e9
# What is left of a body that nobody wants: up to this it is read, beyond it the connection closes.
SKIPPED_BYTES = 64 * 2**10
_LENGTH_DIGITS = 19
_IS_TOLD = "is_told_to_continue"
_MALFORMED = BrokenBody("the body is malformed")


class ClientConnection(Protocol):
    """The caller's connection. `left`: bytes of the body in hand that have not come, where that is
    known. `ahead`: what came behind the request in hand. `is_full`: the caller does not take what
    is written. `is_for_good`: all bytes that follow are aiohttp's.
    """

    transport: asyncio.Transport
    left: int
    ahead: bytes
    is_full: bool
    has_ended: bool
    is_for_good: bool

    def accepts_requests(self) -> bool: ...
    def hold_back(self) -> None: ...
    def serve_by_application(self, data: bytes) -> None: ...
    def begins(self, *, is_whole: bool) -> None: ...
    def answered(self, is_last: bool) -> None: ...
    def refuse(self, why: str) -> None: ...
    def refuse_head(self, why: str) -> None: ...
    def end(self, *, gently: bool) -> None: ...
    def abort(self) -> None: ...


class Application:
    """`make` makes its handler. `turn` is set unless the body in hand waits for room."""

    def __init__(
        self, client: ClientConnection, make: Callable[["Application"], "Handler"]
    ) -> None:
        self.client = client
        self._make = make
        self._handler: Handler | None = None
        self._request: web.BaseRequest | None = None
        self._begun = 0
        self.turn = asyncio.Event()
        self.turn.set()

    # -- for the connection -----------------------------------------------------------------

    def serve(self, data: bytes) -> None:
        """A request whose first bytes these are."""
        self._request = None
        if self._handler is None:
            self._handler = self._make(self)
            self._handler.connection_made(self.client.transport)
            if self.client.is_full:
                self._handler.pause_writing()
        self._handler.data_received(data)

    def feed(self, piece: bytes) -> None:
        if self._handler is not None and not self._handler.has_misread:
            self._handler.data_received(piece)
            if self._handler.has_misread and not self.is_whole():
                self.failed(_MALFORMED)

    @property
    def waiting(self) -> int:
        """Return how many requests have come, and have not begun."""
        return 0 if self._handler is None else self._handler.requests - self._begun

    def failed(self, error: AdapterError) -> None:
        """The rest of the body will not come."""
        content = None if self._request is None else self._request.content
        if content is not None and content.exception() is None:
            content.set_exception(error)
            # who reads may just have been woken by the end of a chunk, and then waits on past it
            asyncio.get_running_loop().call_soon(content.set_exception, error)
            self.turn.set()

    def release(self, request: web.BaseRequest) -> None:
        """Drop what an error of the body holds of the request, which is over."""
        if (error := request.content.exception()) is not None:
            drop_tracebacks(error)

    def is_whole(self) -> bool:
        """The body of the request in hand, or there is none in hand."""
        return self._request is None or self._request.content.is_eof()

    def is_held_back(self) -> bool:
        """The body in hand waits for room, or its caller for leave to send it."""
        return not self.turn.is_set() or (
            self._request is not None and _awaits_continue(self._request)
        )

    def left(self, exc: Exception | None) -> None:
        if self._handler is not None:
            self._handler.connection_lost(exc)

    def caller_is_full(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def caller_takes_more(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    # -- for who answers --------------------------------------------------------------------

    def begins(self, request: web.BaseRequest) -> None:
        self._request = request
        self._begun += 1
        is_whole = request.content.is_eof()
        self.client.begins(is_whole=is_whole)
        if not is_whole and self._handler is not None and self._handler.has_misread:
            self.failed(_MALFORMED)
        elif not is_whole and self.client.has_ended:
            self.failed(BrokenBody("the body broke off"))

    def say_continue(self, request: web.BaseRequest) -> None:
        """To who waits for that before it sends the body."""
        if _awaits_continue(request) and request.transport is not None:
            request[_IS_TOLD] = True
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def may_be_kept(self, request: web.BaseRequest) -> bool:
        """Return whether the rest of the body is known to be small."""
        if "Upgrade" in request.headers:
            return False  # aiohttp may skip what comes behind one
        if not request.content.is_eof():
            is_little = not self.client.is_for_good and self.client.left <= SKIPPED_BYTES
            comes = request.content.exception() is None and "Expect" not in request.headers
            if not (is_little and comes):
                return False
        return self.client.accepts_requests()

    def refuse(self, why: str) -> web.StreamResponse:
        """Return a response that nobody gets: the connection is not aiohttp's any more."""
        self.client.refuse_head(why)
        assert self._handler is not None  # noqa: S101 - it asks for this
        self._handler.transport = None
        return web.Response()

    async def has_answered(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Returns when aiohttp may go on with the next request."""
        try:
            if response.keep_alive and self.client.accepts_requests():
                async for _ in request.content.iter_any():
                    pass
                self._request = None
                self.client.answered(False)  # noqa: FBT003
                return
        except AdapterError:
            self.client.abort()
        is_gentle = "Upgrade" in request.headers or not request.content.is_eof()
        self.client.end(gently=is_gentle)
        await _until_cancelled()

    async def caller_has_left(self) -> NoReturn:
        """Amid an answer; aiohttp would call that an error of the handler."""
        self.client.abort()
        await _until_cancelled()


def _awaits_continue(request: web.BaseRequest) -> bool:
    has_come = request.content.is_eof() or request.content.total_bytes
    if has_come or request.version != HttpVersion11 or _IS_TOLD in request:
        return False
    return request.headers.get("Expect", "").lower() == "100-continue"


async def _until_cancelled() -> NoReturn:
    """Cancel what the end of the connection ends."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing completes it")


class Handler(web.RequestHandler):
    """aiohttp's own, one for each connection that needs one."""

    __slots__ = ("application",)

    def __init__(self, server: web.Server, application: Application) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_NEVER_SECONDS,
            access_log=None,  # type: ignore[arg-type] # as its own runner does
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
            auto_decompress=False,  # compressed bodies are Triton's to open
        )
        self.application = application

    def data_received(self, data: bytes) -> None:
        """Feed what was received. The frames of an error of the parser hold it, and the error."""
        super().data_received(data)
        if self._messages and not isinstance(last := self._messages[-1][0], RawRequestMessage):
            drop_tracebacks(last.exc)

    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        """Resume the transport, as aiohttp does at the end of each body; not while much waits
        behind it.
        """
        super().resume_reading(*args, **kwargs)
        self.application.client.hold_back()

    @property
    def requests(self) -> int:
        """Count the heads that were read, that of a malformed request too."""
        return self._request_count

    @property
    def has_misread(self) -> bool:
        """What came last is malformed. aiohttp answers that in its turn, and says nothing to who
        reads the body that it was a part of.
        """
        return bool(self._messages) and not isinstance(self._messages[-1][0], RawRequestMessage)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP gets the same JSON as any other bad request, and no traceback.

        A 500 from here would be a bug in the edge itself: aiohttp logs and answers that.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        why = " ".join(str(message or exc).split())
        if isinstance(exc, InvalidURLError):
            why = f"its target is {why}"
        return self.application.refuse(f"this is not an HTTP request: {why}")


class Request(web.BaseRequest):
    async def _prepare_hook(self, resp: web.StreamResponse) -> None:
        resp.headers.popall("Server", None)  # what the listener is made of is nobody's business


def application_of(request: web.BaseRequest) -> Application:
    assert isinstance(request.protocol, Handler)  # noqa: S101 - nothing else is ever made
    return request.protocol.application


def why_misread(request: web.BaseRequest) -> str | None:
    """Refuse what aiohttp accepts and other servers may read differently."""
    codings = [coding.lower() for coding in request.headers.getall("Transfer-Encoding", ())]
    if request.method == "CONNECT":
        return "CONNECT is not served: this is not a proxy"
    if request.version not in {HttpVersion10, HttpVersion11}:
        return "this is not an HTTP request: only HTTP/1.0 and HTTP/1.1 are served"
    if len(request.headers.get("Content-Length", "")) > _LENGTH_DIGITS:
        return f"Content-Length has more than {_LENGTH_DIGITS} digits"
    if codings and (codings != ["chunked"] or request.version == HttpVersion10):
        return "of all transfer codings only chunked is understood"
    return None
