"""Keeps many requests that fail alike from filling the log, and from paying for a line each."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

from adapter.errors import ModelFailed, OutOfMemory

log = logging.getLogger(__name__)

_LINES, _SECONDS = 20, 1.0
# What a model did is told each time.
_UNLIMITED = (ModelFailed, OutOfMemory)

Kind: TypeAlias = tuple[type[Exception], int]


def _later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


class LogLimit:
    """Admits 20 lines a second for each class of error, all at debug, and logs how many more there
    were.

    `later` calls a function after so many seconds.
    """

    def __init__(
        self, listener: str, *, later: Callable[[float, Callable[[], None]], None] = _later
    ) -> None:
        self._listener = listener
        self._later = later
        self._counts: dict[Kind, int] = {}

    def admits(self, error: Exception, level: int) -> bool:
        """Count a line of `level` about the error; return whether to write it."""
        if isinstance(error, _UNLIMITED) or log.isEnabledFor(logging.DEBUG):
            return True
        counts, key = self._counts, (type(error), level)
        if not counts:
            self._later(_SECONDS, self._sum_up)
        count = counts[key] = counts.get(key, 0) + 1
        return count <= _LINES

    def _sum_up(self) -> None:
        counts, self._counts = self._counts, {}
        for (kind, level), count in counts.items():
            if count > _LINES:
                fields: dict[str, object] = {"listener": self._listener, "error": kind.__name__}
                fields["requests"] = count - _LINES
                log.log(level, "request.failed_again", extra=fields)
