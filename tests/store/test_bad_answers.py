"""Stores that lie, hang or have another address: what their callers get, and other callers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from adapter.core.artifacts import ArtifactKey, CacheUse, FetchProgress
from adapter.errors import NoRoom, StoreUnavailable
from adapter.packages.unpack import Limits
from adapter.settings.locations import parse_location
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.ports import Changed, StoredFile
from tests.buckets import KEYS


class Moody:
    """A store of any key. `why` it fails; `hangs`: it does not answer; `lies`, `is_silent`: it has
    another object than it says, or sends nothing of it.
    """

    def __init__(self, url: str) -> None:
        self.location = parse_location(url)
        self.why: StoreUnavailable | None = None
        self.hangs = self.lies = self.is_silent = False
        self.is_read = asyncio.Event()

    async def _answers(self) -> None:
        if self.why is not None:
            raise self.why
        if self.hangs:
            await asyncio.Event().wait()

    async def stat(self, path: str) -> StoredFile:
        await self._answers()
        return StoredFile(path, 3, "v1", 1.0)

    async def read(self, file: StoredFile, offset: int, end: int) -> AsyncIterator[bytes]:
        self.is_read.set()
        if self.is_silent:
            await asyncio.Event().wait()
        if self.lies:
            raise Changed
        yield b"abc"[offset:]

    async def check(self) -> None:
        await self._answers()


@pytest.fixture
async def shared(tmp_path: Path):
    """Two stores with one cache, which fetches one model at a time."""
    stores = {"a": Moody("s3://a"), "b": Moody("s3://b")}
    cache = ArtifactCache(
        stores,
        CacheFolder(tmp_path / "cache"),
        limit_bytes=2**20,
        concurrency=1,
        limits=Limits(max_unpacked_bytes=2**20),
    )
    await cache.open()
    async with asyncio.timeout(30):
        yield stores["a"], stores["b"], cache
    await cache.close()


async def fetched(cache: ArtifactCache, store: str, path: str) -> CacheUse:
    artifact, use = await cache.fetch(ArtifactKey(store, path), FetchProgress())
    cache.release(artifact)
    return use


async def test_silent_store_does_not_block_another(shared):
    a, _, cache = shared
    a.is_silent = True
    hanging = asyncio.create_task(fetched(cache, "a", "first"))
    await a.is_read.wait()
    async with asyncio.timeout(5):
        assert await fetched(cache, "b", "first") is CacheUse.MISS
    hanging.cancel()
    await asyncio.wait({hanging})


async def test_disk_does_not_wait_for_absent_store(shared):
    a, _, cache = shared
    await fetched(cache, "a", "first")
    a.why = StoreUnavailable("it did not answer in time")
    assert await fetched(cache, "a", "first") is CacheUse.DISK
    a.why, a.hangs = None, True
    async with asyncio.timeout(10):
        assert await fetched(cache, "a", "first") is CacheUse.DISK
    assert cache.unreachable_reason == "store s3://a: it did not answer in time"
    a.hangs = False
    assert await fetched(cache, "a", "first") is CacheUse.DISK
    assert cache.unreachable_reason is None


async def test_short_answers_are_no_change_of_store(shared):
    a, _, cache = shared
    a.lies = True
    with pytest.raises(StoreUnavailable, match="says it has 3 bytes, and does not send them"):
        await fetched(cache, "a", "first")


_REDIRECT = b"HTTP/1.1 301 Moved Permanently\r\nContent-Length: 0\r\n\r\n"
_NO_LENGTH = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: -5\r\n\r\n'


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_REDIRECT, "is AWS_REGION that of the bucket?"),
        (_NO_LENGTH, "its answer lacks what is needed to fetch an object"),
        (b"220 mail.example ESMTP\r\n", "its answer is not HTTP"),
        (b"", "it closes connections without an answer"),
    ],
)
async def test_wrong_bucket_address_is_named(open_cache, monkeypatch, answer, reason):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with closing(server):
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        cache = await open_cache("s3://models", timeout_seconds=1)
        with pytest.raises(StoreUnavailable) as failed:
            await cache.fetch("a.tar.gz")
    assert str(failed.value).endswith(reason)


async def test_false_length_is_forgotten_with_its_answer(shared, monkeypatch):
    """A false Content-Length once made all later fetches of the version reserve as much."""
    a, _, cache = shared
    right = a.stat

    async def overstate(path: str) -> StoredFile:
        return replace(await right(path), size_bytes=10**12)

    with monkeypatch.context() as patch:
        patch.setattr(a, "stat", overstate)
        with pytest.raises(NoRoom, match=r"931\.3 GiB"):
            await fetched(cache, "a", "first")
    assert await fetched(cache, "a", "first") is CacheUse.MISS
