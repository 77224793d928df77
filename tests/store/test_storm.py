"""A store that cuts, lies and falls silent, and kills at any moment, for minutes."""

import asyncio
import itertools
import os
import random
import time

import pytest

from adapter.errors import NoRoom, StoreUnavailable
from tests.store.conftest import TryCache, archive, files_of, names
from tests.store.killed import fill, killed_user, whole
from tests.store.web import (
    Page,
    Serve,
    WebServer,
    cut_after,
    says_more,
    silence,
    status,
    well,
    whole_instead_of_a_part,
)

SECONDS = float(os.environ.get("NIGHTLY_SECONDS", "60"))
SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(SECONDS + 300)]

_MIB = 2**20
_LIMIT = 20 * _MIB


def test_kills_at_random_moments_leave_whole_artifacts(folder, tmp_path):
    contents = fill(folder, 10, 5 * _MIB)
    moments, kills, taken_over = random.Random(SEED), 0, 0
    end = time.monotonic() + SECONDS / 2
    while time.monotonic() < end or not kills:
        killed_user(folder, tmp_path / "cache", moments.uniform(0, 0.6))
        taken_over += whole(tmp_path / "cache", contents)
        kills += 1
    assert taken_over >= kills, f"{kills} kills, {taken_over} artifacts taken over"


class Storm(list[Serve]):
    """The script of a server that does something else at each request, and never ends."""

    def __init__(self, website: WebServer) -> None:
        super().__init__()
        self.chance = random.Random(SEED)
        self.versions: dict[str, dict[str, bytes]] = {}
        self._website = website
        self._numbers = itertools.count()

    def publish(self, path: str) -> None:
        """Put another version there."""
        etag = f'"{next(self._numbers)}"'
        content = self.chance.randbytes(self.chance.randrange(1, 3 * _MIB))
        self.versions[etag] = {"model.bin": content}
        self._website.pages[path] = Page(archive(self.versions[etag]), etag)

    def __bool__(self) -> bool:
        return True

    def pop(self, _: object = -1) -> Serve:
        async def change(answer):
            self.publish(answer.request.path)
            return await cut_after(self.chance.randrange(_MIB))(answer)

        odd = [change, silence, whole_instead_of_a_part, says_more(10)]
        odd.append(status(self.chance.choice([500, 503, 429])))
        odd.append(cut_after(self.chance.randrange(2 * _MIB)))
        return self.chance.choice([well, well, well, *odd])


async def fetched(cache: TryCache, storm: Storm, path: str) -> bool:
    """Whether a version came, which must be one that there was, and have its content."""
    try:
        artifact, _ = await cache.fetch(path)
    except (StoreUnavailable, NoRoom):
        return False
    assert files_of(artifact) == storm.versions[artifact.etag]
    assert cache.cache.used_bytes <= _LIMIT
    cache.cache.release(artifact)
    return True


async def test_what_comes_from_a_bad_store_is_always_a_version_that_it_had(website, open_cache):
    website.script = storm = Storm(website)
    paths = [f"{number}.tar.gz" for number in range(12)]
    for path in paths:
        storm.publish(f"/{path}")
    cache = await open_cache(website.url, limit_bytes=_LIMIT, timeout_seconds=0.5)
    end, outcomes = time.monotonic() + SECONDS / 2, list[bool]()

    async def use() -> None:
        while time.monotonic() < end:
            outcomes.append(await fetched(cache, storm, storm.chance.choice(paths)))

    await asyncio.gather(*(use() for _ in range(6)))
    assert outcomes.count(True) > len(outcomes) / 2
    assert len(names(cache.cache.root / "artifacts")) == cache.cache.disk().artifacts
    assert not names(cache.cache.root / "work")
