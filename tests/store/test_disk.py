"""Room on disk: what leaves it, in which order, and what never does."""

import asyncio
import errno
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from adapter.core.artifacts import CacheUse, DiskUse, FetchProgress
from adapter.errors import NoRoom
from adapter.packages.unpack import RESERVE_BYTES, RESERVE_INODES, Free
from adapter.store import fetch
from adapter.store.cache_folder import CacheFolder, Note
from adapter.store.disk import Disk, Reservation
from tests.store.conftest import IdleModels, archive, files_of, names, zipped

_MIB = 2**20


@pytest.fixture
def models(folder: Path) -> Path:
    """Six packages of 1 MiB and a bit, as folders and as archives in turn."""
    for number in range(6):
        content = os.urandom(_MIB)
        if number % 2:
            (folder / str(number)).write_bytes(archive({"model.bin": content}))
        else:
            (folder / str(number)).mkdir()
            (folder / str(number) / "model.bin").write_bytes(content)
    return folder


def notes_of(cache) -> list[dict[str, Any]]:
    """The notes of the artifacts that are served without a fetch."""
    return [json.loads(note.read_bytes()) for note in cache.cache.root.glob("artifacts/*/*.json")]


def on_disk(cache) -> set[str]:
    """The keys that are served without a fetch."""
    return {note["path"] for note in notes_of(cache)}


async def test_the_least_recently_used_leaves_for_what_comes(models, open_cache, caplog):
    caplog.set_level("INFO")
    cache = await open_cache(models, limit_bytes=int(4.5 * _MIB))
    for key in "0", "2", "4", "0":
        await cache.fetch_and_release(key)
    assert on_disk(cache) == {"0", "2", "4"}
    (models / "6").mkdir()
    (models / "6/model.bin").write_bytes(os.urandom(2 * _MIB))
    await cache.fetch_and_release("6")
    assert on_disk(cache) == {"0", "4", "6"}
    assert cache.evicted == ["limit"]
    [evicted] = [each for each in caplog.records if each.message == "artifact.evicted"]
    assert (evicted.key, evicted.reason) == ("2", "limit")
    assert evicted.bytes > _MIB


async def test_what_is_in_use_never_leaves(models, open_cache):
    cache = await open_cache(models, limit_bytes=int(2.5 * _MIB), room_seconds=3600)
    first, _ = await cache.fetch("0")
    second, _ = await cache.fetch("2")
    async with asyncio.timeout(30):
        with pytest.raises(NoRoom, match=r"no room on disk.*cache_limit, 2\.5 MiB"):
            await cache.fetch("4")
    assert on_disk(cache) == {"0", "2"}
    assert len(files_of(first)["model.bin"]) == len(files_of(second)["model.bin"]) == _MIB
    assert cache.cache.used_bytes == first.size_bytes + second.size_bytes
    cache.cache.release(first)
    await cache.fetch("4")
    assert on_disk(cache) == {"2", "4"}


async def test_a_version_that_was_replaced_leaves_first(models, open_cache):
    cache = await open_cache(models, limit_bytes=int(3.5 * _MIB))
    await cache.fetch_and_release("2")
    await cache.fetch_and_release("0")
    (models / "0/model.bin").write_bytes(os.urandom(_MIB))
    await cache.fetch_and_release("0")
    await cache.fetch_and_release("4")
    assert await cache.fetch_and_release("2") is CacheUse.DISK


async def test_archive_counts_once_while_it_is_unpacked(models, open_cache):
    """It is unpacked as it comes, and never on disk itself."""
    cache = await open_cache(models, limit_bytes=int(0.9 * _MIB))
    with pytest.raises(
        NoRoom, match=r"it needs 1\.0 MiB or more in all, and cache_limit is 921\.6 KiB"
    ):
        await cache.fetch("1")
    assert cache.cache.used_bytes == 0
    cache = await open_cache(models, limit_bytes=int(1.1 * _MIB), at=models.parent / "other")
    await cache.fetch("1")
    assert _MIB < cache.cache.used_bytes < 1.1 * _MIB


async def test_large_archive_gets_room_in_steps(folder, open_cache):
    for number in range(8):
        (folder / f"small{number}").mkdir()
        (folder / f"small{number}/model.bin").write_bytes(bytes(5 * _MIB))
    # packs 100 to 1, so that its size says nothing of what it takes
    (folder / "large.tar.gz").write_bytes(archive({"model.bin": bytes(30 * _MIB)}))
    cache = await open_cache(folder, limit_bytes=56 * _MIB)
    for number in range(8):
        await cache.fetch_and_release(f"small{number}")
    await cache.fetch("large.tar.gz")
    assert on_disk(cache) == {"large.tar.gz", "small4", "small5", "small6", "small7"}
    assert cache.cache.used_bytes <= 56 * _MIB


async def test_zip_that_never_fits_evicts_nothing(folder, open_cache):
    """A zip says what its entries take before the first one is unpacked."""
    for number in range(3):
        (folder / f"small{number}").mkdir()
        (folder / f"small{number}/model.bin").write_bytes(bytes(5 * _MIB))
    large = folder / "large.zip"
    large.write_bytes(zipped({"model.bin": bytes(60 * _MIB)}))
    cache = await open_cache(folder, limit_bytes=20 * _MIB)
    for number in range(3):
        await cache.fetch_and_release(f"small{number}")
    first, second = FetchProgress(), FetchProgress()
    for progress in first, second:
        with pytest.raises(NoRoom) as refused:
            await cache.fetch(large.name, progress)
        said = str(refused.value)
        assert said.count("(") == 1, "one sentence, that names the place once"
        assert re.search(r"it needs 60\.\d MiB or more in all, and cache_limit is 20\.0 MiB", said)
    assert on_disk(cache) == {"small0", "small1", "small2"}
    assert (first.done_bytes, second.done_bytes) == (large.stat().st_size, 0)
    large.write_bytes(zipped({"model.bin": bytes(_MIB)}))
    await cache.fetch(large.name)


async def test_fetch_knows_how_long_it_waited(folder, open_cache):
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "model.bin").write_bytes(bytes(_MIB))
    cache = await open_cache(folder, concurrency=1)
    first, second = FetchProgress(), FetchProgress()
    await asyncio.gather(cache.fetch("a", first), cache.fetch("b", second))
    waited = sorted([first.waited_seconds, second.waited_seconds])
    assert waited[0] < waited[1]


async def test_nothing_is_evicted_in_vain(models, open_cache):
    class Pinned(IdleModels):
        can_unload_later = False

        def unevictable_bytes(self) -> int:
            return 2 * _MIB

    cache = await open_cache(models, limit_bytes=int(2.5 * _MIB))
    await cache.fetch_and_release("0")
    cache.models = Pinned()
    with pytest.raises(NoRoom, match=r"2\.0 MiB never leave, as their models are pinned"):
        await cache.fetch("2")
    assert on_disk(cache) == {"0"}


# -- the disk itself ----------------------------------------------------------------------


@pytest.fixture
def cache_folder(tmp_path: Path):
    folder = CacheFolder(tmp_path / "cache")
    folder.open()
    yield folder
    folder.close()


async def reserve(disk: Disk, what: str, size_bytes: int, inodes: int = 0) -> Reservation:
    """Reserve room for a fetch that goes on for as long as the test does."""
    reservation = Reservation(disk, what)
    disk._reservations.append(reservation)
    await reservation.write(size_bytes, inodes)
    return reservation


async def keep(folder: CacheFolder, disk: Disk, path: str, size_bytes: int) -> None:
    """Put an artifact there that says that it is so large, and that nobody uses."""
    work = folder.new_work()
    (work / "files").mkdir(parents=True)
    (work / "files" / path).write_bytes(b"x")
    note = Note("/store", path, "1", path, size_bytes, {path: 1})
    folder.publish(work, note)
    disk.unpin(disk.add(note, await reserve(disk, path, size_bytes)))


async def test_full_disk_is_as_full_cache(cache_folder):
    """One GiB is left to others."""
    free = RESERVE_BYTES + 10
    evicted = []

    def on_evicted(note, reason):
        nonlocal free
        free += note.size_bytes
        evicted.append((note.path, reason))

    cache_folder.free = lambda: Free(free, None)
    disk = Disk(cache_folder, 2**40, on_evicted)
    await keep(cache_folder, disk, "a", 5)
    await keep(cache_folder, disk, "b", 5)
    await reserve(disk, "new", 12)
    assert evicted == [("a", "disk")]
    with pytest.raises(NoRoom, match=r"has 1\.0 GiB free, and 1\.0 GiB are kept for others"):
        await reserve(disk, "more", 100)
    assert evicted == [("a", "disk")], "nothing leaves in vain"
    await reserve(disk, "some", 18)
    assert evicted == [("a", "disk"), ("b", "disk")]


@pytest.mark.parametrize(("needed", "who"), [(80, "c"), (82, "ac"), (84, "abc"), (99, "cd")])
@pytest.mark.parametrize("reason", ["limit", "disk"])
async def test_small_artifacts_stay_where_a_large_suffices(cache_folder, reason, needed, who):
    free, evicted = 2**40, []

    def on_evicted(note, why):
        nonlocal free
        free += note.size_bytes
        evicted.append(note.path)
        assert why == reason

    limit = 104 if reason == "limit" else 2**40
    cache_folder.free = lambda: Free(free, None)
    disk = Disk(cache_folder, limit, on_evicted)
    for path, size in {"a": 2, "b": 2, "c": 80, "d": 20}.items():
        await keep(cache_folder, disk, path, size)
    if reason == "disk":
        free = RESERVE_BYTES
    await reserve(disk, "new", needed)
    assert "".join(evicted) == who


async def test_lost_artifact_leaves_too(cache_folder):
    evicted = []
    disk = Disk(cache_folder, 104, lambda note, _: evicted.append(note.path))
    for path, size in {"a": 2, "b": 2, "c": 80, "d": 20}.items():
        await keep(cache_folder, disk, path, size)
    disk.find_current("/store", "b").is_lost = True
    await reserve(disk, "new", 80)
    assert evicted == ["b", "c"]


async def test_derived_limit_rises_with_disk_never_falls(cache_folder):
    left = iter([100, 200, 50])  # as others write to the disk, and delete
    cache_folder.free = lambda: Free(RESERVE_BYTES + next(left), None)
    disk = Disk(cache_folder, None)
    limits = []
    for _ in range(3):
        await disk.refresh()
        limits.append(disk.limit_bytes)
    assert limits == [90, 180, 180]


async def test_few_inodes_are_as_a_full_disk(cache_folder):
    free = RESERVE_INODES + 2
    evicted = []

    def on_evicted(note, reason):
        nonlocal free
        free += 5
        evicted.append((note.path, reason))

    cache_folder.free = lambda: Free(2**50, free)
    disk = Disk(cache_folder, 2**40, on_evicted)
    await keep(cache_folder, disk, "a", 5)
    await reserve(disk, "new", 10, inodes=7)
    assert evicted == [("a", "disk")]
    lack = r"in 8 files, 8 of them still, and .* 4103 inodes free, and 4096 are kept"
    with pytest.raises(NoRoom, match=lack):
        await reserve(disk, "more", 10, inodes=8)


class FewInodes:
    """A disk with room for 300 files and folders; `most`: how many there were at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.most = 0

    def free(self) -> Free:
        made = 0
        for _, folders, files in os.walk(self._root):  # passes over folders that leave meanwhile
            made += len(folders) + len(files)
        self.most = max(self.most, made)
        return Free(2**40, RESERVE_INODES + 300 - made)


@pytest.mark.parametrize("pack", [archive, zipped, None])
async def test_empty_files_count_as_inodes(folder, open_cache, pack):
    files = {f"1/{number}": b"" for number in range(400)}
    key = "m.zip" if pack is zipped else "m"
    if pack is not None:
        (folder / key).write_bytes(pack(files))
    else:
        (folder / "m/1").mkdir(parents=True)
        for name in files:
            (folder / "m" / name).touch()
    cache = await open_cache(folder)
    disk = FewInodes(cache.cache.root)
    cache.cache._folder.free = disk.free
    for progress in FetchProgress(), FetchProgress():
        with pytest.raises(NoRoom, match=r"cache_dir has .* inodes free, and 4096 are kept"):
            await cache.fetch(key, progress)
    assert disk.most <= 300
    assert progress.done_bytes == 0, "what it needs is known by then"
    assert (names(cache.cache.root / "work"), cache.cache.used_bytes) == ([], 0)
    cache.cache._folder.free = lambda: Free(2**40, None)
    artifact, _ = await cache.fetch(key)
    assert artifact.size_bytes == cache.cache.used_bytes > 400 * 4096


async def test_folders_at_once_stop_before_inodes_run_out(folder, open_cache):
    """Each has room for its own files as it begins: both together have none."""
    for key in "ab":
        (folder / key).mkdir()
        for number in range(200):
            (folder / key / str(number)).touch()
    cache = await open_cache(folder, concurrency=2)
    disk = FewInodes(cache.cache.root)
    cache.cache._folder.free = disk.free
    fetched = await asyncio.gather(cache.fetch("a"), cache.fetch("b"), return_exceptions=True)
    assert any(isinstance(each, NoRoom) for each in fetched)
    assert disk.most <= 300 + 2 * 8, "eight files of each fetch are made at once"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[Free]:
    """What the disk has free, to be replaced."""
    figures = [Free(2**40, None)]
    monkeypatch.setattr(CacheFolder, "free", lambda _: figures[0])
    return figures


@pytest.mark.parametrize(
    "lack",
    [
        (Free(700 * _MIB, None), "700.0 MiB free, and 1.0 GiB are kept for others"),
        (Free(2**40, RESERVE_INODES), "4096 inodes free, and 4096 are kept for others"),
    ],
)
async def test_full_disk_is_reported_until_it_has_room(models, open_cache, free, caplog, lack):
    free[:], told = [lack[0]], lack[1]
    cache = await open_cache(models, limit_bytes=None)
    await cache.cache.check()
    assert cache.cache.full_reason == f"the disk of cache_dir has {told}"
    [warned] = [each for each in caplog.records if each.message == "artifact.disk_full"]
    assert warned.reason == cache.cache.full_reason
    for key in "1", "2":
        progress = FetchProgress()
        with pytest.raises(NoRoom) as refused:
            await cache.fetch(key, progress)
        assert "it needs 1.0 MiB or more in" in str(refused.value)
        assert f"the disk of cache_dir has {told}" in str(refused.value)
        assert "set cache_dir to another disk; see docs/stores.md#the-disk" in str(refused.value)
        assert progress.done_bytes == 0
    free[:] = [Free(2**40, None)]
    await cache.cache.check()
    assert cache.cache.full_reason is None
    await cache.fetch("1")


async def test_free_is_the_lesser_of_limit_and_disk(models, open_cache, free):
    cache = await open_cache(models, limit_bytes=4 * _MIB)
    artifact, _ = await cache.fetch("0")
    size = artifact.size_bytes
    assert cache.cache.disk() == DiskUse(1, size, 0, 4 * _MIB - size, 4 * _MIB)
    await reserve(cache.cache._disk, "another", _MIB)
    assert cache.cache.disk() == DiskUse(1, size, _MIB, 3 * _MIB - size, 4 * _MIB)
    free[:] = [Free(RESERVE_BYTES + 10, None)]
    await cache.cache.check()
    assert cache.cache.disk().free_bytes == 10


async def test_foreign_files_evict_no_model_in_vain(models, open_cache, free):
    cache = await open_cache(models, limit_bytes=None)
    cache.models = IdleModels()
    await cache.fetch_and_release("0")
    await cache.fetch("2")
    free[:] = [Free(RESERVE_BYTES - 3 * _MIB, None)]
    with pytest.raises(
        NoRoom, match=r"needs 1\.0 MiB or more in all, and the disk of cache_dir has"
    ):
        await cache.fetch("4")
    assert (on_disk(cache), cache.models.unloads) == ({"0", "2"}, 0)


async def test_archive_outgrowing_the_disk_is_refused_next(folder, open_cache, free):
    # packs 100 to 1: what the store announces has room, what comes out has not
    (folder / "large.tar.gz").write_bytes(archive({"model.bin": bytes(60 * _MIB)}))
    for key in "ab":
        (folder / key).mkdir()
        (folder / key / "model.bin").write_bytes(bytes(5 * _MIB))

    cache = await open_cache(folder, limit_bytes=500 * _MIB)
    cache.models = IdleModels()
    await cache.fetch("a")
    await cache.fetch_and_release("b")

    def left() -> Free:
        files = [path for path in cache.cache.root.rglob("*") if path.is_file()]
        blocks = sum(path.stat().st_size // 4096 + 1 for path in files)
        return Free(RESERVE_BYTES + 13 * _MIB - blocks * 4096, None)

    cache.cache._folder.free = left
    for progress in FetchProgress(), FetchProgress():
        with pytest.raises(
            NoRoom, match=r"are kept for others.*; of the cache 5\.0 MiB are of models in use"
        ):
            await cache.fetch("large.tar.gz", progress)
    assert on_disk(cache) == {"a"}
    assert progress.done_bytes == 0, "what it needs is known by then"
    assert cache.cache.used_bytes == sum(note["size_bytes"] for note in notes_of(cache))
    assert not names(cache.cache.root / "work")


async def test_lying_disk_is_not_retried_at_once(models, open_cache, monkeypatch):
    """It takes no more, though it says that it has room."""

    def full(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    cache = await open_cache(models)
    monkeypatch.setattr(fetch, "_write_all", full)
    with pytest.raises(NoRoom, match=r"1\.0 MiB or more in all.* cache_dir: Disk quota exceeded"):
        await cache.fetch("2")
    monkeypatch.undo()
    with pytest.raises(NoRoom, match="Disk quota exceeded"):
        await cache.fetch("2")
    await cache.fetch("4")


async def test_request_for_room_waits_for_departures(cache_folder):
    disk = Disk(cache_folder, 10)
    await keep(cache_folder, disk, "a", 10)
    has_begun, may_end = threading.Event(), threading.Event()
    remove = cache_folder.remove

    def remove_slowly(id_):
        has_begun.set()
        assert may_end.wait(60)
        remove(id_)

    cache_folder.remove = remove_slowly
    tasks = [asyncio.create_task(reserve(disk, "first", 5))]
    assert await asyncio.to_thread(has_begun.wait, 60)
    tasks.append(asyncio.create_task(reserve(disk, "second", 5)))
    await asyncio.sleep(0)
    may_end.set()
    first, second = await asyncio.gather(*tasks)
    assert (first.size_bytes, second.size_bytes, disk.used_bytes) == (5, 5, 10)
