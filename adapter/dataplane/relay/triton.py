"""The connection to Triton that is a caller's own: what needs no thought passes as it came."""

from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange
from adapter.dataplane.relay.inbound import Sink
from adapter.dataplane.relay.link import Link
from adapter.dataplane.relay.message import PREFIX_BYTES, length_of
from adapter.dataplane.relay.wire import Piece, part

if TYPE_CHECKING:
    from adapter.dataplane.relay.relay import Relay

_OF_THE_WAY = frozenset(
    {frames.INITIAL_WINDOW_SIZE, frames.MAX_FRAME_SIZE, frames.MAX_CONCURRENT_STREAMS}
)
# type and flags
_DATA = frames.DATA << 8
_HEAD = frames.HEADERS << 8 | frames.END_HEADERS
_END = _HEAD | frames.END_STREAM


class Triton(Link):
    """Its windows and settings are the caller's, and the other way round."""

    def __init__(self, relay: "Relay") -> None:
        caller = relay.caller
        super().__init__(
            relay,
            {
                frames.INITIAL_WINDOW_SIZE: caller.initial_window,
                frames.MAX_FRAME_SIZE: caller.most_frame,
            },
        )
        more = caller.room - frames.DEFAULT_WINDOW
        if more > 0:
            self.out.append(frames.window_update(0, more))
        caller.debt = max(0, -more)

    def sent_to_caller(self, _: int) -> int:
        return 0

    def settings(self, values: list[tuple[int, int]]) -> None:
        wanted = {key: value for key, value in values if key in _OF_THE_WAY}
        if wanted:
            self.caller.pass_settings(wanted, self)
        else:
            self.acknowledge()

    def window_update(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self.caller.credit(increment)
            return
        exchange = self.exchange_of(stream_id)
        if exchange is not None and not exchange.is_asked and increment:
            self.caller.control(frames.window_update(stream_id, increment))

    def walk(self, data: bytes, at: int) -> None:
        """What the caller gets as it is passes in runs of as many frames as are here."""
        caller = self.caller
        if caller.is_strained:
            super().walk(data, at)
            return
        exchanges, start, end, room = caller.exchanges, at, len(data), caller.room
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.read_head(data, at)
            head, at = at, at + frames.HEAD_BYTES + (high << 8 | low)
            if at > end:
                at = head
                break
            payload = head + frames.HEAD_BYTES
            exchange = exchanges.get(stream_id) if kind <= frames.HEADERS else None
            what = kind << 8 | flags
            if exchange is None or not self._passes(exchange, what, data, payload, at):
                if start < head:
                    caller.out.append(part(data, start, head))
                start = at
                self.frame(kind, flags, stream_id, data[payload:at])
        if start < at:
            caller.out.append(part(data, start, at))
        caller.chores -= (room - caller.room) >> 13
        if at < end:
            self.keep(data, at)

    def _passes(self, exchange: Exchange, what: int, data: bytes, start: int, end: int) -> bool:
        if exchange.is_over or exchange.passage is None:
            return False
        if what >> 8 == frames.HEADERS:
            return self._head_passes(exchange, what, data[start:end])
        size = end - start
        if what != _DATA or not size:
            return False
        if not exchange.has_data:
            if length_of(data[start : start + PREFIX_BYTES]) > self.relay.site.max_message_bytes:
                return False
            exchange.has_data = True
        exchange.room -= size
        self.caller.room -= size
        return True

    def _head_passes(self, exchange: Exchange, what: int, block: bytes) -> bool:
        """Blocks that have come before, and mean no error."""
        answer = self.reader.kept(block)
        if answer is None:
            return False
        if what == _HEAD:
            exchange.has_head = True
            return True
        if what != _END or answer.status != 0 or not exchange.is_asked:
            return False
        exchange.is_answered = True
        self.relay.answered(exchange)
        return True

    def answer_begins(self, exchange: Exchange, flags: int, size: int, piece: Piece) -> None:
        """A frame that is not all here goes on in pieces, if all of it fits."""
        caller = self.caller
        if len(piece) == size or caller.is_strained:
            super().answer_begins(exchange, flags, size, piece)
            return
        exchange.room -= size
        caller.room -= size
        caller.out += (frames.head(size, frames.DATA, flags, exchange.id), piece)
        caller.is_within = True

    def rest(self, flags: int, stream_id: int) -> Sink:
        return self._rest_of_frame if self.caller.is_within else super().rest(flags, stream_id)

    def _rest_of_frame(self, piece: Piece, is_last: bool) -> None:
        self.caller.go_on(piece, is_last=is_last)

    def lost(self) -> None:
        if self.caller.is_within:  # its frame has to end; the stream ends with an error
            self.caller.go_on(bytes(self.left), is_last=True)
        super().lost()
