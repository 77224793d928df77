"""Downloads in parts from servers that lie, break or change: right bytes or a clear error."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.core.artifacts import ArtifactKey, FetchProgress
from adapter.errors import ArtifactNotFound, InvalidArtifact, NoRoom, StoreUnavailable
from adapter.packages.unpack import Limits
from adapter.runtime import clock
from adapter.settings.locations import parse_location
from adapter.store import download
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.stores import open_store
from tests.store.conftest import archive, files_of, zipped
from tests.store.web import lead_s3_to, serving

_KIB = 2**10
_PART = 64 * _KIB
_FILES = {"1/model.bin": os.urandom(600 * _KIB), "config.pbtxt": b"backend: 'python'"}
_PACKED = archive(_FILES)
_OTHER_FILES = {"1/model.bin": os.urandom(600 * _KIB), "config.pbtxt": b"backend: 'python'"}
_OTHER = archive(_OTHER_FILES)

FAULTS = (
    "none",
    "cut",
    "ignores ranges",
    "wrong range",
    "other bytes",
    "other version",
    "slow down",
    "not found",
    "longer",
)


def md5_of(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def with_huge_size(packed: bytes) -> bytes:
    """Return an archive of one file that says it unpacks to 900 MiB."""
    size = (900 * 2**20).to_bytes(4, "little")
    if packed.startswith(b"PK"):
        entry = packed.index(b"PK\1\2")
        return packed[: entry + 24] + size + packed[entry + 28 :]
    return packed[:-4] + size


class LyingBucket:
    """Serves one object, and does the next of its faults at each GET until none is left."""

    def __init__(self) -> None:
        self.content = _PACKED
        self.etag: str | None = md5_of(_PACKED)
        self.faults: list[str] = []
        self.gets: list[str] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        key = request.path.rpartition("/")[2]
        if "list-type" in request.query or not key.startswith("a"):
            return web.Response(text="<ListBucketResult></ListBucketResult>")
        if request.method == "HEAD":
            headers = {**self._headers(), "Content-Length": str(len(self.content))}
            return web.Response(headers=headers)
        asked = request.headers.get("Range", "")
        self.gets.append(asked)
        return await self._answer(request, asked, self.faults.pop(0) if self.faults else "none")

    def _headers(self) -> dict[str, str]:
        time = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        return time if self.etag is None else {**time, "ETag": self.etag}

    async def _answer(self, request: web.Request, asked: str, fault: str) -> web.StreamResponse:
        if fault == "other version":
            self.content = _OTHER if self.content is _PACKED else _PACKED
            self.etag = self.etag and md5_of(self.content)
        match = request.headers.get("If-Match")
        if match and match != self.etag:
            return web.Response(status=412)
        if fault in {"slow down", "not found"}:
            status = 503 if fault == "slow down" else 404
            return web.Response(status=status, text="<Error><Code>SlowDown</Code></Error>")
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else 0
        end = int(last) + 1 if last else len(self.content)
        is_part = bool(asked) and fault != "ignores ranges"
        body = self.content[start:end] if is_part else self.content
        if fault == "other bytes":
            body = bytes(len(body))
        elif fault == "huge size":
            body = with_huge_size(body)
        headers = self._headers()
        if is_part:
            shift = 1 if fault == "wrong range" else 0
            whole = len(self.content)
            headers["Content-Range"] = f"bytes {start + shift}-{end - 1 + shift}/{whole}"
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        response.content_length = len(body) + (10 if fault == "longer" else 0)
        await response.prepare(request)
        await response.write(body[: len(body) // 2] if fault == "cut" else body)
        if fault in {"cut", "longer"} and request.transport is not None:
            request.transport.close()
        return response


@pytest.fixture
async def lying(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LyingBucket]:
    bucket = LyingBucket()
    monkeypatch.setattr(download, "PART_BYTES", _PART)
    monkeypatch.setattr(download, "MIN_SPLIT_BYTES", 2 * _PART)
    async with serving(bucket.serve) as url:
        lead_s3_to(url, monkeypatch)
        yield bucket


@asynccontextmanager
async def open_cache(folder: Path) -> AsyncIterator[ArtifactCache]:
    """Open a cache of the bucket; its folder for work is empty at the end."""
    store = open_store("model_store", parse_location("s3://models"), 0.3)
    cache = ArtifactCache(
        {"": store},
        CacheFolder(folder),
        limit_bytes=2**29,
        concurrency=4,
        limits=Limits(),
    )
    await cache.open()
    try:
        yield cache
        assert not any((folder / "work").iterdir())
    finally:
        await cache.close()


async def fetch(folder: Path, key: str = "a.tar.gz") -> dict[str, bytes]:
    """Fetch the object with a cache of its own; return what is in it."""
    async with open_cache(folder) as cache:
        artifact, _ = await cache.fetch(ArtifactKey("", key), FetchProgress())
        return files_of(artifact)


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let so many seconds pass at once."""
    later = time.monotonic() + seconds
    monkeypatch.setattr(clock, "monotonic", lambda: later)


async def test_large_object_comes_in_parts(lying: LyingBucket, tmp_path):
    assert await fetch(tmp_path) == _FILES
    starts = range(0, len(_PACKED), _PART)
    ends = (min(start + _PART, len(_PACKED)) - 1 for start in starts)
    ranges = [f"bytes={start}-{end}" for start, end in zip(starts, ends, strict=True)]
    last = f"bytes={starts[-1]}-"
    assert sorted(lying.gets) == sorted([*ranges[:-1], last])


async def test_download_releases_its_connections(lying: LyingBucket):
    """All downloads share them: one that keeps its own makes each later download slower."""
    store = open_store("model_store", parse_location("s3://models"), 0.3)
    file = await store.stat("a.tar.gz")
    assert file is not None
    connections = asyncio.Semaphore(2)
    async for _ in download.Download(store, file, connections).chunks():
        pass
    async with asyncio.timeout(10):
        for _ in range(2):
            await connections.acquire()


async def test_store_without_ranges_sends_the_object_whole(lying: LyingBucket, tmp_path):
    lying.faults = ["ignores ranges"] * 16
    assert await fetch(tmp_path) == _FILES
    assert lying.gets[-1] == ""


async def test_object_without_etag_comes_by_one_connection(lying: LyingBucket, tmp_path):
    lying.etag = None
    lying.faults = ["cut"]
    assert await fetch(tmp_path) == _FILES
    assert set(lying.gets) == {""}


@pytest.mark.parametrize("part", [0, 4])
async def test_garbled_archive_is_fetched_once_more(lying: LyingBucket, tmp_path, part):
    lying.faults = ["none"] * part + ["other bytes"]
    assert await fetch(tmp_path) == _FILES


async def test_garbled_file_is_fetched_once_more(lying: LyingBucket, tmp_path):
    """Compare a lone file with the MD5 in its ETag: nothing else tells that it is wrong."""
    lying.content = os.urandom(300 * _KIB)
    lying.etag = md5_of(lying.content)
    lying.faults = ["none", "other bytes"]
    assert await fetch(tmp_path, "a.bin") == {"": lying.content}


async def test_etag_other_than_md5_is_accepted_second_time(lying: LyingBucket, tmp_path):
    """S3 has such ETags for objects that KMS encrypts."""
    lying.etag = f'"{"0" * 32}"'
    assert await fetch(tmp_path) == _FILES


async def test_archive_that_is_bad_twice_is_refused(lying: LyingBucket, tmp_path):
    lying.content = b"no archive" * 10_000
    lying.etag = md5_of(lying.content)
    with pytest.raises(InvalidArtifact, match="its first bytes are those of no archive"):
        await fetch(tmp_path)


async def test_garbled_archive_is_fetched_once_garbling_ends(
    lying: LyingBucket, tmp_path, monkeypatch
):
    """Refuse it for a minute, no longer: what garbles two downloads, as a proxy may, says nothing
    of the archive, which was refused until a restart.
    """
    key = ArtifactKey("", "a.tar.gz")
    lying.faults = ["other bytes"] * 12
    async with open_cache(tmp_path) as cache:
        with pytest.raises(InvalidArtifact):
            await cache.fetch(key, FetchProgress())
        lying.faults = []
        gets = len(lying.gets)
        with pytest.raises(InvalidArtifact):
            await cache.fetch(key, FetchProgress())
        assert len(lying.gets) == gets, "a bad archive is not downloaded again at once"
        pass_time(monkeypatch, 61)
        artifact, _ = await cache.fetch(key, FetchProgress())
        assert files_of(artifact) == _FILES


@pytest.mark.parametrize("has_sum", [True, False])
@pytest.mark.parametrize("key", ["a.tar.gz", "a.zip"])
async def test_garbled_size_is_not_learned(
    lying: LyingBucket, tmp_path: Path, key: str, *, has_sum: bool
):
    """The end of an archive says how much room it takes. Once garbled, it lost the model until a
    restart: each later fetch reserved as much. Many stores have ETags that are no sums.
    """
    files = {"1/model.bin": os.urandom(50 * _KIB)}
    lying.content = zipped(files) if key.endswith(".zip") else archive(files)
    lying.etag = md5_of(lying.content) if has_sum else '"v1"'
    lying.faults = ["huge size"]
    assert await fetch(tmp_path, key) == files


async def test_size_stated_twice_is_kept_until_changed(lying: LyingBucket, tmp_path, monkeypatch):
    """Two downloads agree: others need not leave the disk once a minute for what never fits."""
    key = ArtifactKey("", "a.zip")
    files = {"1/model.bin": os.urandom(50 * _KIB)}
    lying.content = zipped(files)
    lying.etag = '"v1"'
    lying.faults = ["huge size"] * 2
    async with open_cache(tmp_path) as cache:
        for _ in range(2):
            with pytest.raises(NoRoom, match=r"needs 900\.\d MiB"):
                await cache.fetch(key, FetchProgress())
        pass_time(monkeypatch, 61)
        with pytest.raises(NoRoom):
            await cache.fetch(key, FetchProgress())
        assert len(lying.gets) == 2, "it is not downloaded again"
        lying.etag = '"v2"'
        artifact, _ = await cache.fetch(key, FetchProgress())
        assert files_of(artifact) == files


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(faults=st.lists(st.sampled_from(FAULTS), max_size=30), has_etag=st.booleans())
async def test_lies_end_in_right_bytes_or_error(
    lying: LyingBucket, tmp_path_factory, faults: list[str], has_etag: bool
):
    """A mixed or garbled file is never served. Without an ETag nothing tells one version from
    another, nor garbled bytes from right ones but the archive itself.
    """
    lying.content = _PACKED
    lying.etag = md5_of(_PACKED) if has_etag else None
    lying.faults = faults
    try:
        async with asyncio.timeout(60):
            files = await fetch(tmp_path_factory.mktemp("cache"))
    except (StoreUnavailable, ArtifactNotFound, InvalidArtifact):
        return
    assert files in (_FILES, _OTHER_FILES)
    if has_etag:
        assert files == (_FILES if lying.content is _PACKED else _OTHER_FILES)
