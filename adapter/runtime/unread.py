"""Bounds the answers of streams that their callers have not taken yet.

Triton holds nothing back: what a model answers faster than it is read piles up there, and stays
Triton's memory. So answers are read as they come, whatever their callers do, and are kept here.
When all of them together are too many, the stream with the most is cut.
"""

import logging
from collections import deque
from collections.abc import Callable
from math import inf

from adapter.errors import NotTaken
from adapter.runtime.byte_budget import ByteBudget

log = logging.getLogger(__name__)

# Keeping an answer takes so many bytes beyond its own.
_EACH_BYTES = 64
# So long after one line of the log no other says that a stream is cut.
_LINE_SECONDS = 1.0


class Unread:
    """The answers of all streams that their callers have not taken; they count in `budget`."""

    # `limit`: of all streams, in bytes; `on_cut`: called for each stream that is cut
    def __init__(
        self, budget: ByteBudget, limit: int, on_cut: Callable[[], None] = lambda: None
    ) -> None:
        self.limit = limit
        self.held = 0
        self._budget = budget
        self._on_cut = on_cut
        self._streams: dict[Answers, None] = {}
        self._logged = -inf

    def stream(self, on_cut: Callable[[], None]) -> "Answers":
        """Begin with a stream. `on_cut` ends a write to its caller that may take for ever."""
        return Answers(self, on_cut)

    def count(self, answers: "Answers", size: int) -> None:
        """Count `size` more bytes of one stream; cut a stream if all of them are over the limit."""
        self.held += size
        self._budget.count(size)
        answers.size += size
        if answers.size:
            self._streams[answers] = None
        else:
            self._streams.pop(answers, None)
        if self.held > self.limit:
            self._cut_one()

    def _cut_one(self) -> None:
        """Cut no stream that is alone and has one answer, however large that is."""
        found = max(self._streams, key=lambda each: (each.is_behind, each.size))
        if not found.is_behind and len(self._streams) == 1:
            return
        why = f"{found.size} bytes of its answers wait, and {self.held} of all streams"
        if (now := self._budget.clock()) - self._logged >= _LINE_SECONDS:
            self._logged = now
            log.warning("stream.cut", extra={"reason": why, "limit_bytes": self.limit})
        self._on_cut()
        found.cut(NotTaken(f"the caller reads too slowly: {why}; at most {self.limit} are kept"))


class Answers:
    """Answers of one stream that its caller has not taken: the current one, and those behind it."""

    __slots__ = ("_behind", "_current", "_on_cut", "_unread", "error", "is_dropped", "size")

    def __init__(self, unread: Unread, on_cut: Callable[[], None]) -> None:
        self._unread = unread
        self._on_cut = on_cut
        self._behind: deque[bytes] = deque()
        self._current = 0
        self.size = 0
        self.is_dropped = False
        self.error: NotTaken | None = None

    @property
    def is_behind(self) -> bool:
        """Return whether it has more than the answer that its caller takes next."""
        return len(self._behind) + bool(self._current) > 1

    def put(self, answer: bytes) -> None:
        """Keep an answer, unless all are dropped."""
        if not self.is_dropped:
            self._behind.append(answer)
            self._unread.count(self, len(answer) + _EACH_BYTES)

    def take(self) -> bytes | None:
        """Return the next answer; what was taken before has reached the caller. None: there is no
        answer now.
        """
        taken, self._current = self._current, 0
        if taken and not self.is_dropped:
            self._unread.count(self, -taken)
        if not self._behind:
            return None
        answer = self._behind.popleft()
        self._current = len(answer) + _EACH_BYTES
        return answer

    def cut(self, error: NotTaken) -> None:
        """Drop all answers because of `error`, and end the write to the caller."""
        self.error = error
        self.drop()
        self._on_cut()

    def drop(self) -> None:
        """Keep nothing, now and later."""
        self.is_dropped = True
        self._behind.clear()
        self._unread.count(self, -self.size)
