"""The asyncio side of a connection: its output buffer, its events, how it is closed."""

import asyncio
import logging
from typing import TypeAlias, cast

from adapter.protocols.http2 import frames
from adapter.protocols.http2.frames import Code, ConnectionFault

log = logging.getLogger(__name__)

Piece: TypeAlias = bytes | memoryview

_PAUSE_BYTES = 2**18
# unsent bytes; DATA stops at _PAUSE_BYTES, so the rest are replies to the peer's frames
_MAX_UNSENT_BYTES = 2**21
_ERROR_CLOSE_SECONDS, _CLOSE_SECONDS = 2.0, 30.0
_SMALL_BYTES = 2**12
_JOINED_BYTES = 2**15  # copying so much costs less than writing many chunks


class FrameTransport(asyncio.Protocol):
    """`flush` writes `out`, or keeps it until the connection is made."""

    def __init__(self) -> None:
        self.is_open = self.is_lost = self.is_paused = False
        self.is_ping_acknowledged = self.has_received = True
        self.out: list[Piece] = []
        self._transport: asyncio.Transport | None = None
        self._abort: asyncio.TimerHandle | None = None

    # -- for subclasses ---------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        raise NotImplementedError

    def connected(self) -> None:
        raise NotImplementedError

    def flush_all(self) -> None:
        """Flush every connection to which received data may have been forwarded."""
        raise NotImplementedError

    def lost(self) -> None:
        """The connection is unusable, though written data may still be sent. Called once."""
        raise NotImplementedError

    def gone(self) -> None:
        """The transport is closed."""
        raise NotImplementedError

    def send_queued(self) -> None:
        """Send queued data: the peer reads again."""
        raise NotImplementedError

    def last_stream(self) -> int:
        raise NotImplementedError

    # -- asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
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
        self.send_queued()
        self.flush_all()

    def data_received(self, data: bytes) -> None:
        if not self.is_open:
            return
        self.has_received = True
        try:
            self.received(data)
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))
        except Exception:
            log.exception("request.failed", extra={"method": "http/2"})
            self.close(Code.INTERNAL_ERROR)
        self.flush_all()

    # -- sending ----------------------------------------------------------------------------

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
        """The peer sends frames that need replies, and does not read the replies."""
        transport = self._transport
        if not self.is_paused or transport is None:
            return False
        return transport.get_write_buffer_size() > _MAX_UNSENT_BYTES

    def ping(self) -> None:
        self.is_ping_acknowledged = False
        self.out.append(frames.ping(b"adapter?"))

    def send_goaway(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        self.out.append(frames.goaway(self.last_stream(), code, why))

    def close(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        transport = self._transport
        if self.is_open and transport is not None:
            self.send_goaway(code, why)
            self.flush()
            self.is_open = False
            transport.close()
            seconds = _ERROR_CLOSE_SECONDS if code else _CLOSE_SECONDS
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
    """Return a copy where that is cheaper than a view."""
    if end - start > _SMALL_BYTES:
        return memoryview(data)[start:end]
    return data[start:end]
