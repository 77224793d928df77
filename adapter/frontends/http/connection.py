"""One caller's connection: one request at a time in hand, what comes behind it waits.

It owns the transport. A plain request goes to Triton from here (fast_path.py); of any other the
bytes go to aiohttp, which writes to the same transport: its head at once, then its body, and never
a byte of the next request. Where the body's end is aiohttp's to tell, all further bytes are.
"""

import asyncio
import math
import re
import socket
from enum import IntEnum, auto
from typing import Protocol, cast

from adapter.errors import AdapterError, BrokenBody, NotStarted
from adapter.frontends.bodies import Arrival, Limits
from adapter.frontends.http.application import HEAD_BYTES, Application, Handler
from adapter.frontends.http.fast_path import FastPath, Inference
from adapter.frontends.http.head import Head, Heads
from adapter.frontends.http.head_scanner import END, without_upgrade
from adapter.runtime.turns import Turns

# Bytes behind the request in hand from which on the caller is held back.
_AHEAD_BYTES = 64 * 2**10
# A longer read waits for a turn of the event loop that has time left. aiohttp gets so many bytes
# in one turn: in chunks of one byte they take it 7 ms.
_SHORT_BYTES = 16 * 2**10
_END_BYTES = len(END)
_CR, _EMPTY_LINES = ord("\r"), re.compile(rb"(?:\r\n)+")
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\n"  # how its preface begins
_BARE_LF = re.compile(rb"(?<!\r)\n")
# What a request, or the empty lines before it, may begin with. Anything else is refused at once.
_METHOD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz\r\n"


class State(IntEnum):
    IDLE = auto()
    HEAD = auto()  # some of it is there
    FAST = auto()
    APPLICATION = auto()
    LINGERING = auto()  # all was said; what still comes is dropped
    CLOSING = auto()  # when what was written is out


# A connection holds the int: to look a member of an enumeration up takes Python 3.11 long.
_IDLE, _HEAD, _FAST, _APPLICATION, _LINGERING, _CLOSING = map(int, State)


class Listener(Protocol):
    """The listener that accepted the connection, with all that its connections share."""

    limits: Limits
    fast: FastPath
    heads: Heads
    turns: Turns

    @property
    def linger_seconds(self) -> float: ...
    def handler(self, application: Application) -> Handler: ...
    def opened(self, connection: "Connection") -> None: ...
    def lost(self, connection: "Connection") -> None: ...
    def crowded(self) -> None:
        """A connection ends early, as there is no room for what came behind its request."""

    def malformed(self, why: str) -> bytes: ...


class Connection:
    """`is_full`: the caller does not take what is written. `has_ended`: nothing more will come of
    it. `is_for_good`: all bytes that follow are aiohttp's. `left`: of the body of the request in
    hand; `ahead`: what came behind it.
    """

    def __init__(self, server: Listener) -> None:
        self.transport: asyncio.Transport
        self.state = _IDLE
        self.is_full = self.has_ended = self.had_request = self.is_for_good = False
        self.left = 0
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()  # in this state
        self._write_due = self._gone_due = math.inf
        self.ahead = b""
        self._arrival: Arrival | None = None
        self._kept = 0  # bytes in the budget
        self._late: bytes | None = None  # what waits for its turn
        self._is_crowded = False
        self._heads, self._known = server.heads, server.heads.known
        self._path = server.fast
        self._inference = Inference(self, server.fast)
        self._application = Application(self, server.handler)

    def accepts_requests(self) -> bool:
        return self._path.accepts_requests and not self._is_crowded

    def is_idle(self) -> bool:
        """It has no whole head of a request in hand."""
        is_between = self.state in {_IDLE, _HEAD}
        return is_between and not self._application.waiting

    def can_make_room(self) -> bool:
        """Return whether it may be ended for a new connection: it is idle, or its caller has ended
        its side. Such a caller has disconnected, but for few, who wait for their answer.
        """
        is_ended = self.has_ended and self.state in {_FAST, _APPLICATION}
        return is_ended or self.is_idle()

    def worth(self) -> tuple[bool, bool, float]:
        """Return what orders connections that can make room: those whose caller has ended its side
        end first, then those that never had a request, then those idle for longest.
        """
        return not self.has_ended, self.had_request, self._since

    def make_room(self) -> None:
        """End the connection for a new one. Triton goes on with a request that it has."""
        if self.is_idle():
            self.close()
        else:
            self.abort()

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        is_late = self._late is not None
        if not is_late and len(data) > _SHORT_BYTES:
            is_late = self.is_for_good or not self._server.turns.has_time()
        if not (is_late and self._is_put_off(data)):
            self._received(data)

    def _received(self, data: bytes) -> None:
        try:
            state = self.state
            if self.is_for_good:
                if state not in (_LINGERING, _CLOSING):
                    self._pass_on(data)
            elif state == _IDLE and not self.is_full:
                at = data.find(END) + _END_BYTES
                if at < _END_BYTES or data[0] == _CR:
                    self._read_head(data)
                else:
                    self._read_whole_head(data[:at], data[at:])
            elif state == _HEAD:
                self._read_head(self.ahead + data, max(0, len(self.ahead) - _END_BYTES + 1))
            elif state not in (_LINGERING, _CLOSING):
                self._read_body(data)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def _is_put_off(self, data: bytes, *, is_older: bool = False) -> bool:
        """Keep the data for a later turn of the event loop; return False if there is no room.
        `is_older`: it came before what is kept already.
        """
        late, budget = self._late, self._path.budget
        if late is None and not budget.has_buffer_for(len(data)):
            return False
        budget.buffer(len(data))
        self._late = data + (late or b"") if is_older else (late or b"") + data
        self.transport.pause_reading()
        if late is None:
            self._server.turns.wait(self._read_late)
        return True

    def _read_late(self) -> None:
        """Read what was put off, and more unless something else holds the caller back."""
        try:
            data, self._late = self._late, None
            if data is None:
                return
            if self.is_for_good and self.state != _CLOSING:
                data, self._late = data[:_SHORT_BYTES], data[_SHORT_BYTES:] or None
            self._path.budget.buffer(-len(data))
            if self._late is not None:
                self._server.turns.wait(self._read_late)
            elif self.state == _FAST and self.left:
                self._inference.resume()
            elif self.state != _CLOSING:
                self._read_on()
            self._received(data)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def _pass_on(self, data: bytes) -> None:
        """To aiohttp, whose connection it is for good."""
        if self.state == _APPLICATION:
            self._arrived(len(data))
        elif self.state == _HEAD or data.strip(b"\r\n"):  # empty lines begin no request
            self._enter(_HEAD)
        self._application.feed(data)
        self._count_behind(data)

    def eof_received(self) -> bool:
        """True: the caller may still read."""
        while self._late is not None:
            self._read_late()
        self.has_ended = True
        self._gone_due = self._loop.time() + self._server.limits.gone
        is_behind = self.ahead or self._application.waiting
        is_over = self.state in {_LINGERING, _CLOSING} or (self.state == _IDLE and not is_behind)
        self._ended()
        return not is_over

    def _ended(self) -> None:
        try:
            if self.state == _HEAD and not self._application.waiting:
                if self.is_for_good or self.ahead.strip(b"\r\n"):
                    self.refuse_head("the head of the request broke off")
                else:
                    self.close()  # after empty lines, which begin no request
            elif self.state not in {_IDLE, _LINGERING, _CLOSING} and not self._is_whole():
                self._fail(BrokenBody("the body broke off"))
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            try:
                if self.state == _FAST:
                    self._inference.left()
            finally:
                self.state = _CLOSING
                self._read_late()
                self._take_ahead()
                self._application.left(exc)
                self._server.lost(self)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def pause_writing(self) -> None:
        try:
            self.is_full = True
            self._write_due = self._loop.time() + self._server.limits.answer
            self._application.caller_is_full()
            self._inference.caller_is_full()
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def resume_writing(self) -> None:
        try:
            self.is_full = False
            self._write_due = math.inf
            self._application.caller_takes_more()
            self._inference.caller_takes_more()
            if self.state == _IDLE:
                self._next()
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    # -- requests, one after the other ------------------------------------------------------

    def _read_head(self, data: bytes, begin: int = 0) -> None:
        """`begin`: from where on the end of the head is to be looked for."""
        if data[0] == _CR and (empty := _EMPTY_LINES.match(data)):  # RFC 9112 section 2.2
            data, self.ahead, begin = data[empty.end() :], b"", 0
            if not data:
                self._enter(_HEAD)
                return
        at = data.find(END, begin) + _END_BYTES
        if at >= _END_BYTES:
            self._read_whole_head(data[:at], data[at:])
        elif len(data) > HEAD_BYTES:
            self._refuse_long_head()
        elif _BARE_LF.search(data, begin):  # it would never end
            self.refuse_head("a line of the head of the request ends with LF alone")
        elif data[0] in _METHOD:
            self.ahead = data
            self._enter(_HEAD)
        else:
            self._serve_for_good(data)

    def _read_whole_head(self, raw: bytes, behind: bytes) -> None:
        head = self._known.get(raw)
        if head is None:
            if len(raw) > HEAD_BYTES:
                self._refuse_long_head()
                return
            head = self._heads.read(raw)
        if head.length < 0 and (same := without_upgrade(raw)) != raw:
            raw, head = same, self._heads.read(same)
        if head.length >= 0:
            self._begin(head, raw, behind)
        elif raw == _HTTP2:
            self.refuse_head("this is HTTP/2; this listener serves HTTP/1.1, and gRPC has its own")
        else:
            self._serve_for_good(raw + behind)

    def _serve_for_good(self, data: bytes) -> None:
        """Hand all further bytes to aiohttp."""
        self.ahead = b""
        self._enter(_HEAD)
        self.is_for_good = True
        first, behind = data[:_SHORT_BYTES], data[_SHORT_BYTES:]
        self._application.serve(first)
        self._count_behind(first)
        if behind and not self._is_put_off(behind, is_older=True):
            self._received(behind)

    def _count_behind(self, data: bytes) -> None:
        """Of what aiohttp was given: it alone knows where the next request begins."""
        current = 0 if self.state == _APPLICATION else 1
        if self._application.waiting > current and not self._keeps(data):
            self.abort()

    def _begin(self, head: Head, raw: bytes, body: bytes) -> None:
        length, self.ahead = head.length, b""
        left = length - len(body)
        if left < 0:
            left, behind, body = 0, body[length:], body[:length]
            self._put_ahead(behind)
        self.had_request = True
        self.left = left
        self._arrival = None
        if left:
            self._arrived(len(body))
            self._read_on()
        self.state = _FAST
        if not self._inference.begin(head, raw, body):
            self.serve_by_application(raw + body)
        if left and self.has_ended:
            self._fail(BrokenBody("the body broke off"))

    def serve_by_application(self, data: bytes) -> None:
        """The request whose first bytes these are."""
        self.state = _APPLICATION
        self._application.serve(data)

    def _read_body(self, data: bytes) -> None:
        left = self.left
        piece, behind = data[:left], data[left:]
        if behind:
            self._put_ahead(behind)
        if piece:
            self.left = left - len(piece)
            self._arrived(len(piece))
            if self.state == _FAST:
                self._inference.feed(piece, is_last=not self.left)
            else:
                self._application.feed(piece)

    def _put_ahead(self, behind: bytes) -> None:
        """Keep what came behind the request in hand. Where there is no room for it, the connection
        ends with the answer: what it was the beginning of has not begun.
        """
        if self._keeps(behind):
            self.ahead += behind
        self.hold_back()

    def _keeps(self, data: bytes) -> bool:
        budget, size = self._path.budget, len(data)
        if not self._is_crowded and budget.has_buffer_for(size):
            budget.buffer(size)
            self._kept += size
        elif not self._is_crowded:
            self._is_crowded = True
            self._take_ahead()
            self._server.crowded()
        return not self._is_crowded

    def _take_ahead(self) -> bytes:
        data, self.ahead = self.ahead, b""
        if self._kept:
            self._path.budget.buffer(-self._kept)
            self._kept = 0
        return data

    def _arrived(self, size: int) -> None:
        if self._arrival is None:
            self._arrival = Arrival(self._server.limits, self._loop.time())
        self._arrival.received += size

    def begins(self, *, is_whole: bool) -> None:
        """A request that aiohttp serves: its head is there."""
        self._enter(_APPLICATION)
        self.had_request = True
        if not is_whole:
            self._arrived(0)

    def answered(self, is_last: bool) -> None:
        """The request in hand is, to the last byte; `is_last`: and the caller was told so."""
        accepts_requests = self._path.accepts_requests and not self._is_crowded
        if is_last or self.left or not accepts_requests:
            self.end(gently=bool(self.left or self.ahead or self._is_crowded))
            return
        was_at_once = self.state == _FAST and self._arrival is None and not self.ahead
        self.state, self._since = _IDLE, self._loop.time()
        self._arrival = None
        if was_at_once and not self.has_ended:  # nothing has held the caller back
            return
        if self.is_for_good:
            if not self._application.waiting:
                self._take_ahead()
        elif len(self.ahead) <= _AHEAD_BYTES:
            self._read_on()
        if self.ahead or self.has_ended:
            self._next()

    def hold_back(self) -> None:
        """Read no more while much waits behind the request in hand, or a read for its turn."""
        if self._is_crowded or self._late is not None or len(self.ahead) > _AHEAD_BYTES:
            self.transport.pause_reading()

    def _read_on(self) -> None:
        if not self.transport.is_reading():
            self.transport.resume_reading()

    def _next(self) -> None:
        if self.ahead and not self.is_full:
            self._read_on()
            self._read_head(self._take_ahead())
        if self.has_ended and self.is_idle() and not self.is_full:
            self.close()

    # -- time limits ------------------------------------------------------------------------

    def check_time_limits(self, now: float) -> None:
        """Close what has waited for too long; called every now and then."""
        try:
            # aiohttp may have done so; the fast path waits to be told that the caller is lost
            if self.transport.is_closing() and self.state != _FAST:
                self._enter(_CLOSING)
            if now >= self._write_due or now >= self._gone_due:
                self.abort()
            elif self.state in {_FAST, _APPLICATION}:
                self._check_request(now)
            else:
                self._check_waiting(now - self._since)
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    def _check_waiting(self, seconds: float) -> None:
        """`seconds`: how long it has been in its state."""
        state, limits = self.state, self._server.limits
        if state == _IDLE and seconds >= limits.idle:
            self.close()
        elif state == _HEAD and seconds >= limits.head:
            self.refuse_head(f"the head of the request took longer than {limits.head:g} s")
        elif (state == _LINGERING and seconds >= self._server.linger_seconds) or (
            state == _CLOSING and seconds >= limits.answer
        ):
            self.abort()

    def _check_request(self, now: float) -> None:
        if self._arrival is not None and not self._is_whole():
            is_reading = self.transport.is_reading() and not self._application.is_held_back()
            error = self._arrival.check_time_limits(now, is_reading=is_reading)
            if error is not None:
                self._fail(error)

    def _is_whole(self) -> bool:
        return self._application.is_whole() if self.is_for_good else not self.left

    def _fail(self, error: AdapterError) -> None:
        """The rest of the body will not come."""
        if self.state == _FAST:
            self._inference.failed(error)
        elif self.state == _APPLICATION:
            self._application.failed(error)

    def refuse(self, why: str) -> None:
        """The request in hand, if its body has not come yet."""
        if self.state in {_FAST, _APPLICATION} and not self._is_whole():
            self._fail(NotStarted(f"{why}; the body of this request had not come yet"))

    def bug(self, error: Exception) -> None:
        """An error that nobody expected, of a callback of this connection."""
        self._inference.bug(error)

    # -- ends -------------------------------------------------------------------------------

    def _refuse_long_head(self) -> None:
        self.refuse_head(f"the head of the request is longer than {HEAD_BYTES} bytes")

    def refuse_head(self, why: str) -> None:
        """Nobody knows where the next request would begin."""
        self.transport.write(self._server.malformed(why))
        self.end(gently=True)

    def _enter(self, state: int) -> None:
        if self.state != state:
            self.state = state
            self._since = self._loop.time()

    def end(self, *, gently: bool) -> None:
        """`gently`: bytes that were not read would reset the connection, maybe before the caller
        has seen the answer; so they are read for a while, for nothing.
        """
        if self.has_ended or not gently:
            self.close()
            return
        self._take_ahead()
        self._enter(_LINGERING)
        self.transport.write_eof()
        self.transport.resume_reading()

    def stop(self) -> None:
        """The server closes: at once where nothing is in hand, else behind the answer."""
        if self.is_idle():
            self.close()

    def close(self) -> None:
        """When what was written is out."""
        self._enter(_CLOSING)
        self._gone_due = math.inf
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()
