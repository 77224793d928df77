"""The double under the tests of residency does what the stores and their disk cache do."""

import os
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter.control.ports import Artifacts
from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, FetchProgress
from adapter.errors import ArtifactNotFound
from adapter.packages.unpack import Limits
from adapter.settings.locations import parse_location
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.stores import open_store
from tests.fakes.artifacts import FakeArtifacts
from tests.fakes.steps import Steps


@dataclass(frozen=True)
class Shop:
    """A store with its cache, and a way to put a version of a model there."""

    artifacts: Artifacts
    put: Callable[[str, str], None]

    async def fetch(self, path: str) -> tuple[Artifact, CacheUse]:
        return await self.artifacts.fetch(ArtifactKey("", path), FetchProgress())


@pytest.fixture(params=["fake", "real"])
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    if request.param == "fake":
        fake = FakeArtifacts(Steps())
        yield Shop(fake, fake.versions.__setitem__)
        return
    (folder := tmp_path / "store").mkdir()

    def put(path: str, version: str) -> None:
        (tmp_path / "file").write_text(version)
        with tarfile.open(tmp_path / "draft", "w") as tar:
            tar.add(tmp_path / "file", f"{version}/file")
        os.utime(tmp_path / "draft", (int(version), int(version)))
        (tmp_path / "draft").replace(folder / path)

    store = open_store("model_store", parse_location(str(folder)), 30.0)
    limits = Limits(max_unpacked_bytes=2**30)
    at = CacheFolder(tmp_path / "cache")
    cache = ArtifactCache({"": store}, at, limit_bytes=2**30, concurrency=4, limits=limits)
    await cache.open()
    yield Shop(cache, put)
    await cache.close()


async def test_an_artifact_is_missed_once_and_then_on_disk(shop):
    shop.put("m.tar", "1")
    progress = FetchProgress()
    first, use = await shop.artifacts.fetch(ArtifactKey("", "m.tar"), progress)
    assert (use, progress.percent) == (CacheUse.MISS, 100)
    assert first.key == ArtifactKey("", "m.tar")
    assert shop.artifacts.unused() == (0, 0)
    shop.artifacts.release(first)
    assert shop.artifacts.unused() == (1, first.size_bytes)
    assert await shop.fetch("m.tar") == (first, CacheUse.DISK)
    shop.artifacts.release(first)


async def test_each_fetch_has_a_release_of_its_own(shop):
    shop.put("m.tar", "1")
    (one, _), (other, _) = await shop.fetch("m.tar"), await shop.fetch("m.tar")
    assert one == other
    shop.artifacts.release(one)
    assert shop.artifacts.unused() == (0, 0)
    shop.artifacts.release(other)
    assert shop.artifacts.unused()[0] == 1


async def test_a_key_that_is_not_there_is_not_found(shop):
    with pytest.raises(ArtifactNotFound):
        await shop.fetch("missing.tar")


async def test_another_version_is_seen_and_lies_beside_the_old_one(shop):
    shop.put("m.tar", "1")
    old, _ = await shop.fetch("m.tar")
    assert await shop.artifacts.is_current(old)
    shop.put("m.tar", "2")
    assert not await shop.artifacts.is_current(old)
    new, use = await shop.fetch("m.tar")
    assert use is CacheUse.MISS
    assert new.etag != old.etag
    assert new.folder != old.folder
    assert await shop.artifacts.is_current(new)
    for artifact in (old, new):
        shop.artifacts.release(artifact)


async def test_a_name_is_found_with_the_suffix_of_an_archive(shop):
    shop.put("m.tar", "1")
    shop.put("n.tar.gz", "1")
    assert await shop.artifacts.find(ArtifactKey("", "m.tar")) == ArtifactKey("", "m.tar")
    assert await shop.artifacts.find(ArtifactKey("", "n")) == ArtifactKey("", "n.tar.gz")
    assert await shop.artifacts.find(ArtifactKey("", "o")) is None
