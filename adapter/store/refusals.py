"""Remembers briefly what a store lacks or refuses, and which versions cannot be unpacked.

A store may err about anything that it says, and a proxy before it may garble what it sends. So what
it says of a key is forgotten in seconds. That a version cannot be unpacked is forgotten in a
minute, as to find it out costs up to two downloads. A version is known by its size as well as by
its ETag: what was learned of an object under a false length is never applied to the same object
under the right one.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from adapter.errors import AdapterError, ArtifactNotFound, InvalidArtifact, NoRoom, StoreDenied
from adapter.runtime import clock

MAX_REMEMBERED = 1024
# How long each kind of refusal is remembered. Any other error may not come again a moment later,
# time-outs and failures of the store above all.
Seconds = Mapping[type[AdapterError], float]
OF_KEYS: Seconds = {ArtifactNotFound: 5.0, StoreDenied: 1.0, InvalidArtifact: 5.0}
OF_VERSIONS: Seconds = {NoRoom: 5.0, InvalidArtifact: 60.0}

# a key, and what was sought there: nothing more for the key itself; or a version
Question = tuple[str, ...]


class Refusals:
    """Remembers the last refusals, which saves the store the same request a moment later."""

    def __init__(self, seconds: Seconds, clock: Callable[[], float] = clock.now) -> None:
        self._seconds = seconds
        self._clock = clock
        self._found: OrderedDict[Question, tuple[float, type[AdapterError], str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def remember(self, question: Question, error: AdapterError) -> None:
        """Remember the error, if it is one that will be the same in a moment."""
        if (seconds := self._seconds.get(type(error))) is None:
            return
        self._found.pop(question, None)
        self._found[question] = (self._clock() + seconds, type(error), str(error))
        if len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)

    def knows(self, question: Question) -> bool:
        """Return whether a refusal is remembered."""
        if (known := self._found.get(question)) is None:
            return False
        if self._clock() < known[0]:
            return True
        del self._found[question]
        return False

    def raise_known(self, question: Question) -> None:
        """Raise the error that is remembered, if there is one."""
        if self.knows(question):
            _, kind, text = self._found[question]
            raise kind(text)
