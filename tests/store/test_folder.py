"""A folder as a store, and what holds for every store."""

import asyncio
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from adapter.core.artifacts import CacheUse, FetchProgress
from adapter.errors import (
    ArtifactNotFound,
    InvalidModel,
    InvalidRequest,
    StoreUnavailable,
)
from adapter.settings.locations import StoreKind, StoreLocation
from adapter.store.folder import FolderStore
from adapter.store.ports import Changed
from tests.store.conftest import archive, files_of, modified, names

_FILES = {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}


async def test_an_archive_is_unpacked_into_the_cache(folder, open_cache):
    (folder / "team").mkdir()
    (folder / "team/digits.tar.gz").write_bytes(archive(_FILES))
    cache = await open_cache(folder)
    progress = FetchProgress()
    artifact, use = await cache.fetch("team/digits.tar.gz", progress)
    assert use is CacheUse.MISS
    assert files_of(artifact) == _FILES
    assert Path(artifact.folder).is_relative_to(cache.cache.root)
    size = (folder / "team/digits.tar.gz").stat().st_size
    assert (progress.done_bytes, progress.total_bytes) == (size, size)
    assert cache.cache.used_bytes == artifact.size_bytes


async def test_folder_is_fetched_with_its_times(folder, open_cache):
    for name, content in _FILES.items():
        (folder / "digits" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "digits" / name).write_bytes(content)
    os.utime(folder / "digits/1/model.py", (1e9, 1e9))
    artifact, _ = await (await open_cache(folder)).fetch("digits")
    assert files_of(artifact) == _FILES
    assert modified(f"{artifact.folder}/1/model.py") == 1e9


async def test_file_name_that_is_not_utf8_is_fetched(folder, open_cache):
    """Unpacking a zip of Windows leaves such names; the file is also found after a restart."""
    odd = os.fsdecode(b"gr\xf6\xdfe.txt")
    (folder / "a").mkdir()
    (folder / "a" / odd).write_bytes(b"x")
    cache = await open_cache(folder)
    artifact, _ = await cache.fetch("a")
    assert files_of(artifact) == {odd: b"x"}
    await cache.cache.close()
    assert await (await open_cache(folder)).fetch("a") == (artifact, CacheUse.DISK)


async def test_lone_file_is_a_package(folder, open_cache):
    (folder / "net.onnx").write_bytes(b"onnx")
    artifact, _ = await (await open_cache(folder)).fetch("net.onnx")
    assert Path(artifact.folder).name == "net.onnx"
    assert files_of(artifact) == {"": b"onnx"}


async def test_file_written_to_while_read_has_changed(folder):
    """Its begin was of the old content, and its end is of the new."""
    (folder / "net.onnx").write_bytes(b"old" * 100)
    store = FolderStore(StoreLocation(StoreKind.FOLDER, str(folder)))
    file = await store.stat("net.onnx")
    assert file is not None
    async with aclosing(store.read(file, 0, 200)) as chunks:
        assert await anext(chunks)
        with (folder / "net.onnx").open("r+b") as content:
            content.seek(200)
            content.write(b"new")
            content.flush()
            os.utime(content.fileno())
        with pytest.raises(Changed):
            await anext(chunks)


async def test_folder_with_changed_file_is_another_version(folder, open_cache):
    (folder / "a/1").mkdir(parents=True)
    (folder / "a/1/model.py").write_bytes(b"1")
    (folder / "a/config.pbtxt").write_bytes(b"c")
    cache = await open_cache(folder)
    first, _ = await cache.fetch("a")
    assert await cache.cache.is_current(first)
    (folder / "a/1/model.py").write_bytes(b"22")
    assert not await cache.cache.is_current(first)
    (folder / "a/1/model.py").unlink()
    assert not await cache.cache.is_current(first)


async def test_absent_key_is_named_without_path(folder, open_cache):
    cache = await open_cache(folder)
    with pytest.raises(ArtifactNotFound) as missing:
        await cache.fetch("nope.tar.gz")
    expected = "Failed to download model data (key: nope.tar.gz): "
    assert str(missing.value) == f"{expected}there is no such key"


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar", ".zip"])
async def test_key_without_suffix_is_refused_with_key(folder, open_cache, suffix):
    (folder / "team").mkdir()
    (folder / f"team/digits{suffix}").write_bytes(b"")
    cache = await open_cache(folder)
    for _ in range(2):  # also while it is remembered that there is none
        with pytest.raises(ArtifactNotFound) as missing:
            await cache.fetch("team/digits")
        assert str(missing.value).endswith(
            f"there is no such key; did you mean team/digits{suffix}?"
        )


async def test_a_key_below_a_file_is_not_there(folder, open_cache):
    (folder / "a").write_bytes(b"x")
    with pytest.raises(ArtifactNotFound):
        await (await open_cache(folder)).fetch("a/b")


@pytest.mark.parametrize("link", ["file", "folder", "inside a folder"])
async def test_a_link_out_of_the_store_is_refused(folder, open_cache, tmp_path, link):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/model.py").write_bytes(b"secret")
    if link == "file":
        (folder / "a").symlink_to(tmp_path / "secret/model.py")
    elif link == "folder":
        (folder / "a").symlink_to(tmp_path / "secret")
    else:
        (folder / "a").mkdir()
        (folder / "a/model.py").symlink_to("../../secret/model.py")
    cache = await open_cache(folder)
    with pytest.raises(InvalidRequest, match="leads out of the store"):
        await cache.fetch("a")
    assert cache.cache.used_bytes == 0


async def test_a_link_within_the_store_is_followed(folder, open_cache):
    (folder / "real").mkdir()
    (folder / "real/config.pbtxt").write_bytes(b"c")
    (folder / "a").symlink_to("real")
    artifact, _ = await (await open_cache(folder)).fetch("a")
    assert files_of(artifact) == {"config.pbtxt": b"c"}


async def test_folder_in_home_is_found(folder, open_cache, monkeypatch):
    """Expand `~` as cache_dir does: a file of settings is read by no shell."""
    monkeypatch.setenv("HOME", str(folder.parent))
    (folder / "a").write_bytes(b"x")
    artifact, _ = await (await open_cache("~/store")).fetch("a")
    assert files_of(artifact) == {"": b"x"}


async def test_unmounted_store_is_unavailable_not_empty(tmp_path, open_cache):
    cache = await open_cache(tmp_path / "not-mounted")
    with pytest.raises(StoreUnavailable, match="the folder is not there"):
        await cache.fetch("a")
    assert "the folder is not there" in cache.cache.unreachable_reason
    (tmp_path / "not-mounted").mkdir()
    (tmp_path / "not-mounted/a").write_bytes(b"x")
    await cache.fetch("a")
    assert cache.cache.unreachable_reason is None


async def test_only_archives_above_limit_are_refused(folder, open_cache):
    (folder / "a.tar.gz").write_bytes(archive({"model.bin": bytes(3 * 2**20)}))
    (folder / "b").mkdir()
    (folder / "b/model.bin").write_bytes(bytes(3 * 2**20))
    cache = await open_cache(folder, max_unpacked_bytes=2**20)
    with pytest.raises(InvalidModel, match=r"more than 1048576 bytes.* a folder has none"):
        await cache.fetch("a.tar.gz")
    await cache.fetch("b")


async def test_callers_of_one_key_fetch_it_once(folder, open_cache, caplog):
    caplog.set_level("INFO")
    (folder / "a.tar.gz").write_bytes(archive({"model.bin": os.urandom(2**20)}))
    cache = await open_cache(folder)
    found = await asyncio.gather(*(cache.fetch("a.tar.gz") for _ in range(8)))
    assert sorted(use.value for _, use in found) == ["disk"] * 7 + ["miss"]
    events = [record.message for record in caplog.records]
    assert events.count("artifact.fetch_begun") == events.count("artifact.fetched") == 1


async def test_cancelled_fetch_leaves_nothing(folder, open_cache):
    (folder / "a.tar.gz").write_bytes(archive({"model.bin": os.urandom(30 * 2**20)}))
    cache = await open_cache(folder)
    for pauses in (0, 1, 3, 10, 30, 100):
        progress = FetchProgress()
        task = asyncio.create_task(cache.fetch("a.tar.gz", progress))
        for _ in range(pauses):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            cache.cache.release(task.result()[0])
    artifact, _ = await cache.fetch("a.tar.gz")
    assert files_of(artifact).keys() == {"model.bin"}
    assert cache.cache.used_bytes == artifact.size_bytes
    assert not names(cache.cache.root / "work")
