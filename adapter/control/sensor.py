"""The memory reader, and whether what it says can be relied on yet."""

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable

from adapter.control.ports import MemoryReader
from adapter.core.evidence import MemorySample, sample_of
from adapter.core.ledger import Ledger
from adapter.core.memory import Bytes, MemoryReading, total

_SAMPLES = 512
# Of a device: a change that its reader must show sooner or later.
_NOTICEABLE_SHARE = 100


class MemorySensor:
    """`samples`: what was seen of late, with its time.monotonic(). `is_shared`: whether something
    takes memory that is no model's.
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
        self._is_shared = await self._ask_shared()  # first: it may end before the reading
        reading = await self._reader.read()
        self._ledger.open(reading)
        if reading is not None:
            self.samples.append((time.monotonic(), sample_of(self._ledger.snapshot(), reading)))
        return reading

    @property
    def last(self) -> MemoryReading | None:
        return self._reader.last

    @property
    def lag_seconds(self) -> float:
        return self._reader.last.lag_seconds if self._reader.last else 0.0

    def changed(self) -> None:
        """Memory has just changed: for as long as they lag, readings may be from before."""
        self._changed_at = time.monotonic()

    def must_show(self, amounts: Bytes, since: float) -> None:
        """So much came or went, at `since` (time.monotonic) at the earliest, and no reader that
        works can miss it.
        """
        if self._is_noticeable(amounts):
            self._reader.changed(since)

    def missed(self, measured: Bytes, expected: Bytes) -> bool:
        """Whether `measured` says more of the reader than of the load. One that is late or frozen
        shows nothing at all of it; one that shows a part has moved, and is believed.
        """
        return self.lag_seconds > 0 and total(measured) == 0 and self._is_noticeable(expected)

    def is_settling(self, reading: MemoryReading | None) -> bool:
        """The last reading may be older than the last change, or frozen."""
        if reading is None:
            return False
        age = time.monotonic() - self._changed_at
        return age < reading.lag_seconds or self._reader.is_in_doubt

    def settled(self, reading: MemoryReading | None) -> MemoryReading | None:
        """None in place of a reading that nothing may be measured from."""
        return None if self._is_shared or self.is_settling(reading) else reading

    def _is_noticeable(self, amounts: Bytes) -> bool:
        books = self._ledger.snapshot().devices
        return any(
            count * _NOTICEABLE_SHARE >= books[device].limit_bytes
            for device, count in amounts.items()
            if device in books
        )
