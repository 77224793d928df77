"""Fetches that are cancelled, or that end amid the work of their threads."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter.core.artifacts import CacheUse
from adapter.store import fetch
from adapter.store.cache_folder import CacheFolder, Note
from adapter.store.disk import Disk
from adapter.store.fetch import RoomOfProcess
from adapter.store.folder import FolderStore
from tests.store.conftest import archive, names

_LIMIT = 2**20


async def test_fetch_cancelled_while_published_leaves_nothing(
    folder: Path, open_cache: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact is in its place by then, and nobody knows of it."""
    (folder / "m.tar.gz").write_bytes(archive({"1/model.bin": b"x"}))
    cache = await open_cache(folder)
    is_published = threading.Event()
    may_end = threading.Event()
    publish = CacheFolder.publish

    def publish_slowly(self: CacheFolder, work: Path, note: Note) -> None:
        publish(self, work, note)
        is_published.set()
        assert may_end.wait(60)

    monkeypatch.setattr(CacheFolder, "publish", publish_slowly)
    fetching = asyncio.create_task(cache.fetch("m.tar.gz"))
    assert await asyncio.to_thread(is_published.wait, 60)
    fetching.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    monkeypatch.undo()
    assert names(cache.cache.root / "artifacts") == names(cache.cache.root / "work") == []
    assert cache.cache.used_bytes == 0
    assert await cache.fetch_and_release("m.tar.gz") is CacheUse.MISS


@pytest.mark.parametrize(
    ("holder", "name"), [(fetch, "_open_new"), (FolderStore, "_open_file")], ids=["cache", "store"]
)
async def test_fetch_cancelled_as_files_open_closes_them(
    folder: Path,
    open_cache: Callable,
    monkeypatch: pytest.MonkeyPatch,
    holder: object,
    name: str,
) -> None:
    (folder / "m").write_bytes(b"x")
    cache = await open_cache(folder)
    await cache.fetch_and_release("m")
    before = count_descriptors()
    (folder / "m").write_bytes(b"xx")
    is_open = threading.Event()
    may_end = threading.Event()
    open_file = getattr(holder, name)

    def open_slowly(*args: object) -> int:
        descriptor: int = open_file(*args)
        is_open.set()
        assert may_end.wait(60)
        return descriptor

    monkeypatch.setattr(holder, name, open_slowly)
    fetching = asyncio.create_task(cache.fetch("m"))
    assert await asyncio.to_thread(is_open.wait, 60)
    fetching.cancel()
    for _ in range(20):  # until the cancellation has come to whoever opens
        await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    async with asyncio.timeout(60):
        while count_descriptors() > before:  # noqa: ASYNC110 - nobody reports it
            await asyncio.sleep(0.01)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    folder = CacheFolder(tmp_path)
    folder.open()
    return Disk(folder, _LIMIT, room_seconds=3600)


async def test_process_gets_no_room_once_its_fetch_ended(disk: Disk) -> None:
    with disk.reservation("a fetch") as reservation:
        room = RoomOfProcess(reservation)
        room.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.to_thread(room.reserve, 1, 0)
        assert (reservation.size_bytes, disk.used_bytes) == (0, 0)


async def test_process_waits_for_room_until_its_fetch_ends(disk: Disk) -> None:
    with disk.reservation("the first") as first, disk.reservation("the second") as second:
        await first.reserve(_LIMIT)
        room = RoomOfProcess(second)
        taking = asyncio.create_task(asyncio.to_thread(room.reserve, 1, 0))
        async with asyncio.timeout(60):
            while not second.waited_seconds:  # noqa: ASYNC110 - nobody reports it
                await asyncio.sleep(0.01)
        room.close()
        with pytest.raises(asyncio.CancelledError):
            await taking
