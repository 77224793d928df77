"""The connection to the server beside us, which serves what does not go straight to Triton."""

from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange, Upload, data_frame
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.link import Link
from adapter.dataplane.relay.wire import Piece

if TYPE_CHECKING:
    from adapter.dataplane.relay.relay import Relay

_CREDIT_BYTES = 2**14


class Served(Link):
    """Its windows for requests end here: what has left may be sent again by the caller. Those of
    streams pass for answers.
    """

    def __init__(self, relay: "Relay") -> None:
        caller = relay.caller
        super().__init__(relay, {frames.INITIAL_WINDOW_SIZE: caller.initial_window})
        self._stream_room = frames.DEFAULT_WINDOW
        self._uploads: dict[int, tuple[Exchange, Upload]] = {}  # that have something to send

    def new_upload(self) -> Upload:
        return Upload(self._stream_room)

    def sent_to_caller(self, size: int) -> int:
        self.credit(size)
        return size if self.relay.triton is not None else 0

    def pass_settings(self, values: list[tuple[int, int]], ticket: list[int]) -> None:
        found = [value for key, value in values if key == frames.INITIAL_WINDOW_SIZE]
        self._tickets.append(ticket)
        self.control(frames.settings({frames.INITIAL_WINDOW_SIZE: found[-1]} if found else {}))

    # -- requests ---------------------------------------------------------------------------

    def upload(self, exchange: Exchange, upload: Upload, piece: Piece, *, end: bool) -> None:
        upload.queue.append((piece, end))
        self._uploads[exchange.id] = (exchange, upload)
        self._send_on()

    def _send_on(self) -> None:
        """A frame of each in turn."""
        waiting = list(self._uploads)
        while waiting:
            waiting = [stream_id for stream_id in waiting if self._send_one(stream_id)]

    def _send_one(self, stream_id: int) -> bool:
        """Whether there is more that can be sent."""
        exchange, upload = self._uploads[stream_id]
        piece, end = upload.queue[0]
        room = min(upload.room, self.room, frames.FRAME_BYTES)
        if piece and room <= 0:
            return False
        sent = piece[:room]
        if len(piece) > room:
            upload.queue[0] = (piece[room:], end)
            end = False
        else:
            upload.queue.popleft()
        self.out.append(data_frame(stream_id, sent, end=end))
        upload.room -= len(sent)
        self.room -= len(sent)
        self._credit_caller(exchange, upload, len(sent))
        if not upload.queue:
            del self._uploads[stream_id]
        return bool(upload.queue)

    def _credit_caller(self, exchange: Exchange, upload: Upload, size: int) -> None:
        self.caller.credit(size)
        upload.owed += size
        if upload.owed >= _CREDIT_BYTES and not exchange.is_asked:
            self.caller.control(frames.window_update(exchange.id, upload.owed))
            upload.owed = 0

    def release(self, exchange: Exchange, code: int) -> None:
        super().release(exchange, code)
        _, upload = self._uploads.pop(exchange.id, (exchange, None))
        if upload is not None:
            self.caller.credit(len(upload))

    # -- windows ----------------------------------------------------------------------------

    def settings(self, values: list[tuple[int, int]]) -> None:
        for key, value in values:
            if key == frames.INITIAL_WINDOW_SIZE:
                difference, self._stream_room = value - self._stream_room, value
                for exchange in self.caller.exchanges.values():
                    if exchange.upload is not None:
                        exchange.upload.room += difference
        self.acknowledge()
        self._send_on()

    def window_update(self, stream_id: int, increment: int) -> None:
        if stream_id:
            exchange = self.exchange_of(stream_id)
            if exchange is None or exchange.upload is None:
                return
            exchange.upload.room += increment
            if exchange.upload.room > frames.MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
        else:
            self.more_room(increment)
        self._send_on()
