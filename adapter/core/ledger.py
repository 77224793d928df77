"""The book of memory bytes per device and model: reserved before a load, held after it, released
when gone.

Synchronous throughout, hence atomic on the event loop: nobody can decide on a state of the book
that another is changing.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from adapter.core.memory import UNSEEN, Bytes, Device, DeviceState, MemoryReading, at_least_zero
from adapter.core.model import TritonName
from adapter.errors import MemoryFigures


@dataclass(frozen=True, slots=True)
class DeviceBook:
    """All in bytes. `baseline` is what is taken with no model of ours loaded.

    `index` is CUDA's number of the GPU within Triton, None where nobody says. `client_limit`:
    what MPS allows each process of it, None without such a limit. `fresh`: what was taken with no
    model when Triton had just started, or before it was asked for the first one. `unaccounted`:
    what was used beyond that and what models hold, at the last quiet moment; both None before one.
    """

    limit_bytes: int
    headroom_bytes: int
    baseline_bytes: int
    reserved_bytes: int
    held_bytes: int
    index: int | None = None
    client_limit_bytes: int | None = None
    fresh_bytes: int | None = None
    unaccounted_bytes: int | None = None

    def free_bytes(self, used_bytes: int | None) -> int:
        """Return what may be handed out: what is left below the limit, less the headroom."""
        return max(0, self.left_bytes(used_bytes) - self.headroom_bytes)

    def left_bytes(self, used_bytes: int | None) -> int:
        """Return what is left below the limit, by the worse of book and observation; negative when
        the limit is exceeded.

        The observation lags behind loads that have only begun, the book does not know what others
        take (docs/memory.md).
        """
        booked = self.baseline_bytes + self.held_bytes + self.reserved_bytes
        return self.limit_bytes - max(booked, (used_bytes or 0) + self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """`models` are those with something reserved or held. The sums are over the known devices."""

    devices: Mapping[Device, DeviceBook]
    models: int

    def free(self, reading: MemoryReading | None) -> Bytes:
        used: Bytes = reading.used if reading else {}
        return {device: book.free_bytes(used.get(device)) for device, book in self.devices.items()}

    def show(self, reading: MemoryReading | None) -> dict[Device, DeviceState]:
        """Return the figures of each device for operators, probes and contracts."""
        used: Bytes = reading.used if reading else {}
        return {
            device: DeviceState(
                limit_bytes=book.limit_bytes,
                used_bytes=used.get(device),
                free_bytes=book.free_bytes(used.get(device)),
                baseline_bytes=book.baseline_bytes,
                reserved_bytes=book.reserved_bytes,
                held_bytes=book.held_bytes,
                headroom_bytes=book.headroom_bytes,
                unaccounted_bytes=book.unaccounted_bytes,
            )
            for device, book in self.devices.items()
        }

    def left(self, reading: MemoryReading | None) -> Bytes:
        """Return what is left below each limit, the headroom included; negative above a limit."""
        used: Bytes = reading.used if reading else {}
        return {device: book.left_bytes(used.get(device)) for device, book in self.devices.items()}

    def free_bytes(self, reading: MemoryReading | None) -> int | None:
        """None without devices: there is no limit to hold anything to."""
        return sum(self.free(reading).values()) if self.devices else None

    @property
    def limit_bytes(self) -> int | None:
        """None without devices."""
        return sum(book.limit_bytes for book in self.devices.values()) if self.devices else None

    @property
    def headroom_bytes(self) -> int:
        return sum(book.headroom_bytes for book in self.devices.values())

    @property
    def baseline(self) -> Bytes:
        return {device: book.baseline_bytes for device, book in self.devices.items()}

    @property
    def baseline_bytes(self) -> int:
        return sum(book.baseline_bytes for book in self.devices.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(book.reserved_bytes for book in self.devices.values())

    @property
    def held_bytes(self) -> int:
        return sum(book.held_bytes for book in self.devices.values())

    def most_of_one(self, figures: MemoryFigures) -> int | None:
        """Return the most that one process may take of the device of `figures`."""
        book = self.devices.get(Device(figures.device or ""))
        client = book.client_limit_bytes if book else None
        known = [each for each in (figures.limit_bytes, client) if each is not None]
        return min(known, default=None)

    def tightest(self, needs: Bytes, reading: MemoryReading | None) -> Device | None:
        """Where the most is missing or, when all fits, the least is left. None without devices."""
        free = self.free(reading)
        return max(free, key=lambda device: needs.get(device, 0) - free[device], default=None)


class Ledger:
    """`memory_limit` bounds every device by itself. `headroom` says what to keep free of a limit,
    `client_limits` what a process may take of each GPU, by CUDA's numbers.

    Bytes on a device that is not known (yet) are kept with their model and count in no sum.
    """

    def __init__(
        self,
        memory_limit: int | None,
        headroom: Callable[[int], int],
        client_limits: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._memory_limit = memory_limit
        self._client_limits = client_limits
        self._headroom = headroom
        self._empty: dict[Device, DeviceBook] = {}  # the books as they are without any model
        self._models: dict[TritonName, _Entry] = {}  # and stuck loads
        # kept up to date: a look costs the same for 10 and 10,000
        self._reserved, self._held = _Sum(), _Sum()

    def open(self, reading: MemoryReading | None) -> None:
        """Add the devices of `reading` that are not known yet; those that are stay as they are.

        Without a reading the limit that was set is all there is to go by: it becomes the limit of
        UNSEEN, which goes again once devices are read and no model has anything on it.
        """
        if reading is None:
            if self._memory_limit is not None and not self._empty:
                self._add(UNSEEN, self._memory_limit, None)
            return
        for device, seen in reading.devices.items():
            if device not in self._empty:
                self._add(device, seen.limit_bytes, seen.index)
        if reading.devices and not self._reserved.on[UNSEEN] + self._held.on[UNSEEN]:
            self._empty.pop(UNSEEN, None)

    @property
    def has_devices(self) -> bool:
        """Return whether any device has a limit."""
        return bool(self._empty)

    def rebase(self, reading: MemoryReading | None) -> None:
        """Take what is used and no model's for the baseline.

        Nothing happens while something is reserved: how much of that is in `reading` nobody knows.
        """
        if reading is None or self._reserved.models:
            return
        for device, book in self._empty.items():
            if (used := reading.used.get(device)) is not None:
                baseline = max(0, used - self._held.on[device])
                self._empty[device] = replace(book, baseline_bytes=baseline)

    def settle_baseline(self, reading: MemoryReading) -> None:
        """`reading` shows only what is no model's."""
        for device, book in self._empty.items():
            if (used := reading.used.get(device)) is not None:
                self._empty[device] = replace(book, baseline_bytes=used)

    def started(self, reading: MemoryReading) -> None:
        """Note what a Triton takes that has just started. `reading` is from a quiet moment."""
        for device, book in self._empty.items():
            self._empty[device] = replace(book, fresh_bytes=None)
        self.audit(reading)

    def audit(self, reading: MemoryReading) -> None:
        """Note what neither a fresh Triton nor a model accounts for: what failed loads have leaked,
        say, or an unload has not given back. `reading` is from a quiet moment.
        """
        for device, book in self._empty.items():
            if (used := reading.used.get(device)) is None:
                continue
            others = max(0, used - self._held.on[device])
            fresh = others if book.fresh_bytes is None else book.fresh_bytes
            unaccounted = max(0, others - fresh)
            self._empty[device] = replace(book, fresh_bytes=fresh, unaccounted_bytes=unaccounted)

    def reserve(self, name: TritonName, needs: Bytes) -> None:
        """Book an estimate for a load that begins."""
        if name in self._models:
            raise ValueError(f"{name!r} is in the ledger already")
        if any(count < 0 for count in needs.values()):
            raise ValueError(f"{dict(needs)} cannot be reserved: bytes are not negative")
        self._put(name, _Entry(self._reserved, dict(needs)))

    def settle(self, name: TritonName, measured: Bytes | None) -> Bytes:
        """The load is done: hold what was measured, or the estimate when nothing could be."""
        known = self._models.get(name)
        if known is None or known.sum is not self._reserved:
            raise KeyError(f"nothing is reserved for {name!r}")
        self.hold(name, known.amounts if measured is None else measured)
        return self.of(name)

    def hold(self, name: TritonName, held: Bytes) -> None:
        """What the model takes became known otherwise than by settling its load."""
        self._put(name, _Entry(self._held, at_least_zero(held)))

    def release(self, name: TritonName) -> None:
        """The bytes are free again. Harmless when there are none: undoing may come twice."""
        self._put(name, None)

    def of(self, name: TritonName) -> Bytes:
        entry = self._models.get(name)
        return entry.amounts if entry else {}

    def snapshot(self) -> LedgerSnapshot:
        books = {
            device: replace(
                book,
                reserved_bytes=self._reserved.on[device],
                held_bytes=self._held.on[device],
            )
            for device, book in self._empty.items()
        }
        return LedgerSnapshot(books, models=len(self._models))

    def _add(self, device: Device, limit_bytes: int, index: int | None) -> None:
        if self._memory_limit is not None:
            limit_bytes = min(limit_bytes, self._memory_limit)
        headroom = self._headroom(limit_bytes)
        if device == UNSEEN:  # of one GPU or several
            client = max(self._client_limits.values(), default=None)
        else:
            client = None if index is None else self._client_limits.get(index)
        self._empty[device] = DeviceBook(limit_bytes, headroom, 0, 0, 0, index, client)

    def _put(self, name: TritonName, entry: "_Entry | None") -> None:
        """Enter in place of what there was of the model; None: it has nothing any more."""
        if (old := self._models.pop(name, None)) is not None:
            old.sum.models -= 1
            old.sum.on.subtract(old.amounts)
        if entry is not None:
            self._models[name] = entry
            entry.sum.models += 1
            entry.sum.on.update(entry.amounts)


@dataclass(slots=True)
class _Sum:
    """How many models have something reserved, or held, and the bytes of all on each device."""

    models: int = 0
    on: Counter[Device] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One model's bytes, and the sum that they are in: that of what is reserved, or held."""

    sum: _Sum
    amounts: Bytes
