"""Poll memory for the ledger, and wait until the memory of an unloaded model is back."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from adapter.control.ports import MemoryReader, MemorySettings
from adapter.core import times
from adapter.core.ledger import DeviceBook, Leaving, Ledger, is_unload_done, limit_of
from adapter.core.memory import HOST, UNSEEN, Bytes, Device, MemoryReading
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

_SAMPLES = 512
# While nothing loads or unloads, traffic alone changes little, and a reading of host memory costs
# milliseconds for each process.
_QUIET_SECONDS = 2.0
# How far back to look for a call that has just failed and whose start is not known.
_RECENT_SECONDS = 2.5


@dataclass(slots=True, eq=False)
class Readings:
    """Reads memory, has the ledger know each reading, and keeps the recent ones."""

    reader: MemoryReader
    ledger: Ledger
    settings: MemorySettings
    metrics: Metrics
    last: MemoryReading | None = None
    read_at: float = -math.inf
    _samples: deque[tuple[float, MemoryReading]] = field(
        default_factory=lambda: deque(maxlen=_SAMPLES)
    )
    # devices whose limit is a setting: the kernel or the driver would give models more
    _limited: set[Device] = field(default_factory=set)

    async def read(self) -> MemoryReading | None:
        """Return what is used now, and correct the ledger by it; None if nothing can be read."""
        asked_at = clock.monotonic()
        reading = await self.reader.read()
        self.last = reading
        self.read_at = asked_at
        self._add_devices(reading)
        if reading is None:
            self.ledger.observe({}, asked_at)
            return None
        # callers that wait at the same time get the same reading: it is kept once
        if not self._samples or self._samples[-1][1] is not reading:
            self._samples.append((clock.monotonic(), reading))
        self.ledger.observe(
            reading.used,
            asked_at,
            reading.lag_seconds,
            available=_find_available(reading),
        )
        return reading

    async def poll(self) -> None:
        """Read memory if a load or an unload is in progress, else every two seconds."""
        now = clock.monotonic()
        self.ledger.advance(now)
        is_busy = self.ledger.is_in_progress(self.ledger.devices)
        if is_busy or now - self.read_at >= _QUIET_SECONDS:
            await self.read()

    @property
    def lag_seconds(self) -> float:
        """Return how old the figures of a reading may be."""
        return self.last.lag_seconds if self.last else 0.0

    @property
    def has_devices(self) -> bool:
        """Return whether the memory of any device is read."""
        return self.last is not None and bool(self.last.devices)

    def is_limited(self, size: Bytes) -> bool:
        """Return whether one of the devices of this size has a limit below what the device has: the
        kernel and the driver would let models pass the limit, so that the adapter enforces it.
        """
        return not self._limited.isdisjoint(size)

    def list_since(self, since: float | None) -> list[MemoryReading]:
        """Return the last reading from before a call that began at `since`, and all readings after
        it. Without a time return those of the last seconds.
        """
        first_at = clock.monotonic() - _RECENT_SECONDS
        if since is not None:
            first_at = max(
                (read_at for read_at, _ in self._samples if read_at <= since), default=since
            )
        return [reading for read_at, reading in self._samples if read_at >= first_at]

    async def wait_until_back(self, leaving: Leaving) -> None:
        """Wait until most of what a model held is free again, for five seconds at most."""
        started_at = clock.monotonic()
        while True:
            reading = await self.read()
            used = reading.used if reading else {}
            waited_seconds = clock.monotonic() - started_at
            if is_unload_done(leaving, used, waited_seconds, self.lag_seconds):
                break
            await asyncio.sleep(times.POLL_SECONDS)
        self.metrics.recovery_seconds.observe(clock.monotonic() - started_at)

    # -- inside -----------------------------------------------------------------------------

    def _add_devices(self, reading: MemoryReading | None) -> None:
        """Add new devices to the ledger. Without readings the limit stands for all devices."""
        devices = self.ledger.devices
        limit_bytes = self.settings.limit_bytes
        if reading is None:
            if not devices and limit_bytes is not None:
                self.ledger.open_devices({UNSEEN: self._make_book(UNSEEN, limit_bytes, None)})
            return
        new_books = {
            device: self._make_book(device, figures.limit_bytes, figures.index)
            for device, figures in reading.devices.items()
            if device not in devices
        }
        self.ledger.open_devices(new_books)
        is_unseen_empty = UNSEEN in devices and self.ledger.is_empty(UNSEEN)
        if reading.devices and is_unseen_empty:
            del devices[UNSEEN]

    def _make_book(self, device: Device, size_bytes: int, number: int | None) -> DeviceBook:
        """Return the book of a new device, with its limit."""
        limit_bytes = limit_of(self.settings.limit_bytes, size_bytes)
        if limit_bytes < size_bytes:
            self._limited.add(device)
        process_limits = self.settings.process_limits
        return DeviceBook(
            limit_bytes,
            headroom_bytes=self.settings.headroom_of(limit_bytes),
            process_limit_bytes=None if number is None else process_limits.get(number),
            number=number,
            # models of an earlier run were adopted before the first reading
            settled_bytes=self.ledger.booked(device),
        )


def _find_available(reading: MemoryReading) -> Bytes:
    """Return what the machine and the cgroup still have of host memory, if that is known."""
    if reading.available_bytes is None or HOST not in reading.devices:
        return {}
    return {HOST: reading.available_bytes}
