"""Reserves room on disk for fetches: decides which waits, which begins again, and which is refused.

What a store announces is reserved before the first byte comes, so that a fetch that has to wait
holds nothing yet. An archive needs more while it is unpacked, and may lack that while it holds what
it has: then only the fetch that began first waits. Any other gives back what it has, and begins
again when those before it have ended. So no two wait for each other.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from adapter.errors import NoRoom
from adapter.runtime import clock
from adapter.runtime.threads import CACHE
from adapter.store.disk import Claim, Disk

if TYPE_CHECKING:
    from adapter.control.ports import DiskRoom

# Nobody reports that a model has no request any more.
_LOOK_SECONDS = 0.25


class BeginsAgain(Exception):
    """The fetch lacks room while another one, which began before it, has some. Not an answer."""

    def __init__(self, lack: NoRoom) -> None:
        super().__init__(str(lack))
        self.lack = lack


class RoomForFetches:
    """Reserves room for each fetch, in the order in which they began."""

    def __init__(self, disk: Disk, seconds: float) -> None:
        self.models: DiskRoom | None = None  # unloads idle models; None: what is in use stays
        self._disk = disk
        self._seconds = seconds  # how long one fetch may wait in all
        self._claims: list[Claim] = []  # the one that began first comes first
        self._freed = asyncio.Event()
        self._unloading = asyncio.Lock()

    @contextmanager
    def claim(self, what: str, *, unloads: bool = True) -> Iterator[Claim]:
        """Yield the claim of a fetch, which keeps its place in the order until the end."""
        loop = asyncio.get_running_loop()
        self._disk.on_freed = lambda: loop.call_soon_threadsafe(self._freed.set)

        def wait(count: int, lack: NoRoom) -> None:
            asyncio.run_coroutine_threadsafe(self._wait(claim, count, lack), loop).result()

        claim = Claim(what, self._disk, wait, unloads)
        self._claims.append(claim)
        try:
            yield claim
        finally:
            self._claims.remove(claim)

    async def reserve(self, claim: Claim, count: int, inodes: int = 0) -> None:
        """Reserve `count` bytes ahead of what will be written, in so many files. Raises NoRoom and
        InvalidArtifact as the claim does.
        """
        claim.staying_bytes = self.staying_bytes()
        while True:
            try:
                return await CACHE.run_to_end(self._disk.take, claim, count, inodes, is_ahead=True)
            except NoRoom as lack:
                await self._wait(claim, count, lack)

    async def earlier_ended(self, claim: Claim, again: BeginsAgain) -> None:
        """Wait until no fetch that began before this one holds room. Raises NoRoom."""
        while self._is_after_another(claim):
            await self._pause(claim, again.lack)

    # -- inside -----------------------------------------------------------------------------

    async def _wait(self, claim: Claim, count: int, lack: NoRoom) -> None:
        """Return when another try is worth it; raise `lack` when none is, or BeginsAgain."""
        known, claim.staying_bytes = claim.staying_bytes, self.staying_bytes()
        if claim.is_given_up or count > self._disk.most_for(claim):
            raise lack
        if claim.staying_bytes < known or claim.lacked_at < self._disk.freed_count:
            return
        if claim.unloads and await self._has_unloaded(count):
            return
        if claim.size_bytes and self._is_after_another(claim):
            raise BeginsAgain(lack)
        if not self._may_come(claim):
            raise lack
        await self._pause(claim, lack)

    def staying_bytes(self) -> int:
        """Return the bytes on disk of models that nothing unloads for room."""
        return self.models.bytes_that_stay() if self.models else 0

    async def _has_unloaded(self, count: int) -> bool:
        """Unload one model for `count` more bytes, or wait for that of another fetch."""
        if self.models is None:
            return False
        is_first = not self._unloading.locked()
        async with self._unloading:
            return not is_first or await self.models.unload_one(self._disk.missing(count))

    def _is_after_another(self, claim: Claim) -> bool:
        earlier = self._claims[: self._claims.index(claim)]
        return any(each.size_bytes for each in earlier)

    def _may_come(self, claim: Claim) -> bool:
        others = (each for each in self._claims if each is not claim)
        # Whether what is kept stays in use is known once it is handed over.
        if any(each.size_bytes or each.is_kept for each in others):
            return True
        return claim.unloads and self.models is not None and self.models.may_unload

    async def _pause(self, claim: Claim, lack: NoRoom) -> None:
        """Wait until something has left the disk, or for a moment."""
        left = self._seconds - claim.waited_seconds
        if left <= 0:
            raise lack
        begun = clock.monotonic()
        self._freed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                await self._freed.wait()
        claim.waited_seconds += clock.monotonic() - begun
