"""The folder of the cache outlives its process, whatever ends it."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapter.core.artifacts import CacheUse
from adapter.errors import InvalidSettings
from adapter.store.cache_folder import CacheFolder
from tests.store.conftest import archive, files_of, names
from tests.store.killed import fill, killed_user, whole

_FILES = {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}


async def test_the_order_of_use_outlives_the_process(folder, open_cache):
    fill(folder, 6, 2**20)
    cache = await open_cache(folder, limit_bytes=2**30)
    for key in "0", "2", "4", "0":
        await cache.fetch_and_release(key)
    await cache.cache.close()
    again = await open_cache(folder, limit_bytes=int(2.5 * 2**20))
    assert again.evicted == ["limit"], "the limit may be another one"
    assert await again.fetch_and_release("0") is CacheUse.DISK
    assert await again.fetch_and_release("4") is CacheUse.DISK
    assert await again.fetch_and_release("2") is CacheUse.MISS


async def test_written_bytecode_does_no_harm(folder, open_cache):
    (folder / "a.tar.gz").write_bytes(archive(_FILES))
    cache = await open_cache(folder)
    artifact, _ = await cache.fetch("a.tar.gz")
    imported_by_python(Path(artifact.folder))
    await cache.cache.close()
    assert (await (await open_cache(folder)).fetch("a.tar.gz"))[1] is CacheUse.DISK


@pytest.mark.parametrize(
    "harm", ["file gone", "file cut", "note gone", "note cut", "note of other"]
)
async def test_incomplete_files_are_removed_at_start(folder, open_cache, harm):
    (folder / "a.tar.gz").write_bytes(archive(_FILES))
    (folder / "b.tar.gz").write_bytes(archive({"b": b"b"}))
    cache = await open_cache(folder)
    artifact, _ = await cache.fetch("a.tar.gz")
    await cache.fetch("b.tar.gz")
    await cache.cache.close()
    spoil(Path(artifact.folder), harm)
    again = await open_cache(folder)
    assert (await again.fetch("b.tar.gz"))[1] is CacheUse.DISK
    artifact, use = await again.fetch("a.tar.gz")
    assert (files_of(artifact), use) == (_FILES, CacheUse.MISS)
    assert len(names(again.cache.root / "artifacts")) == 2


def imported_by_python(package: Path) -> None:
    (package / "1/__pycache__").mkdir()
    (package / "1/__pycache__/model.pyc").write_bytes(b"compiled")


def spoil(package: Path, harm: str) -> None:
    note = package.parent.parent / "current.json"
    if harm == "file gone":
        (package / "1/model.py").unlink()
    elif harm == "file cut":
        (package / "1/model.py").write_bytes(b"")
    elif harm == "note gone":
        note.unlink()
    elif harm == "note cut":
        note.write_bytes(note.read_bytes()[:-10])
    else:
        note.write_text(note.read_text().replace("a.tar.gz", "c.tar.gz"))


def test_start_waits_for_an_ending_process(tmp_path):
    first = CacheFolder(tmp_path / "cache")
    first.open()
    second = CacheFolder(tmp_path / "cache", lock_seconds=60)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(second.open)
        with pytest.raises(TimeoutError):
            opened.result(0.2)
        first.close()
        assert opened.result(30) == []
    second.close()


def test_a_folder_with_other_files_is_not_touched(tmp_path):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/thesis.tex").write_text("years of work")
    with pytest.raises(InvalidSettings, match="holds other files"):
        CacheFolder(tmp_path).open()
    assert (tmp_path / "artifacts/thesis.tex").read_text() == "years of work"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match=r"cache_dir: .*file/cache: Not a directory"):
        CacheFolder(tmp_path / "file/cache").open()


def test_kill_leaves_only_whole_artifacts(folder, tmp_path):
    contents = fill(folder, 10, 5 * 2**20)
    moments = random.Random(1)
    taken_over = 0
    for _ in range(4):
        killed_user(folder, tmp_path / "cache", moments.uniform(0, 0.4))
        taken_over += whole(tmp_path / "cache", contents)
    assert taken_over
