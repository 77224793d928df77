"""Flow control of one HTTP/2 connection, both ways: RFC 9113 section 5.2.

What its peer sends is given back to the peer's windows as the other side takes it: the window of a
stream when its bytes went on, the window of the connection at once, unless too much is held. So no
stream waits for another, and memory is bounded. The peer is told when half of a window is due.
"""

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.states import State
from adapter.dataplane.relay.wire import Piece, Wire

if TYPE_CHECKING:
    from adapter.dataplane.relay.exchange import Exchange
    from adapter.dataplane.relay.site import Site

# what we take: of a stream, of the connection, in a frame
STREAM_WINDOW, CONNECTION_WINDOW, MAX_FRAME = 2**19, 2**20, 2**16
# each WINDOW_UPDATE costs a call of the kernel, and wakes the peer
_STREAM_CREDIT, _CONNECTION_CREDIT = STREAM_WINDOW // 2, CONNECTION_WINDOW // 2
_CONNECTION_CREDIT_BESIDE = CONNECTION_WINDOW // 8  # where one goes out anyway
# what one connection may hold though all of them together hold too much
_SHARE_BYTES = 2**20

_TURN_BYTES = 2**16  # of a stream, before it is another's turn
_ITEMS_A_FLUSH = 32


class Stream:
    """One end of an exchange. `number`: its id as frames have it. `room`: what we may send;
    `queue`: what there is no room for, `tail` the frames that end it; `allowed`: what the peer may
    send, `due` what it does not know yet.
    """

    __slots__ = (
        "allowed",
        "due",
        "exchange",
        "id",
        "number",
        "queue",
        "queued",
        "room",
        "state",
        "tail",
    )

    def __init__(self, stream_id: int, exchange: "Exchange", room: int) -> None:
        self.id = stream_id
        self.number = frames.number(stream_id)
        self.exchange = exchange
        self.room = room
        self.queue: deque[Piece] | None = None
        self.queued = 0
        self.tail = b""
        self.allowed = STREAM_WINDOW
        self.due = 0
        self.state = State.OPEN

    @property
    def is_ended(self) -> bool:
        """By the peer."""
        return self.state is State.HALF_CLOSED_REMOTE or self.state is State.CLOSED


class Flow(Wire):
    """`held`: bytes that were received here and wait until they can go on."""

    def __init__(self, site: "Site") -> None:
        super().__init__()
        self.site = site
        self.streams: dict[int, Stream] = {}
        self.chores = 0
        # what we may send
        self.room = self.initial_window = frames.DEFAULT_WINDOW
        self.most_frame = frames.FRAME_BYTES
        # with a queue and a window of their own; the others wait for the peer to widen theirs
        self._ready: OrderedDict[int, Stream] = OrderedDict()
        # what the peer may send
        self._allowed = CONNECTION_WINDOW
        self._due = 0
        self._waiting: dict[int, Stream] = {}  # for their windows, until `give`
        self.held = 0

    # -- for subclasses ---------------------------------------------------------------------

    def sent(self, stream: Stream, size: int) -> None:
        """So much DATA of that stream has been written."""
        raise NotImplementedError

    def finished(self, stream: Stream) -> None:
        """The end of that stream has been written."""
        raise NotImplementedError

    def other(self, stream: Stream) -> "Flow | None":
        """Who received what that stream sends."""
        raise NotImplementedError

    # -- what the peer may send -------------------------------------------------------------

    def credit(self, stream: Stream, size: int) -> None:
        """So much of what came on that stream has gone on, or is not needed."""
        stream.due += size
        if stream.due >= _STREAM_CREDIT:
            self._waiting[stream.id] = stream

    def hold(self, size: int) -> None:
        """`size` received bytes are kept until they can go on; negative when they have."""
        self.held += size
        self.site.held += size

    @property
    def is_pressed(self) -> bool:
        """It holds more than its share of too much."""
        return self.held > _SHARE_BYTES and self.site.held > self.site.max_held_bytes

    def give(self) -> None:
        """Give windows back: not little by little, and after all that was read at once."""
        least = _CONNECTION_CREDIT
        if self._waiting:
            for stream in self._waiting.values():
                if stream.id in self.streams and not stream.is_ended:
                    self.out.append(frames.window_update(stream.id, stream.due))
                    stream.allowed += stream.due
                    stream.due = 0
                    least = _CONNECTION_CREDIT_BESIDE
            self._waiting.clear()
        if self._due >= least and not self.is_pressed:
            self.out.append(frames.window_update(0, self._due))
            self._allowed += self._due
            self._due = 0

    def may_send(self, stream: Stream) -> bool:
        """The peer, as far as its windows go."""
        return stream.allowed > 0 and self._allowed > 0

    def take(self, size: int) -> None:
        """So much DATA has come, of whatever stream."""
        self._allowed -= size
        if self._allowed < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        self._due += size
        self.chores -= size >> 13

    # -- what is sent -----------------------------------------------------------------------

    def send(self, stream: Stream, piece: Piece, *, end: bool = False) -> None:
        """DATA, at once if it fits; `end` ends the stream."""
        size = len(piece)
        if stream.queue or (size and not self._fits(stream, size)):
            self._queue(stream, piece)
            if end:
                stream.tail = frames.head(0, frames.DATA, frames.END_STREAM, stream.id)
            self.pump()
            return
        if size <= self.most_frame:
            self.out += (frames.data_start(size, int(end)), stream.number, piece)
        else:
            self._send_cut(stream, piece, int(end))
        stream.room -= size
        self.room -= size
        self.sent(stream, size)
        if end:
            self.finished(stream)

    def _fits(self, stream: Stream, size: int) -> bool:
        return size <= stream.room and size <= self.room and not self.is_paused

    def _send_cut(self, stream: Stream, piece: Piece, flags: int) -> None:
        """In frames that the peer takes."""
        size, most, view = len(piece), self.most_frame, memoryview(piece)
        for at in range(0, size - most, most):
            self.out += (frames.head(most, frames.DATA, 0, stream.id), view[at : at + most])
        last = size - (size - 1) // most * most
        self.out += (frames.head(last, frames.DATA, flags, stream.id), view[size - last :])

    def end(self, stream: Stream, tail: bytes) -> None:
        """These frames end the stream, behind what waits."""
        if stream.queue:
            stream.tail = tail
        else:
            self.out.append(tail)
            self.finished(stream)

    def _queue(self, stream: Stream, piece: Piece) -> None:
        if stream.queue is None:
            stream.queue = deque()
        if piece:  # a copy: a view would keep all that was read with it
            stream.queue.append(bytes(piece))
            stream.queued += len(piece)
            self._hold_for(stream, len(piece))
            self._make_ready(stream)

    def _make_ready(self, stream: Stream) -> None:
        if stream.queue and stream.room > 0:
            self._ready[stream.id] = stream

    def _hold_for(self, stream: Stream, size: int) -> None:
        other = self.other(stream)
        if other is not None:
            other.hold(size)

    def unqueue(self, stream: Stream) -> None:
        """What waits is not needed any more."""
        if stream.queue:
            stream.queue.clear()
            self._ready.pop(stream.id, None)
            self._hold_for(stream, -stream.queued)
            self.sent(stream, stream.queued)
            stream.queued = 0

    def pump(self) -> None:
        """Some of each stream in turn, as far as there is room."""
        while self._ready and self.room > 0 and not self.is_paused:
            self._send_next(self._ready.popitem(last=False)[1])
            if len(self.out) > _ITEMS_A_FLUSH:
                self.flush()

    def _send_next(self, stream: Stream) -> None:
        queue, room = stream.queue, min(stream.room, self.room, _TURN_BYTES)
        if not queue or room <= 0:
            return
        piece = queue.popleft()
        if len(piece) > room:
            queue.appendleft(memoryview(piece)[room:])
            piece = memoryview(piece)[:room]
        size = len(piece)
        self._send_cut(stream, piece, 0)
        stream.room -= size
        stream.queued -= size
        self.room -= size
        self.chores -= size >> 13
        self._make_ready(stream)  # behind the others
        self._hold_for(stream, -size)
        self.sent(stream, size)
        if not queue and stream.tail:
            self.out.append(stream.tail)
            self.finished(stream)

    def forget(self, stream: Stream) -> None:
        if stream.queue:
            self.unqueue(stream)
        self.streams.pop(stream.id, None)

    def widen(self, increment: int) -> None:
        """Of the connection."""
        self.room = _widened(self.room, increment)
        self.pump()

    def widen_one(self, stream: Stream, increment: int) -> None:
        stream.room += increment
        if stream.queue:
            self._make_ready(stream)
            self.pump()

    def widen_all(self, difference: int) -> None:
        """Of each stream; it may be negative."""
        for stream in self.streams.values():
            stream.room = _widened(stream.room, difference)
            if stream.room > 0:
                self._make_ready(stream)
            else:
                self._ready.pop(stream.id, None)
        self.pump()


def _widened(room: int, by: int) -> int:
    if room + by > frames.MAX_WINDOW:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
    return room + by
