"""Files that somebody deletes from the cache while it is open."""

import shutil
from pathlib import Path

import pytest

from adapter.core.artifacts import CacheUse
from adapter.errors import BackendUnavailable, InvalidSettings, StoreUnavailable
from adapter.store.cache_folder import CacheFolder
from tests.store.conftest import archive, files_of, names

_FILES = {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}


@pytest.fixture
def store(folder: Path) -> Path:
    (folder / "a.tar.gz").write_bytes(archive(_FILES))
    return folder


def delete(package: str, cache_dir: Path, what: str) -> None:
    if what == "a file":
        Path(package, "1/model.py").unlink()
    elif what == "the package":
        shutil.rmtree(package)
    elif what == "the artifact":
        shutil.rmtree(Path(package).parent.parent)
    elif what == "what is in cache_dir":
        for each in cache_dir.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    else:
        shutil.rmtree(cache_dir)


@pytest.mark.parametrize(
    "what", ["a file", "the package", "the artifact", "what is in cache_dir", "cache_dir"]
)
async def test_deleted_files_are_fetched_again_and_logged(store, open_cache, caplog, what):
    cache = await open_cache(store)
    first, _ = await cache.fetch("a.tar.gz")
    cache.cache.release(first)
    delete(first.folder, cache.cache.root, what)
    artifact, use = await cache.fetch("a.tar.gz")
    assert (files_of(artifact), use) == (_FILES, CacheUse.MISS)
    assert [each.key for each in caplog.records if each.message == "artifact.lost"] == ["a.tar.gz"]
    assert cache.cache.used_bytes == artifact.size_bytes
    cache.cache.release(artifact)
    assert await cache.fetch("a.tar.gz") == (artifact, CacheUse.DISK)


async def test_emptied_folder_stays_its_adapters(store, open_cache):
    cache = await open_cache(store)
    await cache.fetch_and_release("a.tar.gz")
    delete("", cache.cache.root, "what is in cache_dir")
    await cache.fetch_and_release("a.tar.gz")
    with pytest.raises(InvalidSettings, match="in use by another"):
        CacheFolder(cache.cache.root, lock_seconds=0).open()
    await cache.cache.close()
    assert await (await open_cache(store)).fetch_and_release("a.tar.gz") is CacheUse.DISK


def test_emptied_folder_taken_by_another_is_left(tmp_path):
    first, second = (CacheFolder(tmp_path / "cache", lock_seconds=0) for _ in range(2))
    first.open()
    delete("", tmp_path / "cache", "what is in cache_dir")
    second.open()
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="in use by another") as raised:
            first.make(first.new_work())
        assert str(tmp_path) not in str(raised.value)  # which callers read
    assert f"{tmp_path}/cache is in use" in first.lost_reason
    second.make(second.new_work())
    second.close()
    first.make(first.new_work())
    assert first.lost_reason is None


async def test_incomplete_model_needs_its_store(store, open_cache):
    cache = await open_cache(store)
    artifact, _ = await cache.fetch("a.tar.gz")
    cache.cache.release(artifact)
    delete(artifact.folder, cache.cache.root, "a file")
    store.rename(store.parent / "away")
    with pytest.raises(StoreUnavailable):
        await cache.fetch("a.tar.gz")
    (store.parent / "away").rename(store)
    assert await cache.fetch_and_release("a.tar.gz") is CacheUse.MISS


async def test_holder_of_lost_files_keeps_their_successors(store, open_cache):
    cache = await open_cache(store)
    first, _ = await cache.fetch("a.tar.gz")
    delete(first.folder, cache.cache.root, "a file")
    second, _ = await cache.fetch("a.tar.gz")
    cache.cache.release(second)
    assert cache.cache.unused() == (0, 0)
    cache.cache.release(first)
    assert cache.cache.unused() == (1, first.size_bytes)
    assert len(names(cache.cache.root / "artifacts")) == 1
