"""Keeps many requests that fail alike from filling the log, and from paying for a line each."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

from adapter.errors import ModelFailed, OutOfMemory

log = logging.getLogger(__name__)

_LINES, _SECONDS = 20, 1.0
# Lines of these are counted for each model.
_OF_MODEL = (ModelFailed, OutOfMemory)

Kind: TypeAlias = tuple[type[Exception], int, str | None]


def _later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


class LogLimit:
    """Admits 20 lines in a second for each class of error, and one in each second while there are
    more; all at debug. It logs how many more there were.

    `later` calls a function after so many seconds.
    """

    def __init__(
        self, listener: str, *, later: Callable[[float, Callable[[], None]], None] = _later
    ) -> None:
        self._listener = listener
        self._later = later
        self._counts: dict[Kind, int] = {}
        self._flood: set[Kind] = set()  # of the last second

    def admits(self, error: Exception, level: int) -> bool:
        """Count a line of `level` about the error; return whether to write it."""
        if log.isEnabledFor(logging.DEBUG):
            return True
        model_id = error.model_id if isinstance(error, _OF_MODEL) else None
        counts, key = self._counts, (type(error), level, model_id)
        if not counts:
            self._later(_SECONDS, self._sum_up)
        count = counts[key] = counts.get(key, 0) + 1
        return count <= (1 if key in self._flood else _LINES)

    def _sum_up(self) -> None:
        counts, self._counts = self._counts, {}
        before, self._flood = self._flood, {key for key, n in counts.items() if n > _LINES}
        for key, count in counts.items():
            kind, level, model_id = key
            if (more := count - (1 if key in before else _LINES)) > 0:
                fields: dict[str, object] = {"listener": self._listener, "error": kind.__name__}
                fields |= {"requests": more} | ({"model_id": model_id} if model_id else {})
                log.log(level, "request.failed_again", extra=fields)
