"""One HTTP/2 connection, of either role: what its owner hears are heads, data and ends."""

import asyncio
import logging
from typing import Any, Protocol, cast

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.inbound import MAX_STREAMS, Inbound
from adapter.dataplane.relay.streams import CONNECTION_WINDOW, STREAM_WINDOW, Sender, Stream

log = logging.getLogger(__name__)

_RESETS_KEPT = 1000
_ABORT_SECONDS = 2.0


class Owner(Protocol):
    def head(self, stream: Stream, head: Any, *, end: bool) -> None: ...
    def data(self, stream: Stream, piece: bytes, *, end: bool) -> None: ...
    def reset(self, stream: Stream, code: int) -> None:
        """By the peer, or by us for what the peer did; it is gone."""

    def closed(self, stream: Stream) -> None:
        """Both sides have ended it."""

    def going(self, peer: "Peer", last_stream_id: int) -> None: ...
    def lost(self, peer: "Peer") -> None: ...
    def flush(self) -> None: ...


class Peer(asyncio.Protocol):
    def __init__(
        self, owner: Owner, reader: HeaderReader[Any], *, is_server: bool, max_header_bytes: int
    ) -> None:
        self.owner = owner
        self.sender = Sender(is_server=is_server)
        self.is_open = self.is_connected = self.is_acknowledged = False
        self.has_pong = True
        self.last_id = 0
        self.max_streams = MAX_STREAMS
        self.chores = 0
        self.heard = True
        self._is_lost = False
        self._is_server = is_server
        self.receive_window = CONNECTION_WINDOW
        self._debt = 0
        self._resets: dict[int, None] = {}
        self._transport: asyncio.Transport | None = None
        self._inbound = Inbound(
            self, reader, is_server=is_server, max_header_bytes=max_header_bytes
        )
        self._greet(max_header_bytes)

    def _greet(self, max_header_bytes: int) -> None:
        values = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: max_header_bytes,
        }
        if self._is_server:
            values[frames.MAX_CONCURRENT_STREAMS] = MAX_STREAMS
        else:
            values[frames.ENABLE_PUSH] = 0
            self.sender.control(frames.PREFACE)
        self.sender.control(frames.settings(values))
        self.sender.control(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))

    # -- of asyncio -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is none by name
        self._transport = transport
        self.is_open = self.is_connected = True
        if self._is_lost:
            transport.abort()
            return
        self.sender.attach(transport)
        self.owner.flush()

    def connection_lost(self, _: Exception | None) -> None:
        self._lose()
        self.owner.flush()

    def pause_writing(self) -> None:
        self.sender.pause()

    def resume_writing(self) -> None:
        self.sender.resume()
        self.owner.flush()

    def data_received(self, data: bytes) -> None:
        if not self.is_open:
            return
        self.heard = True
        try:
            self._inbound.feed(data)
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))
        except Exception:
            log.exception("request.failed", extra={"method": "http/2"})
            self.close(Code.INTERNAL_ERROR)
        self.owner.flush()

    # -- what its owner asks ----------------------------------------------------------------

    def open_stream(self, stream_id: int) -> Stream:
        stream = Stream(self, stream_id, self.sender.initial_window)
        self.sender.streams[stream_id] = stream
        self.last_id = max(self.last_id, stream_id)
        return stream

    def credit(self, stream: Stream | None, size: int) -> None:
        """That much of what it sent has gone on: it may send as much again."""
        if self._is_lost:
            return
        self._debt += size
        if self._debt >= CONNECTION_WINDOW // 2:
            self.sender.control(frames.window_update(0, self._debt))
            self.receive_window += self._debt
            self._debt = 0
        if stream is not None and not stream.got_end:
            stream.debt += size
            if stream.debt >= STREAM_WINDOW // 2 and self.sender.streams.get(stream.id) is stream:
                self.sender.control(frames.window_update(stream.id, stream.debt))
                stream.receive_window += stream.debt
                stream.debt = 0

    def end_stream(self, stream: Stream, code: int) -> None:
        """With RST_STREAM."""
        if self.sender.streams.get(stream.id) is not stream:
            return
        self.sender.control(frames.reset(stream.id, code))
        self.was_reset(stream)

    def was_reset(self, stream: Stream) -> None:
        self.sender.forget(stream)
        self._resets[stream.id] = None
        if len(self._resets) > _RESETS_KEPT:
            del self._resets[next(iter(self._resets))]
        self.owner.closed(stream)

    def has_reset(self, stream_id: int) -> bool:
        """Lately, so that more of it may be in flight."""
        return stream_id in self._resets

    def ping(self) -> None:
        self.has_pong = False
        self.sender.control(frames.ping(b"adapter?"))

    def say_goodbye(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        last = self.last_id if self._is_server else 0
        self.sender.control(frames.goaway(last, code, why))

    def close(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        transport = self._transport
        if self.is_open and transport is not None:
            self.say_goodbye(code, why)
            self.sender.flush()
            self.is_open = False
            transport.close()
            asyncio.get_running_loop().call_later(_ABORT_SECONDS, transport.abort)
        self._lose()

    def _lose(self) -> None:
        self.is_open = False
        if not self._is_lost:
            self._is_lost = True
            self.sender.detach()
            self.owner.lost(self)
