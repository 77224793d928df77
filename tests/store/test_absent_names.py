"""Names that a store lacks, of which callers may send any number."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapter.core.artifacts import ArtifactKey
from adapter.errors import ArtifactNotFound
from tests.store.conftest import TryCache

_MANY = 300


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def refuse_many(cache: TryCache, prefix: str) -> None:
    for number in range(_MANY):
        key = ArtifactKey("", f"{prefix}{number}")
        assert await cache.cache.find(key) is None
        with pytest.raises(ArtifactNotFound):
            await cache.cache.fetch(key, None)


async def test_absent_names_are_never_interned(folder: Path, open_cache, monkeypatch):
    """Python 3.12 keeps interned strings for ever, and pathlib interns each part of a path."""
    cache = await open_cache(folder)
    interned: list[str] = []
    intern = sys.intern

    def record(text: str) -> str:
        interned.append(text)
        return intern(text)

    monkeypatch.setattr(sys, "intern", record)
    await refuse_many(cache, "absent")
    assert not [text for text in interned if text.startswith("absent")]


async def test_refusal_leaves_no_garbage_cycle(folder: Path, open_cache):
    """Garbage that only a collection frees stays for as long as there is much of it."""
    cache = await open_cache(folder)
    await refuse_many(cache, "first")
    with without_collections():
        await refuse_many(cache, "absent")
        assert gc.collect() < _MANY
