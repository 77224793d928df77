"""One connection as asyncio sees it, and what is written to it."""

import asyncio
import logging
from typing import TypeAlias, cast

from adapter.protocols.http2 import frames
from adapter.protocols.http2.frames import Code, ConnectionFault

log = logging.getLogger(__name__)

Piece: TypeAlias = bytes | memoryview

_PAUSE_BYTES = 2**18
# that wait to be sent; DATA stops at the mark above, so the rest are answers of ours
_MAX_UNSENT_BYTES = 2**21
_LAST_WORDS_SECONDS, _LAST_ANSWER_SECONDS = 2.0, 30.0
_SMALL_BYTES = 2**12
_JOINED_BYTES = 2**15  # to copy so much costs less than to write many pieces


class Wire(asyncio.Protocol):
    """`out` is written by `flush`; without a transport it waits for one."""

    def __init__(self) -> None:
        self.is_open = self.is_lost = self.is_paused = False
        self.has_pong = self.heard = True
        self.out: list[Piece] = []
        self._transport: asyncio.Transport | None = None
        self._abort: asyncio.TimerHandle | None = None

    # -- for subclasses ---------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def connected(self) -> None:
        raise NotImplementedError

    def flush_all(self) -> None:
        """Of all connections that what was received may have written to."""
        raise NotImplementedError

    def lost(self) -> None:
        """It is of no use any more; what has been written may still be on its way. Told once."""
        raise NotImplementedError

    def gone(self) -> None:
        """Nothing is on its way any more."""
        raise NotImplementedError

    def pump(self) -> None:
        """The peer reads again."""
        raise NotImplementedError

    def last_stream(self) -> int:
        raise NotImplementedError

    # -- of asyncio -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        if self.is_lost:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_PAUSE_BYTES)
        self.is_open = True
        self.connected()
        self.flush()

    def connection_lost(self, _: Exception | None) -> None:
        if self._abort is not None:
            self._abort.cancel()
        self._lose()
        self.gone()
        self.flush_all()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.pump()
        self.flush_all()

    def data_received(self, data: bytes) -> None:
        if not self.is_open:
            return
        self.heard = True
        try:
            self.received(data)
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))
        except Exception:
            log.exception("request.failed", extra={"method": "http/2"})
            self.close(Code.INTERNAL_ERROR)
        self.flush_all()

    # -- what is sent -----------------------------------------------------------------------

    def flush(self) -> None:
        if self.is_open and self._transport is not None:
            out, self.out = self.out, []
            if sum(map(len, out)) <= _JOINED_BYTES:
                self._transport.write(b"".join(out))
            else:
                self._transport.writelines(out)
        elif self.is_lost:
            self.out.clear()

    def is_flooded(self) -> bool:
        """The peer makes us answer, and reads nothing."""
        transport = self._transport
        if not self.is_paused or transport is None:
            return False
        return transport.get_write_buffer_size() > _MAX_UNSENT_BYTES

    def ping(self) -> None:
        self.has_pong = False
        self.out.append(frames.ping(b"adapter?"))

    def say_goodbye(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        self.out.append(frames.goaway(self.last_stream(), code, why))

    def close(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        transport = self._transport
        if self.is_open and transport is not None:
            self.say_goodbye(code, why)
            self.flush()
            self.is_open = False
            transport.close()
            seconds = _LAST_WORDS_SECONDS if code else _LAST_ANSWER_SECONDS
            self._abort = asyncio.get_running_loop().call_later(seconds, transport.abort)
        self._lose()
        if transport is None:
            self.gone()

    def _lose(self) -> None:
        self.is_open = False
        if not self.is_lost:
            self.is_lost = True
            self.out.clear()
            self.lost()


def part(data: bytes, start: int, end: int) -> Piece:
    """A copy where that is cheaper than a view."""
    if end - start > _SMALL_BYTES:
        return memoryview(data)[start:end]
    return data[start:end]
