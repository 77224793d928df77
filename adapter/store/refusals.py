"""Remembers for a moment what a store surely does not have, and what it refuses; and for good which
versions of what it has cannot be unpacked, or kept.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from adapter.errors import AdapterError, ArtifactNotFound, InvalidArtifact, StoreDenied
from adapter.runtime import clock

MAX_REMEMBERED = 1024
# Anything else may be otherwise a moment later, time-outs and failures of the store above all.
_SECONDS: dict[type[AdapterError], float] = {
    ArtifactNotFound: 5.0,
    StoreDenied: 1.0,
    InvalidArtifact: math.inf,
}

# a key, and what was looked for there: nothing more for the key itself; or a version
Question = tuple[str, ...]


class Refusals:
    """The last answers of one store that save it from being asked the same again at once."""

    def __init__(self, clock: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._found: OrderedDict[Question, tuple[float, type[AdapterError], str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def remember(self, question: Question, error: AdapterError) -> None:
        """Remember the error, if it is one that will be the same in a moment."""
        if (seconds := _SECONDS.get(type(error))) is None:
            return
        self._found.pop(question, None)
        self._found[question] = (self._clock() + seconds, type(error), str(error))
        if len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)

    def known(self, question: Question) -> AdapterError | None:
        """Return the error that is remembered, if there is one."""
        if (known := self._found.get(question)) is None:
            return None
        until, kind, text = known
        if self._clock() < until:
            return kind(text)
        del self._found[question]
        return None

    def raise_known(self, question: Question) -> None:
        if (error := self.known(question)) is not None:
            raise error
