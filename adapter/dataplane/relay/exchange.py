"""One request of the caller, from its head until both sides have ended it."""

from adapter.dataplane.relay.message import PREFIX_BYTES, MessageWatch, length_of
from adapter.dataplane.relay.ports import Call, Passage
from adapter.dataplane.relay.streams import Stream
from adapter.errors import InferenceFailed


class Exchange:
    """`held`: what came before it was known where the request goes. `up` is the stream it went
    on as; `passage` is there when that one is Triton's.
    """

    __slots__ = (
        "_answer_bytes",
        "_watch",
        "call",
        "caller",
        "deadline",
        "has_head",
        "held",
        "is_over",
        "passage",
        "up",
    )

    def __init__(self, caller: Stream, call: Call, deadline: float) -> None:
        self.caller = caller
        self.call = call
        self.deadline = deadline
        self.held: list[bytes] = []
        self.up: Stream | None = None
        self.passage: Passage | None = None
        self.has_head = False  # the caller has had the head of the answer
        self.is_over = False
        self._answer_bytes = 0
        self._watch: MessageWatch | None = None

    def start(self, start: bytes, *, end: bool) -> None:
        """The first bytes of a message that names its model."""
        watch = MessageWatch(length_of(start))
        watch.feed(start[PREFIX_BYTES:])
        if end:
            watch.end()
        self._watch = watch

    def check_request(self, piece: bytes, *, end: bool) -> None:
        if self.passage is not None and self._watch is not None:
            self._watch.feed(piece)
            if end:
                self._watch.end()

    def check_answer(self, piece: bytes, most: int) -> None:
        if self.passage is None:
            return
        is_first, self._answer_bytes = not self._answer_bytes, self._answer_bytes + len(piece)
        size = self._answer_bytes - PREFIX_BYTES
        if is_first and len(piece) >= PREFIX_BYTES:
            size = length_of(piece)
        if size > most:
            raise InferenceFailed(f"Triton's answer is too large: {size} vs. {most} bytes")
