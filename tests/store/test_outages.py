"""Which version of a model is served while its store is away: the one that the store had last."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, FetchProgress
from adapter.errors import ArtifactNotFound, NoRoom, StoreUnavailable
from adapter.packages.unpack import Limits
from adapter.settings.locations import parse_location
from adapter.store import cache as cache_module
from adapter.store import versions as versions_module
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.disk import Cached
from adapter.store.ports import StoredFile
from tests.store.conftest import archive, files_of, forget_refusals

_MIB = 2**20
Start = Callable[..., Awaitable[ArtifactCache]]


class MemoryStore:
    """A store of objects in memory that can be away."""

    def __init__(self, name: str) -> None:
        self.location = parse_location(f"s3://{name}")
        self.is_away = False
        self.checks = 0
        self._objects: dict[str, tuple[str, bytes]] = {}  # ETag and content, by path

    def put(self, key: str, version: str, *, padding: bytes = b"") -> None:
        """Put a version of a model there: an archive, an object, or the objects of a folder."""
        content = version.encode() + padding
        if key.endswith(".tar.gz"):
            self._objects[key] = (version, archive({"said": content}))
        elif key.endswith(".onnx"):
            self._objects[key] = (version, content)
        else:
            self._objects[f"{key}/said"] = (version, content)

    def delete(self, key: str) -> None:
        for path in [path for path in self._objects if path == key or path.startswith(f"{key}/")]:
            del self._objects[path]

    def _file(self, path: str) -> StoredFile:
        etag, content = self._objects[path]
        return StoredFile(path, len(content), etag, 0.0)

    def _refuse_if_away(self) -> None:
        if self.is_away:
            raise StoreUnavailable("the store is away")

    async def check(self) -> None:
        self.checks += 1
        self._refuse_if_away()

    async def stat(self, path: str) -> StoredFile | None:
        self._refuse_if_away()
        return self._file(path) if path in self._objects else None

    async def list_below(self, path: str, limit: int) -> list[StoredFile]:
        self._refuse_if_away()
        return [self._file(each) for each in self._objects if each.startswith(f"{path}/")][:limit]

    async def read(self, file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        self._refuse_if_away()
        yield self._objects[file.path][1][offset:]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("models")


@pytest.fixture
async def start(store: MemoryStore, tmp_path: Path) -> AsyncIterator[Start]:
    """Open a cache, always in the same folder; the one before is abandoned as by a SIGKILL."""
    async with AsyncExitStack() as stack:
        opened: list[CacheFolder] = []

        async def start(
            limit_bytes: int = 2**30,
            *,
            concurrency: int = 4,
            check_seconds: float = 10.0,
            **more: MemoryStore,
        ) -> ArtifactCache:
            if opened:
                opened.pop().close()
            folder = CacheFolder(tmp_path / "cache")
            opened.append(folder)
            cache = ArtifactCache(
                {"": store, **more},
                folder,
                limit_bytes=limit_bytes,
                concurrency=concurrency,
                limits=Limits(max_unpacked_bytes=2**30),
                room_seconds=0.0,
            )
            await cache.open(check_seconds)
            stack.push_async_callback(cache.close)
            return cache

        yield start


def key_of(path: str, store: str = "") -> ArtifactKey:
    return ArtifactKey(store, path)


async def hold(cache: ArtifactCache, path: str, store: str = "") -> tuple[Artifact, CacheUse]:
    key = key_of(path, store)
    forget_refusals(cache)
    return await cache.fetch(key, FetchProgress())


async def use(cache: ArtifactCache, path: str, store: str = "") -> tuple[str, CacheUse]:
    """Return the version that is served, and where it was."""
    artifact, found = await hold(cache, path, store)
    cache.release(artifact)
    [content] = files_of(artifact).values()
    return content.decode(), found


@pytest.fixture(params=["m.tar.gz", "m.onnx", "m"], ids=["archive", "object", "folder"])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_outage_is_unavailable_without_current_version(store, start):
    """The older version is loaded, so only the current one can leave the disk for another model."""
    cache = await start(int(2.5 * _MIB))
    padding = bytes(_MIB)
    store.put("m", "v1", padding=padding)
    first, _ = await hold(cache, "m")
    store.put("m", "v2", padding=padding)
    cache.release((await hold(cache, "m"))[0])
    store.put("n", "other", padding=padding)
    cache.release((await hold(cache, "n"))[0])
    cache.release(first)
    store.is_away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await use(cache, "m")
        cache = await start(int(2.5 * _MIB))


async def test_outage_is_unavailable_without_current_files(store, start, path):
    cache = await start()
    for version in ("v1", "v2"):
        store.put(path, version)
        artifact, _ = await hold(cache, path)
        cache.release(artifact)
    shutil.rmtree(Path(artifact.folder).parent)
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await use(cache, path)


async def test_outage_during_fetch_serves_no_older_version(store, start, path, monkeypatch):
    """The store has named the new version, and was away before its bytes came."""
    cache = await start()
    store.put(path, "v1")
    await use(cache, path)
    store.put(path, "v2")

    async def read(file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        store.is_away = True
        raise StoreUnavailable("the store is away")
        yield b""

    monkeypatch.setattr(store, "read", read)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await use(cache, path)
        cache = await start()


async def test_replaced_version_is_not_served_before_renewal(store, start, path):
    """The store has said that it has another version; nothing of it was fetched yet."""
    cache = await start()
    store.put(path, "v1")
    first, _ = await hold(cache, path)
    store.put(path, "v2")
    assert not await cache.is_current(first)
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await use(cache, path)


@pytest.mark.parametrize("asked_by", ["fetch", "find", "is_current"])
async def test_deleted_model_is_not_served_in_outage(store, start, path, asked_by):
    cache = await start()
    store.put(path, "v1")
    first, _ = await hold(cache, path)
    store.delete(path)
    if asked_by == "fetch":
        with pytest.raises(ArtifactNotFound):
            await use(cache, path)
    elif asked_by == "find":
        assert await cache.find(key_of(path.removesuffix(".tar.gz"))) is None
    else:
        with pytest.raises(ArtifactNotFound):
            await cache.is_current(first)
    store.is_away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await use(cache, path)
        with pytest.raises(StoreUnavailable):
            await cache.find(key_of(path.removesuffix(".tar.gz")))
        cache = await start()
    store.is_away = False
    store.put(path, "v1")
    assert await use(cache, path) == ("v1", CacheUse.DISK)


async def test_equal_keys_of_stores_have_own_versions(store, start, path):
    team = MemoryStore("team")
    cache = await start(team=team)
    for each in (store, team):
        each.put(path, "v1")
    for name in ("", "team"):
        await use(cache, path, name)
    store.put(path, "v2")
    await use(cache, path)
    store.is_away = True
    team.is_away = True
    cache = await start(team=team)
    assert await use(cache, path) == ("v2", CacheUse.DISK)
    assert await use(cache, path, "team") == ("v1", CacheUse.DISK)


async def test_stores_of_one_location_fetch_a_key_once(store, start, path):
    """A second fetch would replace the files of the first one while Triton reads them."""
    twin = MemoryStore("models")
    cache = await start(twin=twin)
    for each in (store, twin):
        each.put(path, "v1")
    found = await asyncio.gather(hold(cache, path), hold(cache, path, "twin"))
    assert [use.value for _, use in found] == ["miss", "disk"]
    for artifact, _ in found:
        cache.release(artifact)
    assert cache.unused() == (1, found[0][0].size_bytes)


async def test_cache_without_version_is_fetched_again(store, start, path):
    """A folder of before the notes had names for it: nothing says which version is the last."""
    cache = await start()
    store.put(path, "v1")
    artifact, _ = await hold(cache, path)
    cache.release(artifact)
    [note] = cache.root.glob("artifacts/*/current.json")
    note.rename(note.with_name("note.json"))
    store.is_away = True
    cache = await start()
    with pytest.raises(StoreUnavailable):
        await use(cache, path)
    store.is_away = False
    assert await use(cache, path) == ("v1", CacheUse.MISS)


async def test_key_on_disk_is_found_without_store(store, start, path):
    """V2 asks for it by its name, also after a restart; the endpoint names the key."""
    store.put(path, "1")
    await use(await start(), path)
    store.is_away = True
    cache = await start()
    asked = {path, path.removesuffix(".tar.gz")}
    assert {await cache.find(key_of(each)) for each in asked} == {key_of(path)}
    with pytest.raises(StoreUnavailable):
        await cache.find(key_of("other"))


async def test_slow_note_of_new_version_is_no_outage(store, start, monkeypatch):
    """The store was away before, so it has a moment to answer. It did, but what was noted on disk
    took longer: the call failed, by a text with the key of another model.
    """
    cache = await start()
    store.put("a", "v1")
    await use(cache, "a")
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await use(cache, "b")
    store.is_away = False
    store.put("a", "v2")
    monkeypatch.setattr(cache_module, "_BRIEFLY_SECONDS", 0.05)
    mark = cache._disk.mark

    async def mark_slowly(cached: Cached, *, is_replaced: bool) -> None:
        await mark(cached, is_replaced=is_replaced)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(cache._disk, "mark", mark_slowly)
    assert await use(cache, "a") == ("v2", CacheUse.MISS)


async def test_silent_store_is_reported_with_its_key(store, start, monkeypatch, caplog):
    cache = await start()
    store.put("a", "v1")
    await use(cache, "a")
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await use(cache, "secret-of-another-team")
    monkeypatch.setattr(cache_module, "_BRIEFLY_SECONDS", 0.05)
    monkeypatch.setattr(store, "stat", lambda _: asyncio.Event().wait())
    async with asyncio.timeout(30):
        assert await use(cache, "a") == ("v1", CacheUse.DISK)
    [event] = [each for each in caplog.records if each.message == "artifact.not_checked"]
    assert "key: a): it did not answer within 0.05 s" in event.reason
    assert "secret-of-another-team" not in event.reason


async def test_absent_store_is_checked_until_it_returns(store, start, caplog):
    store.is_away = True
    cache = await start(check_seconds=0.001)
    await wait_for(lambda: store.checks > 3)
    assert cache.unreachable_reason == "store s3://models: the store is away"
    store.is_away = False
    await wait_for(lambda: cache.unreachable_reason is None)
    events = [each.message for each in caplog.records]
    assert events.count("artifact.store_unreachable") == 1
    checks = store.checks
    await cache.check()
    assert store.checks == checks


async def test_silent_store_does_not_stop_other_checks(store, start, monkeypatch, caplog):
    team = MemoryStore("team")
    team.is_away = True
    is_answered = asyncio.Event()
    monkeypatch.setattr(store, "check", is_answered.wait)
    monkeypatch.setattr(versions_module, "_SILENT_SECONDS", 0.01)
    cache = await start(check_seconds=0.001, team=team)
    await wait_for(lambda: team.checks > 3)
    await wait_for(lambda: "not answered" in (cache.unreachable_reason or ""))
    assert cache.unreachable_reason.startswith("store s3://models:")
    team.is_away = False
    is_answered.set()
    await wait_for(lambda: cache.unreachable_reason is None)
    events = [each.message for each in caplog.records]
    assert events.count("artifact.store_unreachable") == 2


async def wait_for(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_met():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.001)


async def test_silent_store_does_not_block_another(store, start, monkeypatch):
    team = MemoryStore("team")
    for each in (store, team):
        each.put("m", "v1")
    cache = await start(concurrency=1, team=team)
    is_read = asyncio.Event()

    async def hang(file: StoredFile, offset: int, end: int) -> AsyncGenerator[bytes, None]:
        is_read.set()
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(store, "read", hang)
    hanging = asyncio.create_task(use(cache, "m"))
    await is_read.wait()
    async with asyncio.timeout(5):
        assert await use(cache, "m", "team") == ("v1", CacheUse.MISS)
    hanging.cancel()
    await asyncio.wait({hanging})


async def test_false_length_is_forgotten_with_its_answer(store, start, monkeypatch):
    """A false Content-Length once made all later fetches of the version reserve as much."""
    store.put("m.onnx", "v1")
    cache = await start()
    right = await store.stat("m.onnx")

    async def overstate(path: str) -> StoredFile:
        return replace(right, size_bytes=10**12)

    with monkeypatch.context() as patch:
        patch.setattr(store, "stat", overstate)
        with pytest.raises(NoRoom, match=r"931\.3 GiB"):
            await use(cache, "m.onnx")
    assert await use(cache, "m.onnx") == ("v1", CacheUse.MISS)
