"""The asyncio side of a connection: its states, its events, how it is closed."""

import asyncio
import logging
from abc import ABC, abstractmethod
from enum import Enum, IntEnum, auto
from types import FunctionType
from typing import TypeAlias, TypeVar, cast

from adapter.relay.frames import Code, ConnectionFault
from adapter.runtime.turns import Turns

log = logging.getLogger(__name__)

T = TypeVar("T")
Piece: TypeAlias = bytes | memoryview

_PAUSE_BYTES = 2**18
# unsent bytes; DATA stops at _PAUSE_BYTES, so the rest are replies to the peer's frames
_MAX_UNSENT_BYTES = 2**21
_CLOSE_SECONDS = 30.0
_ERROR_CLOSE_SECONDS = 2.0
SMALL_BYTES = 2**12  # copying so much costs less than a view
_JOINED_BYTES = 2**15  # copying so much costs less than writing many chunks
UNTIMED_BYTES = 2**11  # fewer bytes than this are handled at once, whatever the time


class State(IntEnum):
    """The state of a transport's connection."""

    CONNECTING = 0
    OPEN = 1
    CLOSING = 2  # nothing is read or written any more, though written data may still be sent
    CLOSED = 3


class Heard(Enum):
    """Whether the peer has sent anything since the last check."""

    SOMETHING = auto()
    NOTHING = auto()
    NOTHING_SINCE_PING = auto()


# looking up a member of an enumeration is slow in Python 3.11
_CONNECTING, _OPEN, _CLOSING, _CLOSED = State
_SOMETHING = Heard.SOMETHING


class FrameTransport(asyncio.Protocol, ABC):
    """The asyncio side of one connection: reads in turns with other connections, and
    writes frames.
    """

    __slots__ = (
        "_abort", "_handled", "_transport", "_turns", "_unread",
        "heard", "is_paused", "state", "until",
    )  # fmt: skip

    def __init__(self, turns: Turns) -> None:
        self.state = _CONNECTING
        self.heard = _SOMETHING
        self.is_paused = False  # the peer does not read: what is written now is buffered
        self.until = 0.0  # time.monotonic when the time of this turn is up
        self._turns = turns
        self._unread = b""
        self._handled = 0  # bytes of `_unread`
        self._transport: asyncio.Transport | None = None
        self._abort: asyncio.TimerHandle | None = None

    @property
    def was_open(self) -> bool:
        """Return whether the connection was made."""
        return self._transport is not None

    @property
    def has_unread(self) -> bool:
        """Whether received bytes wait for this connection's next turn."""
        return bool(self._unread)

    # -- for subclasses ---------------------------------------------------------------------

    @abstractmethod
    def handle_bytes(self, data: bytes, at: int = 0) -> int:
        """Handle `data` from `at` on, until it is later than `until`; return how far that is."""

    @abstractmethod
    def flush_all(self) -> None:
        """Flush every connection to which received data may have been forwarded."""

    @abstractmethod
    def close(self, code: int = Code.NO_ERROR, text: str = "") -> None:
        """Send `code` to the peer, and close the connection."""

    @abstractmethod
    def handle_lost(self) -> None:
        """Handle that the connection is CLOSING: it is unusable. Called once."""

    @abstractmethod
    def handle_closed(self) -> None:
        """Handle that the connection is CLOSED."""

    # -- asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the connection, or abort it if it was closed meanwhile."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        if self.state is not _CONNECTING:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_PAUSE_BYTES)
        self.state = _OPEN
        self.flush_all()  # the frames that were queued before, SETTINGS first

    def connection_lost(self, _: Exception | None) -> None:
        """Call `handle_lost` unless that was done, mark the connection as CLOSED, and call
        `handle_closed`.
        """
        if self._abort is not None:
            self._abort.cancel()
        self._lose()
        self.state = _CLOSED
        self.handle_closed()
        self.flush_all()

    def pause_writing(self) -> None:
        """Queue DATA from now on: the peer does not read."""
        self.is_paused = True

    def data_received(self, data: bytes) -> None:
        """Handle bytes now, or in a later turn if they may take long and there is no time left."""
        if self.state is not _OPEN:
            return
        self.heard = _SOMETHING
        if self._unread:  # some was on its way when reading was paused
            self._unread += data
            return
        if len(data) > UNTIMED_BYTES:
            if not self._turns.has_time():
                self._unread = data
                self._handled = 0
                self._wait_for_turn()
                return
            self.until = self._turns.until
        if self._receive(data, 0):
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Stop reading, and handle the unread bytes in this connection's next turn."""
        if self._transport is not None:
            self._transport.pause_reading()
            self._turns.wait(self._continue_reading)

    def _continue_reading(self) -> None:
        """Handle the unread bytes, and wait for another turn if some are left."""
        data, self._unread = self._unread, b""
        if self.state is not _OPEN or self._transport is None:
            return
        self.until = self._turns.until
        if self._receive(data, self._handled):
            self._turns.wait(self._continue_reading)
        else:
            self._transport.resume_reading()

    def _receive(self, data: bytes, at: int) -> bool:
        """Handle `data`; return whether some of it is left when the time is up."""
        try:
            at = self.handle_bytes(data, at)
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))
        except Exception:
            log.exception("request.failed", extra={"method": "http/2"})
            self.close(Code.INTERNAL_ERROR)
        self.flush_all()
        if at == len(data) or self.state is not _OPEN:
            return False
        self._unread = data
        self._handled = at
        return True

    # -- sending ----------------------------------------------------------------------------

    def write(self, pieces: list[Piece]) -> None:
        """Send `pieces`; a no-op unless OPEN."""
        transport = self._transport
        if self.state is not _OPEN or transport is None:
            return
        if sum(map(len, pieces)) <= _JOINED_BYTES:
            transport.write(b"".join(pieces))
        else:
            transport.writelines(pieces)

    @property
    def is_flooded(self) -> bool:
        """Whether more than 2 MiB written to the peer are unread: it sends frames that need
        replies, and does not read the replies.
        """
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > _MAX_UNSENT_BYTES

    def end_transport(self, code: int) -> None:
        """Close once the written bytes are sent, or after some seconds, fewer after an error."""
        transport = self._transport
        if self.state is _OPEN and transport is not None:
            transport.close()
            seconds = _ERROR_CLOSE_SECONDS if code else _CLOSE_SECONDS
            self._abort = asyncio.get_running_loop().call_later(seconds, transport.abort)
            self._lose()
        elif transport is None:
            self._lose()
            self.state = _CLOSED
            self.handle_closed()

    def _lose(self) -> None:
        """Mark the connection as CLOSING, and call `handle_lost`, unless that was done."""
        if self.state < _CLOSING:
            self.state = _CLOSING
            self.handle_lost()


def with_own_code(cls: type[T]) -> type[T]:
    """Give a class copies of the functions that it inherits. Python 3.11 and later note in the code
    where the attributes of one class are, so that two classes with the same code slow each other
    down: by a sixth of a small gRPC call.
    """
    for base in cls.__mro__[1:]:
        for name, function in vars(base).items():
            if isinstance(function, FunctionType) and getattr(cls, name) is function:
                own = FunctionType(
                    function.__code__.replace(),
                    function.__globals__,
                    name,
                    function.__defaults__,
                    function.__closure__,
                )
                own.__kwdefaults__ = function.__kwdefaults__
                setattr(cls, name, own)
    return cls


def part(data: Piece, start: int, end: int) -> Piece:
    """Return part of `data`: a copy where that is cheaper than a view."""
    if end - start > SMALL_BYTES:
        return memoryview(data)[start:end]
    return data[start:end]
