"""Bounds the sum of the request bodies that are on their way to Triton.

Each body that is large enough to count claims all of its length before any of it goes on, in the
order of their asking, so that what has begun can always end.
"""

from collections import OrderedDict
from collections.abc import Callable


class Claim:
    """Of one body. `end` is to be called once all of it has gone on, or no more of it is to go;
    further calls do nothing.
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


class InflightBytes:
    """`taken`: bytes that are claimed now. A body larger than `limit` goes alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: OrderedDict[Claim, None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many bodies wait."""
        return len(self._waiting)

    def has_room_for(self, size: int) -> bool:
        return not self._waiting and (self.taken == 0 or self.taken + size <= self.limit)

    def claim(self, size: int, act: Callable[[], None]) -> Claim:
        """`act` is called once there is room: before this returns where there is, and else within
        the `end` of another claim. It must not raise.
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
