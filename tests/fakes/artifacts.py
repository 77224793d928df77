"""Stores and a disk cache without either: `versions` is what the stores have."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection

from adapter.core.artifacts import (
    Artifact,
    ArtifactKey,
    CacheUse,
    DiskUse,
    FetchProgress,
)
from adapter.errors import ArtifactNotFound
from adapter.runtime import clock
from adapter.store.ports import DiskEvictor
from tests.fakes.steps import Steps

_SUFFIXES = ("", ".tar.gz", ".tgz", ".tar", ".zip")


class FakeArtifacts:
    """`versions[path]` is the etag of what the store has, `on_disk[path]` that of what the cache
    has. `pins` counts the fetches of each folder that were not released. `asked` are the keys that
    the store was asked for, in order.
    """

    def __init__(self, steps: Steps) -> None:
        self.versions: dict[str, str] = {}
        self.on_disk: dict[str, str] = {}
        self.pins: Counter[str] = Counter()
        self.asked: list[str] = []
        self.limit_bytes = 1000
        self.waits_for_others = False  # until the step "fetch" is taken
        self._turns = defaultdict[ArtifactKey, asyncio.Lock](asyncio.Lock)
        self._steps = steps

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        *,
        models: DiskEvictor | None = None,
        callers: Collection[str] = (),
    ) -> tuple[Artifact, CacheUse]:
        async with self._turns[key]:
            self.unloads = models is not None
            return await self._fetch(key, progress)

    async def _fetch(self, key: ArtifactKey, progress: FetchProgress) -> tuple[Artifact, CacheUse]:
        self.asked.append(str(key))
        asked = clock.monotonic()
        await self._steps.take("fetch", str(key))
        if self.waits_for_others:
            progress.waited_seconds = clock.monotonic() - asked
        if str(key) not in self.versions:
            raise ArtifactNotFound(f"the store has no {key}")
        etag = self.versions[str(key)]
        progress.done_bytes = progress.total_bytes = 10
        use = CacheUse.DISK if self.on_disk.get(str(key)) == etag else CacheUse.MISS
        self.on_disk[str(key)] = etag
        folder = f"/{key}" if etag == "1" else f"/{key}@{etag}"
        self.pins[folder] += 1
        return Artifact(key, folder, etag, 10), use

    def release(self, artifact: Artifact) -> None:
        assert self.pins[artifact.folder] > 0, "released twice"
        self.pins[artifact.folder] -= 1

    def disk(self) -> DiskUse:
        size = 10 * len(self.on_disk)
        limit = self.limit_bytes
        return DiskUse(len(self.on_disk), size, 0, limit - size, limit)

    def unused(self) -> tuple[int, int]:
        held = {folder.strip("/") for folder in +self.pins}
        found = [key for key, tag in self.on_disk.items() if not {key, f"{key}@{tag}"} & held]
        return len(found), 10 * len(found)

    async def is_current(self, artifact: Artifact) -> bool:
        await self._steps.take("is_current", str(artifact.key))
        return self.versions.get(str(artifact.key)) == artifact.etag

    async def find(self, key: ArtifactKey) -> ArtifactKey | None:
        await self._steps.take("find", str(key))
        for suffix in _SUFFIXES:
            found = ArtifactKey(key.store, key.path + suffix)
            if str(found) in self.versions:
                return found
        return None
