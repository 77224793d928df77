"""A bucket on moto's server as a store."""

from pathlib import Path

import pytest

from adapter.core.artifacts import ArtifactKey, CacheUse, FetchProgress
from adapter.errors import ArtifactNotFound, InvalidModel, StoreUnavailable
from tests.buckets import KEYS_A_PAGE
from tests.store.conftest import archive, files_of, names

_FILES = {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}


async def test_an_archive_is_fetched_from_below_the_prefix(bucket, open_cache):
    bucket.put({"models/team/a.tar.gz": archive(_FILES), "a.tar.gz": archive({"other": b""})})
    cache = await open_cache(f"s3://{bucket.name}/models/")
    artifact, use = await cache.fetch("team/a.tar.gz")
    assert (files_of(artifact), use) == (_FILES, CacheUse.MISS)
    assert await cache.cache.is_current(artifact)
    assert await cache.fetch("team/a.tar.gz") == (artifact, CacheUse.DISK)


async def test_prefix_is_a_package_without_folder_objects(bucket, open_cache):
    bucket.put({f"m/{name}": content for name, content in _FILES.items()})
    for marker in ("m/", "m/1/", "m/2/"):
        bucket.put_marker(marker)
    bucket.put({"mm/x": b"", "m.txt": b""})
    artifact, _ = await (await open_cache(f"s3://{bucket.name}")).fetch("m")
    assert files_of(artifact) == _FILES
    assert names(Path(artifact.folder)) == ["1", "2", "config.pbtxt"]


async def test_listings_of_several_pages_are_fetched_whole(bucket, open_cache):
    files = {f"f/{number}": b"x" for number in range(3 * KEYS_A_PAGE + 1)}
    bucket.put(files)
    artifact, _ = await (await open_cache(f"s3://{bucket.name}")).fetch("f")
    assert len(files_of(artifact)) == len(files)


async def test_changing_prefix_is_fetched_anew(bucket, open_cache):
    bucket.put({"m/a": b"1", "m/b": b"1"})
    cache = await open_cache(f"s3://{bucket.name}")

    class Progress(FetchProgress):
        """Changes the bucket once both files have come: servers need not send one whole that is
        replaced meanwhile.
        """

        __slots__ = ()
        is_changed = False

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "done_bytes" and value == 2 and not Progress.is_changed:
                Progress.is_changed = True
                bucket.put({"m/a": b"2", "m/b": b"2", "m/c": b"2"})

    artifact, _ = await cache.fetch("m", Progress())
    assert files_of(artifact) == {"a": b"2", "b": b"2", "c": b"2"}


@pytest.mark.parametrize("key", ["a b+c%20#?.tar.gz", "ä/ü.tar.gz", "x=1&y=2/~z'(1).tar.gz"])
async def test_a_key_may_be_any_text(bucket, open_cache, key):
    bucket.put({key: archive(_FILES)})
    artifact, _ = await (await open_cache(f"s3://{bucket.name}")).fetch(key)
    assert files_of(artifact) == _FILES


async def test_missing_key_is_named_with_its_bucket(bucket, open_cache):
    with pytest.raises(ArtifactNotFound) as missing:
        await (await open_cache(f"s3://{bucket.name}/p")).fetch("a.tar.gz")
    place = f"(bucket: {bucket.name}, key: p/a.tar.gz)"
    assert str(missing.value) == f"Failed to download model data {place}: there is no such key"


async def test_missing_bucket_is_the_stores_fault(bucket, open_cache):
    cache = await open_cache("s3://nosuchbucket")
    with pytest.raises(StoreUnavailable, match="404 Not Found, NoSuchBucket"):
        await cache.fetch("a.tar.gz")
    assert "NoSuchBucket" in cache.cache.unreachable_reason


async def test_name_is_found_with_archive_suffix(bucket, open_cache):
    bucket.put({"a.zip": b"", "a.tar": b"", "b/config.pbtxt": b""})
    cache = (await open_cache(f"s3://{bucket.name}")).cache
    assert await cache.find(ArtifactKey("", "a")) == ArtifactKey("", "a.tar")
    assert await cache.find(ArtifactKey("", "b")) == ArtifactKey("", "b")
    assert await cache.find(ArtifactKey("", "c")) is None
    bucket.put({"c.zip": b""})
    assert await cache.find(ArtifactKey("", "c")) is None, "remembered for some seconds"


async def test_secrets_are_in_no_message(bucket, open_cache, monkeypatch, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    cache = await open_cache(f"s3://{bucket.name}", timeout_seconds=1)
    with pytest.raises(StoreUnavailable, match="connection refused") as failed:
        await cache.fetch("a")
    said = str(failed.value) + str([vars(record) for record in caplog.records])
    assert "secret" not in said.replace("AWS_SECRET", "")


async def test_object_name_too_long_is_named(bucket, open_cache):
    bucket.put({f"m/{'n' * 300}": b""})
    with pytest.raises(InvalidModel, match=r"n' cannot be the path of a file: .* over 255 bytes"):
        await (await open_cache(f"s3://{bucket.name}")).fetch("m")
