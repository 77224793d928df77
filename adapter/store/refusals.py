"""Remembers briefly what a store lacks or refuses; and for good which versions cannot be unpacked,
and how much room a version needs.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from adapter.errors import AdapterError, ArtifactNotFound, InvalidArtifact, NoRoom, StoreDenied
from adapter.runtime import clock

MAX_REMEMBERED = 1024
# Anything else may be otherwise a moment later, time-outs and failures of the store above all.
_SECONDS: dict[type[AdapterError], float] = {
    ArtifactNotFound: 5.0,
    StoreDenied: 1.0,
    NoRoom: 5.0,
    InvalidArtifact: math.inf,
}

# a key, and what was sought there: nothing more for the key itself; or a version
Question = tuple[str, ...]


class Refusals:
    """The last refusals of one store, which save it from the same request a moment later."""

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


@dataclass(slots=True)
class Need:
    """The room on disk that a version needs, as far as that was seen."""

    size_bytes: int = 0  # the most that was ever requested in all
    inodes: int = 0
    stated_bytes: int = 0  # in all by the archive's own word, for messages alone


class Needs:
    """The needs of versions: a fetch that ran short while it unpacked says what the next one has to
    reserve first.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Question, Need] = OrderedDict()

    def of(self, version: Question) -> Need:
        return replace(self._seen.get(version, Need()))

    def learn(self, version: Question, need: Need) -> None:
        self._seen[version] = need
        self._seen.move_to_end(version)
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
