"""The connections that a caller's goes on to: Triton's, and that of the server beside us.

Streams have the numbers that the caller gave them.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange, Upload
from adapter.dataplane.relay.frames import StreamFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.inbound import Inbound, Sink
from adapter.dataplane.relay.message import length_of
from adapter.dataplane.relay.wire import Piece
from adapter.errors import InferenceFailed

if TYPE_CHECKING:
    from adapter.dataplane.relay.ports import Answer
    from adapter.dataplane.relay.relay import Relay

_HEADER_BYTES = 4 * 2**20  # texts of Triton's errors may be long
_CREDIT_BYTES = 2**14


class Link(Inbound):
    def __init__(self, relay: "Relay", values: dict[int, int]) -> None:
        super().__init__(
            HeaderReader(relay.site.answers, _HEADER_BYTES), _HEADER_BYTES, frames.MAX_FRAME_BYTES
        )
        self.relay = relay
        self.caller = relay.caller
        self.was_connected = False
        self._due = 0  # for what did not go on to the caller, or not at its cost
        self._tickets: deque[list[int]] = deque([[1]])  # of settings that it has to acknowledge
        greeting = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.MAX_HEADER_LIST_SIZE: _HEADER_BYTES,
        }
        self.out += (frames.PREFACE, frames.settings(greeting | values))

    # -- of the connection ------------------------------------------------------------------

    def connected(self) -> None:
        self.was_connected = True
        if self.caller.is_paused:
            self.read_on(is_wanted=False)

    def flush_all(self) -> None:
        self.relay.flush()

    def lost(self) -> None:
        self.relay.link_lost(self)

    def gone(self) -> None:
        """Nobody waits for that."""

    def paused(self) -> None:
        self.caller.read_on(is_wanted=self.relay.may_read())

    def last_stream(self) -> int:
        return 0

    def going(self, last_stream_id: int) -> None:
        self.relay.link_going(self, last_stream_id)

    def credit(self, size: int) -> None:
        """The window of the connection, for what the caller gives none back."""
        self._due += size
        if self._due >= _CREDIT_BYTES:
            self.control(frames.window_update(0, self._due))
            self._due = 0

    def sent_to_caller(self, size: int) -> int:
        """How much of it is a debt to Triton."""
        raise NotImplementedError

    def upload(self, exchange: Exchange, upload: Upload, piece: Piece, *, end: bool) -> None:
        raise NotImplementedError

    def release(self, exchange: Exchange, code: int) -> None:
        """Nobody waits for it any more."""
        self.control(frames.reset(exchange.id, code))

    def pass_settings(self, values: list[tuple[int, int]], ticket: list[int]) -> None:
        self._tickets.append(ticket)
        self.control(frames.settings(dict(values)))

    def settings_acknowledged(self) -> None:
        if self._tickets:
            self._tickets.popleft()[0] -= 1
            self.caller.acknowledge()

    def take_all_settings(self) -> None:
        """It will take none any more."""
        while self._tickets:
            self.settings_acknowledged()

    def acknowledge(self) -> None:
        self.control(frames.head(0, frames.SETTINGS, frames.ACK, 0))

    # -- answers ----------------------------------------------------------------------------

    def walk(self, data: bytes, at: int) -> None:
        end = len(data)
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.read_head(data, at)
            start, at = at + frames.HEAD_BYTES, at + frames.HEAD_BYTES + (high << 8 | low)
            if at > end:
                at = start - frames.HEAD_BYTES
                break
            self.frame(kind, flags, stream_id, data[start:at])
        if at < end:
            self.keep(data, at)

    def exchange_of(self, stream_id: int) -> Exchange | None:
        """None when nobody waits for it any more."""
        exchange = self.caller.exchanges.get(stream_id)
        if exchange is None or exchange.link is not self or exchange.is_over:
            return None
        return exchange

    def data(self, flags: int, stream_id: int, size: int, piece: Piece) -> None:
        exchange = self.exchange_of(stream_id)
        if exchange is None or not self._is_good(exchange, flags, piece):
            self.credit(len(piece))
        else:
            exchange.has_data = True
            self.answer_begins(exchange, flags, size, piece)

    def rest(self, flags: int, stream_id: int) -> Sink:
        exchange = self.exchange_of(stream_id)
        return self._drop if exchange is None else partial(self._answer_data, exchange, flags)

    def _is_good(self, exchange: Exchange, flags: int, piece: Piece) -> bool:
        if exchange.passage is None:
            return True
        most = self.relay.site.max_message_bytes
        if not exchange.has_data and length_of(piece) > most:
            text = f"Triton's answer is too large: {length_of(piece)} vs. {most} bytes"
        elif flags:
            exchange.is_answered = True
            text = "Triton's answer has no trailers"
        else:
            return True
        self.relay.fail(exchange, InferenceFailed(text))
        return False

    def answer_begins(self, exchange: Exchange, flags: int, size: int, piece: Piece) -> None:
        self._answer_data(exchange, flags, piece, len(piece) == size)

    def _answer_data(self, exchange: Exchange, flags: int, piece: Piece, is_last: bool) -> None:
        if exchange.is_over:
            self.credit(len(piece))
            return
        end = bool(flags) and is_last
        self.caller.send_data(exchange, piece, self, end=end)
        if end:
            self.relay.answered(exchange)

    def _drop(self, piece: Piece, _: bool) -> None:
        self.credit(len(piece))

    def padding(self, stream_id: int, size: int) -> None:
        self.credit(size)
        self.control(frames.window_update(stream_id, size))

    def block(self, flags: int, stream_id: int, block: bytes) -> None:
        exchange = self.exchange_of(stream_id)
        try:
            answer: Answer = self.reader.read(block)
        except StreamFault as fault:
            if exchange is not None:
                self.relay.fail(exchange, InferenceFailed(f"Triton's answer is odd: {fault}"))
            return
        if exchange is not None:
            end = bool(flags & frames.END_STREAM)
            exchange.is_answered = end
            self.relay.answer_head(exchange, answer, end=end)

    def was_reset(self, stream_id: int, code: int) -> None:
        exchange = self.exchange_of(stream_id)
        if exchange is not None:
            exchange.is_answered = True
            self.relay.link_reset(exchange, code)
