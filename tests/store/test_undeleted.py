"""Files of the cache that cannot be deleted for a while."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from adapter.core.artifacts import CacheUse
from adapter.errors import NoRoom
from tests.store.conftest import TryCache, archive

_MIB = 2**20
_LIMIT = 5 * _MIB


@pytest.fixture
def store(folder: Path) -> Path:
    for name in "abcd":
        (folder / f"{name}.tar.gz").write_bytes(archive({"stuck": name.encode() * 2 * _MIB}))
    return folder


@pytest.fixture
def block_deletion(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make files named `stuck` undeletable, as an immutable flag or a bad disk does."""
    delete = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(path) == "stuck":  # noqa: PTH119 - as os has it
            raise PermissionError(1, "Operation not permitted")
        delete(path, dir_fd=dir_fd)

    def block_deletion() -> None:
        monkeypatch.setattr(os, "unlink", refuse)

    return block_deletion


def measure(cache: TryCache) -> int:
    """Return the bytes of all files that the cache has on disk."""
    return sum(path.stat().st_size for path in cache.cache.root.rglob("stuck"))


def check_counts(cache: TryCache) -> None:
    """Compare what the cache counts with the disk; folders and rounding take some more."""
    undeleted_bytes = cache.cache.disk().undeleted_bytes
    assert 0 < measure(cache) <= undeleted_bytes <= cache.cache.used_bytes
    assert undeleted_bytes - measure(cache) < 2**17


async def test_undeleted_files_count_until_they_are_deleted(
    store, open_cache, block_deletion, monkeypatch, caplog
):
    cache = await open_cache(store, limit_bytes=_LIMIT, room_seconds=0.1)
    await cache.fetch_and_release("a.tar.gz")
    await cache.fetch_and_release("b.tar.gz")
    block_deletion()
    for name in ("c.tar.gz", "d.tar.gz"):
        with pytest.raises(NoRoom, match="cannot be deleted") as refused:
            await cache.fetch(name)
    assert "cache_limit, 5.0 MiB" in str(refused.value)
    check_counts(cache)
    logged = [each for each in caplog.records if each.message == "artifact.not_deleted"]
    assert {each.reason for each in logged} == {"Operation not permitted"}
    monkeypatch.undo()
    await cache.cache.check()
    assert cache.cache.disk().undeleted_bytes == cache.cache.used_bytes == measure(cache) == 0
    assert await cache.fetch_and_release("c.tar.gz") is CacheUse.MISS


async def test_cache_opens_beside_undeletable_files(store, open_cache, block_deletion):
    cache = await open_cache(store, limit_bytes=_LIMIT, room_seconds=0.1)
    for name in ("a.tar.gz", "b.tar.gz"):
        await cache.fetch_and_release(name)
    block_deletion()
    with pytest.raises(NoRoom):
        await cache.fetch("c.tar.gz")
    await cache.cache.close()
    again = await open_cache(store, limit_bytes=_MIB)
    check_counts(again)
    with pytest.raises(NoRoom, match="cannot be deleted"):
        await again.fetch("a.tar.gz")
