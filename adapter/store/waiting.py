"""Reserves room on disk for fetches: decides which waits, which begins again, and which is refused.

What a store announces is reserved before the first byte comes, so that a fetch that has to wait
holds nothing yet. An archive needs more while it is unpacked, and may lack that while it holds what
it has: then only the fetch that began first waits. Any other gives back what it has, and begins
again when those before it have ended. So no two wait for each other.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from adapter.errors import NoRoom
from adapter.runtime import clock
from adapter.runtime.threads import CACHE
from adapter.store.disk import Disk, Reservation
from adapter.store.ports import DiskEvictor

# Nobody reports that a model has no request any more.
_LOOK_SECONDS = 0.25


class BeginsAgain(Exception):
    """The fetch lacks room while another one, which began before it, has some. Not an answer."""

    def __init__(self, shortage: NoRoom) -> None:
        super().__init__(str(shortage))
        self.shortage = shortage


class RoomForFetches:
    """Reserves room for each fetch, in the order in which they began."""

    def __init__(self, disk: Disk, seconds: float) -> None:
        self._disk = disk
        self._seconds = seconds  # how long one fetch may wait in all
        self._reservations: list[Reservation] = []  # the one that began first comes first
        self._freed = asyncio.Event()
        self._unloading = asyncio.Lock()

    @contextmanager
    def reservation(self, what: str, models: DiskEvictor | None = None) -> Iterator[Reservation]:
        """Yield the reservation of a fetch, which keeps its place in the order until the end."""
        loop = asyncio.get_running_loop()
        self._disk.on_freed = lambda: loop.call_soon_threadsafe(self._freed.set)

        def wait(count: int, shortage: NoRoom) -> None:
            asyncio.run_coroutine_threadsafe(
                self._wait(reservation, count, shortage), loop
            ).result()

        reservation = Reservation(what, self._disk, wait, models)
        self._reservations.append(reservation)
        try:
            yield reservation
        finally:
            self._reservations.remove(reservation)

    async def reserve(self, reservation: Reservation, count: int, inodes: int = 0) -> None:
        """Reserve `count` bytes ahead of what will be written, in so many files. Raises NoRoom and
        InvalidArtifact as the reservation does.
        """
        reservation.refresh()
        while True:
            try:
                return await CACHE.run_to_end(
                    self._disk.take, reservation, count, inodes, is_ahead=True
                )
            except NoRoom as shortage:
                await self._wait(reservation, count, shortage)

    async def earlier_ended(self, reservation: Reservation, again: BeginsAgain) -> None:
        """Wait until no fetch that began before this one holds room. Raises NoRoom."""
        while self._is_after_another(reservation):
            await self._pause(reservation, again.shortage)

    # -- inside -----------------------------------------------------------------------------

    async def _wait(self, reservation: Reservation, count: int, shortage: NoRoom) -> None:
        """Return when another try is worth it; raise `shortage` if none is, or BeginsAgain."""
        known = reservation.staying_bytes
        reservation.refresh()
        if reservation.is_given_up or count > self._disk.most_for(reservation):
            raise shortage
        if reservation.staying_bytes < known or reservation.short_at < self._disk.freed_count:
            return
        if reservation.models and await self._has_unloaded(reservation.models, count):
            return
        if reservation.size_bytes and self._is_after_another(reservation):
            raise BeginsAgain(shortage)
        if not self._can_get_more(reservation):
            raise shortage
        await self._pause(reservation, shortage)

    async def _has_unloaded(self, models: DiskEvictor, count: int) -> bool:
        """Unload one model for `count` more bytes, or wait for that of another fetch."""
        is_first = not self._unloading.locked()
        async with self._unloading:
            return not is_first or await models.unload_one(self._disk.missing(count))

    def _is_after_another(self, reservation: Reservation) -> bool:
        earlier = self._reservations[: self._reservations.index(reservation)]
        return any(each.size_bytes for each in earlier)

    def _can_get_more(self, reservation: Reservation) -> bool:
        others = (each for each in self._reservations if each is not reservation)
        # Whether what is kept stays in use is known once it is handed over.
        if any(each.size_bytes or each.is_cached for each in others):
            return True
        return reservation.models is not None and reservation.models.can_unload

    async def _pause(self, reservation: Reservation, shortage: NoRoom) -> None:
        """Wait until something has left the disk, or for a moment."""
        left = self._seconds - reservation.waited_seconds
        if left <= 0:
            raise shortage
        begun = clock.monotonic()
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                await self._freed.wait()
        reservation.waited_seconds += clock.monotonic() - begun
