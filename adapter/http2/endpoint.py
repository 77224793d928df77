"""One end of an HTTP/2 connection: frames judged by RFC 9113 sections 4 to 6."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from adapter.http2 import frames
from adapter.http2.flow_control import (
    CONNECTION_WINDOW,
    MAX_FRAME,
    STREAM_WINDOW,
    AnyStream,
    FlowControl,
)
from adapter.http2.frames import Code, ConnectionFault
from adapter.http2.headers import HeaderReader
from adapter.http2.transport import SMALL_BYTES, UNTIMED_BYTES, Heard, Piece, State, part
from adapter.runtime import clock
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable


_DATA, _HEAD_BYTES, _FRAME_BYTES = frames.DATA, frames.HEAD_BYTES, frames.FRAME_BYTES
_read_head = frames.read_head
_GLITCHES_A_SECOND, _GLITCHES_OF_A_RESET, _GLITCHES_OF_SETTINGS = 20_000, 10, 10
_MORE_THAN_A_BLOCK = frames.PADDED | frames.HAS_PRIORITY
_HEADERS, _END_HEADERS, _IS_WHOLE = (
    frames.HEADERS,
    frames.END_HEADERS,
    frames.END_HEADERS | _MORE_THAN_A_BLOCK,
)
_MAX_STREAM, _END_STREAM, _PADDED = frames.MAX_STREAM, frames.END_STREAM, frames.PADDED
LEAST_BYTES = 24  # of DATA: the shortest message of an inference has 25
_STREAMS_A_GLITCH = 8  # of those whose window SETTINGS changes
_MAX_SETTINGS_BYTES = 64 * frames.SETTING_BYTES
_MAX_GATHERED = 2**16  # of a frame that is no DATA; what RFC 9113 has is shorter, HEADERS aside
_MAX_CONTINUATIONS = 320  # of 16 KiB: the longest headers of Triton


class Endpoint(FlowControl[AnyStream]):
    """One end of a connection; subclasses say what becomes of its streams.

    `glitches` weighs this second's frames that had no effect, less some for useful ones.
    """

    __slots__ = (
        "_acts", "_block", "_continuations", "_data", "_data_left", "_few", "_has_settings",
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
        self.preface = b""  # what the peer has to send first
        self._is_within = True  # the preface or a frame has begun, and is not complete
        self._max_block = max_block_bytes
        self._rest = bytearray()  # an incomplete frame
        # of a DATA frame that is handled as it comes: END_STREAM and stream, what is still to come
        self._data, self._data_left, self._padding_left = (0, 0), 0, 0
        self._few = bytearray()
        # SETTINGS must come first, and nothing between the frames of a header block
        self._has_settings, self._is_strict = False, True
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, fragments
        self._continuations = 0
        self.max_streams = frames.MAX_STREAM
        self._acts: dict[int, Callable[[int, int, bytes], None]] = {
            frames.HEADERS: self._on_headers,
            frames.PRIORITY: self._on_priority,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.CONTINUATION: self._on_continuation,
        }

    def send_settings(self, values: dict[int, int]) -> None:
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
        self.heard = Heard.NOTHING_SINCE_PING
        self.out.append(frames.ping(b"adapter?"))

    def send_goaway(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        self.out.append(frames.goaway(self.last_accepted, code, why))

    def close(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        if self.state is State.OPEN:
            self.send_goaway(code, why)
            self.flush()
        self.end_transport(code)

    # -- for subclasses ---------------------------------------------------------------------

    def connected(self) -> None:
        self.flush()

    @abstractmethod
    def data(self, stream: AnyStream, piece: Piece, end: bool) -> None:
        """Handle DATA. Call `credit` for it once it is forwarded, or not needed."""

    @abstractmethod
    def frame_without_stream(self, stream_id: int, kind: int) -> None:
        """Handle a frame of a stream that is not open; raise ConnectionFault if it is an error."""

    @abstractmethod
    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Handle a header block."""

    @abstractmethod
    def was_reset(self, stream: AnyStream, code: int) -> None:
        """Handle RST_STREAM; the stream is forgotten already."""

    @abstractmethod
    def reset(self, stream: AnyStream, code: int) -> None:
        """Send RST_STREAM, and forget the stream."""

    def goaway_received(self, last_stream_id: int) -> None:
        """Handle GOAWAY. A client opens no streams after it; open ones continue."""

    @abstractmethod
    def stream_fault(self, stream: AnyStream, code: Code) -> None:
        """Handle a stream error (section 5.4.2)."""

    def ping_acknowledged(self, payload: bytes) -> None:
        """Handle a PING with ACK."""

    # -- receiving --------------------------------------------------------------------------

    def received(self, data: bytes, at: int = 0) -> int:
        if self._is_within:
            at = self._go_on(data, at)
        return self._walk(data, at) if at < len(data) else at

    def _go_on(self, data: bytes, at: int) -> int:
        """Handle the rest of what has begun; return where in `data` it ends."""
        if self.preface:
            at = self._take_preface(data, at)
        if self._rest:
            at = self._complete(data, at)
        if self._data_left or self._padding_left:
            at = self._continue_data(data, at)
        if not (self._rest or self._data_left or self._padding_left or self.preface):
            self._is_within = False
        return at

    def _take_preface(self, data: bytes, at: int) -> int:
        size = min(len(data) - at, len(self.preface))
        if data[at : at + size] != self.preface[:size]:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "not HTTP/2")
        self.preface = self.preface[size:]
        return at + size

    def _complete(self, data: bytes, at: int) -> int:
        """Complete the frame in `_rest`; return where in `data` it ends."""
        rest = self._rest
        while (more := self._needed(rest) - len(rest)) > 0:
            if at == len(data):
                return at
            rest += memoryview(data)[at : at + more]
            at = min(at + more, len(data))
        self._rest = bytearray()
        self._walk(bytes(rest), 0)
        return at

    def _needed(self, rest: bytearray) -> int:
        if len(rest) < frames.HEAD_BYTES:
            return frames.HEAD_BYTES
        high, low, kind, flags, _ = frames.read_head(rest, 0)
        size = high << 8 | low
        self._check_size(kind, size)
        if _goes_on(kind, size):
            size = 1 if flags & frames.PADDED else 0
        return int(frames.HEAD_BYTES + size)

    def _walk(self, data: bytes, at: int) -> int:
        """Handle frames until the time is up; return where that is."""
        end = len(data)
        is_timed = end > UNTIMED_BYTES
        while end - at >= _HEAD_BYTES:
            high, low, kind, flags, stream_id = _read_head(data, at)
            size, start = high << 8 | low, at + _HEAD_BYTES
            stream_id &= _MAX_STREAM
            if start + size > end:
                if self._begins_data(kind, flags, stream_id, size, part(data, start, end)):
                    at = end
                break
            at = start + size
            if size > _FRAME_BYTES or self._is_strict:
                self._check(kind, flags, stream_id, size)
            if kind == _DATA:
                payload = memoryview(data)[start:at] if size > SMALL_BYTES else data[start:at]
                self._on_data(flags, stream_id, payload)
            elif kind == _HEADERS and flags & _IS_WHOLE == _END_HEADERS and stream_id:
                self.block(flags, stream_id, data[start:at])
            else:
                self._acts.get(kind, self._on_unknown)(flags, stream_id, data[start:at])
            if is_timed and at < end and clock.monotonic() > self.until:
                return at
        self._keep(data, at)
        return end

    def _keep(self, data: bytes, at: int) -> None:
        """Keep the start of an incomplete frame."""
        if at < len(data):
            self._rest += part(data, at, len(data))
            self._is_within = True
            self._needed(self._rest)

    def _begins_data(
        self, kind: int, flags: int, stream_id: int, size: int, payload: Piece
    ) -> bool:
        """Begin an incomplete DATA frame; return False if the frame must be gathered first."""
        if not _goes_on(kind, size) or (flags & frames.PADDED and not payload):
            return False
        self._check(frames.DATA, flags, stream_id, size)
        self._data, self._data_left = (flags & frames.END_STREAM, stream_id), size
        self._is_within = True
        if flags & frames.PADDED:
            self._padding_left = payload[0]
            self._data_left -= 1 + self._padding_left
            self._drop_padding(stream_id, 1 + self._padding_left)
            payload = payload[1:]
            if not self._data_left:
                self._on_data(flags & frames.END_STREAM, stream_id, b"")
        self._continue_data(payload, 0)
        return True

    def _drop_padding(self, stream_id: int, size: int) -> None:
        self._receive_window -= size
        self.unannounced += size
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.receive_window -= size
            self.credit(stream, size)

    def _continue_data(self, data: Piece, at: int) -> int:
        """Handle more of that frame; return where in `data` it ends."""
        end, left = len(data), self._data_left
        if end - at > left:
            end = at + left
        if at < end:
            self._data_left = left = left - (end - at)
            piece = data if end - at == len(data) else part(data, at, end)
            if end - at < _FRAME_BYTES or self._few:
                piece = self._gathered(piece)
            if piece:
                flags, stream_id = self._data
                self._on_data(0 if left else flags, stream_id, piece)
        if self._padding_left:
            padding = min(self._padding_left, len(data) - end)
            self._padding_left -= padding
            end += padding
        return end

    def _gathered(self, piece: Piece) -> Piece:
        """Return what to handle of that frame now: nothing while its next bytes are few."""
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
        most = MAX_FRAME if kind == frames.DATA else max(self._max_block, _MAX_GATHERED)
        if size > most:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame over the limit")

    def _check(self, kind: int, flags: int, stream_id: int, size: int) -> None:
        """Check the size of a frame, and whether it may come now."""
        self._check_size(kind, size)
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block breaks off")
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS must come first")

    def glitch(self, weight: int = 1) -> None:
        """Count a frame that has no effect."""
        self.glitches += weight
        if self.glitches > _GLITCHES_A_SECOND or (self.is_paused and self.is_flooded):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that move nothing")

    def a_second_passed(self) -> None:
        self.glitches = 0

    def small_frame(self, glitches: int = 1) -> None:
        """Count a frame that costs much for its few bytes."""
        self.glitch(glitches)

    # -- frames -----------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: Piece) -> None:
        size = len(payload)
        self._receive_window -= size
        self.unannounced += size
        self.glitches -= size >> 13
        if self._receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None:
            if size < LEAST_BYTES:
                self.small_frame()
            self.frame_without_stream(stream_id, frames.DATA)
            return
        stream.receive_window -= size
        if stream.is_ended or stream.receive_window < 0:
            code = Code.STREAM_CLOSED if stream.is_ended else Code.FLOW_CONTROL_ERROR
            self.stream_fault(stream, code)
            return
        if flags & _PADDED:
            payload = frames.without_padding(payload)
            self.credit(stream, size - len(payload))
        end = stream.is_ended = flags & _END_STREAM == _END_STREAM
        self.data(stream, payload, end)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & _MORE_THAN_A_BLOCK:
            payload = frames.without_padding_and_priority(payload, flags)
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream")
        if flags & frames.END_HEADERS:
            self.block(flags, stream_id, payload)
        else:
            self._block, self._is_strict = (stream_id, flags, bytearray(payload)), True
            self._continuations = 0

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self.small_frame()
        self._continuations += 1
        _, first_flags, block = self._block
        block += payload
        if self._continuations > _MAX_CONTINUATIONS or len(block) > self._max_block:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block over the limit")
        if flags & frames.END_HEADERS:
            self._block, self._is_strict = None, False
            self.block(first_flags, stream_id, bytes(block))

    def _on_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY of no stream")
        self.small_frame()
        if len(payload) != 5:  # noqa: PLR2004 - section 6.3; the connection may go, section 5.4.2
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PRIORITY of an odd length")

    def _on_reset(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.4
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM of an odd length")
        self.glitch(_GLITCHES_OF_A_RESET)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.frame_without_stream(stream_id, frames.RST_STREAM)
        else:
            self.forget(stream)
            self.was_reset(stream, frames.read_number(payload)[0])

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        self.small_frame(_GLITCHES_OF_SETTINGS)
        if len(payload) > _MAX_SETTINGS_BYTES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many settings at once")
        if not flags & frames.ACK:
            self._has_settings, self._is_strict = True, False
            values = frames.read_settings(payload)
            self.out.append(frames.head(0, frames.SETTINGS, frames.ACK, 0))
            self._take_settings(values)
        elif payload:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that are acknowledged")
        elif not self.is_acknowledged:
            self.is_acknowledged = True
            self.reader.table_size_acknowledged()

    def _take_settings(self, values: list[tuple[int, int]]) -> None:
        """Apply the last value of each setting: nothing is sent between two of one frame."""
        self.glitch(len(values))
        found = dict(values)
        if frames.MAX_FRAME_SIZE in found:
            self.max_frame_size = min(found[frames.MAX_FRAME_SIZE], MAX_FRAME)
        self.max_streams = found.get(frames.MAX_CONCURRENT_STREAMS, self.max_streams)
        window = found.get(frames.INITIAL_WINDOW_SIZE, self.initial_window)
        if (difference := window - self.initial_window) != 0:
            self.glitch(len(self.streams) // _STREAMS_A_GLITCH)
            self.initial_window = window
            self.widen_streams(difference)

    def _on_unknown(self, _: int, __: int, ___: bytes) -> None:
        self.small_frame()

    def _on_push(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE was not asked for")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:  # noqa: PLR2004 - section 6.7
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING of an odd length")
        self.small_frame()
        if flags & frames.ACK:
            self.ping_acknowledged(payload)
        else:
            self.out.append(frames.ping(payload, frames.ACK))

    def _on_goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:  # noqa: PLR2004 - section 6.8
            code = Code.PROTOCOL_ERROR if stream_id else Code.FRAME_SIZE_ERROR
            raise ConnectionFault(code, "an odd GOAWAY")
        self.small_frame()
        self.goaway_received(frames.read_number(payload)[0] & frames.MAX_STREAM)

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.9
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an odd length")
        self.small_frame()
        increment = frames.read_number(payload)[0] & frames.MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            self.widen_connection(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self.frame_without_stream(stream_id, frames.WINDOW_UPDATE)
        elif not increment or stream.send_window + increment > frames.MAX_WINDOW:
            code = Code.FLOW_CONTROL_ERROR if increment else Code.PROTOCOL_ERROR
            self.stream_fault(stream, code)
        else:
            self.widen_stream(stream, increment)


def _goes_on(kind: int, size: int) -> bool:
    """Return whether a frame is handled as it arrives, and not gathered first."""
    return kind == frames.DATA and size > frames.FRAME_BYTES
