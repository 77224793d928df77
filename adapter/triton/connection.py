"""One kept connection to Triton's HTTP port: one call at a time, told to its receiver by callbacks.

Where the next answer begins must never be in doubt. httptools parses the head of each answer from
its first byte; a body of known length is counted, one in chunks is parsed to its end, any other
lasts until the connection closes. Whatever does not end cleanly breaks the connection: a request
that was not sent to its end, an answer that was not read, bytes that nobody asked for.
"""

import asyncio
import json
import math
import select
from contextlib import suppress
from enum import IntEnum, auto
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from adapter.core.calls import Hold, RawHeaders, Receiver, ServedModel
from adapter.core.model import ModelId, TritonName
from adapter.core.triton_errors import Faults
from adapter.errors import AdapterError, BackendTimeout, BackendUnavailable
from adapter.runtime import sockets

# Received in a row without a byte of any body: a head, trailers or chunk extensions without end.
_QUIET_BYTES = 256 * 2**10
_MAX_ERROR_BYTES = 4 * 2**20

# On uvloop writes are gathered, elsewhere one write is one packet: small bodies go with the head.
_JOINED_BYTES = 2**14

_END = b"\r\n\r\n"
_OK = 200
# How Triton ends an answer of a model that gave none of its outputs: 200, without a word.
_NO_OUTPUTS = b'"outputs":[]}'
_NO_BODY = frozenset({204, 304})
# generate_stream tells an error as its first event; here it is judged and answered as any other
_EVENT = "data: "


class State(IntEnum):
    """The states of a connection."""

    IDLE = auto()
    SENDING = auto()
    AWAITING_HEAD = auto()
    READING_BODY = auto()
    DONE = auto()
    BROKEN = auto()


class Event(IntEnum):
    """The events that change the state of a connection."""

    BEGUN = auto()
    SENT = auto()  # the request, to its last byte
    HEAD = auto()  # of the answer, the last one where there are informational ones
    ENDED = auto()  # the answer, and the connection with it
    KEPT = auto()  # the answer has ended, and another call may follow
    ANSWERED = auto()  # the whole answer at once, and another call may follow


# A connection holds the int: to look a member of an enumeration up takes Python 3.11 long.
_IDLE, _SENDING, _AWAITING_HEAD, _READING_BODY, _DONE, _BROKEN = map(int, State)
_BEGUN, _SENT, _HEAD, _ENDED, _KEPT, _ANSWERED = map(int, Event)

# Any other event, and the loss of the connection, breaks it.
NEXT = {
    _IDLE: {_BEGUN: _SENDING},
    _SENDING: {_SENT: _AWAITING_HEAD, _HEAD: _READING_BODY},  # with the latter it is never kept
    _AWAITING_HEAD: {_HEAD: _READING_BODY, _ANSWERED: _IDLE},
    _READING_BODY: {_SENT: _READING_BODY, _ENDED: _DONE, _KEPT: _IDLE},
}


class Owner(Protocol):
    """The pool of a connection."""

    def abandoned(self, connection: "Connection") -> None:
        """Note that nobody waits for the answer to a call any more."""

    def free(self, connection: "Connection") -> None:
        """Take a connection back on which another call may follow."""

    def lost(self, connection: "Connection") -> None:
        """Forget a connection that is closed. Called once for each of them."""

    def answered_nothing(self, record: ServedModel) -> None:
        """Note that a model has answered without any of its outputs."""


# Heads of answers by their bytes, all of them of good ones that say their length: Triton says few
# different ones, and to parse one costs a tenth of a small request.
_KNOWN: dict[bytes, tuple[RawHeaders, int]] = {}
_MOST_KNOWN = 512
_KNOWN_BYTES = 512


class Connection:
    """Makes one call of Triton after the other.

    A call: `begin`, then `send`, or `write` and at its end `sent`. Its receiver has the last word
    by `ended` or `failed`. The methods named on_* are called by the parser.
    """

    def __init__(
        self,
        owner: Owner,
        faults: Faults,
        seconds: float,  # limit of a whole call, or of each piece of a stream
    ) -> None:
        self.state = _IDLE
        self.transport: asyncio.Transport
        self._owner = owner
        self._faults = faults
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._readable = select.poll()
        self._timer: asyncio.TimerHandle | None = None
        self._due = self.heard = 0.0
        self._receiver: Receiver | None = None
        self._is_held = False
        self._raw = b""  # of a head that is not whole
        # the head of the last answer, where it is in _KNOWN, and the bytes of all of that answer
        self._last_head = b""
        self._last_bytes = 0
        self._fault: bytearray | None = None
        self.headers: RawHeaders = []
        self.length: int | None = None

    # -- one call ---------------------------------------------------------------------------

    def begin(
        self,
        receiver: Receiver,
        record: ServedModel | None,
        is_stream: bool = False,
        is_probe: bool = False,
    ) -> None:
        """Begin with a call. `is_stream`: its answer may never end. `is_probe`: any status is an
        answer; without it, one other than 200 is passed to `failed`.
        """
        self.state = NEXT[self.state][_BEGUN]
        self._receiver = receiver
        self._record = record
        self._is_stream = is_stream
        self._is_probe = is_probe
        self._is_sent = False
        self.heard = now = self._loop.time()
        self._due = now + self.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._time_is_up)

    def send(self, head: bytes, body: bytes) -> None:
        """Write the whole request."""
        if len(body) <= _JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        self.state = NEXT[self.state][_SENT]
        self._is_sent = True

    def write(self, piece: bytes) -> None:
        """Write a piece of the request."""
        self.heard = self._loop.time()
        self.transport.write(piece)

    def sent(self) -> None:
        """Note that all of the request is written."""
        if self.state != _BROKEN:
            self._is_sent = True
            self.state = NEXT[self.state][_SENT]

    def pause_reading(self) -> None:
        """Triton is held back."""
        if self._receiver is not None and not self._is_held:
            self._is_held = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on from Triton."""
        if self._is_held and self.state != _BROKEN:
            self._is_held = False
            self.heard = self._loop.time()
            self.transport.resume_reading()

    def leave(self, receiver: Receiver, hold: Hold | None) -> None:
        """Tell `receiver` nothing more. What Triton works on is not taken from it: the answer
        is read for nobody, and `hold` is abandoned until then. No-op where the call is over.
        """
        if self._receiver is not receiver:
            return
        if hold is None or not self.is_delivered():
            self._receiver = None
            self.abort()
            return
        hold.abandon()
        self._receiver = _Nobody(hold)
        self._due = math.inf
        self.resume_reading()
        self._owner.abandoned(self)

    def close_abandoned(self) -> bool:
        """Close the connection if nobody waits for the answer; return whether that was so. Triton
        goes on with the request. When it is done nobody is told.
        """
        receiver = self._receiver
        if not isinstance(receiver, _Nobody):
            return False
        self._receiver = None
        self.abort()
        receiver.ended()
        return True

    def abort(self) -> None:
        """Close the connection at once."""
        self.state = _BROKEN
        self.transport.abort()

    def is_quiet(self) -> bool:
        """Nothing has come since the last answer, not even the end of the connection.

        A look at the socket itself: what has just come is not known to the event loop yet, and a
        request written now could not be sent again, since nobody could tell who saw it.
        """
        return self.state == _IDLE and not self._readable.poll(0)

    def is_delivered(self) -> bool:
        """Triton has all of the request, as far as this side can tell."""
        is_out = self._is_sent and not self.transport.get_write_buffer_size()
        return is_out and not self.transport.is_closing()

    # -- its end ----------------------------------------------------------------------------

    def _end(self, whole: bytes | None = None) -> None:
        """The answer is all there, and the connection is free before its receiver hears of it.
        `whole`: its body, of which the receiver has heard nothing yet.
        """
        receiver, self._receiver = self._receiver, None
        if self._is_kept:
            self.state = NEXT[self.state][_KEPT]
            if self._is_held:
                self.resume_reading()
            self._owner.free(self)
        else:
            self.state = NEXT[self.state][_ENDED]
            self.abort()
        if receiver is None:
            return
        if whole is not None:
            self._report_whole(receiver, whole)
        elif self._fault is None:
            receiver.ended()
        else:
            receiver.failed(self._judged(self._fault))

    def _break(self, why: str) -> None:
        model_id = self._record.asked_for if self._receiver and self._record else None
        text = f"the connection to Triton broke: {why}"
        self._fail(BackendUnavailable(text, model_id=model_id, delivered=True))

    def _fail(self, error: AdapterError) -> None:
        receiver, self._receiver = self._receiver, None
        self.abort()
        if receiver is not None:
            receiver.failed(error)

    def _judged(self, raw: bytearray) -> AdapterError:
        text = raw.decode("utf-8", "backslashreplace").removeprefix(_EVENT)
        with suppress(ValueError, TypeError, KeyError):  # any other shape: the raw text says most
            text = str(json.loads(text)["error"])
        kind = next((value for name, value in self.headers if name.lower() == b"content-type"), b"")
        record = self._record
        return self._faults.explain_inference(
            self.status,
            kind.decode("utf-8", "replace"),
            text,
            name=record.name if record else TritonName(""),
            model_id=record.asked_for if record else ModelId(""),
        )

    def _time_is_up(self) -> None:
        """The timer goes on from call to call: to set one for each would cost more than to look."""
        self._timer = None
        receiver = self._receiver
        now = self._loop.time()
        if receiver is None or self._due == math.inf:
            return
        if self._is_stream:
            self._due = (now if self._is_held else self.heard) + self.seconds
        if self._due > now:
            self._timer = self._loop.call_at(self._due, self._time_is_up)
            return
        text = f"no answer from Triton within {self.seconds:g} s"
        error = BackendTimeout(text, model_id=self._record.asked_for if self._record else None)
        if self.is_delivered():
            receiver.failed(error)  # the receiver leaves the connection
        else:
            self._fail(error)

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with a new connection."""
        self.transport = cast("asyncio.Transport", transport)
        sockets.keep_alive(transport)
        self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Read what Triton has sent."""
        if (
            len(data) == self._last_bytes
            and data.startswith(self._last_head)
            and self.state == _AWAITING_HEAD
        ):
            self._end_as_before(data)
            return
        self.heard = self._loop.time()
        state = self.state
        if state in {_AWAITING_HEAD, _SENDING}:
            self._read_head(data)
        elif state == _READING_BODY:
            self._read_body(data)
        elif state != _BROKEN:
            self._break("an answer to nothing")

    def eof_received(self) -> None:
        """End an answer that lasts until the connection closes; fail any other."""
        if self.state == _READING_BODY and self._lasts_until_closed():
            self._is_kept = False
            self._end()
        else:
            self._break("it was closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the call, if there is one, and tell the owner."""
        if self._timer is not None:
            self._timer.cancel()
        self._break(str(exc or "it was closed"))
        self._owner.lost(self)

    def pause_writing(self) -> None:
        """Have the receiver write no further."""
        if self._receiver is not None:
            self._receiver.pause_writing()

    def resume_writing(self) -> None:
        """Have the receiver write on."""
        if self._receiver is not None:
            self._receiver.resume_writing()

    # -- the answer -------------------------------------------------------------------------

    def _end_as_before(self, data: bytes) -> None:
        """A whole answer with the head of the last one."""
        receiver, self._receiver = self._receiver, None
        self.state = NEXT[self.state][_ANSWERED]
        if self._is_held:
            self.resume_reading()
        self._owner.free(self)
        if receiver is not None:
            self._report_whole(receiver, data[len(self._last_head) :])

    def _report_whole(self, receiver: Receiver, whole: bytes) -> None:
        if whole.endswith(_NO_OUTPUTS) and self._record is not None:
            self._owner.answered_nothing(self._record)
        receiver.answered_whole(whole)

    def _read_head(self, data: bytes) -> None:
        if not self._raw:
            self._last_bytes = 0
            end = data.find(_END) + len(_END)
            if (known := _KNOWN.get(data[:end])) is not None:
                self.headers, self.length = known
                self.status = _OK
                self._is_kept = True
                self._last_head = data[:end]
                self._last_bytes = end + self.length
                self._answer(data[end:])
                return
            self._quiet = 0
            self._parser = HttpResponseParser(self)
            self._pieces: list[bytes] = []
            self.status = 0
            self._is_kept = self._is_complete = False
            self.headers = []
            self.length = None
        while data:
            begun = len(self._raw)
            self._raw += data
            end = self._raw.find(_END, max(0, begun - 3)) + len(_END)
            is_whole = end >= len(_END)
            if not self._is_parsed(self._raw[begun:end] if is_whole else data):
                return
            if not is_whole:
                return
            head, data, self._raw = self._raw[:end], self._raw[end:], b""
            if self.status >= _OK:
                self._read_length()
                if self.status == _OK and self._is_kept and self.length is not None:
                    self._remember(head)
                self._answer(data)
                return
            # an informational head: the one of the answer follows
            self.status = 0
            self.headers = []

    def _answer(self, rest: bytes) -> None:
        self._is_kept &= self.state == _AWAITING_HEAD
        self.state = NEXT[self.state][_HEAD]
        self._left = 0 if self.status in _NO_BODY else self.length
        is_good = self.status == _OK or self._is_probe
        if is_good and self._is_kept and self._left == len(rest):
            self._end(rest)
            return
        self._quiet = 0
        self._fault = None if is_good else bytearray()
        if is_good and self._receiver is not None:
            self._receiver.answered()
        if self.state == _READING_BODY and (rest or self._left == 0):
            self._read_body(rest)

    def _read_length(self) -> None:
        for name, value in self.headers:
            if name.lower() == b"content-length":
                self.length = int(value)

    def _remember(self, head: bytes) -> None:
        if len(head) <= _KNOWN_BYTES:
            if len(_KNOWN) == _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[head] = self.headers, cast("int", self.length)

    def _read_body(self, data: bytes) -> None:
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:  # nobody has asked for bytes behind the answer
                self._is_kept = False
                data = data[: self._left]
            self._is_complete = self._left <= 0
            self._pass_on(data)
        elif self._is_parsed(data):
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                self._pass_on(piece)
        if self._is_complete and self.state == _READING_BODY:
            self._end()

    def _pass_on(self, piece: bytes) -> None:
        if self._fault is not None:
            self._fault += piece
            if len(self._fault) >= _MAX_ERROR_BYTES:
                self._fail(self._judged(self._fault))
        elif piece and self._receiver is not None:
            self._receiver.received(piece)

    def _is_parsed(self, data: bytes) -> bool:
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self._is_complete:  # the error is about bytes behind the answer
                self._is_kept = False
                return True
            self._break(f"this is not an HTTP answer: {error}")
            return False
        if self._quiet > _QUIET_BYTES:
            self._break("a head without end")
            return False
        return True

    def _lasts_until_closed(self) -> bool:
        codings = [value for name, value in self.headers if name.lower() == b"transfer-encoding"]
        is_chunked = bool(codings) and codings[-1].lower().split(b",")[-1].strip() == b"chunked"
        return self._left is None and not is_chunked

    # -- httptools --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse a second answer behind a complete one."""
        if self._is_complete:
            raise ValueError("an answer to nothing")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field of the head."""
        if self.state != _READING_BODY:  # trailers are nothing to us
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take over the status, and whether another call may follow."""
        self.status = self._parser.get_status_code()
        self._is_kept = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body."""
        self._pieces.append(piece)
        self._quiet = 0

    def on_message_complete(self) -> None:
        """Mark the answer as complete."""
        self._is_complete = self.state == _READING_BODY


class _Nobody:
    """Receives the answer whose caller has left; its model is held until Triton is done."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def answered(self) -> None:
        """Ignore the head."""

    def received(self, piece: bytes) -> None:
        """Drop a piece of the answer."""

    def pause_writing(self) -> None:
        """Ignore that Triton takes no more: all of the request is written."""

    def resume_writing(self) -> None:
        """Ignore that Triton takes more: all of the request is written."""

    def answered_whole(self, _: bytes) -> None:
        """End the hold of the model."""
        self._hold.end()

    def ended(self) -> None:
        """End the hold of the model."""
        self._hold.end()

    def failed(self, error: AdapterError) -> None:
        """End the hold of the model, with the error."""
        self._hold.end(error)
