"""One end of an HTTP/2 connection: frames judged by RFC 9113 sections 4 to 6, and its own windows.

What its peer sends is given back to the peer's windows as the other side takes it: the window of a
stream when its bytes went on, the window of the connection at once, unless too much is held. So no
stream waits for another, and memory is bounded.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.wire import Piece, Wire, part

if TYPE_CHECKING:
    from collections.abc import Callable

    from adapter.dataplane.relay.exchange import Exchange
    from adapter.dataplane.relay.site import Site

# what we take: of a stream, of the connection, in a frame
STREAM_WINDOW, CONNECTION_WINDOW, MAX_FRAME = 2**18 + 2**15, 2**20, 2**16
_STREAM_CREDIT, _CONNECTION_CREDIT = STREAM_WINDOW // 4, CONNECTION_WINDOW // 8
# what one connection may hold though all of them together hold too much
_SHARE_BYTES = 2**20

_CHORES_A_SECOND, _CHORES_OF_A_RESET = 20_000, 10
_MAX_CONTINUATIONS = 1024
_ITEMS_A_FLUSH = 16


class Stream:
    """One end of an exchange. `room`: what we may send; `queue`: what there is no room for, `tail`
    the frames that end it; `allowed`: what the peer may send, `due` what it does not know yet.
    """

    __slots__ = ("allowed", "due", "exchange", "id", "is_ended", "queue", "queued", "room", "tail")

    def __init__(self, stream_id: int, exchange: "Exchange", room: int) -> None:
        self.id = stream_id
        self.exchange = exchange
        self.room = room
        self.queue: deque[Piece] | None = None
        self.queued = 0
        self.tail = b""
        self.allowed = STREAM_WINDOW
        self.due = 0
        self.is_ended = False  # by the peer


class Endpoint(Wire):
    """`chores` counts the frames of this second that moved nothing."""

    def __init__(self, site: "Site", reader: HeaderReader[Any], max_block_bytes: int) -> None:
        super().__init__()
        self.site = site
        self.reader = reader
        self.streams: dict[int, Stream] = {}
        self.is_acknowledged = False
        self.chores = 0
        self._max_block = max_block_bytes
        self._rest = bytearray()  # of a frame that is not all here
        self._has_settings = False
        self._block: tuple[int, int, list[bytes]] | None = None  # stream, flags, fragments
        # what we may send
        self.room = self.initial_window = frames.DEFAULT_WINDOW
        self.most_frame = frames.FRAME_BYTES
        self.max_streams = frames.MAX_STREAM
        self._waiting: dict[int, Stream] = {}
        # what the peer may send
        self._allowed = CONNECTION_WINDOW
        self._due = 0
        self.held = 0
        self._acts: tuple[Callable[[int, int, Any], None], ...] = (
            *(self._on_data, self._on_headers, self._on_priority, self._on_reset),
            *(self._on_settings, self._on_push, self._on_ping, self._on_goaway),
            *(self._on_window_update, self._on_continuation),
        )

    def greet(self, values: dict[int, int]) -> None:
        values = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_FRAME_SIZE: MAX_FRAME,
            frames.MAX_HEADER_LIST_SIZE: self._max_block,
            **values,
        }
        more = CONNECTION_WINDOW - frames.DEFAULT_WINDOW
        self.out += (frames.settings(values), frames.window_update(0, more))

    # -- for subclasses ---------------------------------------------------------------------

    def data(self, stream: Stream, piece: Piece, *, end: bool) -> None:
        """`credit` is to be called for it once it has gone on, or is not needed."""
        raise NotImplementedError

    def no_stream(self, stream_id: int) -> None:
        """A frame of a stream that is not open. ConnectionFault where it never can have been."""
        raise NotImplementedError

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        raise NotImplementedError

    def was_reset(self, stream: Stream, code: int) -> None:
        """The stream is forgotten already."""
        raise NotImplementedError

    def going(self, last_stream_id: int) -> None:
        """The peer sends GOAWAY."""
        raise NotImplementedError

    def stream_fault(self, stream: Stream, code: Code) -> None:
        """The peer broke the rules of this stream."""
        raise NotImplementedError

    def sent(self, stream: Stream, size: int) -> None:
        """So much DATA of that stream has been written."""
        raise NotImplementedError

    def finished(self, stream: Stream) -> None:
        """The end of that stream has been written."""
        raise NotImplementedError

    def other(self, stream: Stream) -> "Endpoint | None":
        """Who received what that stream sends."""
        raise NotImplementedError

    def pong(self, _: bytes) -> None:
        self.has_pong = True

    # -- what is received: pieces -----------------------------------------------------------

    def received(self, data: bytes) -> None:
        at = self._complete(data) if self._rest else 0
        if at < len(data):
            self._walk(data, at)

    def _complete(self, data: bytes) -> int:
        """The frame that had begun; how much of `data` that took."""
        rest, at = self._rest, 0
        while (more := self._needed(rest) - len(rest)) > 0:
            if at == len(data):
                return at
            rest += data[at : at + more]
            at = min(at + more, len(data))
        self._rest = bytearray()
        self._walk(bytes(rest), 0)
        return at

    def _needed(self, rest: bytearray) -> int:
        if len(rest) < frames.HEAD_BYTES:
            return frames.HEAD_BYTES
        high, low, kind, _, _ = frames.read_head(rest, 0)
        self._check_size(kind, high << 8 | low)
        return int(frames.HEAD_BYTES + (high << 8 | low))

    def _walk(self, data: bytes, at: int) -> None:
        end = len(data)
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.read_head(data, at)
            size, start = high << 8 | low, at + frames.HEAD_BYTES
            if start + size > end:
                break
            at = start + size
            if size > frames.FRAME_BYTES:
                self._check_size(kind, size)
            if not self._has_settings or self._block is not None:
                self._check_order(kind, flags, stream_id & frames.MAX_STREAM)
            if kind < len(self._acts):
                payload = part(data, start, at) if kind == frames.DATA else data[start:at]
                self._acts[kind](flags, stream_id & frames.MAX_STREAM, payload)
            else:
                self.chore()
        if at < end:
            self._rest += part(data, at, end)
            self._needed(self._rest)

    def _check_size(self, kind: int, size: int) -> None:
        most = MAX_FRAME if kind == frames.DATA else max(self._max_block, MAX_FRAME)
        if size > most:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame over the limit")

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block breaks off")
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS must come first")

    def chore(self, weight: int = 1) -> None:
        """A frame that moves nothing."""
        self.chores += weight
        if self.chores > _CHORES_A_SECOND or self.is_flooded():
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that move nothing")

    # -- frames -----------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: Piece) -> None:
        size = len(payload)
        self._allowed -= size
        if self._allowed < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        self._due += size
        self.chores -= size >> 13
        stream = self.streams.get(stream_id)
        if stream is None:
            self.no_stream(stream_id)
        else:
            self._data_of(stream, flags, payload)
        if self._due >= _CONNECTION_CREDIT:
            self.give()

    def _data_of(self, stream: Stream, flags: int, piece: Piece) -> None:
        size = len(piece)
        stream.allowed -= size
        if stream.is_ended:
            self.stream_fault(stream, Code.STREAM_CLOSED)
            return
        if stream.allowed < 0:
            self.stream_fault(stream, Code.FLOW_CONTROL_ERROR)
            return
        if flags & frames.PADDED:
            piece = frames.without_padding(piece)
            self.credit(stream, size - len(piece))
        end = bool(flags & frames.END_STREAM)
        if not piece and not end:
            self.chore()
        stream.is_ended = end
        self.data(stream, piece, end=end)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = frames.without_padding_and_priority(payload, flags)
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream")
        if flags & frames.END_HEADERS:
            self.block(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, [payload])

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, parts = self._block
        parts.append(payload)
        if len(parts) > _MAX_CONTINUATIONS or sum(map(len, parts)) > self._max_block:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block over the limit")
        if flags & frames.END_HEADERS:
            self._block = None
            self.block(first_flags, stream_id, b"".join(parts))

    def _on_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY of no stream")
        self.chore()
        if len(payload) != 5:  # noqa: PLR2004 - section 6.3; the connection may go, section 5.4.2
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PRIORITY of an odd length")

    def _on_reset(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.4
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM of an odd length")
        self.chore(_CHORES_OF_A_RESET)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.no_stream(stream_id)
        else:
            self.forget(stream)
            self.was_reset(stream, frames.read_number(payload)[0])

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        self.chore()
        if not flags & frames.ACK:
            self._has_settings = True
            self._take_settings(frames.read_settings(payload))
            self.out.append(frames.head(0, frames.SETTINGS, frames.ACK, 0))
        elif payload:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that are acknowledged")
        elif not self.is_acknowledged:
            self.is_acknowledged = True
            self.reader.no_table_from_here()

    def _take_settings(self, values: list[tuple[int, int]]) -> None:
        for key, value in values:
            if key == frames.INITIAL_WINDOW_SIZE:
                difference, self.initial_window = value - self.initial_window, value
                for stream in self.streams.values():
                    stream.room = _widened(stream.room, difference)
            elif key == frames.MAX_FRAME_SIZE:
                self.most_frame = min(value, MAX_FRAME)
            elif key == frames.MAX_CONCURRENT_STREAMS:
                self.max_streams = value
        self.pump()

    def _on_push(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE was not asked for")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:  # noqa: PLR2004 - section 6.7
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING of an odd length")
        self.chore()
        if flags & frames.ACK:
            self.pong(payload)
        else:
            self.out.append(frames.ping(payload, frames.ACK))

    def _on_goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:  # noqa: PLR2004 - section 6.8
            code = Code.PROTOCOL_ERROR if stream_id else Code.FRAME_SIZE_ERROR
            raise ConnectionFault(code, "an odd GOAWAY")
        self.chore()
        self.going(frames.read_number(payload)[0] & frames.MAX_STREAM)

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.9
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an odd length")
        self.chore()
        increment = frames.read_number(payload)[0] & frames.MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            self.room = _widened(self.room, increment)
            self.pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self.no_stream(stream_id)
        elif not increment or stream.room + increment > frames.MAX_WINDOW:
            code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
            self.stream_fault(stream, code)
        else:
            stream.room += increment
            if stream.queue:
                self.pump()

    # -- what the peer may send -------------------------------------------------------------

    def credit(self, stream: Stream, size: int) -> None:
        """So much of what came on that stream has gone on, or is not needed."""
        stream.due += size
        if stream.due >= _STREAM_CREDIT and not stream.is_ended and stream.id in self.streams:
            self.out.append(frames.window_update(stream.id, stream.due))
            stream.allowed += stream.due
            stream.due = 0

    def hold(self, size: int) -> None:
        """`size` received bytes are kept until they can go on; negative when they have."""
        self.held += size
        self.site.held += size
        if size < 0:
            self.give()

    @property
    def is_pressed(self) -> bool:
        """It holds more than its share of too much."""
        return self.held > _SHARE_BYTES and self.site.held > self.site.max_held_bytes

    def give(self) -> None:
        """Give the connection's window back, not little by little."""
        if self._due >= _CONNECTION_CREDIT and not self.is_pressed:
            self.out.append(frames.window_update(0, self._due))
            self._allowed += self._due
            self._due = 0

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
        self.out += (frames.head(size, frames.DATA, int(end), stream.id), piece)
        stream.room -= size
        self.room -= size
        self.sent(stream, size)
        if end:
            self.finished(stream)

    def _fits(self, stream: Stream, size: int) -> bool:
        most = min(stream.room, self.room, self.most_frame)
        return size <= most and not self.is_paused

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
            self._waiting[stream.id] = stream

    def _hold_for(self, stream: Stream, size: int) -> None:
        other = self.other(stream)
        if other is not None:
            other.hold(size)

    def unqueue(self, stream: Stream) -> None:
        """What waits is not needed any more."""
        if stream.queue:
            stream.queue.clear()
            self._waiting.pop(stream.id, None)
            self._hold_for(stream, -stream.queued)
            self.sent(stream, stream.queued)
            stream.queued = 0

    def pump(self) -> None:
        """A frame of each stream in turn, as far as there is room."""
        waiting = list(self._waiting.values())
        while waiting and self.room > 0 and not self.is_paused:
            waiting = [stream for stream in waiting if self._send_next(stream)]
            if len(self.out) > _ITEMS_A_FLUSH:
                self.flush()

    def _send_next(self, stream: Stream) -> bool:
        """Whether it has more."""
        room = min(stream.room, self.room, self.most_frame)
        if not stream.queue or room <= 0 or self.is_paused:
            return False
        piece = stream.queue.popleft()
        if len(piece) > room:
            stream.queue.appendleft(memoryview(piece)[room:])
            piece = memoryview(piece)[:room]
        size = len(piece)
        self.out += (frames.head(size, frames.DATA, 0, stream.id), piece)
        stream.room -= size
        stream.queued -= size
        self.room -= size
        self.chores -= size >> 13
        del self._waiting[stream.id]
        if stream.queue:
            self._waiting[stream.id] = stream  # behind the others
        self._hold_for(stream, -size)
        self.sent(stream, size)
        if not stream.queue and stream.tail:
            self.out.append(stream.tail)
            self.finished(stream)
        return bool(stream.queue)

    def forget(self, stream: Stream) -> None:
        self.unqueue(stream)
        self.streams.pop(stream.id, None)


def _widened(room: int, by: int) -> int:
    if room + by > frames.MAX_WINDOW:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
    return room + by
