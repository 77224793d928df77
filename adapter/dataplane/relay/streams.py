"""One stream of one connection, and the half of a connection that sends: windows and queues."""

import asyncio
from collections import deque
from typing import Any

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code, ConnectionFault, StreamFault

STREAM_WINDOW, CONNECTION_WINDOW = 2**17, 2**21  # bytes that a peer may send us unread
# of bytes that wait in the transport; two connections may have filled it with DATA at once
_MAX_UNSENT_BYTES = 4 * CONNECTION_WINDOW
_PAUSE_BYTES = 2**18


class Stream:
    """`use` is what its owner makes of it. `source` is the stream whose bytes leave through this
    one: its peer may send more when they have left.
    """

    __slots__ = (
        "debt",
        "got_end",
        "id",
        "peer",
        "queue",
        "receive_window",
        "send_window",
        "sent_end",
        "source",
        "use",
    )

    def __init__(self, peer: Any, stream_id: int, send_window: int) -> None:
        self.peer = peer
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = STREAM_WINDOW
        self.debt = 0
        self.got_end = self.sent_end = False
        self.queue: deque[tuple[bytes, bool, bool]] = deque()  # bytes, are headers, are last
        self.source: Stream | None = None
        self.use: Any = None

    @property
    def unsent_bytes(self) -> int:
        return sum(len(piece) for piece, are_headers, _ in self.queue if not are_headers)


class Sender:
    """Writes are gathered until `flush`. Without a transport they wait for one."""

    def __init__(self, *, is_server: bool) -> None:
        self.initial_window = frames.DEFAULT_WINDOW
        self.streams: dict[int, Stream] = {}
        self._is_server = is_server
        self._window = frames.DEFAULT_WINDOW
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._is_paused = True
        self._ready: dict[Stream, None] = {}  # have something to send, and a window of their own

    def attach(self, transport: asyncio.Transport) -> None:
        transport.set_write_buffer_limits(high=_PAUSE_BYTES)
        self._transport = transport
        self.resume()

    def detach(self) -> None:
        self._transport = None
        self._is_paused = True
        self._out.clear()

    def control(self, frame: bytes) -> None:
        self._out.append(frame)

    def flush(self) -> None:
        if not self._out or self._transport is None:
            return
        out = b"".join(self._out)
        self._out.clear()
        self._transport.write(out)

    def is_flooded(self) -> bool:
        """The peer reads nothing and makes us answer; DATA alone cannot come to that much."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > _MAX_UNSENT_BYTES

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._ready.update((s, None) for s in self.streams.values() if s.queue)
        self._go_on()

    # -- what streams send ------------------------------------------------------------------

    def headers(self, stream: Stream, block: bytes, *, end: bool) -> None:
        if stream.sent_end:
            return
        if stream.queue:
            stream.queue.append((block, True, end))
            return
        self._out.append(frames.header_block(stream.id, block, end=end))
        if end:
            self._ended(stream)

    def data(self, stream: Stream, piece: bytes, *, end: bool) -> None:
        """At once when the windows allow it, which most often they do."""
        size = len(piece)
        if stream.sent_end:
            if stream.source is not None:
                stream.source.peer.credit(stream.source, size)
        elif (
            stream.queue
            or self._is_paused
            or size > stream.send_window
            or size > self._window
            or size > frames.FRAME_BYTES
        ):
            stream.queue.append((piece, False, end))
            self._ready[stream] = None
            self._go_on()
        else:
            self._emit(stream, piece, end=end)

    def window_update(self, stream: Stream | None, increment: int) -> None:
        if stream is None:
            self._window += increment
            if self._window > frames.MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
        else:
            stream.send_window += increment
            if stream.send_window > frames.MAX_WINDOW:
                raise StreamFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
            if stream.queue:
                self._ready[stream] = None
        self._go_on()

    def new_initial_window(self, size: int) -> None:
        difference, self.initial_window = size - self.initial_window, size
        for stream in self.streams.values():
            stream.send_window += difference
            if stream.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
            if stream.queue:
                self._ready[stream] = None
        self._go_on()

    def forget(self, stream: Stream) -> None:
        """What it had still to send is dropped, and its source's connection may go on."""
        self._ready.pop(stream, None)
        stream.sent_end = True
        if self.streams.get(stream.id) is stream:
            del self.streams[stream.id]
        if stream.queue:
            left = stream.unsent_bytes
            stream.queue.clear()
            if stream.source is not None:
                stream.source.peer.credit(None, left)

    def _go_on(self) -> None:
        """A frame of each in turn."""
        while self._ready and not self._is_paused:
            stream = next(iter(self._ready))
            del self._ready[stream]
            if self._send_one(stream) and stream.queue:
                self._ready[stream] = None
            elif stream.queue and stream.send_window > 0 and self._window <= 0:
                self._ready[stream] = None
                return

    def _send_one(self, stream: Stream) -> bool:
        if not stream.queue:
            return False
        piece, are_headers, end = stream.queue[0]
        if are_headers:
            stream.queue.popleft()
            self._out.append(frames.header_block(stream.id, piece, end=end))
            if end:
                self._ended(stream)
            return True
        room = min(stream.send_window, self._window, frames.FRAME_BYTES)
        if piece and room <= 0:
            return False
        if len(piece) <= room or not piece:
            stream.queue.popleft()
            self._emit(stream, piece, end=end)
        else:
            stream.queue[0] = (piece[room:], False, end)
            self._emit(stream, piece[:room], end=False)
        return True

    def _emit(self, stream: Stream, piece: bytes, *, end: bool) -> None:
        size = len(piece)
        self._window -= size
        stream.send_window -= size
        self._out += (frames.head(size, frames.DATA, int(end), stream.id), piece)
        source = stream.source
        if source is not None and size:
            source.peer.credit(source, size)
        if end:
            self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        stream.sent_end = True
        if self._is_server and not stream.got_end:  # section 8.1: the rest is not needed
            self._out.append(frames.reset(stream.id, Code.NO_ERROR))
            stream.peer.was_reset(stream)
        elif stream.got_end:
            self.forget(stream)
            stream.peer.owner.closed(stream)
