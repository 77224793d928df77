"""Serves artifacts of the stores through the disk cache: control's port Artifacts."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

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
from adapter.packages.contents import MAX_ENTRIES
from adapter.packages.unpacking import Limits
from adapter.runtime import background, clock
from adapter.runtime.fair_slots import FairSlots
from adapter.runtime.threads import CACHE, MAX_UNPACKED_AT_ONCE
from adapter.store.cache_folder import CacheFolder, Note
from adapter.store.checksums import Checksums
from adapter.store.disk import Cached, Disk, Evicted, Reservation, artifact_of, disk_error
from adapter.store.downloading import Connections
from adapter.store.fetching import Fetch, Version, version_of_folder
from adapter.store.ports import Changed, DiskEvictor, Store, Unfinished, failed, failed_at
from adapter.store.refusals import OF_KEYS, OF_VERSIONS, Needs, Question, Refusals
from adapter.store.waiting import BeginsAgain, RoomForFetches

log = logging.getLogger(__name__)

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
# How often a fetch begins anew because the store has another version meanwhile.
_MAX_CHANGES = 5
# How long a store that could not be used is asked for a version where another one is on disk.
_BRIEFLY_SECONDS = 1.0


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
        on_evicted: Callable[[str], None] = lambda _: None,  # in a thread; reason limit or disk
        on_room: Callable[[], None] = lambda: None,  # a full disk has room again
    ) -> None:
        self._stores = stores
        self._folder = folder
        self._on_evicted = on_evicted
        self._on_room = on_room
        self._limits = limits
        self._disk = Disk(folder, limit_bytes, self._evicted)
        self._room = RoomForFetches(self._disk, room_seconds)
        self._slots = {name: FairSlots(concurrency) for name in stores}
        self._turns: dict[ArtifactKey, asyncio.Lock] = {}
        self._users: Counter[ArtifactKey] = Counter()  # of each turn
        self._refusals = {name: Refusals(OF_KEYS) for name in stores}
        self._unfit = Refusals(OF_VERSIONS)
        self._needs = Needs()
        self._connections = Connections()
        self._unpackings = asyncio.Semaphore(MAX_UNPACKED_AT_ONCE)
        self._checksums = {store.location: Checksums(store.location) for store in stores.values()}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unasked = set(stores)
        self._unreachable: dict[str, str] = {}
        self._checking: asyncio.Task[NoReturn] | None = None

    @property
    def stores(self) -> frozenset[str]:
        """Return the names of the stores."""
        return frozenset(self._stores)

    @property
    def root(self) -> Path:
        """Return the real path of the folder that has all artifacts."""
        return self._folder.path

    @property
    def artifacts(self) -> int:
        """Return how many are on disk."""
        return len(self._disk)

    @property
    def used_bytes(self) -> int:
        """Return what artifacts take on disk, and what is reserved for fetches."""
        return self._disk.used_bytes

    @property
    def limit_bytes(self) -> int:
        """Return how many bytes artifacts and fetches may take."""
        return self._disk.limit_bytes

    def disk(self) -> DiskUse:
        """Return how full the cache is."""
        return self._disk.use()

    def unused(self) -> tuple[int, int]:
        """Return how many artifacts on disk are not pinned, and their bytes."""
        return self._disk.unused()

    # -- start and end ----------------------------------------------------------------------

    async def open(self, check_seconds: float = 10.0) -> None:
        """Take over what an earlier run has left on disk, and begin to `check` every so often.

        Raises InvalidSettings if the folder cannot be used, or is in use by another process.
        """
        found = await CACHE.run(self._folder.open)
        for each in sorted(found, key=lambda each: each.last_used):
            self._disk.adopt(each)
        await self._refresh_disk()
        await CACHE.run(self._disk.trim)
        work = background.forever(self.check, seconds=check_seconds)
        self._checking = background.begin("stores", work)
        log.info(
            "artifact.cache_opened",
            extra={
                "folder": str(self._folder.path),
                "artifacts": len(self._disk),
                "bytes": self._disk.used_bytes,
                "limit_bytes": self._disk.limit_bytes,
                "stores": {name: str(each.location) for name, each in self._stores.items()},
            },
        )

    async def close(self) -> None:
        """End what goes on in the background, and give the folder back."""
        if self._checking is not None:
            background.end(self._checking)
            await asyncio.wait({self._checking})
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await CACHE.run(self._folder.close)

    async def check(self) -> None:
        """Check that the folder is still ours and what its disk has free, and the stores that were
        not checked yet or could not be used then.
        """
        known = self._folder.why_lost
        if (why := await CACHE.run(self._folder.refresh)) is not None and why != known:
            log.error("artifact.cache_lost", extra={"reason": why})
        with suppress(OSError):
            await self._refresh_disk()
        await asyncio.gather(*map(self._check, self._unasked | self._unreachable.keys()))

    async def _refresh_disk(self) -> None:
        known = self._disk.why_full
        await CACHE.run(self._disk.refresh)
        if (why := self._disk.why_full) is not None and known is None:
            log.warning("artifact.disk_full", extra={"folder": str(self.root), "reason": why})
        if why is None and known is not None:
            self._on_room()

    @property
    def why_full(self) -> str | None:
        """Return why a fetch needs others to leave the disk; None while there is room."""
        return self._disk.why_full

    @property
    def why_lost(self) -> str | None:
        """Return why nothing can be fetched; None while the folder is ours."""
        return self._folder.why_lost

    def why_unreachable(self) -> str | None:
        """Return why a store could not be used when it was last asked. All are asked when the
        cache is opened, which nobody waits for.
        """
        return next(iter(self._unreachable.values()), None)

    async def _check(self, name: str) -> None:
        store, known = self._stores[name], self._unreachable.get(name)
        try:
            await store.check()
        except AdapterError as error:
            why = self._unreachable[name] = f"store {store.location}: {error}"
            if why != known:
                fields = {"store": str(store.location), "reason": str(error)}
                log.warning("artifact.store_unreachable", extra=fields)
        else:
            self._unreachable.pop(name, None)
        self._unasked.discard(name)

    # -- what control asks ------------------------------------------------------------------

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        *,
        models: DiskEvictor | None = None,
        is_asked_anew: bool = False,
        callers: Collection[str] = (),
    ) -> tuple[Artifact, CacheUse]:
        """Return the artifact, pinned until `release`, and where it was. The version is that which
        the store has now; where the store cannot be asked, the one that it had when it was last
        asked, if that is on disk.

        `models`: as in Artifacts. `is_asked_anew`: the store is asked even if it has just said that
        it has no such key. `callers`: as in FairSlots.
        Raises ArtifactNotFound, InvalidModel, InvalidRequest, NoRoom, StoreDenied,
        StoreUnavailable, and BackendError for the disk's faults.
        """
        store = self._store(key)
        async with self._turn(key):
            try:
                version = await self._asked_for(store, key, is_asked_anew=is_asked_anew)
            except StoreUnavailable as error:
                cached = await self._held(store, key, None)
                if cached is None:
                    raise
                fields = {"key": str(key), "etag": cached.note.etag, "reason": str(error)}
                log.warning("artifact.not_checked", extra=fields)
            else:
                cached = await self._held(store, key, version.etag)
            if cached is None:
                self._unfit.raise_known(_question(store, version))
                asked = clock.monotonic()
                async with self._slots[key.store].slot(str(key), callers):
                    progress.waited_seconds = clock.monotonic() - asked
                    found = await self._fetched(key, version, progress, models)
                return found, CacheUse.MISS
            progress.done_bytes = progress.total_bytes = cached.note.size_bytes
            self._touch(cached)
            return artifact_of(key, cached, self._folder), CacheUse.DISK

    async def _asked_for(self, store: Store, key: ArtifactKey, *, is_asked_anew: bool) -> Version:
        """Return the store's current version. Give up after 1 s if the store could not be used
        when it was last asked and there is a copy on disk to serve.
        """
        why = self._unreachable.get(key.store)
        is_brief = why is not None and self._disk.has_current(str(store.location), key.path)
        try:
            async with asyncio.timeout(_BRIEFLY_SECONDS if is_brief else None):
                return await self._current_version(key, is_asked_anew=is_asked_anew)
        except TimeoutError:
            raise StoreUnavailable(why or "") from None

    async def _held(self, store: Store, key: ArtifactKey, etag: str | None) -> Cached | None:
        """Return what is on disk with all its files, pinned; what has lost some is given up."""
        while (cached := self._disk.hold(str(store.location), key.path, etag)) is not None:
            try:
                if await CACHE.run(self._folder.is_complete, cached.note):
                    return cached
            except BaseException:
                self._disk.release(cached.note.id)
                raise
            self._disk.lose(cached)
            log.warning("artifact.lost", extra={"key": str(key), "store": str(store.location)})
        return None

    def release(self, artifact: Artifact) -> None:
        """Take the pin of one `fetch` off."""
        store = str(self._store(artifact.key).location)
        id_ = Note(store, artifact.key.path, artifact.etag, "", 0, {}).id
        if cached := self._disk.release(id_):
            self._touch(cached)

    async def is_current(self, artifact: Artifact) -> bool:
        """Return whether the store still has this version. Raises as `fetch` does.

        A version that the store has replaced is marked as such, but none is marked as current: a
        fetch of the same key may have heard of a later one meanwhile.
        """
        version = await self._version(artifact.key, is_asked_anew=False)
        if version.etag == artifact.etag:
            return True
        for cached in self._versions_on_disk(artifact.key):
            if cached.note.etag == artifact.etag:
                await self._mark(cached, is_replaced=True)
        return False

    async def find(self, key: ArtifactKey) -> ArtifactKey | None:
        """Return the key that the store has: `key` itself, or with the suffix of an archive; None
        if it has none. Where the store cannot be asked, that which it had when it was last asked,
        if that is on disk. Raises as `fetch` does.
        """
        on_disk = self._key_on_disk(key)
        if on_disk is not None and key.store in self._unreachable:
            return on_disk  # `fetch` asks the store again, but briefly
        try:
            return await self._find_in_store(key)
        except StoreUnavailable:
            if on_disk is None:
                raise
            return on_disk

    async def _find_in_store(self, key: ArtifactKey) -> ArtifactKey | None:
        store = self._store(key)
        refusals = self._refusals[key.store]
        archives = (key.path, *SUFFIXES)
        with suppress(ArtifactNotFound):
            await self._version(key, is_asked_anew=False, is_existence_enough=True)
            return key
        if refusals.knows(archives):
            return None
        if (archive := await _archive(store, key.path)) is not None:
            return replace(key, path=archive)
        for suffix in SUFFIXES:
            await self._mark_versions(replace(key, path=key.path + suffix), None)
        refusals.remember(archives, _absent(store, key.path))
        return None

    def _key_on_disk(self, key: ArtifactKey) -> ArtifactKey | None:
        """Return the key itself, or with the suffix of an archive, whose version that the store had
        last is on disk. An archive does not stand in for a folder or file that the store had.
        """
        location = str(self._store(key).location)
        suffixes = [""] if self._versions_on_disk(key) else ["", *SUFFIXES]
        keys = [replace(key, path=key.path + suffix) for suffix in suffixes]
        return next((each for each in keys if self._disk.has_current(location, each.path)), None)

    # -- versions ---------------------------------------------------------------------------

    def _store(self, key: ArtifactKey) -> Store:
        if (store := self._stores.get(key.store)) is None:
            raise InvalidRequest(f"there is no store {key.store!r}")
        return store

    async def _version(
        self, key: ArtifactKey, *, is_asked_anew: bool, is_existence_enough: bool = False
    ) -> Version:
        """Return what the store has; with `is_existence_enough` not all objects of a folder."""
        store, refusals = self._store(key), self._refusals[key.store]
        if not is_asked_anew:
            refusals.raise_known((key.path,))
        try:
            version = await self._asked(
                store, key.path, 2 if is_existence_enough else MAX_ENTRIES + 1
            )
        except AdapterError as error:
            refusals.remember((key.path,), error)
            if isinstance(error, StoreUnavailable):
                self._unreachable[key.store] = f"store {store.location}: {error}"
            raise
        self._unreachable.pop(key.store, None)
        if version.files:
            return version
        await self._mark_versions(key, None)
        hint = "" if is_existence_enough else await _hint_of_archive(store, key.path)
        refusals.remember((key.path,), _absent(store, key.path, hint))
        # raised without a name: a frame that names the error which it raises is a cycle of garbage
        raise _absent(store, key.path, hint)

    async def _current_version(self, key: ArtifactKey, *, is_asked_anew: bool) -> Version:
        """Return what the store has, and note on disk that this version is the current one. To be
        called in the key's turn.
        """
        version = await self._version(key, is_asked_anew=is_asked_anew)
        await self._mark_versions(key, version.etag)
        return version

    def _versions_on_disk(self, key: ArtifactKey) -> list[Cached]:
        return self._disk.versions(str(self._store(key).location), key.path)

    async def _mark_versions(self, key: ArtifactKey, etag: str | None) -> None:
        """Mark the version `etag` as current, and all others on disk as replaced. `etag` is None
        where the store has no such artifact any more: then all are replaced.
        """
        # the current one comes last: a process that is killed in between leaves none or one
        versions = sorted(self._versions_on_disk(key), key=lambda each: each.note.etag == etag)
        for cached in versions:
            await self._mark(cached, is_replaced=cached.note.etag != etag)

    async def _mark(self, cached: Cached, *, is_replaced: bool) -> None:
        if cached.is_replaced is is_replaced:
            return
        try:
            await CACHE.run_to_end(self._disk.mark, cached, is_replaced=is_replaced)
        except OSError as error:
            raise BackendError(f"the disk of cache_dir: {error.strerror or error}") from error

    async def _asked(self, store: Store, path: str, limit: int) -> Version:
        """Return what the store has, which is a folder without files where it has nothing."""
        if file := await store.stat(path):
            return Version(path, file.etag, (file,), is_folder=False)
        return version_of_folder(path, await store.below(path, limit))

    # -- fetching ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self, key: ArtifactKey) -> AsyncIterator[None]:
        """Let one caller a key in at a time; the next one finds on disk what it has brought."""
        lock = self._turns.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._turns[key]

    async def _fetched(
        self,
        key: ArtifactKey,
        version: Version,
        progress: FetchProgress,
        models: DiskEvictor | None,
    ) -> Artifact:
        """Fetch this version, or the one that the store has by then."""
        store, begun = self._store(key), clock.monotonic()
        fields = {"key": str(key), "store": str(store.location)}
        log.info("artifact.fetch_begun", extra={**fields, "bytes": version.size_bytes})
        what = failed_at(store.location, version.path)
        try:
            with self._room.reservation(what, models) as reservation:
                cached, version = await self._fetched_unless_changed(
                    key, version, reservation, progress
                )
        except (AdapterError, OSError) as error:
            said = error
            if isinstance(error, OSError):
                said = disk_error(error, what, version.disk_bytes)
                self._unfit.remember(_question(store, version), said)
            seconds = clock.monotonic() - begun
            figures = {"bytes": progress.done_bytes, "seconds": round(seconds, 3)}
            log.warning("artifact.fetch_failed", extra={**fields, **figures, "reason": str(said)})
            if said is error:
                raise
            raise said from error
        seconds = clock.monotonic() - begun
        figures = {"bytes": version.size_bytes, "disk_bytes": cached.note.size_bytes}
        log.info("artifact.fetched", extra={**fields, **figures, "seconds": round(seconds, 3)})
        return artifact_of(key, cached, self._folder)

    async def _fetched_unless_changed(
        self, key: ArtifactKey, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> tuple[Cached, Version]:
        store = self._store(key)
        for _ in range(_MAX_CHANGES):
            try:
                return await self._fetch_with_room(store, version, reservation, progress), version
            except Changed:
                known = version
                version = await self._current_version(key, is_asked_anew=True)
        reason = f"it changed {_MAX_CHANGES} times while it was fetched"
        if known == version:
            reason = f"the store says it has {version.size_bytes} bytes, and does not send them"
        raise StoreUnavailable(failed(store.location, key.path, reason))

    async def _fetch_with_room(
        self, store: Store, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> Cached:
        """Fetch the version, and once more where what came cannot be used: it may have been garbled
        on its way.
        """
        is_repeated = False
        while True:
            try:
                return await self._fetch_once(store, version, reservation, progress)
            except BeginsAgain as again:
                await self._room.earlier_ended(reservation, again)
            except InvalidArtifact as error:
                if is_repeated:
                    self._unfit.remember(_question(store, version), error)
                    raise
                is_repeated = True
            except Unfinished as error:
                if is_repeated:
                    raise StoreUnavailable(str(error)) from error
                is_repeated = True

    async def _fetch_once(
        self, store: Store, version: Version, reservation: Reservation, progress: FetchProgress
    ) -> Cached:
        """Fetch the version. Raises BeginsAgain, and Changed if the store has another version
        before this one is whole.
        """
        room, limits, asked = self._room, self._limits, _question(store, version)
        work, published = self._folder.new_work(), list[Cached]()
        reservation.need = self._needs.recall(asked)
        reservation.is_given_up = False
        try:
            await CACHE.run_to_end(self._folder.make, work)
            fetch = Fetch(
                store,
                version,
                work=work,
                reservation=reservation,
                room=room,
                progress=progress,
                limits=limits,
                connections=self._connections,
                unpackings=self._unpackings,
                checksums=self._checksums[store.location],
            )
            name = await fetch.run()
            if version.is_folder and await self._asked_again(store, version) != version.etag:
                raise Changed  # noqa: TRY301 - as all that fetch.run raises
            note = Note(str(store.location), version.path, version.etag, name, 0, {})
            await CACHE.run_to_end(self._publish, work, reservation, note, published)
            return published[0]
        except BaseException as error:
            if isinstance(error, NoRoom | BeginsAgain):
                self._needs.learn(asked, reservation.need)
            for cached in published:  # the fetch was cancelled after that
                self._disk.release(cached.note.id)
            await asyncio.shield(self._begin_in_background(self._dropped(work, reservation)))
            raise

    async def _asked_again(self, store: Store, version: Version) -> str:
        """Return the ETag of the listing now. The objects of a folder change one by one; only equal
        listings before and after a fetch prove that all were there at one time.
        """
        files = await store.below(version.path, MAX_ENTRIES + 1)
        return version_of_folder(version.path, files).etag

    def _publish(
        self, work: Path, reservation: Reservation, note: Note, published: list[Cached]
    ) -> None:
        size_bytes, sizes = self._folder.measure(work)
        reservation.settle(size_bytes)
        whole = replace(note, size_bytes=size_bytes, sizes=sizes)
        self._folder.publish(work, whole)
        published.append(self._disk.add(whole, reservation))

    async def _dropped(self, work: Path, reservation: Reservation) -> None:
        try:
            await CACHE.run_to_end(self._folder.drop, work)
        finally:
            reservation.settle(0)
            reservation.inodes = 0

    # -- the rest ---------------------------------------------------------------------------

    def _touch(self, cached: Cached) -> None:
        """Keep the time of last use for later runs; nobody waits for it."""
        self._begin_in_background(CACHE.run(self._folder.touch, cached.note.id, cached.last_used))

    def _begin_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _evicted(self, evicted: Evicted) -> None:
        """Called in a thread."""
        note = evicted.cached.note
        self._on_evicted(evicted.reason)
        log.info(
            "artifact.evicted",
            extra={
                "key": note.path,
                "store": note.store,
                "bytes": note.size_bytes,
                "reason": evicted.reason,
                "idle_seconds": round(clock.wall() - evicted.cached.last_used, 3),
                "seconds": round(evicted.seconds, 3),
            },
        )


def _question(store: Store, version: Version) -> Question:
    """Return what tells this version from all others, also from one of a falsely stated size."""
    return str(store.location), version.path, version.etag, str(version.size_bytes)


async def _archive(store: Store, path: str) -> str | None:
    """Return the key that is `path` with the suffix of an archive; None if the store has none."""
    paths = [path + suffix for suffix in SUFFIXES]
    found = await asyncio.gather(*map(store.stat, paths), return_exceptions=True)
    for each, file in zip(paths, found, strict=True):
        if isinstance(file, BaseException):
            raise file
        if file is not None:
            return each
    return None


def _absent(store: Store, path: str, hint: str = "") -> ArtifactNotFound:
    return ArtifactNotFound(failed(store.location, path, f"there is no such key{hint}"))


async def _hint_of_archive(store: Store, path: str) -> str:
    """Return the archive that may be meant, to be added to an error; empty if there is none. Keys
    with a suffix are not looked up.
    """
    if not path.endswith(SUFFIXES):
        with suppress(AdapterError):
            if (archive := await _archive(store, path)) is not None:
                return f"; did you mean {archive}?"
    return ""
