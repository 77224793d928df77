"""Stores that cannot be used when the cache is opened, and can be later."""

import asyncio
from pathlib import Path

import pytest

from adapter.errors import StoreUnavailable
from adapter.packages.unpack import Limits
from adapter.settings.locations import parse_location
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder


class Looked:
    """A store that can be used or not; `looks` has which it was at each look."""

    location = parse_location("/models")

    def __init__(self) -> None:
        self.is_there = False
        self.looks = asyncio.Queue[bool]()

    async def check(self) -> None:
        self.looks.put_nowait(self.is_there)
        if not self.is_there:
            raise StoreUnavailable("the folder is not there")


@pytest.fixture
async def opened(tmp_path: Path):
    store = Looked()
    cache = ArtifactCache(
        {"": store},
        CacheFolder(tmp_path / "cache"),
        limit_bytes=2**20,
        concurrency=1,
        limits=Limits(max_unpacked_bytes=2**20),
    )
    await cache.open(check_seconds=0.001)
    yield store, cache
    await cache.close()


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("/models", "the folder itself"),
        ("s3://models", "bucket: models"),
        ("s3://models/team", "bucket: models, key: team"),
    ],
)
def test_error_of_whole_store_names_no_key(url, place):
    assert parse_location(url).place("") == place


async def test_unusable_store_is_asked_until_well(opened, caplog):
    store, cache = opened
    async with asyncio.timeout(30):
        for _ in range(3):
            await store.looks.get()
        assert cache.unreachable_reason == "store /models: the folder is not there"
        store.is_there = True
        while not await store.looks.get():
            pass
    assert cache.unreachable_reason is None
    told = [each.message for when in ("setup", "call") for each in caplog.get_records(when)]
    assert told.count("artifact.store_unreachable") == 1
    await cache.check()
    assert store.looks.empty(), "one that can be used is not asked again"
