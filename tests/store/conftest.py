"""Caches in a temporary folder, in front of folders, buckets of moto's server, and a web server."""

import asyncio
import io
import itertools
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, FetchProgress
from adapter.packages.unpack import Limits
from adapter.settings.locations import parse_location
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.refusals import OF_KEYS, Refusals
from adapter.store.stores import open_store
from tests.buckets import Bucket, s3_server
from tests.store.web import WebServer, web_server

_numbers = itertools.count()


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return a tar.gz, the same for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in files.items():
            made.writestr(name, content)
    return packed.getvalue()


class TryCache:
    """A cache with one store, and fetches by path."""

    def __init__(self, cache: ArtifactCache) -> None:
        self.cache = cache
        self.evicted: list[str] = []
        self.models: Any = None  # a DiskEvictor

    async def fetch(
        self, path: str, progress: FetchProgress | None = None
    ) -> tuple[Artifact, CacheUse]:
        key = ArtifactKey("", path)
        return await self.cache.fetch(key, progress or FetchProgress(), evictor=self.models)

    async def fetch_and_release(self, path: str) -> CacheUse:
        artifact, use = await self.fetch(path)
        self.cache.release(artifact)
        return use


class IdleModels:
    """Models that may be unloaded for a fetch, and never are."""

    can_unload_later = True
    unloads = 0

    async def unload_one(self, missing_bytes: int) -> bool:
        self.unloads += 1
        return False

    def unevictable_bytes(self) -> int:
        return 0


def forget_refusals(cache: ArtifactCache) -> None:
    """Let the cache ask its stores again at once for what they have just refused."""
    for versions in cache._versions.values():
        versions._refusals = Refusals(OF_KEYS)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def modified(path: str) -> float:
    return Path(path).stat().st_mtime


def files_of(artifact: Artifact) -> dict[str, bytes]:
    """Return the contents; of a lone file that under no name."""
    root = Path(artifact.folder)
    if root.is_file():
        return {"": root.read_bytes()}
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is a store."""
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
async def open_cache(tmp_path: Path) -> AsyncIterator[Callable]:
    """Open caches; they are closed after the test."""
    async with AsyncExitStack() as stack:

        async def open_cache(
            url: object,
            *,
            limit_bytes: int | None = 2**30,
            max_unpacked_bytes: int = 2**30,
            timeout_seconds: float = 30.0,
            concurrency: int = 4,
            room_seconds: float = 10.0,
            at: Path | None = None,
        ) -> TryCache:
            evicted: list[str] = []
            store = open_store("model_store", parse_location(str(url)), timeout_seconds)
            cache = ArtifactCache(
                {"": store},
                CacheFolder(at or tmp_path / "cache"),
                limit_bytes=limit_bytes,
                concurrency=concurrency,
                limits=Limits(max_unpacked_bytes=max_unpacked_bytes),
                room_seconds=room_seconds,
                on_evicted=evicted.append,
            )
            await cache.open()
            while not all(each.is_checked for each in cache._versions.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            stack.push_async_callback(cache.close)
            tried = TryCache(cache)
            tried.evicted = evicted
            return tried

        yield open_cache


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that is this test's alone, and that this process finds."""
    made = Bucket(s3_endpoint, f"bucket{next(_numbers)}")
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
async def website() -> AsyncIterator[WebServer]:
    async with web_server() as server:
        yield server
