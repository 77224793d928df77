"""Fetches that lack room on disk wait for each other, and none waits for ever."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.errors import NoRoom
from adapter.store.cache_folder import Cached, CacheFolder, Note
from adapter.store.disk import BeginsAgain, Disk
from tests.store.conftest import IdleModels, TryCache, archive, names

_KIB = 2**10
_LIMIT = 600 * _KIB
_GIVES_WAY_SECONDS = 10
_numbers = itertools.count()


def put(folder: Path, key: str, size_bytes: int, *, packed: bool) -> None:
    """A package; an archive of it is as large."""
    content = os.urandom(size_bytes)
    if packed:
        (folder / key).write_bytes(archive({"model.bin": content}))
    else:
        (folder / key).mkdir()
        (folder / key / "model.bin").write_bytes(content)


def is_empty(cache: TryCache) -> bool:
    """Whether nothing is reserved, and nothing is left of what was not fetched whole."""
    taken = sum(kept.note.size_bytes for kept in cache.cache._disk._cached.values())
    return cache.cache.used_bytes == taken and not names(cache.cache.root / "work")


async def wait_until_empty(cache: TryCache) -> None:
    """Wait until the cache is empty; what is being evicted counts until it is deleted."""
    for _ in range(1000):
        if is_empty(cache):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something is left in the cache")


async def test_later_of_two_crowded_fetches_begins_again(tmp_path):
    """First in this file: without it, the others here wait for each other until they time out."""
    disk = open_disk(tmp_path)
    with disk.reservation("the first") as first, disk.reservation("the second") as second:
        for each in (first, second):
            await each.reserve(_LIMIT // 2)
        reserved = asyncio.ensure_future(first.reserve(_LIMIT // 2 + _KIB))
        for _ in range(500):  # until it has fallen short
            if first.waited_seconds or reserved.done():
                break
            await asyncio.sleep(0.01)
        async with asyncio.timeout(_GIVES_WAY_SECONDS):
            with pytest.raises(BeginsAgain):
                await second.reserve(_LIMIT // 2 + _KIB)
        second.release()
        await reserved


async def test_fetch_that_waited_long_for_room_is_refused(tmp_path):
    disk = open_disk(tmp_path, room_seconds=0.1)
    with disk.reservation("the first") as first, disk.reservation("the second") as second:
        await first.reserve(_LIMIT)
        async with asyncio.timeout(_GIVES_WAY_SECONDS):
            with pytest.raises(NoRoom):
                await second.reserve(_KIB)


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 280), st.booleans()), min_size=2, max_size=8),
    concurrency=st.integers(2, 8),
    seed=st.integers(0, 2**32),
)
async def test_fetches_that_fit_singly_all_succeed(folder, open_cache, sizes, concurrency, seed):
    random, mark = Random(seed), next(_numbers)
    keys = [f"{mark}-{number}" for number in range(len(sizes))]
    for key, (kibs, packed) in zip(keys, sizes, strict=True):
        put(folder, key, kibs * _KIB, packed=packed)
    at = folder.parent / f"cache{mark}"
    cache = await open_cache(
        folder, limit_bytes=_LIMIT, concurrency=concurrency, room_seconds=3600, at=at
    )
    cache.models = IdleModels()

    async def use(key: str) -> None:
        for _ in range(random.choice([0, 1, 10])):
            await asyncio.sleep(0)
        artifact, _ = await cache.fetch(key)
        assert cache.cache.used_bytes <= _LIMIT
        for _ in range(random.choice([0, 1, 10])):
            await asyncio.sleep(0)
        cache.cache.release(artifact)

    await asyncio.gather(*map(use, keys))
    await wait_until_empty(cache)


@pytest.mark.parametrize("packed", [True, False])
async def test_as_many_fetches_succeed_as_fit(folder, open_cache, packed):
    for number in range(6):
        put(folder, str(number), 280 * _KIB, packed=packed)
    cache = await open_cache(folder, limit_bytes=_LIMIT, concurrency=6, room_seconds=3600)
    fetches = (cache.fetch(str(number)) for number in range(6))
    found = await asyncio.gather(*fetches, return_exceptions=True)
    refused = [each for each in found if isinstance(each, NoRoom)]
    assert len(found) - len(refused) == 2
    await wait_until_empty(cache)


_NOTE = Note("", "first", "1", "", _LIMIT, {})


def open_disk(folder: Path, room_seconds: float = 3600) -> Disk:
    cache_folder = CacheFolder(folder)
    cache_folder.open()
    return Disk(cache_folder, _LIMIT, room_seconds=room_seconds)


async def test_room_freed_while_asking_is_taken(tmp_path):
    """The models unload nothing; meanwhile another caller has released an artifact."""
    disk = open_disk(tmp_path)
    with disk.reservation("the first") as first:
        await first.reserve(_LIMIT)
        artifact = disk.add(_NOTE, first)

    class Releasing(IdleModels):
        can_unload_later = False

        async def unload_one(self, missing_bytes: int) -> bool:
            disk.unpin(artifact)
            return False

    with disk.reservation("the second", Releasing()) as second:
        await second.reserve(_LIMIT)
    assert not len(disk)


@pytest.fixture
async def waiting(
    tmp_path: Path,
) -> AsyncIterator[tuple[Disk, Callable[[], Cached], asyncio.Future[None]]]:
    """A fetch that waits for another one, and what ends that one by making its artifact."""
    disk = open_disk(tmp_path)
    with disk.reservation("the second") as second, ExitStack() as stack:
        first = stack.enter_context(disk.reservation("the first"))
        await first.reserve(_LIMIT)
        reserved = asyncio.ensure_future(second.reserve(_LIMIT))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reserved), 0.1)

        def hand_over() -> Cached:
            artifact = disk.add(_NOTE, first)
            stack.close()
            return artifact

        yield disk, hand_over, reserved


async def test_released_model_makes_room_for_waiting_fetch(waiting):
    disk, hand_over, reserved = waiting
    disk.unpin(hand_over())
    await reserved
    assert not len(disk)


async def test_artifacts_in_use_refuse_waiting_fetches(waiting):
    disk, hand_over, reserved = waiting
    hand_over()
    with pytest.raises(NoRoom):
        await reserved
    assert disk.used_bytes == _LIMIT
