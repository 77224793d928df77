"""Reads memory, and decides whether a reading is recent enough to measure from; takes what Triton
reports of its models, and compares it with readings.
"""

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from adapter.control.ports import MemoryReader
from adapter.core.accounts import Account
from adapter.core.evidence import MemorySample, sample_of
from adapter.core.ledger import UNSEEN, Ledger
from adapter.core.measuring import GpuBytes, Reports, differs, on_devices
from adapter.core.memory import Bytes, MemoryReading, most_of, total
from adapter.core.model import Package
from adapter.core.sizing import Sizes
from adapter.runtime import clock

log = logging.getLogger(__name__)

_SAMPLES = 512
# A hundredth of a device: a change of that size must show in a reading sooner or later.
_NOTICEABLE_SHARE = 100


class MemorySensor:
    """Takes readings, and keeps the recent ones as `samples`, each with its clock.monotonic().

    `is_shared` returns whether a process takes memory that belongs to no model. `changed_at`: when
    an operation last changed memory (time.monotonic).
    """

    def __init__(
        self, reader: MemoryReader, ledger: Ledger, is_shared: Callable[[], Awaitable[bool]]
    ) -> None:
        self.samples: deque[tuple[float, MemorySample]] = deque(maxlen=_SAMPLES)
        self._reader = reader
        self._ledger = ledger
        self.changed_at = -math.inf
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
        self.changed_at = clock.monotonic()

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
        age = clock.monotonic() - self.changed_at
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


class ReportedMemory:
    def __init__(self, ledger: Ledger, sizes: Sizes) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._reports = Reports()
        self._lives = -1  # of the Triton that was last asked

    def is_due(self, package: Package) -> bool:
        """Return whether Triton will report what the package takes once it is loaded."""
        return self._reports.are_due(package.backends)

    def asks(self, lives: int) -> bool:
        """Return whether Triton, which became live so often, is to be asked about a load: there is
        a device that it may report of.
        """
        if lives != self._lives:
            self._lives = lives
            self._reports.restarted()
        books = self._ledger.snapshot().devices
        return any(d == UNSEEN or book.index is not None for d, book in books.items())

    def came(self, account: Account, package: Package, usage: Collection[GpuBytes]) -> None:
        """Note what Triton has reported of each model of a package that was loaded."""
        if not usage:
            return
        account.reported = on_devices(usage, self._ledger.snapshot().devices)
        self._reports.came(package.backends, is_reported=account.reported is not None)
        if account.reported is not None:
            account.is_first = self._reports.is_first(account.reported)

    def larger(self, account: Account, seen: Bytes, reading: MemoryReading | None) -> Bytes | None:
        """Return what counts in place of a report, where the load was alone and the reading shows
        more. What the first load on a GPU took beyond its report is Triton's own.
        """
        reported = account.reported or {}
        if account.is_first:
            account.is_first = False
            self._ledger.rebase(reading)
            self._sizes.saw_baseline(self._ledger.snapshot().baseline)
            return None
        if not differs(reported, seen):
            return None
        if self._reports.is_news(account.package_key):
            fields = {"reported_bytes": total(reported), "read_bytes": total(seen)}
            log.warning("memory.report_differs", extra={"model_id": account.model_id, **fields})
        larger = most_of(reported, seen)
        return larger if larger != reported else None
