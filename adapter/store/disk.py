"""Knows what the cache has on disk, and reserves room there for fetches.

All of this belongs to the event loop. Threads only delete files, and read what the disk has free.

What a store announces is reserved before the first byte comes, so that a fetch that has to wait
has nothing on disk yet. The reservation grows with what is written. Where it cannot grow, unused
artifacts are evicted; then idle models are unloaded; then the fetch waits for others. A fetch that
has something on disk waits only if it began first. Any other one gives back what it has, and begins
again when those before it have ended. So no two fetches wait for each other.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from adapter.core.artifacts import DiskUse
from adapter.core.byte_sizes import format_size
from adapter.core.victims import choose_fewest
from adapter.errors import AdapterError, BackendError, NoRoom
from adapter.packages.unpack import RESERVE_BYTES, RESERVE_INODES, Free
from adapter.runtime import clock
from adapter.runtime.threads import CACHE
from adapter.store.cache_folder import Cached, CacheFolder, Note
from adapter.store.ports import DiskEvictor

log = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# of what is free, and of what artifacts have already
_DEFAULT_SHARE = 0.9
_ADVICE = "free some, or set cache_dir to another disk; see docs/stores.md#the-disk"
_DISK = "disk"  # the one place that `choose_fewest` is asked about
_POLL_SECONDS = 0.25  # nobody reports that a model has no request any more


class BeginsAgain(Exception):
    """Ends a fetch that lacks room while one that began before it has some. Not an answer."""

    def __init__(self, shortage: NoRoom) -> None:
        super().__init__(str(shortage))
        self.shortage = shortage


@dataclass(slots=True)
class Need:
    """The most room on disk that fetches of a version have requested. The next one reserves it at
    once.
    """

    size_bytes: int = 0
    inodes: int = 0
    known_until: float = 0.0  # on the monotonic clock

    def clear(self) -> None:
        """Forget what was requested: the download may have been garbled, or of another version."""
        self.size_bytes = 0
        self.inodes = 0


class Reservation:
    """The room on disk of one fetch."""

    def __init__(self, disk: "Disk", what: str, evictor: DiskEvictor | None = None) -> None:
        self.what = what  # names the fetch in messages
        self.evictor = evictor  # unloads idle models for the fetch; None: models in use stay
        self.need = Need()
        self.size_bytes = 0
        self.written_bytes = 0
        self.inodes = 0  # made
        self.waited_seconds = 0.0
        self._disk = disk

    @property
    def unevictable_bytes(self) -> int:
        """Return the bytes on disk of loaded models that are never unloaded for the fetch."""
        return self.evictor.unevictable_bytes() if self.evictor is not None else 0

    @property
    def can_unload_later(self) -> bool:
        """Return whether any model may be unloaded for the fetch, now or later."""
        return self.evictor is not None and self.evictor.can_unload_later

    @property
    def unwritten_bytes(self) -> int:
        """Return what is reserved and not on disk yet."""
        return max(0, self.size_bytes - self.written_bytes)

    async def reserve(self, size_bytes: int, inodes: int = 0) -> None:
        """Grow the reservation to so many bytes in all, or to the bytes that an earlier fetch of
        the version has needed, and wait until so many more files can be made.

        Raises NoRoom and BeginsAgain.
        """
        size_bytes = max(size_bytes, self.need.size_bytes)
        await self._disk.grow(self, size_bytes, max(inodes, self.need.inodes))

    async def write(self, count: int, inodes: int = 0) -> None:
        """Reserve room for so many bytes and files that are about to be written. Grow the
        reservation only where it has less. Raises as `reserve` does.
        """
        self.written_bytes += count
        if self.written_bytes > self.size_bytes or inodes:
            await self._disk.grow(self, self.written_bytes, inodes)
            self.inodes += inodes

    async def settle(self, size_bytes: int) -> None:
        """Grow or shrink the reservation to the bytes that the fetch has on disk. Raises as
        `reserve` does.
        """
        await self._disk.grow(self, size_bytes)
        self._disk.shrink(self, size_bytes)
        self.written_bytes = size_bytes

    def release(self) -> None:
        """Release everything, as nothing of the fetch is on disk any more."""
        self._disk.shrink(self, 0)
        self.written_bytes = 0
        self.inodes = 0

    @property
    def is_too_large(self) -> bool:
        """Whether more is needed than the reservation could ever get (`Disk.find_max_growth`)."""
        return self.need.size_bytes > self.size_bytes + self._disk.find_max_growth(self)


class Disk:
    """The index of the cache, and the room that artifacts and fetches take together."""

    def __init__(
        self,
        folder: CacheFolder,
        limit_bytes: int | None,  # of artifacts and fetches; None: a share of what is free
        on_evicted: Callable[[Note, str], None] = lambda _note, _reason: None,
        *,
        room_seconds: float = 10.0,  # how long one fetch may wait for room in all
    ) -> None:
        self.limit_bytes = limit_bytes or 0  # set by `refresh` if it was not given
        self.full_reason: str | None = (
            None  # why nothing more can be fetched, at the last `refresh`
        )
        self._is_limit_given = limit_bytes is not None
        self._folder = folder
        self._on_evicted = on_evicted
        self._room_seconds = room_seconds
        self._free = Free(0, None)  # of the disk, when it was last asked
        self._cached: dict[str, Cached] = {}  # by id
        self._by_key: dict[tuple[str, str], list[Cached]] = {}  # the newest last
        self._reservations: list[Reservation] = []  # the one that began first comes first
        self._counted_bytes = 0  # of artifacts, of those that are being deleted, and reserved
        self._evictions: set[asyncio.Task[None]] = set()
        self._unloading = asyncio.Lock()
        self._freed = asyncio.Event()
        self._freed_count = 0
        self._marking = asyncio.Lock()  # keeps the folder and `is_replaced` in step

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def used_bytes(self) -> int:
        """Return what artifacts, reservations and files that cannot be deleted take."""
        return self._counted_bytes + self._folder.undeleted_bytes

    async def refresh(self) -> None:
        """Read what is free on the disk, and try again to delete what could not be deleted. A limit
        that was not given only rises.
        """
        undeleted_bytes = self._folder.undeleted_bytes
        await CACHE.run(self._folder.delete_again)
        if self._folder.undeleted_bytes < undeleted_bytes:
            self._note_freed()
        await self._poll_free()
        if not self._is_limit_given:
            limit_bytes = int(_DEFAULT_SHARE * (self.used_bytes + max(0, self._spare_bytes())))
            self.limit_bytes = max(self.limit_bytes, limit_bytes)
        has_bytes = self._free.bytes > RESERVE_BYTES
        is_full = not has_bytes or self._lacks_inodes(1)
        self.full_reason = self._describe_free(int(has_bytes)) if is_full else None

    # -- artifacts --------------------------------------------------------------------------

    def unused(self) -> tuple[int, int]:
        """Return how many artifacts are not pinned, and their bytes."""
        sizes = [cached.note.size_bytes for cached in self._cached.values() if not cached.pins]
        return len(sizes), sum(sizes)

    def measure_use(self) -> DiskUse:
        """Return how full the cache is."""
        size_bytes = sum(cached.note.size_bytes for cached in self._cached.values())
        free_bytes = min(self.limit_bytes - self.used_bytes, self._spare_bytes())
        return DiskUse(
            len(self._cached),
            size_bytes,
            self._counted_bytes - size_bytes,
            max(0, free_bytes),
            self.limit_bytes,
            self._folder.undeleted_bytes,
        )

    async def adopt(self, artifacts: list[Cached]) -> None:
        """Take over the artifacts of an earlier run; evict those that are beyond the limit."""
        for cached in sorted(artifacts, key=lambda each: each.last_used):
            self._index(cached)
        await self.refresh()
        await self._grow_by_evicting(Reservation(self, ""), 0, 0)

    def find(self, store: str, path: str) -> list[Cached]:
        """Return the versions of an artifact that are on disk, the newest last."""
        return list(self._by_key.get((store, path), ()))

    def find_current(self, store: str, path: str) -> Cached | None:
        """Return the version that the store had when it was last asked, if it is on disk."""
        versions = self.find(store, path)
        current = [each for each in versions if not (each.is_lost or each.is_replaced)]
        return current[-1] if current else None

    def find_version(self, store: str, path: str, etag: str) -> Cached | None:
        """Return this version, if it is on disk."""
        versions = self.find(store, path)
        return next((each for each in versions if each.note.etag == etag), None)

    def list_paths(self, store: str) -> list[str]:
        """Return the paths of a store's artifacts that are on disk, sorted."""
        return sorted(path for place, path in self._by_key if place == store)

    def list_pinned_paths(self, store: str) -> list[str]:
        """Return the paths of a store's artifacts that are loaded or about to be, sorted."""
        return [
            path
            for path in self.list_paths(store)
            if any(cached.pins for cached in self._by_key[store, path])
        ]

    async def mark(self, cached: Cached, *, is_replaced: bool) -> None:
        """Note, on disk first, whether the store has another version, or none. Raises OSError and
        BackendUnavailable.
        """
        async with self._marking:
            if cached.is_replaced is not is_replaced:
                await CACHE.run_to_end(self._folder.mark, cached.note.id, is_replaced=is_replaced)
                cached.is_replaced = is_replaced

    def pin(self, cached: Cached) -> None:
        """Keep an artifact on disk until `unpin`, and record that it is used now."""
        cached.pins += 1
        cached.last_used = clock.wall()

    def unpin(self, cached: Cached, idle_seconds: float = 0.0) -> None:
        """Take one pin off, and record that the artifact was used `idle_seconds` ago."""
        cached.pins -= 1
        cached.last_used = max(cached.last_used, clock.wall() - idle_seconds)
        self._note_freed()

    def get(self, id_: str) -> Cached | None:
        """Return the artifact of this id, if it is on disk."""
        return self._cached.get(id_)

    def add(self, note: Note, reservation: Reservation) -> Cached:
        """Make the reservation an artifact, pinned once, and by those who have a lost one of the
        same version.
        """
        cached = Cached(note, clock.wall(), pins=1)
        lost = self._cached.get(note.id)
        if lost is not None:
            self._drop_from_index(lost)
            self._counted_bytes -= lost.note.size_bytes
            cached.pins += lost.pins
        self.shrink(reservation, 0)
        self._index(cached)
        return cached

    def _index(self, cached: Cached) -> None:
        self._cached[cached.note.id] = cached
        self._by_key.setdefault((cached.note.store, cached.note.path), []).append(cached)
        self._counted_bytes += cached.note.size_bytes

    def _drop_from_index(self, cached: Cached) -> None:
        """Forget an artifact; its bytes count until it is off the disk."""
        del self._cached[cached.note.id]
        versions = self._by_key[cached.note.store, cached.note.path]
        versions.remove(cached)
        if not versions:
            del self._by_key[cached.note.store, cached.note.path]

    # -- room -------------------------------------------------------------------------------

    @contextmanager
    def reservation(self, what: str, evictor: DiskEvictor | None = None) -> Iterator[Reservation]:
        """Yield the reservation of a fetch, which keeps its place in the order until the end."""
        reservation = Reservation(self, what, evictor)
        self._reservations.append(reservation)
        try:
            yield reservation
        finally:
            self._reservations.remove(reservation)

    async def grow(self, reservation: Reservation, size_bytes: int, inodes: int = 0) -> None:
        """Grow a reservation as Reservation.reserve says."""
        need = reservation.need
        need.size_bytes = max(need.size_bytes, size_bytes)
        need.inodes = max(need.inodes, reservation.inodes + inodes)
        if size_bytes + reservation.unevictable_bytes > self.limit_bytes:
            raise self._make_shortage(reservation, size_bytes)
        while not await self._grow_by_evicting(reservation, size_bytes, inodes):
            count = size_bytes - reservation.size_bytes
            shortage = self._make_shortage(reservation, size_bytes, inodes)
            if count > self.find_max_growth(reservation):
                raise shortage
            freed_count = self._freed_count
            if await self._unload_one(reservation.evictor, count):
                continue
            # try again at once if an artifact has been deleted meanwhile
            if freed_count == self._freed_count:
                await self._wait_for_others(reservation, shortage)

    def shrink(self, reservation: Reservation, size_bytes: int) -> None:
        """Release what a reservation has beyond so many bytes."""
        self._counted_bytes -= reservation.size_bytes - size_bytes
        reservation.size_bytes = size_bytes
        self._note_freed()

    async def wait_for_earlier(self, reservation: Reservation, shortage: NoRoom) -> None:
        """Wait until no fetch that began before this one has room. Raise the shortage if the fetch
        has waited for too long.
        """
        while self._is_after_another(reservation):
            await self._pause(reservation, shortage)

    def find_max_growth(self, reservation: Reservation) -> int:
        """Return by how many bytes a reservation could grow if all other reservations were
        released, and all artifacts deleted but those of models that are never unloaded for it.
        """
        others_bytes = self._counted_bytes - reservation.size_bytes
        spare_bytes = min(self.limit_bytes - self.used_bytes, self._spare_bytes())
        return others_bytes - reservation.unevictable_bytes + spare_bytes

    async def _grow_by_evicting(
        self, reservation: Reservation, size_bytes: int, inodes: int
    ) -> bool:
        """Grow a reservation, and evict unused artifacts for that. Return False where all of them
        together are too few.
        """
        while True:
            await self._poll_free()
            count = max(0, size_bytes - reservation.size_bytes)
            if self._count_missing(count) <= 0 and not self._lacks_inodes(inodes):
                self._counted_bytes += count
                reservation.size_bytes += count
                return True
            victim = self._choose_victim(count)
            if victim is not None:
                self._drop_from_index(victim)
                exceeds_limit = self.used_bytes + count > self.limit_bytes
                eviction = self._evict(victim, "limit" if exceeds_limit else "disk")
                self._evictions.add(asyncio.create_task(eviction))
            if not self._evictions:
                return False
            done, _ = await asyncio.wait(self._evictions, return_when=asyncio.FIRST_COMPLETED)
            self._evictions -= done
            for task in done:
                task.result()

    async def _evict(self, cached: Cached, reason: str) -> None:
        """Delete an artifact that is not in the index any more. `reason` is `limit` where it leaves
        for room below cache_limit, `disk` where the disk itself is full.
        """
        note = cached.note
        started_at = clock.monotonic()
        try:
            await CACHE.run(self._folder.remove, note.id)
        finally:
            self._counted_bytes -= note.size_bytes
            self._note_freed()
        fields = {
            "key": note.path,
            "store": note.store,
            "bytes": note.size_bytes,
            "reason": reason,
            "idle_seconds": round(clock.wall() - cached.last_used, 3),
            "seconds": round(clock.monotonic() - started_at, 3),
        }
        log.info("artifact.evicted", extra=fields)
        self._on_evicted(note, reason)

    def _choose_victim(self, count: int) -> Cached | None:
        """Return the unused artifact to evict first for `count` more bytes; None if all unused ones
        together are too few.
        """
        missing_bytes = self._count_missing(count)
        idle = [cached for cached in self._cached.values() if not cached.pins]
        if sum(cached.note.size_bytes for cached in idle) < missing_bytes:
            return None
        idle.sort(key=_rank)
        candidates = []
        for cached in idle:
            # a candidate without a size is never spared for a larger one: nobody fetches lost and
            # replaced artifacts any more
            is_useless = cached.is_lost or cached.is_replaced
            sizes = {} if is_useless else {_DISK: cached.note.size_bytes}
            candidates.append((cached, sizes))
        return next(iter(choose_fewest(candidates, {_DISK: missing_bytes})), None)

    async def _unload_one(self, evictor: DiskEvictor | None, count: int) -> bool:
        """Unload one model for `count` more bytes. If another fetch has one unloaded at the moment,
        only wait for that. Return whether there may be more room now.
        """
        if evictor is None:
            return False
        is_first = not self._unloading.locked()
        async with self._unloading:
            return not is_first or await evictor.unload_one(self._count_missing(count))

    async def _wait_for_others(self, reservation: Reservation, shortage: NoRoom) -> None:
        """Wait for other fetches to end, or for models to be idle. Raise the shortage if neither
        can make room. Raise BeginsAgain in a fetch that has some room while an earlier one has some
        as well: the two could wait for each other.
        """
        if reservation.size_bytes and self._is_after_another(reservation):
            raise BeginsAgain(shortage)
        others = [other for other in self._reservations if other is not reservation]
        can_others_end = any(other.size_bytes for other in others)
        if not can_others_end and not reservation.can_unload_later:
            raise shortage
        await self._pause(reservation, shortage)

    def _is_after_another(self, reservation: Reservation) -> bool:
        """Return whether a fetch that began before this one has room."""
        earlier = self._reservations[: self._reservations.index(reservation)]
        return any(other.size_bytes for other in earlier)

    async def _pause(self, reservation: Reservation, shortage: NoRoom) -> None:
        """Wait until something was deleted from the disk, for a quarter of a second at most. Raise
        the shortage if the fetch has waited for as long as it may.
        """
        remaining_seconds = self._room_seconds - reservation.waited_seconds
        if remaining_seconds <= 0:
            raise shortage
        started_at = clock.monotonic()
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(remaining_seconds, _POLL_SECONDS)):
                await self._freed.wait()
        reservation.waited_seconds += clock.monotonic() - started_at

    def _note_freed(self) -> None:
        """Wake those that wait for room."""
        self._freed_count += 1
        self._freed.set()

    # -- figures and words ------------------------------------------------------------------

    async def _poll_free(self) -> None:
        self._free = await CACHE.run(self._folder.free)

    def _spare_bytes(self) -> int:
        """Return what the disk has beside what is reserved on it and kept for others."""
        unwritten_bytes = sum(each.unwritten_bytes for each in self._reservations)
        return self._free.bytes - RESERVE_BYTES - unwritten_bytes

    def _lacks_inodes(self, count: int) -> bool:
        inodes = self._free.inodes
        return bool(count) and inodes is not None and inodes - RESERVE_INODES < count

    def _count_missing(self, count: int) -> int:
        """Return how many bytes must leave before `count` more have room; below 1 for none."""
        by_limit = self.used_bytes + count - self.limit_bytes
        return max(by_limit, count - self._spare_bytes()) if count else by_limit

    def _make_shortage(self, reservation: Reservation, size_bytes: int, inodes: int = 0) -> NoRoom:
        """Return the error of a reservation that cannot have so many bytes in all, or so many more
        files: the limit that binds, what it is used for, and what may leave.
        """
        needed = f"it needs {format_size(reservation.need.size_bytes)} or more"
        still = ""
        if reservation.written_bytes:
            remaining_bytes = reservation.need.size_bytes - reservation.written_bytes
            still = f", {format_size(remaining_bytes)} of that still"
        staying_bytes = reservation.unevictable_bytes
        use = self._describe_use(reservation)
        if size_bytes > self.limit_bytes:
            reason = f"{needed} in all, and {self._describe_limit()}"
        elif size_bytes + staying_bytes > self.limit_bytes:
            staying = format_size(staying_bytes)
            cause = "as their models are pinned or were loaded explicitly"
            reason = f"{needed} in all, and of {self._name_limit()}, {staying} never leave, {cause}"
        elif self.used_bytes + size_bytes - reservation.size_bytes > self.limit_bytes:
            reason = f"{needed} in all{still}, and of {self._name_limit()}, {use}"
        else:
            count = f"in all{still}"
            if self._lacks_inodes(inodes):
                count = f"in {reservation.need.inodes} files, {inodes} of them still"
            free = self._describe_free(inodes)
            reason = f"{needed} {count}, and {free}; of the cache {use}: {_ADVICE}"
        return NoRoom(f"{reservation.what}: no room on disk: {reason}")

    def _describe_limit(self) -> str:
        """Return what the limit is, and where it is from."""
        if self._is_limit_given:
            return f"cache_limit is {format_size(self.limit_bytes)}"
        share = f"the cache has {_DEFAULT_SHARE:.0%} of the rest unless cache_limit is set"
        return f"{self._describe_free()}; {share}; {_ADVICE}"

    def _name_limit(self) -> str:
        limit = format_size(self.limit_bytes)
        if self._is_limit_given:
            return f"cache_limit, {limit}"
        return f"the {limit} that the cache may have while cache_limit is not set"

    def _describe_use(self, reservation: Reservation) -> str:
        """Return what takes the cache's bytes, and how many of them may leave at once."""
        _, unused_bytes = self.unused()
        all_bytes = sum(each.note.size_bytes for each in self._cached.values())
        uses = {
            "are of models in use": all_bytes - unused_bytes,
            "of other fetches": self._counted_bytes - all_bytes - reservation.size_bytes,
            "cannot be deleted (artifact.not_deleted in the log)": self._folder.undeleted_bytes,
            "may leave": unused_bytes,
        }
        words = [f"{format_size(size)} {what}" for what, size in uses.items() if size > 0]
        return ", ".join(words) or "nothing is taken by others"

    def _describe_free(self, inodes: int = 0) -> str:
        """Return what the disk has free: inodes, where it lacks so many, else bytes."""
        if self._lacks_inodes(inodes):
            free = f"{self._free.inodes} inodes free, and {RESERVE_INODES} are kept for others"
        else:
            kept = f"{format_size(RESERVE_BYTES)} are kept for others"
            free = f"{format_size(self._free.bytes)} free, and {kept}"
            spare_bytes = self._free.bytes - RESERVE_BYTES
            if spare_bytes > 0:
                free += f", which leaves {format_size(spare_bytes)}"
        return f"the disk of cache_dir has {free}"


def _rank(cached: Cached) -> tuple[bool, bool, float]:
    """Return the place of an unused artifact in the order of evictions: first the lost ones, then
    the replaced ones, then the one that was used longest ago.
    """
    return not cached.is_lost, not cached.is_replaced, cached.last_used


def make_disk_error(error: OSError, what: str, size_bytes: int) -> AdapterError:
    """Return the error of a fetch, which `what` names, that the disk has ended."""
    reason = f"the disk of cache_dir: {error.strerror or error}"
    if error.errno not in _FULL:
        return BackendError(f"{what}: {reason}")
    needed = f"no room on disk: it needs {format_size(size_bytes)} or more in all"
    return NoRoom(f"{what}: {needed}, and {reason}")
