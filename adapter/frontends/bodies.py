"""Limits the bodies of callers: their bytes in the budget, their time, the parts of their JSON."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from adapter.errors import AdapterError, BrokenBody, InvalidRequest, SlowBody
from adapter.runtime.byte_budget import ByteBudget

_MAX_PARTS = 100_000
_MAX_DIGITS = 400
_PIECE_BYTES = 2**20


class HeldBody:
    """Counts a body in the budget of callers' bytes until its context ends."""

    def __init__(
        self,
        budget: ByteBudget,
        announced: int | None,  # its length; None if nobody knows it
        *,
        is_reading: Callable[[], bool] = lambda: True,  # whether more of it may come
    ) -> None:
        self.is_reading = is_reading
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self._error: AdapterError | None = None
        self._holding = budget.hold(self, announced)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Count the body no longer."""
        self._holding.end()
        self._may_go_on.set()

    def arrived(self) -> None:
        """Note that the last of the body was counted."""
        self._holding.arrived()

    async def take(self, size: int) -> None:
        """Count `size` bytes that have arrived, and wait until more may come. Raises what the body
        was cut for.
        """
        if not self._holding.take(size):
            self._may_go_on.clear()
            await self._may_go_on.wait()
        if self._error is not None:
            raise self._error

    # -- for the budget ---------------------------------------------------------------------

    def resume(self) -> None:
        """Let `take` return."""
        self._may_go_on.set()

    def cut(self, error: AdapterError) -> None:
        """Have `take` raise the error."""
        self._error = error
        self._may_go_on.set()


def parsed(text: str | bytes, what: str) -> Any:
    """Parse JSON. Raise InvalidRequest for what is not JSON, and for far more parts than a control
    call needs: the parser blocks the event loop, and makes gigabytes of 60 MB of `{},`.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    parts = 0
    for at in range(0, len(raw), _PIECE_BYTES):
        parts += sum(raw.count(mark, at, at + _PIECE_BYTES) for mark in b"{[,")
        if parts > _MAX_PARTS:
            raise InvalidRequest(
                f"{what} has more than {_MAX_PARTS} of the characters {{ [ and ,; at most so many "
                "are accepted"
            )
    try:
        return _DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error


def _int(text: str) -> int:
    """Parse an integer of at most 400 digits. Python's own limit is ten times as high, and the time
    grows with the square of the digits.
    """
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {_MAX_DIGITS} are accepted")
    return int(text)


# In a thread the parser gives way to the event loop only where it calls Python.
def _float(text: str) -> float:
    return float(text)


def _same(members: dict[str, Any]) -> dict[str, Any]:
    return members


# json.loads would make another one for each text, which takes as long as to parse a small one
_DECODER = json.JSONDecoder(parse_int=_int, parse_float=_float, object_hook=_same)


def json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raise InvalidRequest for anything else."""
    value = parsed(text, what)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds the time limits of HTTP connections, in seconds."""

    idle: float = 3630  # between two requests; proxies have less, so that they close first
    head: float = 30  # from its first byte to its last
    body: float = 60  # without any progress
    answer: float = 60  # without any progress
    # how long work goes on for a caller who has ended its side: it may have left, or only wait
    gone: float = 2
    # for a caller who still sends what nobody reads, to see its answer before the reset
    linger: float = 5
    drain: float = 0.5  # the same in a drain
    slow: float = 10  # after this a body has to come at `rate` on average
    rate: float = 64 * 2**10  # bytes a second


class Arrival:
    """Times one body; time in which its caller is held back does not count."""

    __slots__ = ("_limits", "_looked", "_quiet", "_seconds", "_seen", "received")

    def __init__(self, limits: Limits, now: float) -> None:
        self.received = 0
        self._seen = 0
        self._limits = limits
        self._looked = now
        self._seconds = self._quiet = 0.0

    def check_time_limits(self, now: float, *, is_reading: bool) -> InvalidRequest | None:
        """Return the error of the body, if it has one."""
        seconds, self._looked = now - self._looked, now
        if not is_reading:
            return None
        self._seconds += seconds
        self._quiet = 0.0 if self.received != self._seen else self._quiet + seconds
        self._seen = self.received
        limits = self._limits
        if self._quiet >= limits.body:
            return BrokenBody(f"nothing came of the body for {limits.body:g} s")
        if self._seconds > limits.slow and self.received < self._seconds * limits.rate:
            return SlowBody(f"the body comes at less than {limits.rate / 2**10:g} KiB/s")
        return None
