"""Listings of the packages of a store: a folder, a bucket, a long listing, and stores that fail."""

import os
import tempfile
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from adapter.core.artifacts import ArtifactKey, PackagePage
from adapter.errors import StoreUnavailable
from adapter.packages.unpack import Limits
from adapter.settings.locations import StoreLocation, parse_location
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.ports import LISTED_AT_ONCE, StoredFile
from tests.buckets import Bucket
from tests.store.conftest import TryCache, archive
from tests.store.web import Page

PACKED = archive({"config.pbtxt": b"", "1/model.py": b"x"})
MODELS = 33_334  # three keys each
MAX_PAGE_BYTES = 2**20


def put(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"12345")


async def names_of(list_page: Callable[[str], Awaitable[PackagePage]]) -> list[str]:
    """Return the names of all pages, one after the other."""
    names: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await list_page(after)
        names += [each.key.path for each in page.packages]
        assert page.after is None or page.after > after
        after = page.after
    return names


async def test_odd_time_does_not_end_listing(open_cache):
    """Use tmpfs: not every file system keeps such a time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        put(Path(folder), "a.onnx")
        os.utime(f"{folder}/a.onnx", (3e11, 3e11))
        listing = (await open_cache(folder)).cache.packages
        page = await listing.list_page("", "", "", 10)
        [package] = page.packages
        assert datetime.fromtimestamp(package.modified, UTC).year == 1970
        assert await listing.describe(package.key) == package


KEYS = (
    "README.md",
    "digits/1/model.onnx",
    "digits/config.pbtxt",
    "digits-b/config.pbtxt",
    "fraud.onnx",
    "nested/team a/é.tar.gz",
    "python/model.py",
    "python/weights/1/x.bin",
    "team/digits/2/model.plan",
    "team/readme.txt",
)
PACKAGES = [
    "digits-b",
    "digits",
    "fraud.onnx",
    "nested/team a/é.tar.gz",
    "python",
    "team/digits",
]


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_folder_lists_packages_page_by_page(open_cache, folder, limit) -> None:
    put(folder, *KEYS)
    packages = (await open_cache(folder)).cache.packages

    assert await names_of(lambda after: packages.list_page("", "", after, limit)) == PACKAGES


@pytest.mark.parametrize("limit", [1, 100])
async def test_bucket_lists_packages_page_by_page(open_cache, bucket: Bucket, limit) -> None:
    bucket.put({f"models/{key}": b"12345" for key in KEYS})
    packages = (await open_cache(f"s3://{bucket.name}/models")).cache.packages

    assert await names_of(lambda after: packages.list_page("", "", after, limit)) == PACKAGES


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("DIGITS", ["digits-b", "digits", "team/digits"]),
        ("digits*", ["digits-b", "digits"]),
        ("*digits", ["digits", "team/digits"]),
        ("fraud.onnx*", ["fraud.onnx"]),
        ("[ft]*", ["fraud.onnx", "team/digits"]),
        ("nobody", []),
        ("zz*", []),
    ],
)
async def test_filter_selects_packages_by_name(open_cache, folder, pattern, expected) -> None:
    put(folder, *KEYS)
    packages = (await open_cache(folder)).cache.packages

    assert await names_of(lambda after: packages.list_page("", pattern, after, 1)) == expected


async def test_release_of_idle_package_is_no_use(open_cache, folder) -> None:
    """The list says when a model was last called, and the disk keeps what was called later."""
    (folder / "a.tar.gz").write_bytes(PACKED)
    opened: TryCache = await open_cache(folder)
    artifact, _ = await opened.fetch("a.tar.gz")
    packages = opened.cache.packages

    async def read_last_use() -> float:
        package = await packages.describe(ArtifactKey("", "a.tar.gz"))
        assert package is not None
        assert package.on_disk is not None
        return package.on_disk.last_used

    fetched_at = await read_last_use()
    opened.cache.release(artifact, idle_seconds=3600)
    assert await read_last_use() == fetched_at

    artifact, _ = await opened.fetch("a.tar.gz")
    opened.cache.release(artifact)
    assert await read_last_use() > fetched_at


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_package_in_use_is_listed_after_its_deletion(open_cache, folder, limit) -> None:
    """A loaded model stays loaded, and whoever lists the models must find it."""
    names = ["a.tar.gz", "b.tar.gz", "c.tar.gz", "d.tar.gz"]
    for name in names:
        (folder / name).write_bytes(PACKED)
    opened: TryCache = await open_cache(folder)
    await opened.fetch("b.tar.gz")
    released, _ = await opened.fetch("d.tar.gz")
    opened.cache.release(released)
    for name in ("b.tar.gz", "d.tar.gz"):
        (folder / name).unlink()
    packages = opened.cache.packages

    assert await names_of(lambda after: packages.list_page("", "", after, limit)) == [
        "a.tar.gz",
        "b.tar.gz",
        "c.tar.gz",
    ]
    shown = await packages.describe(ArtifactKey("", "b.tar.gz"))
    page = await packages.list_page("", "b.*", "", limit)
    for gone in (shown, *page.packages):
        assert gone is not None
        assert gone.on_disk is not None
        assert not gone.on_disk.is_current
    assert (await packages.list_page("", "nothing", "", limit)).packages == []


async def test_folder_that_was_called_is_one_package(open_cache, folder) -> None:
    """A package may hold several models, which look like packages of their own until then."""
    put(folder, "shop/a/config.pbtxt", "shop/a/1/model.py", "shop/b/config.pbtxt")
    opened: TryCache = await open_cache(folder)
    packages = opened.cache.packages
    assert await names_of(lambda after: packages.list_page("", "", after, 10)) == [
        "shop/a",
        "shop/b",
    ]

    await opened.fetch("shop")

    assert await names_of(lambda after: packages.list_page("", "", after, 1)) == ["shop"]


async def test_links_that_lead_back_are_followed_once(open_cache, folder) -> None:
    put(folder, "a/config.pbtxt", "b/config.pbtxt")
    (folder / "a" / "up").symlink_to(folder)
    (folder / "outside").symlink_to("/")
    (folder / "gone").symlink_to(folder / "nothing")
    packages = (await open_cache(folder)).cache.packages

    assert await names_of(lambda after: packages.list_page("", "", after, 1)) == ["a", "b"]


async def test_web_server_lists_what_is_on_disk(open_cache, website) -> None:
    website.pages["/a.tar.gz"] = Page(PACKED)
    website.pages["/b.tar.gz"] = Page(PACKED)
    opened: TryCache = await open_cache(website.url)
    await opened.fetch("b.tar.gz")

    page = await opened.cache.packages.list_page("", "", "", 10)

    assert [each.key.path for each in page.packages] == ["b.tar.gz"]
    assert page.note is not None
    assert "cannot list" in page.note


# -- a long listing -----------------------------------------------------------------------------


class LongStore:
    """Lists 100,000 keys, of three for each model, and counts the parts that were read."""

    def __init__(self) -> None:
        self.location: StoreLocation = parse_location("s3://many/models")
        self.parts = 0
        self.error: Exception | None = None
        self._keys = [
            f"m{number:05}/{name}"
            for number in range(MODELS)
            for name in ("1/labels.txt", "1/model.onnx", "config.pbtxt")
        ]

    async def check(self) -> None:
        pass

    async def list_after(self, path: str) -> AsyncGenerator[Sequence[StoredFile], None]:
        start = next((at for at, key in enumerate(self._keys) if key > path), len(self._keys))
        for at in range(start, len(self._keys), LISTED_AT_ONCE):
            self.parts += 1
            if self.error is not None:
                raise self.error
            keys = self._keys[at : at + LISTED_AT_ONCE]
            yield [StoredFile(key, 7, "e", 1.0) for key in keys]


@pytest.fixture
def store() -> LongStore:
    return LongStore()


@pytest.fixture
def cache(store: LongStore, tmp_path: Path) -> ArtifactCache:
    folder = CacheFolder(tmp_path / "cache")
    limits = Limits()
    return ArtifactCache({"": store}, folder, limit_bytes=1, concurrency=1, limits=limits)


async def test_page_reads_one_part_of_many(cache: ArtifactCache, store: LongStore) -> None:
    tracemalloc.start()
    page = await cache.packages.list_page("", "", "", 100)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < MAX_PAGE_BYTES
    assert [each.key.path for each in page.packages] == [f"m{n:05}" for n in range(100)]
    assert {each.size_bytes for each in page.packages} == {21}
    assert store.parts == 1

    page = await cache.packages.list_page("", "", page.after or "", 100)

    assert page.packages[0].key.path == "m00100"
    assert store.parts == 2


async def test_glob_with_a_prefix_reads_one_part(cache: ArtifactCache, store: LongStore) -> None:
    page = await cache.packages.list_page("", "m3333*", "", 100)

    assert [each.key.path for each in page.packages] == ["m33330", "m33331", "m33332", "m33333"]
    assert (page.after, store.parts) == (None, 1)


async def test_filter_without_match_ends_a_page_early(
    cache: ArtifactCache, store: LongStore
) -> None:
    page = await cache.packages.list_page("", "nobody", "", 100)

    assert (list(page.packages), store.parts) == ([], 20)
    assert page.after is not None


async def test_pages_of_many_keys_have_each_package_once(cache: ArtifactCache) -> None:
    names = await names_of(lambda after: cache.packages.list_page("", "", after, 5000))

    assert names == [f"m{number:05}" for number in range(MODELS)]


async def test_failed_listing_has_its_reason(cache: ArtifactCache, store: LongStore) -> None:
    store.error = StoreUnavailable("connection refused")

    page = await cache.packages.list_page("", "", "", 100)

    assert (list(page.packages), page.note) == ([], "connection refused")
