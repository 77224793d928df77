"""One end of an HTTP/2 connection: frames judged by RFC 9113 sections 4 to 6.

Bytes are cut into frames as they arrive. Large DATA frames are handled piece by piece, all others
once they are complete. A peer may send frames that have no effect, or that cost much for their few
bytes, without end: both are counted, and too many of them end the connection.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from adapter.relay import frames
from adapter.relay.flow_control import (
    CONNECTION_WINDOW,
    MAX_FRAME,
    STREAM_WINDOW,
    AnyStream,
    FlowControl,
)
from adapter.relay.frames import Code, ConnectionFault
from adapter.relay.headers import HeaderReader
from adapter.relay.transport import SMALL_BYTES, UNTIMED_BYTES, Heard, Piece, State, part
from adapter.runtime import clock
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable


# looking up an attribute of a module for each frame costs more than a global
_DATA = frames.DATA
_HEADERS = frames.HEADERS
_END_HEADERS = frames.END_HEADERS
_END_STREAM = frames.END_STREAM
_PADDED = frames.PADDED
_HEAD_BYTES = frames.HEAD_BYTES
_FRAME_BYTES = frames.FRAME_BYTES
_MAX_STREAM = frames.MAX_STREAM
_read_head = frames.read_head

_GLITCHES_A_SECOND = 20_000
_GLITCHES_OF_A_RESET = 10
_GLITCHES_OF_SETTINGS = 10
_MORE_THAN_A_BLOCK = frames.PADDED | frames.HAS_PRIORITY
_IS_WHOLE = frames.END_HEADERS | _MORE_THAN_A_BLOCK
LEAST_BYTES = 24  # of DATA: the shortest message of an inference has 25
_STREAMS_A_GLITCH = 8  # SETTINGS that change windows count a glitch for so many streams
_MAX_SETTINGS_BYTES = 64 * frames.SETTING_BYTES
_MAX_GATHERED = 2**16  # bytes of a frame that is not DATA; RFC 9113 has shorter ones but HEADERS
_MAX_CONTINUATIONS = 320  # the longest headers of Triton, in frames of 16 KiB

# the layouts of RFC 9113 section 6
_OF_CONNECTION = frozenset({frames.SETTINGS, frames.PING, frames.GOAWAY})
_OF_STREAMS = frozenset({frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION})
_LENGTHS = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_GOAWAY_BYTES = 8  # without its text


class Endpoint(FlowControl[AnyStream]):
    """One end of a connection; subclasses say what becomes of its streams."""

    __slots__ = (
        "_block", "_continuations", "_data", "_data_left", "_few", "_handlers", "_has_settings",
        "_is_strict", "_is_within", "_max_block", "_padding_left", "_rest",
        "is_acknowledged", "last_accepted", "max_streams", "preface", "reader",
    )  # fmt: skip

    def __init__(
        self, budget: ByteBudget, turns: Turns, reader: HeaderReader[Any], max_block_bytes: int
    ) -> None:
        super().__init__(turns, budget)
        self.reader = reader
        self.last_accepted = 0  # the largest id of the peer's streams
        self.is_acknowledged = False
        self.preface = b""  # bytes that the peer has to send before any frame
        self._is_within = True  # the preface or a frame has begun, and is not complete
        self._max_block = max_block_bytes
        self._rest = bytearray()  # an incomplete frame
        # the DATA frame that is handled piece by piece: END_STREAM and stream, bytes to come
        self._data = (0, 0)
        self._data_left = 0
        self._padding_left = 0
        self._few = bytearray()  # its latest bytes, too few to be handled
        # SETTINGS must come first, and nothing between the frames of a header block
        self._has_settings = False
        self._is_strict = True
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, fragments
        self._continuations = 0
        self.max_streams = frames.MAX_STREAM
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            frames.HEADERS: self._on_headers,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.CONTINUATION: self._on_continuation,
        }

    def send_settings(self, values: dict[int, int]) -> None:
        """Send SETTINGS with these values and the ones that both ends have, and widen the
        connection's window.
        """
        values = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_FRAME_SIZE: MAX_FRAME,
            frames.MAX_HEADER_LIST_SIZE: self._max_block,
            **values,
        }
        more = CONNECTION_WINDOW - frames.DEFAULT_WINDOW
        self.out += (frames.settings(values), frames.window_update(0, more))

    def ping(self) -> None:
        """Send PING, to learn whether the peer is still there."""
        self.heard = Heard.NOTHING_SINCE_PING
        self.out.append(frames.ping(b"adapter?"))

    def send_goaway(self, code: int = Code.NO_ERROR, text: str = "") -> None:
        """Send GOAWAY with the latest stream of the peer that was accepted."""
        self.out.append(frames.goaway(self.last_accepted, code, text))

    def close(self, code: int = Code.NO_ERROR, text: str = "") -> None:
        """Send GOAWAY with `code`, and close the connection."""
        if self.state is State.OPEN:
            self.send_goaway(code, text)
            self.flush()
        self.end_transport(code)

    # -- for subclasses ---------------------------------------------------------------------

    @abstractmethod
    def handle_data(self, stream: AnyStream, piece: Piece, end: bool) -> None:
        """Handle DATA. Call `credit` for it once it is forwarded, or not needed."""

    @abstractmethod
    def handle_closed_stream(self, stream_id: int, kind: int) -> None:
        """Handle a frame of a stream that is not open; raise ConnectionFault for one that never
        was.
        """

    @abstractmethod
    def handle_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        """Handle a header block."""

    @abstractmethod
    def handle_reset(self, stream: AnyStream, code: int) -> None:
        """Handle RST_STREAM; the stream is forgotten already."""

    @abstractmethod
    def reset(self, stream: AnyStream, code: int) -> None:
        """Send RST_STREAM, and forget the stream."""

    def handle_goaway(self, last_stream_id: int) -> None:
        """Handle GOAWAY. A client opens no streams after it; open ones continue."""

    @abstractmethod
    def handle_stream_error(self, stream: AnyStream, code: Code) -> None:
        """Handle a stream error (section 5.4.2)."""

    def handle_ping_ack(self, payload: bytes) -> None:
        """Handle a PING with ACK."""

    # -- receiving --------------------------------------------------------------------------

    def handle_bytes(self, data: bytes, at: int = 0) -> int:
        """Handle frames, and keep the start of an incomplete one."""
        if self._is_within:
            at = self._continue(data, at)
        return self._handle_frames(data, at) if at < len(data) else at

    def _continue(self, data: bytes, at: int) -> int:
        """Handle the rest of the preface or of a frame; return where in `data` it ends."""
        if self.preface:
            at = self._check_preface(data, at)
        if self._rest:
            at = self._complete_frame(data, at)
        if self._data_left or self._padding_left:
            at = self._continue_streamed(data, at)
        if not (self._rest or self._data_left or self._padding_left or self.preface):
            self._is_within = False
        return at

    def _check_preface(self, data: bytes, at: int) -> int:
        """Compare received bytes with what is missing of the client's preface; return where it
        ends.
        """
        size = min(len(data) - at, len(self.preface))
        if data[at : at + size] != self.preface[:size]:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "not HTTP/2")
        self.preface = self.preface[size:]
        return at + size

    def _complete_frame(self, data: bytes, at: int) -> int:
        """Complete the frame in `_rest`; return where in `data` it ends."""
        rest = self._rest
        while (more := self._count_needed(rest) - len(rest)) > 0:
            if at == len(data):
                return at
            rest += memoryview(data)[at : at + more]
            at = min(at + more, len(data))
        self._rest = bytearray()
        self._handle_frames(bytes(rest), 0)
        return at

    def _count_needed(self, rest: bytearray) -> int:
        """Return how many bytes of the frame in `rest` are gathered before it is handled: its head,
        and the payload unless that is handled piece by piece. A frame over the limit raises
        ConnectionFault.
        """
        if len(rest) < frames.HEAD_BYTES:
            return frames.HEAD_BYTES
        high, low, kind, flags, _ = frames.read_head(rest, 0)
        size = high << 8 | low
        self._check_size(kind, size)
        if _is_streamed(kind, size):
            size = 1 if flags & frames.PADDED else 0
        return int(frames.HEAD_BYTES + size)

    def _handle_frames(self, data: bytes, at: int) -> int:
        """Handle the frames from `at` until the time of this turn is up; return where the next one
        begins.

        The beginning of an incomplete frame is kept for the next data, and counts as handled.
        """
        end = len(data)
        is_timed = end > UNTIMED_BYTES
        while end - at >= _HEAD_BYTES:
            high, low, kind, flags, stream_id = _read_head(data, at)
            size = high << 8 | low
            start = at + _HEAD_BYTES
            stream_id &= _MAX_STREAM
            if start + size > end:
                if self._begin_streamed(kind, flags, stream_id, size, part(data, start, end)):
                    at = end
                break
            at = start + size
            if size > _FRAME_BYTES or self._is_strict:
                self._check(kind, flags, stream_id, size)
            if kind == _DATA:
                payload = memoryview(data)[start:at] if size > SMALL_BYTES else data[start:at]
                self._on_data(flags, stream_id, payload)
            elif kind == _HEADERS and flags & _IS_WHOLE == _END_HEADERS and stream_id:
                self.handle_headers(flags, stream_id, data[start:at])
            else:
                _check_layout(kind, stream_id, size)
                self._handlers.get(kind, self._on_unknown)(flags, stream_id, data[start:at])
            if is_timed and at < end and clock.monotonic() > self.until:
                return at
        self._keep(data, at)
        return end

    def _keep(self, data: bytes, at: int) -> None:
        """Keep the start of an incomplete frame."""
        if at < len(data):
            self._rest += part(data, at, len(data))
            self._is_within = True
            self._count_needed(self._rest)

    def _begin_streamed(
        self, kind: int, flags: int, stream_id: int, size: int, payload: Piece
    ) -> bool:
        """Begin with an incomplete DATA frame; return False if it must be gathered first."""
        if not _is_streamed(kind, size) or (flags & frames.PADDED and not payload):
            return False
        self._check(frames.DATA, flags, stream_id, size)
        self._data = (flags & frames.END_STREAM, stream_id)
        self._data_left = size
        self._is_within = True
        if flags & frames.PADDED:
            padding = bytes(payload[:1]) + bytes(payload[0])
            self._on_data(frames.PADDED, stream_id, padding)  # as if an empty frame had it all
            self._padding_left = payload[0]
            self._data_left -= len(padding)
            payload = payload[1:]
        self._continue_streamed(payload, 0)
        return True

    def _continue_streamed(self, data: Piece, at: int) -> int:
        """Handle more of the DATA frame that has begun; return where in `data` it ends."""
        end = len(data)
        left = self._data_left
        if end - at > left:
            end = at + left
        if at < end:
            self._data_left = left = left - (end - at)
            piece = data if end - at == len(data) else part(data, at, end)
            if end - at < _FRAME_BYTES or self._few:
                piece = self._join_few(piece)
            if piece:
                flags, stream_id = self._data
                self._on_data(0 if left else flags, stream_id, piece)
        if self._padding_left:
            padding = min(self._padding_left, len(data) - end)
            self._padding_left -= padding
            end += padding
        return end

    def _join_few(self, piece: Piece) -> Piece:
        """Return the bytes of a streamed frame to handle now: none while they are few, as each
        piece is forwarded in a frame of its own.
        """
        few = self._few
        if len(piece) >= _FRAME_BYTES:
            self._few = bytearray()
            self._on_data(0, self._data[1], bytes(few))
            return piece
        few += piece
        if len(few) < _FRAME_BYTES and self._data_left:
            return b""
        self._few = bytearray()
        return bytes(few)

    def _check_size(self, kind: int, size: int) -> None:
        """Raise ConnectionFault for a frame over the limit of its type."""
        limit = MAX_FRAME if kind == frames.DATA else max(self._max_block, _MAX_GATHERED)
        if size > limit:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame over the limit")

    def _check(self, kind: int, flags: int, stream_id: int, size: int) -> None:
        """Check the size of a frame, and whether it may come now."""
        self._check_size(kind, size)
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block breaks off")
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS must come first")

    def count_glitch(self, weight: int = 1) -> None:
        """Count a frame that has no effect."""
        self.glitches += weight
        if self.glitches > _GLITCHES_A_SECOND or (self.is_paused and self.is_flooded):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that move nothing")

    def start_second(self) -> None:
        """Begin a new second of the budget of glitches."""
        self.glitches = 0

    def count_small_frame(self, glitches: int = 1) -> None:
        """Count a frame that costs much for its few bytes."""
        self.count_glitch(glitches)

    # -- frames -----------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: Piece) -> None:
        """Handle a DATA frame, or a piece of one: charge the receive windows, drop padding, and
        hand the rest to `handle_data`.
        """
        size = len(payload)
        self._receive_window -= size
        self.unannounced += size
        self.glitches -= size >> 13
        if self._receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None:
            if size < LEAST_BYTES:
                self.count_small_frame()
            self.handle_closed_stream(stream_id, frames.DATA)
            return
        stream.receive_window -= size
        if stream.is_ended or stream.receive_window < 0:
            code = Code.STREAM_CLOSED if stream.is_ended else Code.FLOW_CONTROL_ERROR
            self.handle_stream_error(stream, code)
            return
        if flags & _PADDED:
            payload = frames.without_padding(payload)
            self.credit(stream, size - len(payload))
        end = stream.is_ended = flags & _END_STREAM == _END_STREAM
        self.handle_data(stream, payload, end)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a HEADERS frame, or keep its part of a header block until CONTINUATION
        ends that.
        """
        if flags & _MORE_THAN_A_BLOCK:
            payload = frames.without_padding_and_priority(payload, flags)
        if flags & frames.END_HEADERS:
            self.handle_headers(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, bytearray(payload))
            self._is_strict = True
            self._continuations = 0

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Append a CONTINUATION frame to the header block, and handle the block once it is
        complete. Too long a block raises ConnectionFault.
        """
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self.count_small_frame()
        self._continuations += 1
        _, first_flags, block = self._block
        block += payload
        if self._continuations > _MAX_CONTINUATIONS or len(block) > self._max_block:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block over the limit")
        if flags & frames.END_HEADERS:
            self._block = None
            self._is_strict = False
            self.handle_headers(first_flags, stream_id, bytes(block))

    def _on_reset(self, _: int, stream_id: int, payload: bytes) -> None:
        """Handle RST_STREAM: forget its stream, and count a glitch."""
        self.count_glitch(_GLITCHES_OF_A_RESET)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.handle_closed_stream(stream_id, frames.RST_STREAM)
        else:
            self.forget(stream)
            self.handle_reset(stream, frames.read_number(payload)[0])

    def _on_settings(self, flags: int, _: int, payload: bytes) -> None:
        """Apply the peer's SETTINGS and acknowledge them, or note that ours were acknowledged."""
        self.count_small_frame(_GLITCHES_OF_SETTINGS)
        if len(payload) > _MAX_SETTINGS_BYTES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many settings at once")
        if not flags & frames.ACK:
            self._has_settings = True
            self._is_strict = False
            values = frames.read_settings(payload)
            self.out.append(frames.head(0, frames.SETTINGS, frames.ACK, 0))
            self._apply_settings(values)
        elif payload:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that are acknowledged")
        elif not self.is_acknowledged:
            self.is_acknowledged = True
            self.reader.expect_size_update()

    def _apply_settings(self, values: list[tuple[int, int]]) -> None:
        """Apply the last value of each setting: nothing is sent between two of one frame."""
        self.count_glitch(len(values))
        settings = dict(values)
        if frames.MAX_FRAME_SIZE in settings:
            self.max_frame_size = min(settings[frames.MAX_FRAME_SIZE], MAX_FRAME)
        self.max_streams = settings.get(frames.MAX_CONCURRENT_STREAMS, self.max_streams)
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self.initial_window)
        if (difference := window - self.initial_window) != 0:
            self.count_glitch(len(self.streams) // _STREAMS_A_GLITCH)
            self.initial_window = window
            self.widen_streams(difference)

    def _on_unknown(self, _: int, __: int, ___: bytes) -> None:
        """Ignore a frame of unknown type (RFC 9113 section 5.5), but count it as a small one."""
        self.count_small_frame()

    def _on_push(self, _: int, __: int, ___: bytes) -> None:
        """Raise ConnectionFault for PUSH_PROMISE, which no peer may send here."""
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE was not asked for")

    def _on_ping(self, flags: int, _: int, payload: bytes) -> None:
        """Answer PING, or handle the answer to ours."""
        self.count_small_frame()
        if flags & frames.ACK:
            self.handle_ping_ack(payload)
        else:
            self.out.append(frames.ping(payload, frames.ACK))

    def _on_goaway(self, _: int, __: int, payload: bytes) -> None:
        """Check GOAWAY, and hand the last stream that the peer processed to `handle_goaway`."""
        if len(payload) < _GOAWAY_BYTES:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "GOAWAY of an odd length")
        self.count_small_frame()
        self.handle_goaway(frames.read_number(payload)[0] & frames.MAX_STREAM)

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        """Check WINDOW_UPDATE, and add its increment to a send window. An increment of 0, or beyond
        the largest window, is an error of the stream or of the connection.
        """
        self.count_small_frame()
        increment = frames.read_number(payload)[0] & frames.MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            self.widen_connection(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self.handle_closed_stream(stream_id, frames.WINDOW_UPDATE)
        elif not increment or stream.send_window + increment > frames.MAX_WINDOW:
            code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
            self.handle_stream_error(stream, code)
        else:
            self.widen_stream(stream, increment)


def _check_layout(kind: int, stream_id: int, size: int) -> None:
    """Raise ConnectionFault for a frame of a stream, of none, or of a length that its type does not
    have (RFC 9113 section 6).
    """
    is_misplaced = kind in (_OF_CONNECTION if stream_id else _OF_STREAMS)
    if is_misplaced:
        raise ConnectionFault(Code.PROTOCOL_ERROR, f"a frame {kind} of stream {stream_id}")
    if _LENGTHS.get(kind, size) != size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame {kind} of {size} bytes")


def _is_streamed(kind: int, size: int) -> bool:
    """Return whether a frame is handled piece by piece, and not gathered first."""
    return kind == frames.DATA and size > frames.FRAME_BYTES
