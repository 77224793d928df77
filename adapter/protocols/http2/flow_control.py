"""Flow control of one HTTP/2 connection, both ways: RFC 9113 section 5.2.

What its peer sends is given back to the peer's windows as the other side takes it: the window of a
stream when its bytes went on, the window of the connection at once, unless too much is held. So no
stream waits for another, and memory is bounded. The peer is told when half of a window is due.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from adapter.protocols.http2 import frames
from adapter.protocols.http2.frames import Code, ConnectionFault
from adapter.protocols.http2.states import State
from adapter.protocols.http2.transport import Piece, Wire

Owner = TypeVar("Owner")

# what we take: of a stream, of the connection, in a frame
STREAM_WINDOW, CONNECTION_WINDOW, MAX_FRAME = 2**19, 2**20, 2**16
# each WINDOW_UPDATE costs a call of the kernel, and wakes the peer
_STREAM_CREDIT, _CONNECTION_CREDIT = STREAM_WINDOW // 2, CONNECTION_WINDOW // 2
_CONNECTION_CREDIT_BESIDE = CONNECTION_WINDOW // 8  # where one goes out anyway
# what one connection may hold though all of them together hold too much
_SHARE_BYTES = 2**20

_TURN_BYTES = 2**16  # of a stream, before it is another's turn
_ITEMS_A_FLUSH = 32


@dataclass(slots=True)
class HeldBytes:
    """Bytes that all connections of a listener have received and that cannot go on yet; beyond
    `most` no connection gets more than its share.
    """

    most: int
    held: int = 0


class Receiver(Protocol):
    """The connection that received what another one sends on."""

    def hold(self, size: int) -> None: ...


class Stream(Generic[Owner]):
    """One end of what `owner` is. `number`: its id as frames have it.

    `send_window`: what we may send; `queue`: what does not fit into it, `tail` the frames that end
    it. `receive_window`: what the peer may send; `unannounced`: what may be added to that, and the
    peer does not know yet.
    """

    __slots__ = (
        "id",
        "number",
        "owner",
        "queue",
        "queued",
        "receive_window",
        "send_window",
        "state",
        "tail",
        "unannounced",
    )

    def __init__(self, stream_id: int, owner: Owner, send_window: int) -> None:
        self.id = stream_id
        self.number = frames.number(stream_id)
        self.owner = owner
        self.send_window = send_window
        self.queue: deque[Piece] | None = None
        self.queued = 0
        self.tail = b""
        self.receive_window = STREAM_WINDOW
        self.unannounced = 0
        self.state = State.OPEN

    @property
    def is_ended(self) -> bool:
        """By the peer."""
        return self.state is State.HALF_CLOSED_REMOTE or self.state is State.CLOSED


class Flow(Wire, Generic[Owner]):
    """`held`: bytes that were received here and wait until they can go on."""

    def __init__(self, shared: HeldBytes) -> None:
        super().__init__()
        self.shared = shared
        self.streams: dict[int, Stream[Owner]] = {}
        self.glitches = 0
        # what we may send
        self.send_window = self.initial_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.FRAME_BYTES
        # with a queue and a window of their own; the others wait for the peer to widen theirs
        self._ready: OrderedDict[int, Stream[Owner]] = OrderedDict()
        # what the peer may send
        self._receive_window = CONNECTION_WINDOW
        self._unannounced = 0
        self._waiting: dict[int, Stream[Owner]] = {}  # for their windows, until `give`
        self.held = 0

    # -- for subclasses ---------------------------------------------------------------------

    def sent(self, stream: Stream[Owner], size: int) -> None:
        """So much DATA of that stream has been written."""
        raise NotImplementedError

    def finished(self, stream: Stream[Owner]) -> None:
        """The end of that stream has been written."""
        raise NotImplementedError

    def other(self, stream: Stream[Owner]) -> Receiver | None:
        """Who received what that stream sends."""
        raise NotImplementedError

    # -- what the peer may send -------------------------------------------------------------

    def credit(self, stream: Stream[Owner], size: int) -> None:
        """So much of what came on that stream has gone on, or is not needed."""
        stream.unannounced += size
        if stream.unannounced >= _STREAM_CREDIT:
            self._waiting[stream.id] = stream

    def hold(self, size: int) -> None:
        """`size` received bytes are kept until they can go on; negative when they have."""
        self.held += size
        self.shared.held += size

    @property
    def is_pressed(self) -> bool:
        """It holds more than its share of too much."""
        return self.held > _SHARE_BYTES and self.shared.held > self.shared.most

    def give(self) -> None:
        """Give windows back: not little by little, and after all that was read at once."""
        least = _CONNECTION_CREDIT
        if self._waiting:
            for stream in self._waiting.values():
                if stream.id in self.streams and not stream.is_ended:
                    self.out.append(frames.window_update(stream.id, stream.unannounced))
                    stream.receive_window += stream.unannounced
                    stream.unannounced = 0
                    least = _CONNECTION_CREDIT_BESIDE
            self._waiting.clear()
        if self._unannounced >= least and not self.is_pressed:
            self.out.append(frames.window_update(0, self._unannounced))
            self._receive_window += self._unannounced
            self._unannounced = 0

    def may_send(self, stream: Stream[Owner]) -> bool:
        """The peer, as far as its windows go."""
        return stream.receive_window > 0 and self._receive_window > 0

    def take(self, size: int) -> None:
        """So much DATA has come, of whatever stream."""
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        self._unannounced += size
        self.glitches -= size >> 13

    # -- what is sent -----------------------------------------------------------------------

    def send(self, stream: Stream[Owner], piece: Piece, *, end: bool = False) -> None:
        """DATA, at once if it fits; `end` ends the stream."""
        size = len(piece)
        if stream.queue or (size and not self._fits(stream, size)):
            self._queue(stream, piece)
            if end:
                stream.tail = frames.head(0, frames.DATA, frames.END_STREAM, stream.id)
            self.pump()
            return
        if size <= self.max_frame_size:
            self.out += (frames.data_start(size, int(end)), stream.number, piece)
        else:
            self._send_cut(stream, piece, int(end))
        stream.send_window -= size
        self.send_window -= size
        self.sent(stream, size)
        if end:
            self.finished(stream)

    def _fits(self, stream: Stream[Owner], size: int) -> bool:
        return size <= stream.send_window and size <= self.send_window and not self.is_paused

    def _send_cut(self, stream: Stream[Owner], piece: Piece, flags: int) -> None:
        """In frames that the peer takes."""
        size, most, view = len(piece), self.max_frame_size, memoryview(piece)
        for at in range(0, size - most, most):
            self.out += (frames.head(most, frames.DATA, 0, stream.id), view[at : at + most])
        last = size - (size - 1) // most * most
        self.out += (frames.head(last, frames.DATA, flags, stream.id), view[size - last :])

    def end(self, stream: Stream[Owner], tail: bytes) -> None:
        """These frames end the stream, behind what waits."""
        if stream.queue:
            stream.tail = tail
        else:
            self.out.append(tail)
            self.finished(stream)

    def _queue(self, stream: Stream[Owner], piece: Piece) -> None:
        if stream.queue is None:
            stream.queue = deque()
        if piece:  # a copy: a view would keep all that was read with it
            stream.queue.append(bytes(piece))
            stream.queued += len(piece)
            self._hold_for(stream, len(piece))
            self._make_ready(stream)

    def _make_ready(self, stream: Stream[Owner]) -> None:
        if stream.queue and stream.send_window > 0:
            self._ready[stream.id] = stream

    def _hold_for(self, stream: Stream[Owner], size: int) -> None:
        other = self.other(stream)
        if other is not None:
            other.hold(size)

    def unqueue(self, stream: Stream[Owner]) -> None:
        """What waits is not needed any more."""
        if stream.queue:
            stream.queue.clear()
            self._ready.pop(stream.id, None)
            self._hold_for(stream, -stream.queued)
            self.sent(stream, stream.queued)
            stream.queued = 0

    def pump(self) -> None:
        """Some of each stream in turn, as far as there is room."""
        while self._ready and self.send_window > 0 and not self.is_paused:
            self._send_next(self._ready.popitem(last=False)[1])
            if len(self.out) > _ITEMS_A_FLUSH:
                self.flush()

    def _send_next(self, stream: Stream[Owner]) -> None:
        queue, send_window = stream.queue, min(stream.send_window, self.send_window, _TURN_BYTES)
        if not queue or send_window <= 0:
            return
        piece = queue.popleft()
        if len(piece) > send_window:
            queue.appendleft(memoryview(piece)[send_window:])
            piece = memoryview(piece)[:send_window]
        size = len(piece)
        self._send_cut(stream, piece, 0)
        stream.send_window -= size
        stream.queued -= size
        self.send_window -= size
        self.glitches -= size >> 13
        self._make_ready(stream)  # behind the others
        self._hold_for(stream, -size)
        self.sent(stream, size)
        if not queue and stream.tail:
            self.out.append(stream.tail)
            self.finished(stream)

    def forget(self, stream: Stream[Owner]) -> None:
        if stream.queue:
            self.unqueue(stream)
        self.streams.pop(stream.id, None)

    def widen(self, increment: int) -> None:
        """Of the connection."""
        self.send_window = _widened(self.send_window, increment)
        self.pump()

    def widen_one(self, stream: Stream[Owner], increment: int) -> None:
        stream.send_window += increment
        if stream.queue:
            self._make_ready(stream)
            self.pump()

    def widen_all(self, difference: int) -> None:
        """Of each stream; it may be negative."""
        for stream in self.streams.values():
            stream.send_window = _widened(stream.send_window, difference)
            if stream.send_window > 0:
                self._make_ready(stream)
            else:
                self._ready.pop(stream.id, None)
        self.pump()


def _widened(send_window: int, by: int) -> int:
    if send_window + by > frames.MAX_WINDOW:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
    return send_window + by
