"""One kept connection to Triton's HTTP port: one call at a time, on llhttp's parser.

Whoever holds the connection from the pool calls `begin`, writes the request, and reads the answer.
Where the next answer begins must never be in doubt: an answer is over only where the parser says
so, which has had every byte from the first on. Whatever does not end cleanly (a body that was not
sent to its end, an answer that was not read, bytes that nobody asked for) ends the connection.
"""

import asyncio
import math
import select
import socket
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

from adapter.core.model import ModelId
from adapter.errors import BackendTimeout, BackendUnavailable

# Unread bytes of an answer from which on Triton is held back.
_HELD_BYTES = 256 * 2**10
# Received in a row without a byte of any body: a head, trailers or chunk extensions without end.
_QUIET_BYTES = 256 * 2**10

# A Triton whose host is gone is noticed within a minute, also by a call that has no time limit.
_KEEPALIVE = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 30),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)

_OK = 200


class Connection(asyncio.Protocol):
    """`on_lost` is called once, when it is closed for whatever reason.

    The methods named on_* are called by the parser.
    """

    def __init__(self, on_lost: Callable[["Connection"], None]) -> None:
        self.is_lost = False
        self.transport: asyncio.Transport
        self._on_lost = on_lost
        self._model_id: ModelId | None = None
        self._parser = HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._readable = select.poll()
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_in_use = False
        self._is_full = False
        self._is_held = False
        self._forget()

    def _forget(self) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.is_sent = False  # set by whoever writes, after the last byte
        self.is_over = False
        self._has_head = False
        self._is_kept = False
        self._error: BaseException | None = None
        self._pieces: list[bytes] = []
        self._held = 0
        self._quiet = 0

    # -- one call ---------------------------------------------------------------------------

    def begin(
        self, model_id: ModelId | None, seconds: float, *, is_head: bool, is_stream: bool
    ) -> None:
        """`seconds` is the limit for the whole call, or where `is_stream` for each piece of it."""
        self._forget()
        self._model_id = model_id
        self._is_head = is_head
        self._is_stream = is_stream
        self._seconds = seconds
        self._is_in_use = True
        self._heard = self._loop.time()
        self._due = self._heard + seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._time_is_up)

    def end(self) -> bool:
        """The call is over for whoever made it. True when another one may follow."""
        is_clean = self._is_kept and self.is_sent and not self.is_lost and not self._pieces
        self._is_in_use = False
        if not is_clean:
            self._pieces = []
            self.abort()
        return is_clean

    def abort(self) -> None:
        if not self.is_lost:
            self.transport.abort()

    def fail(self, error: BaseException) -> None:
        """The call ends with the first `error`; an answer that is all there can still be read."""
        if self._error is None:
            self._error = error
        self._is_kept = False
        self.abort()
        self._wake()

    def is_quiet(self) -> bool:
        """Nothing has come since the last answer, not even the end of the connection.

        A look at the socket itself: what has just come is not known to the event loop yet, and a
        request written now could not be sent again, since nobody could tell who saw it.
        """
        return not self.is_lost and not self._readable.poll(0)

    def is_delivered(self) -> bool:
        """Triton has all of the request, as far as this side can tell."""
        is_out = self.is_sent and not self.transport.get_write_buffer_size()
        return is_out and not self.transport.is_closing()

    def take_your_time(self) -> None:
        """Nobody waits for the answer any more: no time limit from here on."""
        self._due = math.inf
        if isinstance(self._error, BackendTimeout) and not self.transport.is_closing():
            self._error = None

    # -- writing ----------------------------------------------------------------------------

    async def drained(self) -> None:
        """Wait until Triton has taken most of what was written, or the connection is lost."""
        self._heard = self._loop.time()
        while self._is_full and not self.is_lost:
            self._writer = self._loop.create_future()
            await self._writer
        self._heard = self._loop.time()

    # -- reading ----------------------------------------------------------------------------

    async def head(self) -> None:
        """Wait for `status` and `headers`."""
        while not self._has_head:
            await self._news()

    async def pieces(self) -> list[bytes]:
        """What has come of the body, at least one piece; none at its end."""
        while not self._pieces and not self.is_over:
            await self._news()
        pieces, self._pieces, self._held = self._pieces, [], 0
        if self._is_held:
            self._is_held = False
            self._heard = self._loop.time()
            self.transport.resume_reading()
        return pieces

    async def read(self) -> bytes:
        """All of the body, or what is left of it."""
        whole: list[bytes] = []
        while pieces := await self.pieces():
            whole += pieces
        return b"".join(whole)

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._reader = self._loop.create_future()
        await self._reader

    def _wake(self) -> None:
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _time_is_up(self) -> None:
        """The timer goes on from call to call: to set one for each would cost more than to look."""
        self._timer = None
        if not self._is_in_use or self._due == math.inf:
            return
        if self._is_stream:
            last = self._loop.time() if self._is_held else self._heard
            self._due = last + self._seconds
        if self._due > self._loop.time():
            self._timer = self._loop.call_at(self._due, self._time_is_up)
        else:
            text = f"no answer from Triton within {self._seconds:g} s"
            self._is_late(BackendTimeout(text, model_id=self._model_id))

    def _is_late(self, error: BackendTimeout) -> None:
        """What Triton works on is not taken from it: the connection stays."""
        if not self.is_delivered():
            self.fail(error)
        elif self._error is None:
            self._error = error
            self._wake()

    def _broken(self, why: str) -> BackendUnavailable:
        text = f"the connection to Triton broke: {why}"
        return BackendUnavailable(text, model_id=self._model_id, delivered=True)

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        own = transport.get_extra_info("socket")
        for name, value in _KEEPALIVE:
            own.setsockopt(*name, value)
        self._readable.register(own.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if not self._is_in_use or self.is_over:
            self.fail(self._broken("an answer to nothing"))
            return
        self._heard = self._loop.time()
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail(self._broken(f"this is no HTTP answer: {error}"))
        if self._quiet > _QUIET_BYTES:
            self.fail(self._broken("a head without end"))
        if self._held > _HELD_BYTES and not self._is_held:
            self._is_held = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._has_head and self._lasts_until_closed():
            self.is_over = True
        self.fail(self._broken("it was closed"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self.fail(self._broken(str(exc or "it was closed")))
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    # -- httptools --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_over:
            raise ValueError("an answer to nothing")
        self.headers = CIMultiDict()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers are nothing to us
            self.headers.add(name.decode(), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _OK:  # there is more to come
            return
        self.status = status
        self._has_head = True
        # The parser cannot be told that no body follows, so the connection ends with such a call.
        self.is_over = self._is_head
        self._quiet = 0

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._held += len(piece)
        self._quiet = 0

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_over = True
            self._is_kept = self._parser.should_keep_alive()

    def _lasts_until_closed(self) -> bool:
        codings = self.headers.get("Transfer-Encoding", "").lower().split(",")
        return "Content-Length" not in self.headers and codings[-1].strip() != "chunked"
