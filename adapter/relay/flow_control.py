"""Flow control of one HTTP/2 connection, both ways: RFC 9113 section 5.2.

A stream's receive window is replenished when its bytes have been forwarded, the connection's at
once, unless too much is buffered: no stream blocks another, and memory is bounded. WINDOW_UPDATE is
sent when most of a window has been used, or a part of it and there is something else to write.
"""

from abc import abstractmethod
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from adapter.relay import frames
from adapter.relay.frames import Code, ConnectionFault
from adapter.relay.transport import FrameTransport, Piece, State
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns

_CONNECTING = State.CONNECTING  # looking up a member of an enumeration is slow in Python 3.11

# receive windows of a stream, in which a tensor of 600 KiB comes without a pause, and of the
# connection; the largest frame that we accept, as none may be larger than the window
STREAM_WINDOW = 5 * 2**17
CONNECTION_WINDOW = 2**20
MAX_FRAME = STREAM_WINDOW
# each WINDOW_UPDATE costs a system call, and wakes the peer; less where something is written anyway
_STREAM_CREDIT = 2**19
CONNECTION_CREDIT = 3 * 2**18
_SHARED_WRITE_CREDIT = 2**18
# what one connection may buffer though all of them together are over the limit
_SHARE_BYTES = 2**20

_TURN_BYTES = 2**16  # of one stream, before the next stream's turn
_ITEMS_A_FLUSH = 32


@dataclass(slots=True, eq=False)
class Stream:
    """A stream of one connection, with both of its windows."""

    id: int
    send_window: int
    queue: deque[Piece] | None = None  # DATA beyond `send_window`, in all `queued` bytes
    queued: int = 0
    tail: bytes = b""  # the frames that end the stream after it
    receive_window: int = STREAM_WINDOW
    # receive credit that no WINDOW_UPDATE has carried yet; while `is_held_back`, none will, nor the
    # connection's for `held_back` bytes of it
    unannounced: int = 0
    held_back: int = 0
    is_held_back: bool = False
    is_ended: bool = False  # the peer has sent END_STREAM


AnyStream = TypeVar("AnyStream", bound=Stream)


class FlowControl(FrameTransport, Generic[AnyStream]):
    """The streams of one end of a connection, and its windows.

    `out` is what `flush` writes, as soon as the connection is made. `buffered` counts bytes that
    were received here and not forwarded yet.
    """

    __slots__ = (
        "_ready", "_receive_window", "buffered", "creditors", "glitches", "held_back",
        "initial_window", "max_frame_size", "out", "send_window", "shared", "streams",
        "unannounced",
    )  # fmt: skip

    def __init__(self, turns: Turns, shared: ByteBudget) -> None:
        super().__init__(turns)
        self.out: list[Piece] = []
        self.shared = shared
        self.streams: dict[int, AnyStream] = {}
        self.glitches = 0
        # towards the peer
        self.send_window = self.initial_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.FRAME_BYTES
        # streams with a queue and an open window; the others wait for WINDOW_UPDATE
        self._ready: OrderedDict[int, AnyStream] = OrderedDict()
        # from the peer
        self._receive_window = CONNECTION_WINDOW
        self.unannounced = 0
        self.creditors: dict[int, AnyStream] = {}  # have credit to announce
        self.buffered = self.held_back = 0

    # -- for subclasses ---------------------------------------------------------------------

    @abstractmethod
    def on_sent(self, stream: AnyStream, size: int) -> None:
        """Handle that `size` bytes of DATA of that stream were written."""

    @abstractmethod
    def on_finished(self, stream: AnyStream) -> None:
        """Handle that the frame that ends the stream was written."""

    @abstractmethod
    def count_queued(self, stream: AnyStream, size: int) -> None:
        """Count `size` bytes of a queue at the connection that received them; negative when they
        leave it.
        """

    # -- receiving --------------------------------------------------------------------------

    def credit(self, stream: AnyStream, size: int) -> None:
        """Return receive credit: `size` bytes of that stream were forwarded, or are not needed."""
        stream.unannounced += size
        if stream.unannounced >= _STREAM_CREDIT and not stream.is_held_back:
            self.creditors[stream.id] = stream

    def hold_back(self, stream: AnyStream, size: int) -> None:
        """Return no credit of that stream until `release_credit`, nor the connection's for these
        `size` bytes: its window bounds the bytes that its clients send and nobody has room for.
        """
        stream.is_held_back = True
        stream.held_back += size
        self.held_back += size
        self.unannounced -= size
        self.creditors.pop(stream.id, None)

    def release_credit(self, stream: AnyStream) -> None:
        """Return the credit of that stream again, also for the bytes that were held back."""
        size, stream.held_back = stream.held_back, 0
        stream.is_held_back = False
        self.held_back -= size
        self.unannounced += size
        self.credit(stream, 0)

    @property
    def is_stalled(self) -> bool:
        """Whether the bytes held back keep all other streams from sending."""
        return self.held_back > 0 and self._receive_window <= 0

    def add_buffered(self, size: int) -> None:
        """Count `size` received bytes that are kept here; negative when they are released."""
        self.buffered += size
        self.shared.buffer(size)

    @property
    def is_over_budget(self) -> bool:
        """Whether all connections are over the limit, and this one is over its share."""
        return self.buffered > _SHARE_BYTES and self.shared.is_buffer_full

    def _add_window_updates(self) -> None:
        """Announce receive credit in large steps; that of the connection in any, while bytes are
        held back, as the other streams have nothing else.
        """
        if self.creditors:
            for stream in self.creditors.values():
                if stream.id in self.streams and not stream.is_ended:
                    self.out.append(frames.window_update(stream.id, stream.unannounced))
                    stream.receive_window += stream.unannounced
                    stream.unannounced = 0
            self.creditors.clear()
        least = _SHARED_WRITE_CREDIT if self.out else CONNECTION_CREDIT
        if self.held_back:
            least = 1
        if self.unannounced >= least and not self.is_over_budget:
            self.out.append(frames.window_update(0, self.unannounced))
            self._receive_window += self.unannounced
            self.unannounced = 0

    def is_peer_due(self, stream: AnyStream) -> bool:
        """Return whether only the peer is waited for: the windows let it send on that stream, and
        nothing that it has sent waits for its turn here.
        """
        is_open = stream.receive_window > 0 and self._receive_window > 0
        return is_open and not self.has_unread

    # -- sending ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the queued frames, after everything that was read at once."""
        if self.creditors or self.unannounced >= _SHARED_WRITE_CREDIT or self.held_back:
            self._add_window_updates()
        if self.out and self.state is not _CONNECTING:
            out, self.out = self.out, []
            self.write(out)

    def resume_writing(self) -> None:
        """Send what is queued: the peer reads again."""
        self.is_paused = False
        self.send_queued()
        self.flush_all()

    def send(self, stream: AnyStream, piece: Piece, *, end: bool = False) -> None:
        """Send DATA, or queue it where a window is too small; `end` ends the stream."""
        size = len(piece)
        if stream.queue or (
            size and (size > stream.send_window or size > self.send_window or self.is_paused)
        ):
            self._queue(stream, piece)
            if end:
                stream.tail = frames.head(0, frames.DATA, frames.END_STREAM, stream.id)
            self.send_queued()
            return
        if size <= self.max_frame_size:
            self.out += (frames.head(size, frames.DATA, int(end), stream.id), piece)
        else:
            self._send_frames(stream, piece, int(end))
        stream.send_window -= size
        self.send_window -= size
        self.on_sent(stream, size)
        if end:
            self.on_finished(stream)

    def _send_frames(self, stream: AnyStream, piece: Piece, flags: int) -> None:
        """Send DATA in frames of at most `max_frame_size`."""
        size = len(piece)
        limit = self.max_frame_size
        view = memoryview(piece)
        for at in range(0, size - limit, limit):
            self.out += (frames.head(limit, frames.DATA, 0, stream.id), view[at : at + limit])
        rest = size - (size - 1) // limit * limit
        self.out += (frames.head(rest, frames.DATA, flags, stream.id), view[size - rest :])

    def end(self, stream: AnyStream, tail: bytes) -> None:
        """End the stream with these frames, behind its queued DATA."""
        if stream.queue:
            stream.tail = tail
        else:
            self.out.append(tail)
            self.on_finished(stream)

    def _queue(self, stream: AnyStream, piece: Piece) -> None:
        """Append DATA to the queue of its stream, and count the queued bytes."""
        if stream.queue is None:
            stream.queue = deque()
        if piece:  # a copy: a view would keep all that was read with it
            stream.queue.append(bytes(piece))
            stream.queued += len(piece)
            self.count_queued(stream, len(piece))
            self._make_ready(stream)

    def _make_ready(self, stream: AnyStream) -> None:
        """Add a stream to those that `send_queued` serves, if it has queued DATA and its window is
        open.
        """
        if stream.queue and stream.send_window > 0:
            self._ready[stream.id] = stream

    def drop_queue(self, stream: AnyStream) -> None:
        """Drop the queued DATA of a stream, and credit their sender as if they were sent."""
        if stream.queue:
            stream.queue.clear()
            self._ready.pop(stream.id, None)
            self.count_queued(stream, -stream.queued)
            self.on_sent(stream, stream.queued)
            stream.queued = 0

    def send_queued(self) -> None:
        """Send queued DATA of each stream in turn, as far as the windows reach."""
        while self._ready and self.send_window > 0 and not self.is_paused:
            self._send_next(self._ready.popitem(last=False)[1])
            if len(self.out) > _ITEMS_A_FLUSH:
                self.flush()

    def _send_next(self, stream: AnyStream) -> None:
        """Send at most one turn's bytes of a stream's queue, as far as the windows reach, and then
        its end.
        """
        queue = stream.queue
        send_window = min(stream.send_window, self.send_window, _TURN_BYTES)
        if not queue or send_window <= 0:
            return
        piece = queue.popleft()
        if len(piece) > send_window:
            queue.appendleft(memoryview(piece)[send_window:])
            piece = memoryview(piece)[:send_window]
        size = len(piece)
        self._send_frames(stream, piece, 0)
        stream.send_window -= size
        stream.queued -= size
        self.send_window -= size
        self.glitches -= size >> 13
        self._make_ready(stream)  # after the others
        self.count_queued(stream, -size)
        self.on_sent(stream, size)
        if not queue and stream.tail:
            self.out.append(stream.tail)
            self.on_finished(stream)

    def forget(self, stream: AnyStream) -> None:
        """Remove a stream, with its queue and what counts for it."""
        if stream.queue:
            self.drop_queue(stream)
        if stream.is_held_back:
            self.release_credit(stream)
        self.streams.pop(stream.id, None)

    def widen_connection(self, increment: int) -> None:
        """Add the increment of a WINDOW_UPDATE to the connection's send window, and send queued
        DATA. Raises ConnectionFault beyond the largest window.
        """
        self.send_window = _widened(self.send_window, increment)
        self.send_queued()

    def widen_stream(self, stream: AnyStream, increment: int) -> None:
        """Add the increment of a WINDOW_UPDATE, which was checked before, to a stream's send
        window, and send queued DATA.
        """
        stream.send_window += increment
        if stream.queue:
            self._make_ready(stream)
            self.send_queued()

    def widen_streams(self, difference: int) -> None:
        """Add a change of SETTINGS_INITIAL_WINDOW_SIZE, which may be negative, to the send window
        of every stream, and send queued DATA.
        """
        for stream in self.streams.values():
            stream.send_window = _widened(stream.send_window, difference)
            if stream.send_window > 0:
                self._make_ready(stream)
            else:
                self._ready.pop(stream.id, None)
        self.send_queued()


def _widened(send_window: int, by: int) -> int:
    """Return a send window with the increment added; raise ConnectionFault beyond 2^31 - 1."""
    if send_window + by > frames.MAX_WINDOW:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
    return send_window + by
