"""One request of the caller, from its head until the caller has the end of the answer."""

from collections import deque
from typing import TYPE_CHECKING

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.ports import Call, Passage

if TYPE_CHECKING:
    from adapter.dataplane.relay.link import Link
    from adapter.dataplane.relay.message import MessageWatch


class Exchange:
    """`held`: what came before it was known where the request goes. `link`: where it went;
    `passage` is there when that is Triton. `room`: the caller's window for the answer.
    """

    __slots__ = (
        "call",
        "deadline",
        "granted",
        "has_data",
        "has_head",
        "held",
        "id",
        "is_answered",
        "is_asked",
        "is_over",
        "link",
        "passage",
        "room",
        "upload",
        "watch",
    )

    def __init__(self, stream_id: int, call: Call, room: int, deadline: float) -> None:
        self.id = stream_id
        self.call = call
        self.room = room
        self.deadline = deadline
        self.held = b""
        self.granted = 0  # window updates that came before there was a link
        self.link: Link | None = None
        self.passage: Passage | None = None
        self.watch: MessageWatch | None = None
        self.upload: Upload | None = None
        self.has_head = self.has_data = False  # of the answer, the caller has
        self.is_asked = False  # the caller has ended its request
        self.is_answered = False  # the link has ended its answer
        self.is_over = False  # nothing passes any more; the caller is told, or has gone


class Upload:
    """What the server beside us has still to take of a request."""

    __slots__ = ("owed", "queue", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.queue: deque[tuple[bytes | memoryview, bool]] = deque()  # and whether it is the last
        self.owed = 0  # has gone on, and the caller does not know yet

    def __len__(self) -> int:
        return sum(len(piece) for piece, _ in self.queue)


def data_frame(stream_id: int, piece: bytes | memoryview, *, end: bool) -> bytes:
    return frames.head(len(piece), frames.DATA, int(end), stream_id) + piece
