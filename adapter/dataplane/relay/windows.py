"""The caller's connection, as far as windows and settings go: those pass from end to end.

So the caller may send what Triton takes, and Triton what the caller takes. The connection's window
for answers is the one thing that two have a part in. What the server beside us has sent is a debt:
the caller's next window updates pay it and are not for Triton, and until it is paid what does not
fit waits here.
"""

from collections import deque
from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.exchange import Exchange, data_frame
from adapter.dataplane.relay.frames import Code, ConnectionFault
from adapter.dataplane.relay.headers import HeaderReader
from adapter.dataplane.relay.inbound import Inbound
from adapter.dataplane.relay.ports import Call
from adapter.dataplane.relay.wire import Piece

if TYPE_CHECKING:
    from adapter.dataplane.relay.link import Link

MAX_STREAMS = 1000
HEADER_BYTES = 2**14  # of a request: as much as grpc ever takes
_CREDIT_BYTES, _FEW_BYTES = 2**14, 2**15


class Waiting:
    """A frame that the caller has no window for; `size` of it counts."""

    __slots__ = ("frame", "link", "size", "stream_id")

    def __init__(self, stream_id: int, frame: bytes, size: int, link: "Link | None") -> None:
        self.stream_id = stream_id
        self.frame = frame
        self.size = size
        self.link = link


class CallerWindows(Inbound):
    """`initial_window` and `most_frame` are for what we send, by its settings; `stream_window` for
    what it sends.
    """

    def __init__(self, reader: HeaderReader[Call]) -> None:
        super().__init__(reader, HEADER_BYTES, frames.FRAME_BYTES)
        self.exchanges: dict[int, Exchange] = {}
        self.initial_window, self.most_frame = frames.DEFAULT_WINDOW, frames.FRAME_BYTES
        self.stream_window = frames.DEFAULT_WINDOW
        self.debt = 0
        self._waiting: deque[Waiting] = deque()
        self._allowed = frames.DEFAULT_WINDOW  # for what it sends
        self._due = 0  # of which it is not told yet
        self._tickets: deque[list[int]] = deque()  # its settings: how many have not taken them
        self._awaiting: deque[Link | None] = deque([None])  # whose settings it has to take
        values = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            frames.MAX_HEADER_LIST_SIZE: HEADER_BYTES,
        }
        self.out.append(frames.settings(values))

    def links(self) -> "list[Link]":
        raise NotImplementedError

    def all_sent(self) -> None:
        """Nothing waits any more."""
        raise NotImplementedError

    def triton_window(self, increment: int) -> None:
        """The caller takes so much more of Triton."""
        raise NotImplementedError

    # -- what it sends ----------------------------------------------------------------------

    def use(self, size: int) -> None:
        self._allowed -= size
        if self._allowed < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more than the connection's window")

    def credit(self, size: int) -> None:
        """Triton takes so much more, or so much was not for Triton. Little by little is told at
        once only to who has little left.
        """
        self._due += size
        if self._due >= _CREDIT_BYTES or self._allowed < _FEW_BYTES:
            if self._due:
                self.control(frames.window_update(0, self._due))
            self._allowed += self._due
            self._due = 0

    def open_again(self) -> None:
        """Triton is lost, and what it had not given back with it; others take the rest."""
        self.credit(max(0, frames.DEFAULT_WINDOW - self._allowed - self._due))

    # -- what it takes ----------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting) or self.is_within

    @property
    def is_strained(self) -> bool:
        """Whether Triton may send more than fits."""
        return bool(self.debt or self._waiting)

    def send(self, stream_id: int, frame: bytes, size: int, link: "Link | None" = None) -> None:
        """`size` of `frame` is DATA. In order; at once if it fits."""
        if self._waiting or self.is_within or size > max(self.room, 0):
            self._waiting.append(Waiting(stream_id, frame, size, link))
            self._send_waiting()
        else:
            self._send(frame, size, link)

    def send_data(self, exchange: Exchange, piece: Piece, link: "Link", *, end: bool) -> None:
        exchange.room -= len(piece)
        last = max(len(piece) - 1, 0) // frames.FRAME_BYTES
        for i in range(last + 1):
            part = piece[i * frames.FRAME_BYTES : (i + 1) * frames.FRAME_BYTES]
            frame = data_frame(exchange.id, part, end=end and i == last)
            self.send(exchange.id, frame, len(part), link)

    def _send(self, frame: bytes, size: int, link: "Link | None") -> None:
        self.out.append(frame)
        self.room -= size
        if link is not None:
            self.debt += link.sent_to_caller(size)

    def _send_waiting(self) -> None:
        while self._waiting and not self.is_within:
            first = self._waiting[0]
            if first.size > max(self.room, 0):
                self._send_a_part(first)
                return
            self._waiting.popleft()
            self._send(first.frame, first.size, first.link)
        if not self._waiting:
            self.all_sent()

    def _send_a_part(self, first: Waiting) -> None:
        room, at = self.room, frames.HEAD_BYTES
        if room > 0:
            _, _, _, flags, _ = frames.read_head(first.frame)
            payload = first.frame[at:]
            self._send(data_frame(first.stream_id, payload[:room], end=False), room, first.link)
            first.frame = data_frame(first.stream_id, payload[room:], end=bool(flags))
            first.size -= room

    def go_on(self, piece: Piece, *, is_last: bool) -> None:
        super().go_on(piece, is_last=is_last)
        self._send_waiting()

    def unsend(self, stream_id: int) -> None:
        """The stream is gone, and with it what waits."""
        if self._waiting:
            for one in [one for one in self._waiting if one.stream_id == stream_id]:
                self._waiting.remove(one)
                if one.link is not None:
                    one.link.credit(one.size)

    def connection_window_update(self, increment: int) -> None:
        self.more_room(increment)
        paid = min(increment, self.debt)
        self.debt -= paid
        if increment > paid:
            self.triton_window(increment - paid)
        self._send_waiting()

    # -- settings ---------------------------------------------------------------------------

    def settings(self, values: list[tuple[int, int]]) -> None:
        """They hold once the links have taken them, so it is then that they are acknowledged."""
        wanted = []
        for key, value in values:
            if key == frames.INITIAL_WINDOW_SIZE:
                self._new_initial_window(value)
                wanted.append((key, value))
            elif key == frames.MAX_FRAME_SIZE:
                self.most_frame = value
                wanted.append((key, value))
        ticket = [0]
        for link in self.links() if wanted else ():
            ticket[0] += 1
            link.pass_settings(wanted, ticket)
        self._tickets.append(ticket)
        self.acknowledge()

    def _new_initial_window(self, size: int) -> None:
        difference, self.initial_window = size - self.initial_window, size
        for exchange in self.exchanges.values():
            exchange.room += difference
            if exchange.room > frames.MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")

    def acknowledge(self) -> None:
        """What has been taken, in order."""
        while self._tickets and not self._tickets[0][0]:
            self._tickets.popleft()
            self.control(frames.head(0, frames.SETTINGS, frames.ACK, 0))

    def pass_settings(self, values: dict[int, int], link: "Link") -> None:
        """Triton's. It may go on as before until they are acknowledged, and so may we."""
        if frames.MAX_CONCURRENT_STREAMS in values:
            most = min(values[frames.MAX_CONCURRENT_STREAMS], MAX_STREAMS)
            values[frames.MAX_CONCURRENT_STREAMS] = most
        self.stream_window = values.get(frames.INITIAL_WINDOW_SIZE, self.stream_window)
        self.max_frame = max(values.get(frames.MAX_FRAME_SIZE, 0), self.max_frame)
        self._awaiting.append(link)
        self.control(frames.settings(values))

    def settings_acknowledged(self) -> None:
        link = self._awaiting.popleft() if self._awaiting else None
        if link is not None:
            link.acknowledge()
