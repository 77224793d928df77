"""Bodies that are held: for the endpoint while their models are fetched, loaded and asked, and of
loads over V2 that bring files.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adapter.errors import TooManyWaiting

_ALL_BYTES = 256 * 2**20


class HeldBodies:
    """Bounds the sum of the bodies that are held. `held`: the bytes that have come of them.

    What is announced counts for nothing: whoever announces much and sends little would keep all
    others out.
    """

    def __init__(self, limit: int = _ALL_BYTES) -> None:
        self.limit = limit
        self.held = 0

    @contextmanager
    def hold(self, announced: int) -> Iterator[Callable[[int], None]]:
        """Yield what counts the bytes of one body as they come. Both raise TooManyWaiting where
        there is no room for them.
        """
        self._refuse_beyond(announced)
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            self._refuse_beyond(size)
            self.held += size
            taken += size

        try:
            yield take
        finally:
            self.held -= taken

    def _refuse_beyond(self, size: int) -> None:
        if self.held + size > self.limit:
            raise TooManyWaiting(
                f"{self.held} bytes of bodies are held; with {size} more these would be above the "
                f"limit of {self.limit}"
            )
