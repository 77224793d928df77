"""Indexes the artifacts on disk, accounts for what they take, and evicts some for others.

It is called from the event loop and, for room, from threads: files are removed in the thread that
reserves room, outside the lock.
"""

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter.core.artifacts import Artifact, ArtifactKey, DiskUse
from adapter.core.byte_sizes import format_size
from adapter.core.victims import choose_fewest
from adapter.errors import AdapterError, BackendError, NoRoom
from adapter.packages.unpacking import RESERVE_BYTES, RESERVE_INODES, Free
from adapter.runtime import clock
from adapter.store.cache_folder import CacheFolder, Found, Note
from adapter.store.ports import DiskEvictor
from adapter.store.refusals import Need

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# of what is free, and of what artifacts have already
_DEFAULT_SHARE = 0.9
_ADVICE = "free some, or set cache_dir to another disk; see docs/stores.md#the-disk"
_DISK = "disk"  # the one place that `choose_fewest` is asked about


@dataclass(slots=True)
class Cached:
    """An artifact on disk."""

    note: Note
    last_used: float  # in seconds since 1970
    pins: int = 0  # by fetches and loads; an artifact without any may leave
    is_replaced: bool = False  # the store has another version, or none; the folder says so too
    is_lost: bool = False  # some of its files were deleted, so that nobody finds it any more


@dataclass(slots=True)
class Evicted:
    """An artifact that has left the disk."""

    cached: Cached
    reason: str  # limit: for room below cache_limit; disk: on the disk itself
    seconds: float = 0.0


def _refuse(_: int, shortage: NoRoom) -> None:
    raise shortage


@dataclass(slots=True)
class Reservation:
    """The room on disk that one fetch has reserved."""

    what: str  # names the fetch in messages
    disk: "Disk" = field(repr=False)
    # `wait(count, error)` runs in a thread when `count` bytes are missing; it returns to retry, or
    # raises
    wait: Callable[[int, NoRoom], None] = field(repr=False, default=_refuse)
    # unloads idle models for it; None: what is in use stays
    models: DiskEvictor | None = field(repr=False, default=None)
    size_bytes: int = 0
    ahead_bytes: int = 0  # of these not yet drawn by a writer
    inodes: int = 0
    need: Need = field(default_factory=Need)
    waited_seconds: float = 0.0
    staying_bytes: int = 0  # of the cache, known never to leave for it
    short_at: int = 0  # the disk's `freed_count` at the last shortage
    is_given_up: bool = False  # nothing more is taken
    is_cached: bool = False  # an artifact was made of it, which its fetch has yet to hand over

    @property
    def written_bytes(self) -> int:
        """Return what writers have drawn of it."""
        return self.size_bytes - self.ahead_bytes

    def refresh(self) -> None:
        """Note the bytes of models that nothing unloads for room."""
        self.staying_bytes = self.models.bytes_that_stay() if self.models else 0

    def take(self, count: int, inodes: int = 0) -> None:
        """Reserve `count` more bytes, and check that `inodes` more files can be made. Bytes
        reserved ahead are used first; then unused artifacts are evicted. To be called in a thread.

        Raises NoRoom.
        """
        count -= self.disk.draw(self, count)
        while count or inodes:
            try:
                self.disk.take(self, count, inodes)
                self.inodes += inodes
                count = inodes = 0
            except NoRoom as shortage:
                self.wait(count, shortage)

    @property
    def most_bytes(self) -> int:
        """Return how many bytes may ever be reserved beside those that are written."""
        by_limit = self.disk.limit_bytes - self.written_bytes
        return max(0, min(by_limit, self.disk.most_for(self)))

    def foresee(self, stated_bytes: int, least_bytes: int) -> None:
        """Note how many bytes an archive unpacks to by its own word. Raise NoRoom, before anything
        leaves the disk for it, if it unpacks to `least_bytes` at least, which are more than
        `most_bytes`; 0 means no such excess.
        """
        self.need.stated_bytes = self.written_bytes + stated_bytes
        if least_bytes:
            self.refuse_more_than_all(least_bytes)
            raise NoRoom(self.disk.explain_shortage(self, least_bytes))

    def give_back(self, count: int, inodes: int = 0) -> None:
        """Release so many bytes and inodes."""
        self.inodes -= inodes
        self.disk.give_back(self, count)

    def settle(self, count: int) -> None:
        """Make the reservation `count` bytes, whatever was reserved. Raises as `take` does."""
        self.disk.draw(self, self.ahead_bytes)
        if count > self.size_bytes:
            self.take(count - self.size_bytes)
        else:
            self.give_back(self.size_bytes - count)

    def refuse_more_than_all(self, count: int) -> None:
        """Raise NoRoom if so many more bytes than are written are above the limit."""
        needed = self.written_bytes + count
        self.need.size_bytes = max(self.need.size_bytes, needed)
        if needed > self.disk.limit_bytes:
            raise NoRoom(f"{self.shortage()} in all, and {self.disk.about_limit()}")

    def shortage(self) -> str:
        """Return the beginning of a message that says what is needed."""
        return f"{self.what}: no room on disk: it needs {format_size(self.all_bytes)} or more"

    @property
    def all_bytes(self) -> int:
        """Return what it needs in all, as far as that is known."""
        return max(self.need.size_bytes, self.need.stated_bytes)


class Disk:
    """The index of the cache, and the room that artifacts and reservations take together."""

    def __init__(
        self,
        folder: CacheFolder,
        limit_bytes: int | None,
        on_evicted: Callable[[Evicted], None],
        *,
        free: Callable[[], Free] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes or 0  # set by `refresh` if it was not given
        self._used_bytes = 0  # by artifacts, and reserved
        self.why_full: str | None = None  # why nothing more can be fetched, at the last `refresh`
        self._left_bytes = self.limit_bytes  # of the disk itself, then
        self._is_limit_given = limit_bytes is not None
        # called in any thread when there is more room, or an artifact may leave
        self.on_freed: Callable[[], object] = lambda: None
        self.freed_count = 0  # how often that was
        self._ahead_bytes = 0  # of all reservations
        self._folder = folder
        self._on_evicted = on_evicted
        self._free = free or folder.free
        self._cached: dict[str, Cached] = {}  # by id
        self._by_key: dict[tuple[str, str], list[Cached]] = {}  # the newest last
        self._leaving = 0
        self._changed = threading.Condition()
        self._marking = threading.Lock()  # keeps notes and marks in step

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def used_bytes(self) -> int:
        """Return what artifacts, reservations and files that cannot be deleted take."""
        return self._used_bytes + self._folder.undeleted_bytes

    def refresh(self) -> None:
        """Read what is free on the disk, and try again to delete what could not be deleted. A limit
        that was not given only rises.
        """
        undeleted_bytes = self._folder.undeleted_bytes
        self._folder.delete_again()
        if self._folder.undeleted_bytes < undeleted_bytes:
            self._note_freed()
        free = self._free()
        with self._changed:
            self._left_bytes = left = max(0, free.bytes - RESERVE_BYTES - self._ahead_bytes)
            if not self._is_limit_given:
                limit_bytes = int(_DEFAULT_SHARE * (self.used_bytes + left))
                self.limit_bytes = max(self.limit_bytes, limit_bytes)
        is_full = free.bytes <= RESERVE_BYTES or _lacks_inodes(free, 1)
        self.why_full = _about(free, 1 if free.bytes > RESERVE_BYTES else 0) if is_full else None

    def about_limit(self) -> str:
        """Return what the limit is, and where it is from."""
        if self._is_limit_given:
            return f"cache_limit is {format_size(self.limit_bytes)}"
        share = f"the cache has {_DEFAULT_SHARE:.0%} of the rest unless cache_limit is set"
        return f"{_about(self._free())}; {share}; {_ADVICE}"

    # -- artifacts --------------------------------------------------------------------------

    def unused(self) -> tuple[int, int]:
        """Return how many artifacts are not pinned, and their bytes."""
        with self._changed:
            sizes = [cached.note.size_bytes for cached in self._cached.values() if not cached.pins]
        return len(sizes), sum(sizes)

    def use(self) -> DiskUse:
        """Return how full the cache is."""
        with self._changed:
            size_bytes = sum(cached.note.size_bytes for cached in self._cached.values())
            free_bytes = min(self.limit_bytes - self.used_bytes, self._left_bytes)
            return DiskUse(
                len(self._cached),
                size_bytes,
                self._used_bytes - size_bytes,
                max(0, free_bytes),
                self.limit_bytes,
                self._folder.undeleted_bytes,
            )

    def adopt(self, found: Found) -> None:
        """Take over an artifact of an earlier run."""
        with self._changed:
            self._add(Cached(found.note, found.last_used, is_replaced=found.is_replaced))

    def trim(self) -> None:
        """Evict what an earlier run stored beyond the limit."""
        self.take(Reservation("", self), 0)

    def hold(self, store: str, path: str, etag: str | None) -> Cached | None:
        """Pin an artifact, and record that it is used now. Without `etag` it is the one that the
        store had when it was last asked. Return None if that one is not on disk, or lost.
        """
        with self._changed:
            versions = [each for each in self._versions(store, path) if not each.is_lost]
            if etag is None:
                versions = [each for each in versions if not each.is_replaced]
            else:
                versions = [each for each in versions if each.note.etag == etag]
            cached = versions[-1] if versions else None
            if cached is not None:
                cached.pins += 1
                cached.last_used = clock.wall()
            return cached

    def has_current(self, store: str, path: str) -> bool:
        """Return whether the version that the store had when it was last asked is on disk."""
        versions = self._versions(store, path)
        return any(not (each.is_lost or each.is_replaced) for each in versions)

    def versions(self, store: str, path: str) -> list[Cached]:
        """Return the versions of an artifact that are on disk, the newest last."""
        with self._changed:
            return list(self._versions(store, path))

    def mark(self, cached: Cached, *, is_replaced: bool) -> None:
        """Note, on disk first, whether the store has another version, or none. To be called in a
        thread. Raises OSError and BackendUnavailable.
        """
        with self._marking:
            self._folder.mark(cached.note.id, is_replaced=is_replaced)
            cached.is_replaced = is_replaced

    def lose(self, cached: Cached) -> None:
        """Take one pin off an artifact whose files are not all there; it is to leave first."""
        with self._changed:
            cached.is_lost = True
            cached.pins -= 1
            self.freed_count += 1
        self.on_freed()

    def add(self, note: Note, reservation: Reservation) -> Cached:
        """Make the reservation an artifact, pinned once, and by those who have a lost one of the
        same version.
        """
        with self._changed:
            lost = self._cached.get(note.id)
            if lost is not None:
                self._remove(lost)
                self._used_bytes -= lost.note.size_bytes
            self._used_bytes -= reservation.size_bytes
            reservation.size_bytes = 0
            reservation.is_cached = True
            cached = Cached(note, clock.wall(), pins=lost.pins + 1 if lost else 1)
            self._add(cached)
            return cached

    def release(self, id_: str) -> Cached | None:
        """Take one pin off, which is a use. Returns None if it is not there."""
        with self._changed:
            cached = self._cached.get(id_)
            if cached is not None and cached.pins:
                cached.pins -= 1
                cached.last_used = clock.wall()
            self.freed_count += 1
        self.on_freed()
        return cached

    def _note_freed(self) -> None:
        """Wake those that wait for room."""
        with self._changed:
            self.freed_count += 1
            self._changed.notify_all()
        self.on_freed()

    def _versions(self, store: str, path: str) -> list[Cached]:
        return self._by_key.get((store, path), [])

    def _add(self, cached: Cached) -> None:
        self._cached[cached.note.id] = cached
        self._by_key.setdefault((cached.note.store, cached.note.path), []).append(cached)
        self._used_bytes += cached.note.size_bytes

    # -- room -------------------------------------------------------------------------------

    def take(
        self, reservation: Reservation, count: int, inodes: int = 0, *, is_ahead: bool = False
    ) -> None:
        """Reserve `count` bytes for the reservation, or raise NoRoom at once; see there.
        `is_ahead`: for what is written later, by `draw`. `inodes` must be free, and are not
        reserved.
        """
        reservation.refuse_more_than_all(count)
        reservation.need.inodes = max(reservation.need.inodes, reservation.inodes + inodes)
        if reservation.size_bytes + count + reservation.staying_bytes > self.limit_bytes:
            raise NoRoom(
                f"{reservation.shortage()} in all, and of cache_limit,"
                f" {format_size(self.limit_bytes)},"
                f" {format_size(reservation.staying_bytes)} never leave"
            )
        while (leaving := self._reserve(reservation, count, inodes, is_ahead=is_ahead)) is not None:
            begun = clock.monotonic()
            try:
                self._folder.remove(leaving.cached.note.id)
            finally:
                with self._changed:
                    self._leaving -= 1
                    self._used_bytes -= leaving.cached.note.size_bytes
                    self.freed_count += 1
                    self._changed.notify_all()
                self.on_freed()
            leaving.seconds = clock.monotonic() - begun
            self._on_evicted(leaving)

    def draw(self, reservation: Reservation, count: int) -> int:
        """Let that much of what was reserved ahead be written; return how much there was."""
        with self._changed:
            drawn = min(count, reservation.ahead_bytes)
            reservation.ahead_bytes -= drawn
            self._ahead_bytes -= drawn
        return drawn

    def give_back(self, reservation: Reservation, count: int) -> None:
        """Release so many bytes of a reservation."""
        with self._changed:
            reservation.size_bytes -= count
            self._used_bytes -= count
        self._note_freed()

    def _reserve(
        self, reservation: Reservation, count: int, inodes: int, *, is_ahead: bool
    ) -> Evicted | None:
        """Reserve and return None, or return what has to leave first, which nobody finds now."""
        with self._changed:
            while True:
                exceeds_limit = self.used_bytes + count > self.limit_bytes
                if not exceeds_limit and self._has_disk(count, inodes):
                    self._give(reservation, count, is_ahead=is_ahead)
                    return None
                if cached := self._pop(count):
                    self._leaving += 1
                    return Evicted(cached, "limit" if exceeds_limit else "disk")
                if not self._leaving:
                    reservation.short_at = self.freed_count
                    raise NoRoom(self.explain_shortage(reservation, count, inodes))
                self._changed.wait()

    def _give(self, reservation: Reservation, count: int, *, is_ahead: bool) -> None:
        self._used_bytes += count
        reservation.size_bytes += count
        if is_ahead:
            reservation.ahead_bytes += count
            self._ahead_bytes += count

    def _has_disk(self, count: int, inodes: int) -> bool:
        if not (count or inodes):
            return True
        free = self._free()
        has_bytes = not count or free.bytes - RESERVE_BYTES - self._ahead_bytes >= count
        return has_bytes and not _lacks_inodes(free, inodes)

    def _pop(self, count: int) -> Cached | None:
        """Remove from the index and return what has to leave first for `count` more bytes; None
        where all that nobody uses is too little.
        """
        idle, missing = (
            [cached for cached in self._cached.values() if not cached.pins],
            self.missing(count),
        )
        if sum(cached.note.size_bytes for cached in idle) < missing:
            return None
        idle.sort(key=lambda cached: (not cached.is_lost, not cached.is_replaced, cached.last_used))
        # replaced and lost artifacts are not spared: nobody fetches them any more
        candidates = [
            (
                cached,
                {} if cached.is_lost or cached.is_replaced else {_DISK: cached.note.size_bytes},
            )
            for cached in idle
        ]
        leaving = choose_fewest(candidates, {_DISK: missing})
        if not leaving:
            return None
        self._remove(leaving[0])
        return leaving[0]

    def missing(self, count: int) -> int:
        """Return how many bytes must leave before `count` more have room; below 1 for none."""
        of_limit = self.used_bytes + count - self.limit_bytes
        return max(of_limit, count - self._spare_bytes() if count else 0)

    def most_for(self, reservation: Reservation) -> int:
        """Return how many bytes can still be written, once all has left that ever may."""
        may_leave = self._used_bytes - reservation.size_bytes - reservation.staying_bytes
        spare = min(self.limit_bytes - self.used_bytes, self._spare_bytes())
        return may_leave + spare + reservation.ahead_bytes

    def _spare_bytes(self) -> int:
        return self._free().bytes - RESERVE_BYTES - self._ahead_bytes

    def _remove(self, cached: Cached) -> None:
        del self._cached[cached.note.id]
        versions = self._by_key[cached.note.store, cached.note.path]
        versions.remove(cached)
        if not versions:
            del self._by_key[cached.note.store, cached.note.path]

    def explain_shortage(self, reservation: Reservation, count: int, inodes: int = 0) -> str:
        """Return why the reservation gets `count` more bytes or so many files neither now nor by
        evicting what is unused: the limit that binds, what it is used for, and what may leave.
        """
        remaining = reservation.all_bytes - reservation.written_bytes
        still = (
            f", {format_size(remaining)} of that still" if remaining < reservation.all_bytes else ""
        )
        needed = f"{reservation.shortage()} in all{still}"
        if self.used_bytes + count > self.limit_bytes:
            return f"{needed}, and of {self._limit_name()}, {self._describe_use(reservation)}"
        free = self._free()
        if _lacks_inodes(free, inodes):
            files = f"{reservation.need.inodes} files, {inodes} of them still"
            needed = f"{reservation.shortage()} in {files}"
        use = self._describe_use(reservation)
        return f"{needed}, and {_about(free, inodes)}; of the cache {use}: {_ADVICE}"

    def _limit_name(self) -> str:
        limit = format_size(self.limit_bytes)
        if self._is_limit_given:
            return f"cache_limit, {limit}"
        return f"the {limit} that the cache may have while cache_limit is not set"

    def _describe_use(self, reservation: Reservation) -> str:
        """Return what takes the cache's bytes, and how many of them may leave at once."""
        in_use_bytes = sum(each.note.size_bytes for each in self._cached.values() if each.pins)
        unused_bytes = sum(each.note.size_bytes for each in self._cached.values() if not each.pins)
        others_bytes = self._used_bytes - in_use_bytes - unused_bytes - reservation.size_bytes
        uses = {
            "are of models in use": in_use_bytes,
            "of other fetches": others_bytes,
            "cannot be deleted (artifact.not_deleted in the log)": self._folder.undeleted_bytes,
            "may leave": unused_bytes,
        }
        words = [f"{format_size(size)} {what}" for what, size in uses.items() if size > 0]
        return ", ".join(words) if words else "nothing is taken by others"


def _about(free: Free, inodes: int = 0) -> str:
    """Return what a disk has free: inodes, where it lacks so many, else bytes."""
    if _lacks_inodes(free, inodes):
        has, reserve, left = f"{free.inodes} inodes", str(RESERVE_INODES), ""
    else:
        has, reserve = format_size(free.bytes), format_size(RESERVE_BYTES)
        spare = free.bytes - RESERVE_BYTES
        left = f", which leaves {format_size(spare)}" if spare > 0 else ""
    return f"the disk of cache_dir has {has} free, and {reserve} are kept for others{left}"


def _lacks_inodes(free: Free, count: int) -> bool:
    return bool(count) and free.inodes is not None and free.inodes - RESERVE_INODES < count


def artifact_of(key: ArtifactKey, cached: Cached, folder: CacheFolder) -> Artifact:
    """Return what control gets of an artifact on disk."""
    return Artifact(key, folder.place(cached.note), cached.note.etag, cached.note.size_bytes)


def disk_error(error: OSError, what: str, size_bytes: int) -> AdapterError:
    """Return the error of a fetch, which `what` names, that the disk has ended."""
    reason = f"the disk of cache_dir: {error.strerror or error}"
    if error.errno not in _FULL:
        return BackendError(f"{what}: {reason}")
    needed = f"no room on disk: it needs {format_size(size_bytes)} or more in all"
    return NoRoom(f"{what}: {needed}, and {reason}")
