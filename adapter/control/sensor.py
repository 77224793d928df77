"""Reads memory, and decides whether a reading is recent enough to measure from."""

import math
from collections import deque
from collections.abc import Awaitable, Callable

from adapter.control.ports import MemoryReader
from adapter.core.evidence import MemorySample, sample_of
from adapter.core.ledger import Ledger
from adapter.core.memory import Bytes, MemoryReading, total
from adapter.runtime import clock

_SAMPLES = 512
# A hundredth of a device: a change of that size must show in a reading sooner or later.
_NOTICEABLE_SHARE = 100


class MemorySensor:
    """Takes readings, and keeps the recent ones as `samples`, each with its clock.monotonic().

    `is_shared` returns whether a process takes memory that belongs to no model.
    """

    def __init__(
        self, reader: MemoryReader, ledger: Ledger, is_shared: Callable[[], Awaitable[bool]]
    ) -> None:
        self.samples: deque[tuple[float, MemorySample]] = deque(maxlen=_SAMPLES)
        self._reader = reader
        self._ledger = ledger
        self._changed_at = -math.inf
        self._ask_shared = is_shared
        self._is_shared = False

    async def read(self) -> MemoryReading | None:
        self._is_shared = (
            await self._ask_shared()
        )  # first: such a process may end before the reading
        reading = await self._reader.read()
        self._ledger.open(reading)
        if reading is not None:
            self.samples.append((clock.monotonic(), sample_of(self._ledger.snapshot(), reading)))
        return reading

    @property
    def last(self) -> MemoryReading | None:
        return self._reader.last

    @property
    def lag_seconds(self) -> float:
        return self._reader.last.lag_seconds if self._reader.last else 0.0

    def changed(self) -> None:
        """Note a change of memory: readings may be from before it, for as long as they lag."""
        self._changed_at = clock.monotonic()

    def must_show(self, amounts: Bytes, since: float) -> None:
        """Expect the reader to show a change by `amounts`, from `since` (time.monotonic) on; small
        changes are ignored.
        """
        if self._is_noticeable(amounts):
            self._reader.changed(since)

    def missed(self, measured: Bytes, expected: Bytes) -> bool:
        """Return whether a zero measurement means a late or frozen reader, not a load that took
        nothing. A reader that shows a part of the load has moved, and is believed.
        """
        return self.lag_seconds > 0 and total(measured) == 0 and self._is_noticeable(expected)

    def is_settling(self, reading: MemoryReading | None) -> bool:
        """Return whether the reading may be older than the last change, or frozen."""
        if reading is None:
            return False
        age = clock.monotonic() - self._changed_at
        return age < reading.lag_seconds or self._reader.is_in_doubt

    def settled(self, reading: MemoryReading | None) -> MemoryReading | None:
        """Return `reading`, or None if nothing may be measured from it."""
        return None if self._is_shared or self.is_settling(reading) else reading

    def _is_noticeable(self, amounts: Bytes) -> bool:
        books = self._ledger.snapshot().devices
        return any(
            count * _NOTICEABLE_SHARE >= books[device].limit_bytes
            for device, count in amounts.items()
            if device in books
        )
