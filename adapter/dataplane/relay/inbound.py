"""The half of a connection that receives: frames are judged, and acted upon."""

from typing import TYPE_CHECKING, Any

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code, ConnectionFault, StreamFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from adapter.dataplane.relay.peer import Peer

MAX_STREAMS = 1000
_CHORES_A_SECOND = 20_000
_MAX_CONTINUATIONS = 1024


class Inbound:
    def __init__(
        self, peer: "Peer", reader: HeaderReader[Any], *, is_server: bool, max_header_bytes: int
    ) -> None:
        self._peer = peer
        self._sender = peer.sender
        self._reader = reader
        self._is_server = is_server
        self._max_header_bytes = max_header_bytes
        self._rest = b""
        self._preface = frames.PREFACE if is_server else b""
        self._has_settings = False
        self._block: tuple[int, int, list[bytes]] | None = None  # stream, flags, fragments
        self._acts: tuple[Callable[[int, int, bytes], None], ...] = (
            *(self._on_data, self._on_headers, self._on_priority, self._on_reset),
            *(self._on_settings, self._on_push, self._on_ping, self._on_goaway),
            *(self._on_window_update, self._on_continuation),
        )

    def feed(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        if self._preface:
            if not data.startswith(self._preface[:end]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "not HTTP/2")
            if end < len(self._preface):
                self._rest = data
                return
            at, self._preface = len(self._preface), b""
        while end - at >= frames.HEAD_BYTES and self._peer.is_open:
            high, low, kind, flags, stream_id = frames.read_head(data, at)
            size = high << 8 | low
            if size > frames.FRAME_BYTES:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame over the limit")
            start = at + frames.HEAD_BYTES
            if start + size > end:
                break
            at = start + size
            self._frame(kind, flags, stream_id & frames.MAX_STREAM, data[start:at])
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block breaks off")
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS must come first")
        if kind < len(self._acts):
            self._acts[kind](flags, stream_id, payload)
        else:
            self._chore()

    def _chore(self) -> None:
        """A frame that moves nothing."""
        self._peer.chores += 1
        self._check_flood()

    def _check_flood(self) -> None:
        if self._peer.chores > _CHORES_A_SECOND or self._sender.is_flooded():
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames to answer")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        stream = self._sender.streams.get(stream_id)
        self._peer.receive_window -= size
        if self._peer.receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")
        if stream is None:
            self._check_closed(stream_id)
            self._peer.credit(None, size)
            return
        end = bool(flags & frames.END_STREAM)
        if not size and not end:
            self._chore()
        piece = frames.without_padding(payload, flags)
        stream.receive_window -= size
        if stream.got_end or stream.receive_window < 0:
            self._peer.credit(None, size)
            code = Code.STREAM_CLOSED if stream.got_end else Code.FLOW_CONTROL_ERROR
            self._refuse(stream, code)
            return
        stream.got_end = end
        if len(piece) < size:
            self._peer.credit(stream, size - len(piece))
        self._peer.owner.data(stream, piece, end=end)
        self._close_if_done(stream)

    def _close_if_done(self, stream: Stream) -> None:
        is_mine = self._sender.streams.get(stream.id) is stream
        if stream.got_end and stream.sent_end and is_mine:
            self._sender.forget(stream)
            self._peer.owner.closed(stream)

    def _refuse(self, stream: Stream, code: int) -> None:
        self._peer.end_stream(stream, code)
        self._peer.owner.reset(stream, code)

    def _check_closed(self, stream_id: int) -> None:
        """Of a stream that is not there: what we have reset may still be in flight."""
        if (
            stream_id == 0
            or stream_id > self._peer.last_id
            or (self._is_server and stream_id % 2 == 0)
        ):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that never was")
        if not self._peer.has_reset(stream_id):
            raise ConnectionFault(Code.STREAM_CLOSED, "a frame of a stream that has ended")
        self._chore()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0 or (self._is_server and stream_id % 2 == 0):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS of no stream of the caller's")
        payload = frames.without_padding(payload, flags)
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:  # noqa: PLR2004 - a stream and a weight
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "no room for the priority")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, payload)
        else:
            self._block = (stream_id, flags, [payload])

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, parts = self._block
        parts.append(payload)
        if len(parts) > _MAX_CONTINUATIONS or sum(map(len, parts)) > self._max_header_bytes:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block over the limit")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(first_flags, stream_id, b"".join(parts))

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        stream, end = self._sender.streams.get(stream_id), bool(flags & frames.END_STREAM)
        is_new = stream is None and self._is_server and stream_id > self._peer.last_id
        if is_new:
            self._check_flood()
            stream = self._peer.open_stream(stream_id)
        try:
            head = self._reader.read(block)
            if stream is None:
                self._check_closed(stream_id)
                return
            self._check_block(stream, is_new=is_new)
        except StreamFault as fault:
            if stream is not None:
                self._refuse(stream, fault.code)
            return
        stream.got_end = end
        self._peer.owner.head(stream, head, end=end)
        self._close_if_done(stream)

    def _check_block(self, stream: Stream, *, is_new: bool) -> None:
        if stream.got_end:
            raise StreamFault(Code.STREAM_CLOSED, "headers after the end")
        if is_new and len(self._sender.streams) > MAX_STREAMS:
            raise StreamFault(Code.REFUSED_STREAM, "too many at once")
        if self._is_server and not is_new:
            raise StreamFault(Code.PROTOCOL_ERROR, "gRPC has no trailers of requests")

    def _on_reset(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.4
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "RST_STREAM of an odd length")
        self._must_have_been(stream_id)
        self._chore()
        stream = self._sender.streams.get(stream_id)
        if stream is not None:
            self._peer.was_reset(stream)
            self._peer.owner.reset(stream, frames.read_number(payload)[0])

    def _must_have_been(self, stream_id: int) -> None:
        if stream_id == 0 or stream_id > self._peer.last_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame of a stream that never was")

    def _on_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY of no stream")
        self._chore()
        stream = self._sender.streams.get(stream_id)
        if len(payload) != 5 and stream is not None:  # noqa: PLR2004 - section 6.3
            self._refuse(stream, Code.FRAME_SIZE_ERROR)

    def _on_push(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE was not asked for")

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        self._chore()
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS that are acknowledged")
            self._peer.is_acknowledged = True
            self._reader.no_table_from_here()
            return
        self._has_settings = True
        for key, value in frames.read_settings(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                self._sender.new_initial_window(value)
            elif key == frames.MAX_CONCURRENT_STREAMS:
                self._peer.max_streams = min(value, MAX_STREAMS)
        self._sender.control(frames.head(0, frames.SETTINGS, frames.ACK, 0))

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:  # noqa: PLR2004 - section 6.7
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "PING of an odd length")
        self._chore()
        if flags & frames.ACK:
            self._peer.has_pong = True
        else:
            self._sender.control(frames.ping(payload, frames.ACK))

    def _on_goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) < 8:  # noqa: PLR2004 - section 6.8
            code = Code.PROTOCOL_ERROR if stream_id else Code.FRAME_SIZE_ERROR
            raise ConnectionFault(code, "an odd GOAWAY")
        self._peer.owner.going(self._peer, frames.read_number(payload)[0] & frames.MAX_STREAM)

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004 - section 6.9
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE of an odd length")
        self._chore()
        increment = frames.read_number(payload)[0] & frames.MAX_WINDOW
        if stream_id == 0:
            if not increment:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            self._sender.window_update(None, increment)
            return
        self._must_have_been(stream_id)
        stream = self._sender.streams.get(stream_id)
        if stream is None:
            return
        if not increment:
            self._refuse(stream, Code.PROTOCOL_ERROR)
            return
        try:
            self._sender.window_update(stream, increment)
        except StreamFault as fault:
            self._refuse(stream, fault.code)
