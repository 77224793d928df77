"""One exchange with Triton: what its connection reports, kept until the coroutine looks at it."""

from collections.abc import Callable

from adapter.control.door import ModelRecord
from adapter.core.calls import Hold, Upstream
from adapter.errors import AdapterError


class Exchange:
    """Receives the answer to one request after the other, and wakes the coroutine for it."""

    __slots__ = (
        "_wake",
        "answer",
        "error",
        "has_ended",
        "is_answered",
        "is_blocked",
        "pieces",
        "upstream",
    )

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.upstream: Upstream | None = None  # while an exchange is under way
        self.answer: bytes | None = None  # a body that came at once
        self.pieces: list[bytes] = []  # of a body that comes in pieces
        self.error: AdapterError | None = None
        self.is_answered = False  # the head of the answer is there
        self.has_ended = False  # the answer is there, to its last byte
        self.is_blocked = False  # Triton does not take what is written

    def begin(self, upstream: Upstream, record: ModelRecord) -> None:
        """Begin an exchange on a connection to Triton."""
        self.upstream = upstream
        self.answer = None
        self.pieces = []
        self.error = None
        self.is_answered = False
        self.has_ended = False
        self.is_blocked = False
        upstream.begin(self, record)

    def leave(self, hold: Hold | None) -> None:
        """Give the exchange up; Triton goes on with a request that it has, which `hold` is of."""
        upstream = self.upstream
        self.upstream = None
        self.pieces = []
        self.answer = None
        self.error = None
        if upstream is not None:
            upstream.leave(self, hold)

    def take_pieces(self) -> list[bytes]:
        """Return the pieces of the answer that have come since."""
        pieces = self.pieces
        self.pieces = []
        return pieces

    # -- Receiver ---------------------------------------------------------------------------

    def answered_whole(self, body: bytes) -> None:
        """Take a whole answer."""
        self.answer = body
        self.is_answered = True
        self.has_ended = True
        self._wake()

    def answered(self) -> None:
        """Note that the head of the answer is there, and its body comes in pieces."""
        self.is_answered = True
        self._wake()

    def received(self, piece: bytes) -> None:
        """Take a piece of the answer."""
        self.pieces.append(piece)
        self._wake()

    def ended(self) -> None:
        """Note that the last piece has come."""
        self.has_ended = True
        self._wake()

    def failed(self, error: AdapterError) -> None:
        """Take the error that ends the exchange."""
        self.error = error
        self._wake()

    def pause_writing(self) -> None:
        """Note that Triton does not take what is written."""
        self.is_blocked = True

    def resume_writing(self) -> None:
        """Note that Triton takes more."""
        self.is_blocked = False
        self._wake()
