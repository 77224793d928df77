"""Account for the memory of each device, by one formula.

    free = limit - headroom - max(used, settled + reserved)

    used      the newest reading; without readings: settled + reserved + leaving
    reserved  the needs of loads in progress, and what Triton is stuck with
    settled   what everything else takes: loaded models, Triton itself, growth, neighbours, memory
              that allocators keep
    leaving   the booked bytes of unloads in progress, and the reserved ones of undone loads
    booked    what a loaded model took, as far as readings or Triton's report tell
    empty     the least reading with nothing loaded, in this life of Triton; 0 until there was one

Nobody measures `settled`. It follows from two things. Loads and unloads move it: a load that ends
adds what it is booked with, an unload that begins subtracts that. And each reading corrects it:

    used - reserved - leaving <= settled <= used

This is the whole theory. A reading is the sum of three figures: `settled`; what loads in progress
have taken so far, between 0 and `reserved`; and what unloads have not given back yet, between 0 and
`leaving`. So each reading gives bounds to `settled`. With nothing in progress both bounds are
equal, and `settled` is the reading: this mends whatever was wrong, and nobody has to find out which
model it belongs to. Under steady traffic, where something is always in progress, `settled` is
carried from one reading to the next.

A load or an unload is in progress until a reading is newer than its end: the time that the reading
shows is that of the reading less the lag of its source. If none comes within 5 s of the end, the
ledger counts without readings.

What a loaded model is booked with follows from the same figures. What was reserved for it counts as
far as the reading allows:

    used - before - reserved of other loads - leaving <= booked <= used - before + reusable

`before` is the reading when the load began, if nothing else was in progress since; then the package
is measured. Otherwise `before` is `settled`. `reusable` is memory that belongs to no model, and may
be the load's: what allocators have kept of earlier models, which the load may have used again; and
what readings have shown since beyond all that was reserved, which `settled` has by now.

The formula relies on unloads being faster than loads: what is leaving should have left before the
loads in progress have taken all that is reserved for them. Otherwise Triton fails a load, which is
a 507.

Memory that belongs to no model (`not_attributed`) is shown to operators. No decision depends on it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from adapter.core import times
from adapter.core.memory import NO_BYTES, UNSEEN, Bytes, Device
from adapter.core.model import Package, TritonName
from adapter.core.sizes import MIB, Need, Size, Sizes, remember, usable_devices
from adapter.errors import MemoryFigures

# An unload is answered when readings show most of its memory free. Drivers and allocators return
# the last quarter late or never.
UNLOADED_SHARE = 0.75
# An unload that frees less of a device is not waited for: the noise of other processes is of that
# size.
_WORTH_WAITING_BYTES = 16 * MIB


@dataclass(slots=True)
class DeviceBook:
    """Holds the figures of one device, in bytes."""

    limit_bytes: int  # of the operator or of the device, whichever is less
    headroom_bytes: int = 0
    process_limit_bytes: int | None = None  # the most that MPS allows each process
    number: int | None = None  # CUDA's number of the GPU; None of host memory or if unknown
    used_bytes: int | None = None  # by the newest reading; None without readings
    available_bytes: int | None = None  # free in the machine and cgroup; host memory only
    settled_bytes: int = 0
    empty_bytes: int | None = None

    @property
    def room_bytes(self) -> int:
        """Return the most bytes that all models together could ever have of the device: its limit
        without what Triton takes when it is empty.
        """
        return self.limit_bytes - (self.empty_bytes or 0)


@dataclass(slots=True)
class LoadEntry:
    """Describes a load in progress."""

    need: Need
    reserved: dict[Device, int]
    before: Bytes  # the readings when it began, of devices that had one
    reusable: dict[Device, int]  # `not_attributed` when it began, and what has come to it since
    is_alone: bool  # nothing else is or was in progress on its devices since its begin
    is_only: bool  # nothing else was loaded on its devices
    is_sent: bool = False  # Triton was asked for it; it takes nothing while it waits for a thread
    ended_at: float | None = None  # when Triton had loaded it; None until then
    # it has failed for lack of memory, says its text, and readings refute that (`is_refuted`)
    is_doubted: bool = False

    def reading_before(self, device: Device) -> int | None:
        """Return the reading that the load can be measured from; None if it was not alone."""
        return self.before.get(device) if self.is_alone else None


@dataclass(frozen=True, slots=True)
class Leaving:
    """Describes memory that is expected back."""

    booked: Bytes
    before: Bytes  # the readings when it began to leave
    ended_at: float = math.inf  # when Triton was done; until then readings may still show it


@dataclass(frozen=True, slots=True)
class Overrun:
    """Names the load to end when more memory is used than a limit that only the adapter
    enforces.
    """

    name: TritonName
    figures: MemoryFigures  # the load needs more than `needed_bytes`: it has them by now
    is_permanent: bool  # nothing else was loaded or loading: ModelTooLarge, not 507
    is_alone: bool = True  # nothing else was loading: the figures are those of this load


@dataclass(frozen=True, slots=True)
class Settlement:
    """Holds what a successful load was booked with."""

    booked: Bytes
    is_measured: bool
    overrun: Overrun | None  # set if the model is to be unloaded again
    # by readings, beside other models on a device: the first model there makes a CUDA context
    rise: Bytes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForgottenSize:
    """Holds what was known of a package until an operator had it forgotten."""

    size: Size | None
    too_little: Bytes  # it needs more than these bytes; empty if it never ran out of memory
    was_too_large: bool  # its loads were refused as ModelTooLarge


def limit_of(setting_bytes: int | None, size_bytes: int) -> int:
    """Return how many bytes of a device may be used: all that it has where nothing is set, and
    never more, as a setting above its size would promise what is not there.
    """
    return size_bytes if setting_bytes is None else min(setting_bytes, size_bytes)


@dataclass(slots=True)
class Ledger:
    """Accounts for the memory of loads and models on each device, and is corrected by readings."""

    devices: dict[Device, DeviceBook]
    sizes: Sizes = field(default_factory=Sizes)
    # the bytes that each loaded model is booked with
    models: dict[TritonName, Bytes] = field(default_factory=dict)
    # loads in progress, in the order of their begin
    loads: dict[TritonName, LoadEntry] = field(default_factory=dict)
    # loads and unloads that Triton does not finish, with the bytes that it keeps for them
    stuck: dict[TritonName, Bytes] = field(default_factory=dict)
    unloads: dict[TritonName, Leaving] = field(default_factory=dict)
    # unloads and undone loads that have ended, until a reading is newer
    returning: list[Leaving] = field(default_factory=list)
    # by package: what was free for a load that ran out of memory with nothing else loaded
    tried: dict[str, Bytes] = field(default_factory=dict)
    # by package: when evictions for it brought too little
    futile_evictions: dict[str, float] = field(default_factory=dict)
    shown_at: float = -math.inf  # the time that the newest reading shows
    booked_until: float = -math.inf  # the last end of a load or an unload that is booked
    returned_at: float = -math.inf  # when memory was last seen back

    # -- the formula ----------------------------------------------------------------------------

    def free(self, device: Device) -> int:
        """Return the bytes that further loads may reserve; negative if more is taken or promised.

        This is the limit, less the headroom and the larger of two figures: the newest reading, and
        `settled` plus `reserved`. Without a reading, memory that is leaving still counts as used.
        """
        book = self.devices[device]
        promised = book.settled_bytes + self.reserved(device)
        used = promised + self.leaving(device) if book.used_bytes is None else book.used_bytes
        return book.limit_bytes - book.headroom_bytes - max(used, promised)

    def free_soon(self, device: Device) -> int:
        """Return the bytes that further loads may reserve once the unloads in progress have ended.

        This is the limit, less the headroom, `settled` and `reserved`; `settled` no longer has what
        is leaving.
        """
        book = self.devices[device]
        promised = book.settled_bytes + self.reserved(device)
        return book.limit_bytes - book.headroom_bytes - promised

    def reserved(self, device: Device) -> int:
        """Return the needs of loads in progress, and what Triton is stuck with."""
        return self._reserved_for_loads(device) + _sum(self.stuck.values(), device)

    def leaving(self, device: Device) -> int:
        """Return the bytes that may become free at any moment: of unloads in progress, and of loads
        that failed and whose memory is not back yet.
        """
        return _sum((leaving.booked for leaving in self._list_leaving()), device)

    def booked(self, device: Device) -> int:
        """Return what all loaded models are booked with."""
        return _sum(self.models.values(), device)

    def not_attributed(self, device: Device) -> int:
        """Return the bytes that neither an empty Triton nor a model accounts for: growth, leaks,
        neighbours, memory that allocators keep.
        """
        book = self.devices[device]
        return max(0, book.settled_bytes - self.booked(device) - (book.empty_bytes or 0))

    def evictable(self) -> dict[TritonName, Bytes]:
        """Return the bytes of each model that Triton has loaded: the booked ones, or the reserved
        ones until a reading shows the model.
        """
        sizes = dict(self.models)
        for name, load in self.loads.items():
            if load.ended_at is not None:
                sizes[name] = load.reserved
        return sizes

    def is_in_progress(self, devices: Collection[Device]) -> bool:
        """Return whether a load or an unload may change one of the devices."""
        moving: list[Bytes] = [load.reserved for load in self.loads.values()]
        moving += [leaving.booked for leaving in self._list_leaving()]
        return any(_is_on(size, devices) for size in moving)

    def is_empty(self, device: Device) -> bool:
        """Return whether nothing is loaded, loading, stuck or leaving on the device."""
        sizes = [*self.models.values(), *self.stuck.values()]
        is_taken = any(device in size for size in sizes)
        return not is_taken and not self.is_in_progress([device])

    def is_only_model(self, name: TritonName) -> bool:
        """Return whether no other model is loaded, loading or stuck, on any device."""
        return {*self.models, *self.loads, *self.stuck} <= {name}

    def need_of(
        self,
        package: Package,
        *,
        device: Device | None = None,
        guess_limit_bytes: int | None = None,
    ) -> Need:
        """Return what the load of a package needs (see `Sizes.need_of`)."""
        rooms = {}
        numbers = {}
        for place, book in self.devices.items():
            rooms[place] = book.room_bytes - book.headroom_bytes
            numbers[place] = book.number
        return self.sizes.need_of(
            package,
            rooms,
            usable_devices(package, numbers),
            device=device,
            guess_limit_bytes=guess_limit_bytes,
        )

    # -- readings -------------------------------------------------------------------------------

    def open_devices(self, books: Mapping[Device, DeviceBook]) -> None:
        """Begin to account for the devices that a reading shows for the first time.

        A model from before any reading may be on each of them. It gets 0 bytes of those where it is
        not booked: so none of them is empty, and the model can be evicted for others. A load that
        began before is not alone there either, and neither are those beside it.
        """
        self.devices.update(books)
        no_bytes = dict.fromkeys(books, 0)
        for sizes in (self.models, self.stuck):
            for name, size in sizes.items():
                if size.keys() <= {UNSEEN}:
                    sizes[name] = {**no_bytes, **size}
        for load in self.loads.values():
            if load.reserved.keys() <= {UNSEEN}:
                load.reserved = no_bytes | load.reserved
                load.reusable = no_bytes | load.reusable

    def observe(
        self,
        used: Bytes,
        now: float,
        lag_seconds: float = 0.0,
        available: Bytes = NO_BYTES,  # free in the machine and cgroup; host memory only
    ) -> None:
        """Correct the ledger by a reading. A device that it lacks counts as unread from now on.

        A reading from before an end that is booked already changes nothing: the ledger knows more.
        """
        if now - lag_seconds <= self.booked_until:
            return
        self.shown_at = now - lag_seconds
        for device, book in self.devices.items():
            book.used_bytes = used.get(device)
            book.available_bytes = available.get(device)
        self._forget_returned(now)
        for device, book in self.devices.items():
            self._grow_reservation(device)
            self._clamp_settled(device)
            if book.used_bytes is None:
                continue
            if book.empty_bytes is not None:
                # with models loaded no less is used than without them
                book.empty_bytes = min(book.empty_bytes, book.used_bytes)
            elif self.is_empty(device):
                book.empty_bytes = book.used_bytes

    def advance(self, now: float) -> None:
        """Discard the readings if a load or an unload ended 5 s ago, and no newer reading has come.

        Without readings nothing waits for one: loads are booked, and unloads count as done.

        A caller that polls memory calls this each time, whether a reading has come or not.
        """
        ends = [leaving.ended_at for leaving in self.returning]
        ends += [load.ended_at for load in self.loads.values() if load.ended_at is not None]
        if any(self.shown_at <= end <= now - times.MEMORY_SECONDS for end in ends):
            self._forget_readings(self.devices)
        self._forget_returned(now)

    def _forget_readings(self, devices: Collection[Device]) -> None:
        for device in devices:
            if device in self.devices:
                self.devices[device].used_bytes = None
                self.devices[device].available_bytes = None

    def _is_shown(self, ended_at: float) -> bool:
        """Return whether a reading is newer than an end. Without readings none is waited for."""
        has_readings = any(book.used_bytes is not None for book in self.devices.values())
        return ended_at < self.shown_at or not has_readings

    def _forget_returned(self, now: float) -> None:
        """Drop the unloads and undone loads whose end the newest reading shows, or all without one.

        Ignore readings from before these ends from now on, and correct `settled`.
        """
        ends = [leaving.ended_at for leaving in self.returning if self._is_shown(leaving.ended_at)]
        if not ends:
            return
        self.returning = [
            leaving for leaving in self.returning if not self._is_shown(leaving.ended_at)
        ]
        self.booked_until = max(self.booked_until, *ends)
        self.returned_at = now
        for device in self.devices:
            self._clamp_settled(device)

    def _grow_reservation(self, device: Device) -> None:
        """Raise the only guessed reservation by what a reading shows above all that is promised.

        With several guesses nothing tells whose load takes more, so all stay.
        """
        book = self.devices[device]
        loads = [load for load in self.loads.values() if device in load.reserved]
        guessed = [load for load in loads if not load.need.is_known]
        if book.used_bytes is not None and len(guessed) == 1:
            promised = book.settled_bytes + self.reserved(device) + self.leaving(device)
            guessed[0].reserved[device] += max(0, book.used_bytes - promised)

    def _clamp_settled(self, device: Device) -> None:
        """Move `settled` between the bounds that the newest reading gives it."""
        book = self.devices[device]
        if book.used_bytes is not None:
            lower = book.used_bytes - self.reserved(device) - self.leaving(device)
            before_bytes = book.settled_bytes
            book.settled_bytes = _clamp(before_bytes, lower, book.used_bytes)
            for load in self.loads.values():
                if device in load.reusable:
                    load.reusable[device] += max(0, book.settled_bytes - before_bytes)

    # -- loads ----------------------------------------------------------------------------------

    def begin_load(self, name: TritonName, need: Need) -> None:
        """Reserve what an admitted load needs. The decision stood on a reading of this moment."""
        is_alone = not self.is_in_progress(need.bytes)
        is_only = all(self.is_empty(device) for device in need.bytes)
        self._mark_not_alone(need.bytes)
        self.loads[name] = LoadEntry(
            need,
            reserved=dict(need.bytes),
            before=self._list_readings(need.bytes),
            reusable={device: self.not_attributed(device) for device in need.bytes},
            is_alone=is_alone,
            is_only=is_only,
        )

    def rename_load(self, old_name: TritonName, name: TritonName) -> None:
        """Give a load in progress another name in Triton; it keeps its place in the order."""
        self.loads = {name if key == old_name else key: load for key, load in self.loads.items()}

    def send_load(self, name: TritonName) -> None:
        """Record that Triton was asked for the load, which may take memory from now on."""
        self.loads[name].is_sent = True

    def end_load(self, name: TritonName, now: float) -> None:
        """Record that Triton has loaded the model. It is booked once `can_settle`."""
        self.loads[name].ended_at = now

    def can_settle(self, name: TritonName) -> bool:
        """Return whether a reading shows all that the load took, or none is waited for."""
        ended_at = self.loads[name].ended_at
        return ended_at is not None and self._is_shown(ended_at)

    def settle(self, name: TritonName, reported: Bytes = NO_BYTES) -> Settlement:
        """Book a load that has ended well, and learn the size of its package. `reported` is what
        Triton says that the model takes.

        Before `can_settle`, as for a model that is unloaded at once, readings do not count: the
        newest one is from before the end of the load.
        """
        overrun = self.overrun_of(name)
        is_shown = self.can_settle(name)
        load = self.loads.pop(name)
        if not is_shown:
            self._forget_readings(load.reserved)
        if load.ended_at is not None:
            self.booked_until = max(self.booked_until, load.ended_at)
        had = self._free_for(load)
        rise = {} if load.is_only else self._find_rise(load)
        is_measured = self._is_measured(load, reported)
        booked = self._book_load(load, reported, is_measured=is_measured)
        key = load.need.package_key
        self.models[name] = booked
        is_reported = bool(reported) and reported.keys() >= load.reserved.keys()
        if booked:
            self.sizes.learn(key, booked, is_measured=is_measured, is_reported=is_reported)
        if overrun is None:
            self.sizes.end_shortage(key)
            self.tried.pop(key, None)
        elif overrun.is_permanent:
            remember(self.tried, key, had)
        return Settlement(booked, is_measured, overrun, rise)

    def _book_load(self, load: LoadEntry, reported: Bytes, *, is_measured: bool) -> Bytes:
        """Move what an ended load has taken into `settled`; return it. That is what Triton reports
        of a device, else what is reserved there as far as the readings allow.
        """
        booked = {device: self._find_booked(load, device) for device in load.reserved} | dict(
            reported
        )
        for device, count in booked.items():
            if device in self.devices:
                self.devices[device].settled_bytes += count
                self._clamp_settled(device)
        if not is_measured:
            return booked
        # a model that took nothing of a device is not there
        return {device: count for device, count in booked.items() if count > 0} or booked

    def fail_load(self, name: TritonName, now: float, *, is_out_of_memory: bool) -> None:
        """Release a load that has failed, once Triton has undone it.

        If it lacked memory, its package needs more the next time. If also nothing else was loaded
        or in progress, `tried` remembers what readings have shown free for it: a load that cannot
        get more is refused from then on. Not so after a text that the readings refute.
        """
        load = self.loads.pop(name)
        self._expect_return(load.reserved, now)
        if is_out_of_memory:
            self._record_shortage(load)

    def _record_shortage(self, load: LoadEntry) -> None:
        """Remember that a load lacked memory, and whether that proves that it never fits."""
        key = load.need.package_key
        self.sizes.record_shortage(key, load.reserved, is_known=load.need.is_known)
        # without readings nobody knows what else has been there
        is_read = load.before.keys() >= load.reserved.keys()
        is_proof = load.is_only and load.is_alone and not load.is_doubted
        if is_proof and is_read:
            remember(self.tried, key, self._free_for(load))

    def find_overrun(self, device: Device) -> Overrun | None:
        """Return the load to end if more is used than the limit: the newest one in Triton with a
        guessed need, else the newest one there. None where the limit holds, where nothing is read,
        or where Triton has no load to end: then loaded models have grown, and none of them is
        ended.

        None also until a reading is newer than the end of each load and unload: the memory may be
        that of a load which was just ended for it. What unloads in progress give back does not
        count.
        """
        book = self.devices.get(device)
        if book is None or book.used_bytes is None or self._is_returning(device):
            return None
        if book.used_bytes - self.leaving(device) <= book.limit_bytes:
            return None
        names = [
            name for name, load in self.loads.items() if load.is_sent and device in load.reserved
        ]
        if not names:
            return None
        guessed = [name for name in names if not self.loads[name].need.is_known]
        name = (guessed or names)[-1]
        load = self.loads[name]
        before = load.reading_before(device)
        own_bytes = load.reserved[device]
        if before is not None:
            own_bytes = max(own_bytes, book.used_bytes - before)
        others_bytes = book.used_bytes - own_bytes
        # a load that has ended takes what the reading shows; of several nobody knows which took it
        has_bound = load.ended_at is None and before is not None
        figures = MemoryFigures(
            own_bytes,
            max(0, book.limit_bytes - book.headroom_bytes - others_bytes),
            book.limit_bytes,
            device,
            own_bytes if has_bound else None,
        )
        return Overrun(
            name,
            figures,
            is_permanent=load.is_only and load.is_alone,
            is_alone=before is not None,
        )

    def overrun_of(self, name: TritonName) -> Overrun | None:
        """Return the first overrun that names this load as the one to end; None without one."""
        for device in self.loads[name].reserved:
            overrun = self.find_overrun(device)
            if overrun is not None and overrun.name == name:
                return overrun
        return None

    def is_overrun_open(self, name: TritonName) -> bool:
        """Return whether this load may still be the one to end: a newer one is being ended, or a
        reading has yet to show what an ended one gives back.
        """
        devices = self.loads[name].reserved
        overruns = [self.find_overrun(device) for device in devices]
        is_other_ended = any(overrun is not None and overrun.name != name for overrun in overruns)
        return is_other_ended or any(self._is_returning(device) for device in devices)

    def _is_returning(self, device: Device) -> bool:
        """Return whether something has ended on the device that no reading shows yet."""
        return any(device in leaving.booked for leaving in self.returning)

    def record_overrun(self, overrun: Overrun) -> None:
        """Reserve what readings have shown of a load that is ended for a limit, so that its next
        need is larger than that.
        """
        load = self.loads[overrun.name]
        for device in load.reserved:
            if device == overrun.figures.device:
                load.reserved[device] = overrun.figures.needed_bytes or 0

    def _find_booked(self, load: LoadEntry, device: Device) -> int:
        """Return what an ended load is booked with: its reservation, as far as the newest reading
        allows.
        """
        believed = load.reserved[device]
        book = self.devices.get(device)
        if book is None or book.used_bytes is None:
            return believed
        before = load.reading_before(device)
        if before is None:
            before = book.settled_bytes
        lower = book.used_bytes - before - self._reserved_for_loads(device) - self.leaving(device)
        upper = book.used_bytes - before + load.reusable[device]
        return _clamp(believed, max(0, lower), max(0, upper))

    def _is_measured(self, load: LoadEntry, reported: Bytes) -> bool:
        """Return whether Triton reports or a reading shows what a load took, of each device. Where
        nobody measures, nothing is known.
        """
        unreported = load.reserved.keys() - reported.keys()
        has_devices = bool(load.reserved or reported)
        return has_devices and unreported <= self._find_rise(load).keys()

    def _find_rise(self, load: LoadEntry) -> Bytes:
        """Return what readings have risen by during a load, of devices where it was alone."""
        if not load.is_alone:
            return NO_BYTES
        used = self._list_readings(load.before)
        return {device: count - load.before[device] for device, count in used.items()}

    def _free_for(self, load: LoadEntry) -> Bytes:
        """Return the bytes that each device had free when this load began. They mean something only
        for a load that was alone on its devices: that is for the caller to know.
        """
        free = {}
        for device in load.reserved:
            book = self.devices[device]
            free[device] = book.limit_bytes - load.before.get(device, book.settled_bytes)
        return free

    def forget(self, package_key: str) -> ForgottenSize:
        """Forget what loads of a package have shown: its size, and that it did not fit. Return what
        that was. The package is tried as one that was never seen; what is loaded stays booked.
        """
        forgotten = ForgottenSize(
            self.sizes.find(package_key),
            self.sizes.find_shortage(package_key),
            was_too_large=package_key in self.tried,
        )
        self.sizes.forget(package_key)
        self.tried.pop(package_key, None)
        self.futile_evictions.pop(package_key, None)
        return forgotten

    # -- unloads --------------------------------------------------------------------------------

    def begin_unload(self, name: TritonName) -> Leaving:
        """Count a loaded model no longer, and expect its memory back.

        Expected is what the model is booked with, but at most what `settled` has beyond an empty
        device: a dead process has given its memory back already. Loads on its devices are not alone
        any more. Return what is expected, for `is_unload_done`.
        """
        booked = self._find_remaining(self.models.pop(name))
        leaving = Leaving(booked, self._list_readings(booked))
        self._mark_not_alone(booked)
        self.unloads[name] = leaving
        for device, count in booked.items():
            if device in self.devices:
                self.devices[device].settled_bytes -= count
        return leaving

    def _find_remaining(self, booked: Bytes) -> Bytes:
        """Return the part of a model's booked bytes that it still holds as its unload begins.

        On each device these are at most the settled bytes beyond those of an empty Triton. The
        memory of a process that has died is back before the unload, and readings have taken it from
        `settled`. The caller has removed the model from `models`.
        """
        remaining = dict(booked)
        for device, count in booked.items():
            book = self.devices.get(device)
            if book is not None:
                remaining[device] = _clamp(book.settled_bytes - (book.empty_bytes or 0), 0, count)
        return remaining

    def end_unload(self, name: TritonName, now: float) -> None:
        """Record that Triton has unloaded the model. Harmless after the end of Triton's life."""
        leaving = self.unloads.pop(name, None)
        if leaving is not None:
            self._expect_return(leaving.booked, now)

    def strand(self, name: TritonName, *, is_out_of_memory: bool = False) -> None:
        """Keep the bytes of a load or an unload that Triton does not finish.

        They stay taken until Triton has finished it after all (`free_stuck`) or has exited.
        A load that lacked memory (`is_out_of_memory`) needs more the next time.
        """
        load = self.loads.pop(name, None)
        if load is None:
            self.stuck[name] = self.unloads.pop(name).booked
            return
        self.stuck[name] = load.reserved
        if is_out_of_memory:
            self._record_shortage(load)

    def record_futile_eviction(self, package_key: str, now: float) -> None:
        """Record that a load of this package was refused though others had left for it.

        For `times.RECENT_SECONDS` nobody is evicted for the package again.
        """
        remember(self.futile_evictions, package_key, now)

    def free_stuck(self, name: TritonName, now: float) -> None:
        """Release what Triton was stuck with, and has finished after all."""
        size = self.stuck.pop(name, None)
        if size is not None:
            self._mark_not_alone(size)
            self._expect_return(size, now)

    def _expect_return(self, size: Bytes, now: float) -> None:
        """Expect a newer reading to show that the bytes are back."""
        self.returning.append(Leaving(size, NO_BYTES, now))
        self._forget_returned(now)

    # -- lives of Triton ------------------------------------------------------------------------

    def adopt(self, name: TritonName, booked: Bytes) -> None:
        """Book a model that an earlier run of the adapter has loaded.

        A reading that shows the model already is not counted twice, and none so far was of an empty
        device. Loads on its devices are not alone any more. A model that no reading has shown to
        that run, or whose load never ended, may be on each device. It gets 0 bytes of those where
        it is not booked: so none of them is empty beside it.
        """
        if booked.keys() <= {UNSEEN}:
            booked = {**dict.fromkeys(self.devices, 0), **booked}
        self._mark_not_alone(booked)
        self.models[name] = booked
        for device, count in booked.items():
            if device in self.devices:
                self.devices[device].settled_bytes += count
                self.devices[device].empty_bytes = None
                self._clamp_settled(device)

    def start_life(self) -> None:
        """Forget what an earlier Triton had loaded: it ended, and another one is up. The loads that
        it broke off end by `fail_load`.
        """
        for booked in self.models.values():
            for device in booked.keys() & self.devices.keys():
                self.devices[device].settled_bytes -= booked[device]
        self.models.clear()
        self.unloads.clear()
        self.returning.clear()
        self.stuck.clear()
        self._mark_not_alone(self.devices)
        for book in self.devices.values():
            book.empty_bytes = None

    # -- inside ---------------------------------------------------------------------------------

    def _list_leaving(self) -> Iterable[Leaving]:
        """Return what is expected back: of unloads in progress, and of what has ended lately."""
        return [*self.unloads.values(), *self.returning]

    def _reserved_for_loads(self, device: Device) -> int:
        """Return the bytes that are reserved for loads in progress, whether taken yet or not."""
        return _sum((load.reserved for load in self.loads.values()), device)

    def _list_readings(self, devices: Collection[Device]) -> Bytes:
        """Return the newest readings of these devices, without those that have none."""
        books = {device: self.devices.get(device) for device in devices}
        return {
            device: book.used_bytes
            for device, book in books.items()
            if book is not None and book.used_bytes is not None
        }

    def _mark_not_alone(self, devices: Collection[Device]) -> None:
        """Record that loads in progress on these devices are not alone any more."""
        for load in self.loads.values():
            if _is_on(load.reserved, devices):
                load.is_alone = False


def is_unload_done(leaving: Leaving, used: Bytes, seconds: float, lag_seconds: float = 0.0) -> bool:
    """Return whether to answer an unload, `seconds` after Triton has ended it.

    Readings show the bytes in use fallen by 3/4 of what is expected since the unload began. This is
    so on each device where 16 MiB or more are expected. Of a model that no reading has shown, one
    is awaited that is newer than its unload: readings are `lag_seconds` old. A reading that fails
    shows nothing, and the next one counts. Or 5 s have passed. Where nothing is read the answer
    follows at once.
    """
    if seconds >= times.MEMORY_SECONDS:
        return True
    for device, count in leaving.booked.items():
        if count < _WORTH_WAITING_BYTES:
            continue
        before = leaving.before.get(device)
        if before is None:
            if device in used and seconds < lag_seconds:
                return False
        elif before - used.get(device, before) < UNLOADED_SHARE * count:
            return False
    return True


def _sum(sizes: Iterable[Bytes], device: Device) -> int:
    return sum(size.get(device, 0) for size in sizes)


def _is_on(size: Mapping[Device, int], devices: Collection[Device]) -> bool:
    """Return whether the size names any of the devices, be it with 0 bytes."""
    return any(device in devices for device in size)


def _clamp(value: int, lower: int, upper: int) -> int:
    return min(max(value, lower), upper)
