"""Serves artifacts of the stores through the disk cache: control's port Artifacts."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from adapter.core.artifacts import (
    Artifact,
    ArtifactKey,
    CacheUse,
    DiskUse,
    FetchProgress,
)
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    BackendError,
    InvalidArtifact,
    InvalidRequest,
    NoRoom,
    StoreUnavailable,
)
from adapter.packages.unpack import Limits
from adapter.runtime import background, clock
from adapter.runtime.slots import FairSlots
from adapter.runtime.threads import CACHE, MAX_UNPACKED_AT_ONCE
from adapter.store.cache_folder import Cached, CacheFolder, Note, artifact_id
from adapter.store.checksums import Checksums
from adapter.store.disk import BeginsAgain, Disk, Need, Reservation, make_disk_error
from adapter.store.download import MAX_CONNECTIONS
from adapter.store.fetch import Fetch
from adapter.store.listing import StorePackages
from adapter.store.ports import (
    Changed,
    DiskEvictor,
    Store,
    Unfinished,
    describe_failure,
    describe_place,
)
from adapter.store.refusals import MAX_REMEMBERED, OF_VERSIONS, Question, Refusals
from adapter.store.versions import SUFFIXES, StoreVersions, Version

log = logging.getLogger(__name__)

# How often a fetch begins anew because the store has another version meanwhile.
_MAX_CHANGES = 5
# How long a store that could not be used is asked for a version where another one is on disk.
_BRIEFLY_SECONDS = 1.0
# How long it is known what a version needs on disk, by a download that may have been garbled.
_NEED_SECONDS = 60.0


class ArtifactCache:
    """Artifacts of several stores, by name. `open` comes first, `close` last."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        folder: CacheFolder,
        *,
        limit_bytes: int | None,  # of artifacts and fetches; None: nine tenths of what is free
        concurrency: int,  # of the fetches from each store
        limits: Limits,
        room_seconds: float = 10.0,  # how long a fetch waits for room
        on_evicted: Callable[[str], None] = lambda _: None,  # by the reason: limit or disk
        on_room: Callable[[], None] = lambda: None,  # a full disk has room again
    ) -> None:
        self._folder = folder
        self._on_room = on_room
        self._limits = limits
        self._disk = Disk(
            folder,
            limit_bytes,
            lambda _, reason: on_evicted(reason),
            room_seconds=room_seconds,
        )
        self._versions = {name: StoreVersions(store) for name, store in stores.items()}
        self._slots = {name: FairSlots(concurrency) for name in stores}
        self._checksums = {name: Checksums(store.location) for name, store in stores.items()}
        # one caller of a place at a time: the next one finds on disk what that one has fetched. Two
        # endpoints may name one location, so that two keys are one place
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._unfit = Refusals(OF_VERSIONS)
        self._needs = lru_cache(MAX_REMEMBERED)(_make_need)
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._unpackings = asyncio.Semaphore(MAX_UNPACKED_AT_ONCE)
        self.packages = StorePackages(self._versions, self._disk)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._checks: list[asyncio.Task[NoReturn]] = []

    @property
    def stores(self) -> frozenset[str]:
        """Return the names of the stores."""
        return frozenset(self._versions)

    @property
    def root(self) -> Path:
        """Return the real path of the folder that has all artifacts."""
        return self._folder.path

    @property
    def used_bytes(self) -> int:
        """Return what artifacts take on disk, and what is reserved for fetches."""
        return self._disk.used_bytes

    @property
    def limit_bytes(self) -> int:
        """Return how many bytes artifacts and fetches may take."""
        return self._disk.limit_bytes

    @property
    def full_reason(self) -> str | None:
        """Return why a fetch needs others to leave the disk; None while there is room."""
        return self._disk.full_reason

    @property
    def lost_reason(self) -> str | None:
        """Return why nothing can be fetched; None while the folder is ours."""
        return self._folder.lost_reason

    @property
    def unreachable_reason(self) -> str | None:
        """Return why a store could not be used when it was last asked. All are asked when the
        cache is opened, which nobody waits for.
        """
        reasons = (each.unreachable_reason for each in self._versions.values())
        return next(filter(None, reasons), None)

    def disk(self) -> DiskUse:
        """Return how full the cache is."""
        return self._disk.measure_use()

    def unused(self) -> tuple[int, int]:
        """Return how many artifacts on disk are not pinned, and their bytes."""
        return self._disk.unused()

    # -- start and end ----------------------------------------------------------------------

    async def open(self, check_seconds: float = 10.0) -> None:
        """Take over what an earlier run has left on disk, and begin to check folder and stores
        every so often, each by itself: one of them may be on a disk that hangs.

        Raises InvalidSettings if the folder cannot be used, or is in use by another process.
        """
        await self._disk.adopt(await CACHE.run(self._folder.open))
        self._report_fullness(None)
        for check in (self.check, *(each.check_again for each in self._versions.values())):
            work = background.forever(check, seconds=check_seconds)
            self._checks.append(background.begin("stores", work))
        use = self._disk.measure_use()
        log.info(
            "artifact.cache_opened",
            extra={
                "folder": str(self._folder.path),
                "artifacts": use.artifacts,
                "bytes": self._disk.used_bytes,
                "limit_bytes": use.limit_bytes,
                "stores": {name: str(each.store.location) for name, each in self._versions.items()},
            },
        )

    async def close(self) -> None:
        """End what goes on in the background, and give the folder back."""
        for task in self._checks:
            background.end(task)
        await asyncio.gather(*self._checks, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await CACHE.run(self._folder.close)

    async def check(self) -> None:
        """Check that the folder is still ours, and what its disk has free."""
        known = self._folder.lost_reason
        reason = await CACHE.run(self._folder.refresh)
        if reason is not None and reason != known:
            log.error("artifact.cache_lost", extra={"reason": reason})
        full_reason = self._disk.full_reason
        with suppress(OSError):
            await self._disk.refresh()
            self._report_fullness(full_reason)

    def _report_fullness(self, earlier_reason: str | None) -> None:
        """Report that the disk has become full, or has room again, since `full_reason` was
        `earlier_reason`.
        """
        reason = self._disk.full_reason
        if reason is not None and earlier_reason is None:
            log.warning("artifact.disk_full", extra={"folder": str(self.root), "reason": reason})
        if reason is None and earlier_reason is not None:
            self._on_room()

    # -- what control asks ------------------------------------------------------------------

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        *,
        evictor: DiskEvictor | None = None,  # as in Artifacts
        callers: Collection[str] = (),  # as in FairSlots
    ) -> tuple[Artifact, CacheUse]:
        """Return the artifact, pinned until `release`, and where it was. The version is that which
        the store has now; where the store cannot be asked, the one that it had when it was last
        asked, if that is on disk.

        Raises ArtifactNotFound, InvalidModel, InvalidRequest, NoRoom, StoreDenied,
        StoreUnavailable, and BackendError for the disk's faults.
        """
        async with self._locks.setdefault(self._place(key), asyncio.Lock()):
            try:
                version = await self._ask_with_patience(key)
            except StoreUnavailable as error:
                cached = await self._pin(key, self._disk.find_current(*self._place(key)))
                if cached is None:
                    raise
                fields = {"key": str(key), "etag": cached.note.etag, "reason": str(error)}
                log.warning("artifact.not_checked", extra=fields)
            else:
                on_disk = self._disk.find_version(*self._place(key), version.etag)
                cached = await self._pin(key, on_disk)
            if cached is None:
                artifact = await self._fetch(key, version, progress, evictor, callers)
                return artifact, CacheUse.MISS
            progress.total_bytes = cached.note.size_bytes
            progress.done_bytes = progress.total_bytes
            self._touch(cached)
            return self._make_artifact(key, cached), CacheUse.DISK

    def release(self, artifact: Artifact, *, idle_seconds: float = 0.0) -> None:
        """Take the pin of one `fetch` off; the last use was `idle_seconds` ago."""
        id_ = artifact_id(*self._place(artifact.key), artifact.etag)
        cached = self._disk.get(id_)
        if cached is not None and cached.pins:
            self._disk.unpin(cached, idle_seconds)
            self._touch(cached)

    async def is_current(self, artifact: Artifact) -> bool:
        """Return whether the store still has this version. Raises as `fetch` does.

        A version that the store has replaced is marked as such, but none is marked as current: a
        fetch of the same key may have heard of a later one meanwhile.
        """
        version = await self._ask(artifact.key)
        if version.etag == artifact.etag:
            return True
        cached = self._disk.find_version(*self._place(artifact.key), artifact.etag)
        if cached is not None:
            await self._mark(cached, is_replaced=True)
        return False

    async def find(self, key: ArtifactKey) -> ArtifactKey | None:
        """Return the key that the store has: `key` itself, or with the suffix of an archive; None
        if it has none. Where the store cannot be asked, that which it had when it was last asked,
        if that is on disk. Raises as `fetch` does.
        """
        on_disk = self._find_on_disk(key)
        if on_disk is not None and self._get_versions(key).unreachable_reason is not None:
            return on_disk  # `fetch` asks the store again, but briefly
        try:
            return await self._find_in_store(key)
        except StoreUnavailable:
            if on_disk is None:
                raise
            return on_disk

    async def _find_in_store(self, key: ArtifactKey) -> ArtifactKey | None:
        with suppress(ArtifactNotFound):
            await self._ask(key, is_existence_enough=True)
            return key
        archive = await self._get_versions(key).find_archive(key.path)
        if archive is not None:
            return replace(key, path=archive)
        for suffix in SUFFIXES:
            await self._mark_current(replace(key, path=key.path + suffix), None)
        return None

    def _find_on_disk(self, key: ArtifactKey) -> ArtifactKey | None:
        """Return the key itself, or with the suffix of an archive, whose version that the store had
        last is on disk. An archive does not stand in for a folder or file that the store had.
        """
        suffixes = [""] if self._disk.find(*self._place(key)) else ["", *SUFFIXES]
        for suffix in suffixes:
            named = replace(key, path=key.path + suffix)
            if self._disk.find_current(*self._place(named)) is not None:
                return named
        return None

    # -- versions ---------------------------------------------------------------------------

    def _get_versions(self, key: ArtifactKey) -> StoreVersions:
        versions = self._versions.get(key.store)
        if versions is None:
            raise InvalidRequest(f"there is no store {key.store!r}")
        return versions

    def _place(self, key: ArtifactKey) -> tuple[str, str]:
        """Return what the disk names an artifact by: where the store is, and the path in it."""
        return str(self._get_versions(key).store.location), key.path

    def _name(self, key: ArtifactKey, version: Version) -> Question:
        """Return what tells this version from all others, also from one of a falsely stated
        size.
        """
        return *self._place(key), version.etag, str(version.size_bytes)

    async def _ask(
        self,
        key: ArtifactKey,
        *,
        is_existence_enough: bool = False,
        limit_seconds: float | None = None,
    ) -> Version:
        """Return what the store has; note on disk if it has nothing. The limit is the store's
        alone: once it has answered, notes on disk take the time that they take.
        """
        versions = self._get_versions(key)
        try:
            async with asyncio.timeout(limit_seconds):
                return await versions.ask(key.path, is_existence_enough=is_existence_enough)
        except ArtifactNotFound:
            await self._mark_current(key, None)
            raise
        except TimeoutError:
            reason = f"it did not answer within {limit_seconds:g} s"
            raise StoreUnavailable(
                describe_failure(versions.store.location, key.path, reason)
            ) from None

    async def _ask_current(self, key: ArtifactKey, limit_seconds: float | None = None) -> Version:
        """Return what the store has, and note on disk that this version is the current one. To be
        called with the key's lock.
        """
        version = await self._ask(key, limit_seconds=limit_seconds)
        await self._mark_current(key, version.etag)
        return version

    async def _ask_with_patience(self, key: ArtifactKey) -> Version:
        """Return the store's current version. Give up after 1 s if the store could not be used
        when it was last asked and there is a copy on disk to serve.
        """
        is_reachable = self._get_versions(key).unreachable_reason is None
        if is_reachable or self._disk.find_current(*self._place(key)) is None:
            return await self._ask_current(key)
        return await self._ask_current(key, _BRIEFLY_SECONDS)

    async def _mark_current(self, key: ArtifactKey, etag: str | None) -> None:
        """Mark the version `etag` as current, and all others on disk as replaced. `etag` is None
        where the store has no such artifact any more: then all are replaced.
        """
        # the current one comes last: a process that is killed in between leaves none or one
        versions = self._disk.find(*self._place(key))
        for cached in sorted(versions, key=lambda each: each.note.etag == etag):
            await self._mark(cached, is_replaced=cached.note.etag != etag)

    async def _mark(self, cached: Cached, *, is_replaced: bool) -> None:
        try:
            await self._disk.mark(cached, is_replaced=is_replaced)
        except OSError as error:
            raise BackendError(f"the disk of cache_dir: {error.strerror or error}") from error

    async def _pin(self, key: ArtifactKey, cached: Cached | None) -> Cached | None:
        """Pin what is on disk; give it up if some of its files are not there any more."""
        if cached is None:
            return None
        self._disk.pin(cached)
        is_complete = False
        try:
            is_complete = await CACHE.run(self._folder.is_complete, cached.note)
            if not is_complete:
                cached.is_lost = True
                fields = {"key": str(key), "store": cached.note.store}
                log.warning("artifact.lost", extra=fields)
        finally:
            if not is_complete:
                self._disk.unpin(cached)
        return cached if is_complete else None

    # -- fetching ---------------------------------------------------------------------------

    async def _fetch(
        self,
        key: ArtifactKey,
        version: Version,
        progress: FetchProgress,
        evictor: DiskEvictor | None,
        callers: Collection[str],
    ) -> Artifact:
        """Fetch this version, or the one that the store has by then."""
        store = self._get_versions(key).store
        self._unfit.raise_known(self._name(key, version))
        asked_at = clock.monotonic()
        async with self._slots[key.store].slot(str(key), callers):
            started_at = clock.monotonic()
            progress.waited_seconds = started_at - asked_at
            fields: dict[str, object] = {"key": str(key), "store": str(store.location)}
            log.info("artifact.fetch_begun", extra={**fields, "bytes": version.size_bytes})
            try:
                what = describe_place(store.location, key.path)
                with self._disk.reservation(what, evictor) as reservation:
                    cached = await self._fetch_whole(key, version, reservation, progress)
            except AdapterError as error:
                fields |= {"bytes": progress.done_bytes, "reason": str(error)}
                fields |= {"seconds": round(clock.monotonic() - started_at, 3)}
                log.warning("artifact.fetch_failed", extra=fields)
                raise
            fields |= {"bytes": progress.total_bytes, "disk_bytes": cached.note.size_bytes}
            fields |= {"seconds": round(clock.monotonic() - started_at, 3)}
            log.info("artifact.fetched", extra=fields)
            return self._make_artifact(key, cached)

    async def _fetch_whole(
        self, key: ArtifactKey, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> Cached:
        """Fetch until all that is on disk is of one version."""
        store = self._get_versions(key).store
        for _ in range(_MAX_CHANGES):
            try:
                return await self._fetch_version(key, version, reservation, progress)
            except Changed:
                former = version
                version = await self._ask_current(key)
        raise _make_unstable(store, former, version)

    async def _fetch_version(
        self, key: ArtifactKey, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> Cached:
        """Fetch one version. What cannot be used, or never has room, is fetched once more: it may
        have been garbled on its way.
        """
        question = self._name(key, version)
        reservation.need = self._get_need(question)
        try:
            return await self._fetch_with_room(key, version, reservation, progress)
        except (InvalidArtifact, Unfinished):
            pass
        except NoRoom:
            if not (progress.done_bytes and reservation.is_too_large):
                raise
        reservation.need.clear()
        try:
            return await self._fetch_with_room(key, version, reservation, progress)
        except (InvalidArtifact, Unfinished) as error:
            reservation.need.clear()
            self._unfit.remember(question, error)
            raise
        except NoRoom:
            # two downloads agree: others need not leave the disk for this version again
            if reservation.is_too_large:
                reservation.need.known_until = math.inf
            raise

    async def _fetch_with_room(
        self, key: ArtifactKey, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> Cached:
        """Fetch one version; begin again where others had to end first."""
        while True:
            try:
                return await self._fetch_once(key, version, reservation, progress)
            except BeginsAgain as again:
                await self._disk.wait_for_earlier(reservation, again.shortage)
            except OSError as error:
                self._unfit.remember(
                    self._name(key, version),
                    make_disk_error(error, reservation.what, version.disk_bytes),
                )
                # made anew: a frame that names the error which it raises is a cycle of garbage
                raise make_disk_error(error, reservation.what, version.disk_bytes) from error

    def _get_need(self, question: Question) -> Need:
        """Return what fetches of the version have needed in the last minute; what two of them found
        too large stays so.
        """
        need = self._needs(question)
        now = clock.monotonic()
        if now > need.known_until:
            need.clear()
            need.known_until = now + _NEED_SECONDS
        return need

    async def _fetch_once(
        self, key: ArtifactKey, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> Cached:
        """Fetch the version. Raises BeginsAgain, and Changed if the store has another version
        before this one is whole.
        """
        versions = self._get_versions(key)
        note = Note(*self._place(key), version.etag, version.name, 0, {})
        work = self._folder.new_work()
        try:
            await CACHE.run_to_end(self._folder.make, work)
            fetch = Fetch(
                versions.store,
                version,
                work=work,
                reservation=reservation,
                progress=progress,
                limits=self._limits,
                connections=self._connections,
                unpackings=self._unpackings,
                checksums=self._checksums[key.store],
            )
            await fetch.run()
            # The objects of a folder change one by one; only equal listings before and after a
            # fetch prove that all were there at one time.
            if version.is_folder and await versions.list_folder(key.path) != version:
                raise Changed  # noqa: TRY301 - as all that fetch.run raises
            size_bytes, sizes = await CACHE.run_to_end(self._folder.measure, work)
            note = replace(note, size_bytes=size_bytes, sizes=sizes)
            await reservation.settle(size_bytes)
            await CACHE.run_to_end(self._folder.publish, work, note)
            return self._disk.add(note, reservation)
        except BaseException:
            await asyncio.shield(self._begin_in_background(self._drop(work, note, reservation)))
            raise

    async def _drop(self, work: Path, note: Note, reservation: Reservation) -> None:
        """Delete what a fetch has written, also where it was published as it was cancelled."""
        try:
            await CACHE.run(self._folder.drop, work)
            if self._disk.get(note.id) is None:
                await CACHE.run(self._folder.remove, note.id)
        finally:
            reservation.release()

    # -- the rest ---------------------------------------------------------------------------

    def _make_artifact(self, key: ArtifactKey, cached: Cached) -> Artifact:
        note = cached.note
        return Artifact(key, self._folder.place(note), note.etag, note.size_bytes)

    def _touch(self, cached: Cached) -> None:
        """Keep the time of last use for later runs; nobody waits for it."""
        self._begin_in_background(CACHE.run(self._folder.touch, cached.note.id, cached.last_used))

    def _begin_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _make_need(_: Question) -> Need:
    """Return an empty need, which the cache of `_needs` keeps for the question."""
    return Need()


def _make_unstable(store: Store, known: Version, version: Version) -> StoreUnavailable:
    """Return the error for a key that could not be fetched whole with any try.

    Its version changed each time; or it stayed, and the store sent less than it says to have.
    """
    reason = f"it changed {_MAX_CHANGES} times while it was fetched"
    if known == version:
        reason = f"the store says it has {version.size_bytes} bytes, and does not send them"
    return StoreUnavailable(describe_failure(store.location, version.path, reason))
