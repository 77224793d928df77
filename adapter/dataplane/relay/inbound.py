"""The half of a connection that receives: frames are judged by RFC 9113 sections 4 to 6.

What a subclass knows to be the other side's business goes on there as the bytes that it came as,
and DATA in the pieces that it comes in.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.wire import Piece, Wire, part

# the next piece of a DATA frame, and whether it is the last
Sink: TypeAlias = Callable[[Piece, bool], None]

_CHORES_A_SECOND, _CHORES_OF_A_RESET = 20_000, 10
_MAX_CONTINUATIONS = 1024
# as much of a DATA frame has to be here before it goes on in pieces: a name fits in
_FIRST_PIECE_BYTES = 2**11


class Inbound(Wire):
    """`room` is the window of the connection for what we send. `chores` counts the frames of this
    second that moved nothing.
    """

    def __init__(self, reader: HeaderReader[Any], max_block_bytes: int, max_frame: int) -> None:
        super().__init__()
        self.is_acknowledged = False
        self.chores = 0
        self.room = frames.DEFAULT_WINDOW
        self.max_frame = max_frame  # of DATA that it may send
        self.reader = reader
        self._max_block = max_block_bytes
        self._rest = bytearray()  # of a frame that is not all here
        self.left = 0  # to come of a DATA frame that goes on in pieces, and where to
        self._sink: Sink = _dropped
        self._has_settings = False
        self.is_plain = False  # any frame may come
        self._block: tuple[int, int, list[bytes]] | None = None  # stream, flags, fragments
        self._acts: tuple[Callable[[int, int, bytes], None], ...] = (
            *(self._on_data, self._on_headers, self._on_priority, self._on_reset),
            *(self._on_settings, self._on_push, self._on_ping, self._on_goaway),
            *(self._on_window_update, self._on_continuation),
        )

    # -- for subclasses ---------------------------------------------------------------------

    def walk(self, data: bytes, at: int) -> None:
        """Take all whole frames of `data` from there on; `keep` what remains."""
        raise NotImplementedError

    def data(self, flags: int, stream_id: int, size: int, piece: Piece) -> None:
        """The first piece of a frame of that size, most often all of it."""
        raise NotImplementedError

    def rest(self, flags: int, stream_id: int) -> Sink:
        """Where its other pieces go."""
        raise NotImplementedError

    def padding(self, stream_id: int, size: int) -> None:
        raise NotImplementedError

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        raise NotImplementedError

    def was_reset(self, stream_id: int, code: int) -> None:
        raise NotImplementedError

    def settings(self, values: list[tuple[int, int]]) -> None:
        raise NotImplementedError

    def settings_acknowledged(self) -> None:
        raise NotImplementedError

    def going(self, last_stream_id: int) -> None:
        raise NotImplementedError

    def pong(self, _: bytes) -> None:
        self.has_pong = True

    def window_update(self, stream_id: int, increment: int) -> None:
        raise NotImplementedError

    # -- pieces -----------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        at = self._complete(data) if self._rest else 0
        if self.left:
            start, at = at, min(at + self.left, len(data))
            self.left -= at - start
            self._sink(part(data, start, at), not self.left)
        if at < len(data):
            self.walk(data, at)

    def _complete(self, data: bytes) -> int:
        """The frame that had begun, or enough of it; how much of `data` that took."""
        rest, at = self._rest, 0
        while (more := self._needed(rest, 0) - len(rest)) and at < len(data):
            rest += data[at : at + more]
            at = min(at + more, len(data))
        if not more:
            self._rest = bytearray()
            self.walk(bytes(rest), 0)
        return at

    def keep(self, data: bytes, at: int) -> None:
        """The frame that begins there is not all here; of DATA goes on what is."""
        if len(data) - at < self._needed(data, at):
            self._rest += part(data, at, len(data))
            return
        high, low, _, flags, stream_id = frames.read_head(data, at)
        self._check_order(frames.DATA, flags, stream_id)
        piece = part(data, at + frames.HEAD_BYTES, len(data))
        size = high << 8 | low
        self.left = size - len(piece)
        flags, stream_id = flags & frames.END_STREAM, stream_id & frames.MAX_STREAM
        self.data(flags, stream_id, size, piece)
        self._sink = self.rest(flags, stream_id)

    def _needed(self, data: bytes | bytearray, at: int) -> int:
        """That much of the frame must be here before it is looked at."""
        if len(data) - at < frames.HEAD_BYTES:
            return frames.HEAD_BYTES
        high, low, kind, flags, _ = frames.read_head(data, at)
        size = high << 8 | low
        self._check_size(kind, size)
        if kind == frames.DATA and not flags & frames.PADDED:
            size = min(size, _FIRST_PIECE_BYTES)
        return frames.HEAD_BYTES + int(size)

    def _check_size(self, kind: int, size: int) -> None:
        most = self.max_frame if kind == frames.DATA else max(self._max_block, frames.FRAME_BYTES)
        if size > most:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame over the limit")

    # -- frames -----------------------------------------------------------------------------

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A whole one."""
        if len(payload) > frames.FRAME_BYTES:
            self._check_size(kind, len(payload))
        if not self.is_plain:
            self._check_order(kind, flags, stream_id)
        if kind < len(self._acts):
            self._acts[kind](flags, stream_id & frames.MAX_STREAM, payload)
        else:
            self.chore()

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

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        piece = payload
        if flags & frames.PADDED:
            piece = frames.without_padding(payload)
            self.padding(stream_id, len(payload) - len(piece))
        if not piece and not flags & frames.END_STREAM:
            self.chore()
        self.data(flags & frames.END_STREAM, stream_id, len(piece), piece)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = frames.without_padding_and_priority(payload, flags)
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream")
        if flags & frames.END_HEADERS:
            self.block(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, [payload])
            self.is_plain = False

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, parts = self._block
        parts.append(payload)
        if len(parts) > _MAX_CONTINUATIONS or sum(map(len, parts)) > self._max_block:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block over the limit")
        if flags & frames.END_HEADERS:
            self._block, self.is_plain = None, True
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
        self.was_reset(stream_id, frames.read_number(payload)[0])

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        self.chore()
        if not flags & frames.ACK:
            self._has_settings = self.is_plain = True
            self.settings(frames.read_settings(payload))
            return
        if payload:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that are acknowledged")
        if not self.is_acknowledged:
            self.is_acknowledged = True
            self.reader.no_table_from_here()
        self.settings_acknowledged()

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
            self.control(frames.ping(payload, frames.ACK))

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
        if not stream_id and not increment:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        self.window_update(stream_id, increment)

    def more_room(self, increment: int) -> None:
        self.room += increment
        if self.room > frames.MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")


def _dropped(_: Piece, __: bool) -> None:
    pass
