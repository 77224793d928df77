"""One end of an HTTP/2 connection: frames judged by RFC 9113 sections 4 to 6."""

from typing import TYPE_CHECKING, Any

from adapter.protocols.http2 import frames
from adapter.protocols.http2.flow_control import (
    CONNECTION_WINDOW,
    MAX_FRAME,
    STREAM_WINDOW,
    BufferedBytes,
    FlowControl,
    Owner,
    Stream,
)
from adapter.protocols.http2.frames import Code, ConnectionFault
from adapter.protocols.http2.headers import HeaderReader
from adapter.protocols.http2.states import AFTER_PEERS_END, FAULTS, State
from adapter.protocols.http2.transport import Piece, part

if TYPE_CHECKING:
    from collections.abc import Callable


_GLITCHES_A_SECOND, _GLITCHES_OF_A_RESET, _GLITCHES_OF_SETTINGS = 20_000, 10, 10
_MORE_THAN_A_BLOCK = frames.PADDED | frames.HAS_PRIORITY
_STREAMS_A_GLITCH = 8  # of those whose window SETTINGS changes
_MAX_SETTINGS_BYTES = 64 * frames.SETTING_BYTES
_MAX_CONTINUATIONS = 320  # of 16 KiB: the longest headers of Triton


class Endpoint(FlowControl[Owner]):
    """`glitches` counts this second's frames that had no effect, less some for DATA."""

    def __init__(
        self, shared: BufferedBytes, reader: HeaderReader[Any], max_block_bytes: int
    ) -> None:
        super().__init__(shared)
        self.reader = reader
        self.is_acknowledged = False
        self._max_block = max_block_bytes
        self._rest = bytearray()  # an incomplete frame
        self._has_settings = False
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, fragments
        self._continuations = 0
        self.max_streams = frames.MAX_STREAM
        self._acts: tuple[Callable[[int, int, Any], None], ...] = (
            *(self._on_data, self._on_headers, self._on_priority, self._on_reset),
            *(self._on_settings, self._on_push, self._on_ping, self._on_goaway),
            *(self._on_window_update, self._on_continuation),
        )

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

    # -- for subclasses ---------------------------------------------------------------------

    def data(self, stream: Stream[Owner], piece: Piece, *, end: bool) -> None:
        """Handle DATA. Call `credit` for it once it is forwarded, or not needed."""
        raise NotImplementedError

    def frame_without_stream(self, stream_id: int, kind: int) -> None:
        """Handle a frame of a stream that is not open; ConnectionFault where that is an error."""
        raise NotImplementedError

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        raise NotImplementedError

    def was_reset(self, stream: Stream[Owner], code: int) -> None:
        """Handle RST_STREAM; the stream is forgotten already."""
        raise NotImplementedError

    def goaway_received(self, last_stream_id: int) -> None:
        """Handle GOAWAY."""
        raise NotImplementedError

    def stream_fault(self, stream: Stream[Owner], code: Code) -> None:
        """Handle a stream error (section 5.4.2)."""
        raise NotImplementedError

    def ping_acknowledged(self, _: bytes) -> None:
        self.is_ping_acknowledged = True

    # -- receiving --------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        at = self._complete(data) if self._rest else 0
        if at < len(data):
            self._walk(data, at)

    def _complete(self, data: bytes) -> int:
        """Complete the frame in `_rest`; return how many bytes of `data` that took."""
        rest, at = self._rest, 0
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
            stream_id &= frames.MAX_STREAM
            if size > frames.FRAME_BYTES:
                self._check_size(kind, size)
            if not self._has_settings or self._block is not None:
                self._check_order(kind, flags, stream_id)
            if kind == frames.DATA:
                self._on_data(flags, stream_id, part(data, start, at))
            elif kind < len(self._acts):
                self._acts[kind](flags, stream_id, data[start:at])
            else:
                self.glitch()
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

    def glitch(self, weight: int = 1) -> None:
        """Count a frame that has no effect."""
        self.glitches += weight
        if self.glitches > _GLITCHES_A_SECOND or self.is_flooded():
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that move nothing")

    # -- frames -----------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: Piece) -> None:
        size = len(payload)
        self.count_data(size)
        stream = self.streams.get(stream_id)
        if stream is None:
            self.frame_without_stream(stream_id, frames.DATA)
            return
        piece = payload
        stream.receive_window -= size
        if stream.state is State.HALF_CLOSED_REMOTE:
            self.stream_fault(stream, FAULTS[stream.state])
            return
        if stream.receive_window < 0:
            self.stream_fault(stream, Code.FLOW_CONTROL_ERROR)
            return
        if flags & frames.PADDED:
            piece = frames.without_padding(piece)
            self.credit(stream, size - len(piece))
        end = bool(flags & frames.END_STREAM)
        if not piece and not end:
            self.glitch()
        if end:
            stream.state = AFTER_PEERS_END[stream.state]
        self.data(stream, piece, end=end)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & _MORE_THAN_A_BLOCK:
            payload = frames.without_padding_and_priority(payload, flags)
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream")
        if flags & frames.END_HEADERS:
            self.block(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, bytearray(payload))
            self._continuations = 0

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self.glitch()
        self._continuations += 1
        _, first_flags, block = self._block
        block += payload
        if self._continuations > _MAX_CONTINUATIONS or len(block) > self._max_block:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block over the limit")
        if flags & frames.END_HEADERS:
            self._block = None
            self.block(first_flags, stream_id, bytes(block))

    def _on_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY of no stream")
        self.glitch()
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
        self.glitch(_GLITCHES_OF_SETTINGS)
        if len(payload) > _MAX_SETTINGS_BYTES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many settings at once")
        if not flags & frames.ACK:
            self._has_settings = True
            values = frames.read_settings(payload)
            self.out.append(frames.head(0, frames.SETTINGS, frames.ACK, 0))
            self._take_settings(values)
        elif payload:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that are acknowledged")
        elif not self.is_acknowledged:
            self.is_acknowledged = True
            self.reader.table_size_acknowledged()

    def _take_settings(self, values: list[tuple[int, int]]) -> None:
        """The last value of each setting counts: nothing is sent between two of one frame."""
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

    def _on_push(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE was not asked for")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:  # noqa: PLR2004 - section 6.7
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING of an odd length")
        self.glitch()
        if flags & frames.ACK:
            self.ping_acknowledged(payload)
        else:
            self.out.append(frames.ping(payload, frames.ACK))

    def _on_goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:  # noqa: PLR2004 - section 6.8
            code = Code.PROTOCOL_ERROR if stream_id else Code.FRAME_SIZE_ERROR
            raise ConnectionFault(code, "an odd GOAWAY")
        self.glitch()
        self.goaway_received(frames.read_number(payload)[0] & frames.MAX_STREAM)

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.9
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an odd length")
        self.glitch()
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
