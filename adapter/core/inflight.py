"""Bounds the sum of the request bodies that are on their way to Triton.

Each body that is large enough to count claims its whole length, in order of arrival, before any of
it is passed on, so that a body that was begun can always be finished.
"""

from collections import OrderedDict
from collections.abc import Callable


class Claim:
    """The claim of one body. `end` is to be called once the body is sent or given up; further calls
    do nothing.
    """

    __slots__ = ("_end", "begin", "size")

    def __init__(
        self, size: int, begin: Callable[[], None], end: Callable[["Claim"], None]
    ) -> None:
        self.size = size
        self.begin = begin
        self._end: Callable[[Claim], None] | None = end

    def end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(self)


def _nothing() -> None: ...


class InflightBytes:
    """The claims on `limit` bytes; `taken` are claimed now. A larger body is sent alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: OrderedDict[Claim, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of bodies that wait."""
        return len(self._waiting)

    def has_room_for(self, size: int) -> bool:
        return not self._waiting and (self.taken == 0 or self.taken + size <= self.limit)

    def claim(self, size: int, act: Callable[[], None] = _nothing) -> Claim:
        """Claim `size` bytes. `act`, which must not raise, is called once they are granted: before
        this returns, or within the `end` of another claim.
        """
        claim = Claim(size, act, self._end)
        has_room = self.has_room_for(size)
        self._waiting[claim] = None
        if has_room:
            self._begin_next()
        return claim

    def _begin_next(self) -> None:
        claim, _ = self._waiting.popitem(last=False)
        self.taken += claim.size
        claim.begin()

    def _end(self, claim: Claim) -> None:
        if claim in self._waiting:
            del self._waiting[claim]
        else:
            self.taken -= claim.size
        while self._waiting:
            size = next(iter(self._waiting)).size
            if self.taken and self.taken + size > self.limit:
                return
            self._begin_next()
