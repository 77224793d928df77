"""Processes that use the cache and are killed, and what they leave."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from adapter.errors import InvalidSettings
from adapter.store.cache_folder import CacheFolder
from tests.store.conftest import archive, names


def fill(folder: Path, count: int, size: int) -> dict[str, bytes]:
    """Write packages, as folders and archives in turn; return each one's model.bin by key."""
    contents = {}
    for number in range(count):
        name, content = str(number), os.urandom(size)
        contents[name] = content
        if number % 2:
            (folder / name).write_bytes(archive({"1/model.py": b"x", "model.bin": content}))
        else:
            (folder / name).mkdir()
            (folder / name / "model.bin").write_bytes(content)
    return contents


# a process that fetches what does not fit all together, again and again
_USER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from adapter.core.artifacts import ArtifactKey, FetchProgress
    from adapter.settings.locations import parse_location
    from adapter.errors import NoRoom
    from adapter.packages.unpack import Limits
    from adapter.store.cache import ArtifactCache
    from adapter.store.cache_folder import CacheFolder
    from adapter.store.stores import open_store

    async def use(cache, number):
        while True:
            for key in "0123456789":
                try:
                    artifact, _ = await cache.fetch(ArtifactKey("", key), FetchProgress())
                except NoRoom:
                    continue
                print(key, flush=True)
                cache.release(artifact)

    async def main(store, folder):
        store = open_store("model_store", parse_location(store), 5)
        cache = ArtifactCache({"": store}, CacheFolder(Path(folder)), limit_bytes=26 * 2**20,
                              concurrency=3, limits=Limits())
        await cache.open()
        await asyncio.gather(*(use(cache, number) for number in range(3)))

    asyncio.run(main(*sys.argv[1:]))
    """
)


def killed_user(store: Path, folder: Path, seconds: float) -> None:
    """Let a process use the cache, and kill it so long after its first fetch."""
    command = [sys.executable, "-c", _USER, str(store), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it has fetched"
            with pytest.raises(InvalidSettings, match=f"process {process.pid}"):
                CacheFolder(folder, lock_seconds=0).open()
            time.sleep(seconds)  # any moment will do
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)


def whole(folder: Path, contents: dict[str, bytes]) -> int:
    """Take the cache over, see that all in it is whole, and that nothing else is there. Returns how
    many artifacts there are.
    """
    # what was killed amid a fork holds the lock until the fork has had its turn
    cache = CacheFolder(folder, lock_seconds=60)
    found = cache.open()
    try:
        for each in found:
            package = Path(cache.place(each.note))
            assert (package / "model.bin").read_bytes() == contents[each.note.path]
        assert sorted(each.note.id for each in found) == names(folder / "artifacts")
        assert not names(folder / "work")
    finally:
        cache.close()
    return len(found)
