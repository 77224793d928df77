"""Refusals of S3 by their code: what callers get, and what is said of the whole store."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web

from adapter.errors import AdapterError, InvalidArtifact, StoreDenied, StoreUnavailable
from adapter.runtime import clock
from tests.buckets import Bucket
from tests.store.conftest import archive, files_of
from tests.store.web import lead_s3_to, serving

_FILES = {"config.pbtxt": b"backend: 'python'"}


class Refusing:
    """A stand-in for S3 that refuses all requests with one status and code."""

    def __init__(self) -> None:
        self.status = 403
        self.code = ""
        self.asked: list[web.Request] = []

    async def refuse(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        body = f"<Error><Code>{self.code}</Code></Error>" if self.code else ""
        return web.Response(status=self.status, text=body)


@pytest.fixture
async def refusing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Refusing]:
    server = Refusing()
    async with serving(server.refuse) as url:
        lead_s3_to(url, monkeypatch)
        yield server


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        ((400, "ExpiredToken"), StoreDenied, "the session token has expired: 400 Bad Request"),
        ((400, "InvalidToken"), StoreDenied, "the store does not know the session token: 400"),
        ((403, "RequestTimeTooSkewed"), StoreDenied, "this machine's clock, which says "),
        ((403, "AccessDenied"), StoreDenied, "refuses access: 403 Forbidden, AccessDenied"),
        ((401, ""), StoreDenied, "refuses access: 401 Unauthorized; check the credentials"),
        ((403, ""), StoreDenied, "refuses access: 403 Forbidden; check the credentials, and that"),
        ((403, "InvalidObjectState"), InvalidArtifact, "the object is archived: restore it"),
    ],
)
async def test_refusal_by_s3_names_its_cause(
    open_cache, refusing: Refusing, answer, kind: type[AdapterError], reason
):
    """An answer to HEAD has no body, so that the code comes with one more GET."""
    refusing.status, refusing.code = answer
    cache = await open_cache("s3://models", timeout_seconds=1)
    with pytest.raises(kind) as refused:
        await cache.fetch("a.tar.gz")
    assert reason in str(refused.value)
    assert type(refused.value) is kind
    refusing.asked.clear()
    with pytest.raises(kind):
        await cache.fetch("a.tar.gz")
    assert not refusing.asked, "the same request is not sent twice in a second"


async def test_archived_object_is_fetched_once_restored(
    open_cache, refusing: Refusing, monkeypatch: pytest.MonkeyPatch
):
    refusing.code = "InvalidObjectState"
    cache = await open_cache("s3://models", timeout_seconds=1)
    with pytest.raises(InvalidArtifact):
        await cache.fetch("a.tar.gz")
    refusing.code = "AccessDenied"
    later = time.monotonic() + 6
    monkeypatch.setattr(clock, "monotonic", lambda: later)
    with pytest.raises(StoreDenied):
        await cache.fetch("a.tar.gz")


async def test_odd_key_elsewhere_leaves_the_store_reachable(open_cache, bucket: Bucket, caplog):
    """It spoils its own prefix alone."""
    bucket.put({"p/a.tar.gz": archive(_FILES)})
    bucket.put_marker("p/old//x")
    cache = await open_cache(f"s3://{bucket.name}/p")
    assert cache.cache.unreachable_reason is None
    assert "artifact.store_unreachable" not in caplog.text
    artifact, _ = await cache.fetch("a.tar.gz")
    assert files_of(artifact) == _FILES
    with pytest.raises(
        InvalidArtifact, match=r'"p/old//x" has a key that cannot be a path; rename or'
    ):
        await cache.fetch("old")


async def test_check_of_a_store_mentions_no_download(open_cache, refusing: Refusing):
    refusing.code = "AccessDenied"
    cache = await open_cache("s3://models/p", timeout_seconds=1)
    assert cache.cache.unreachable_reason == (
        "store s3://models/p: Failed to look into the store (bucket: models, key: p):"
        " the store refuses access: 403 Forbidden, AccessDenied"
    )


async def test_profile_keys_are_found_with_boto3(
    open_cache, refusing: Refusing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    credentials = tmp_path / "credentials"
    credentials.write_text("[team]\naws_access_key_id = profiles-key\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "team")
    await open_cache("s3://models", timeout_seconds=1)
    assert refusing.asked
    for request in refusing.asked:
        assert "Credential=profiles-key/" in request.headers["Authorization"]


_REDIRECT = b"HTTP/1.1 301 Moved Permanently\r\nContent-Length: 0\r\n\r\n"
_NO_LENGTH = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: -5\r\n\r\n'


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_REDIRECT, "is AWS_REGION that of the bucket?"),
        (_NO_LENGTH, "its answer lacks what is needed to fetch an object"),
        (b"220 mail.example ESMTP\r\n", "its answer is not HTTP"),
        (b"", "it closes connections without an answer"),
    ],
    ids=["another region", "no length", "not HTTP", "closed"],
)
async def test_wrong_bucket_address_is_named(open_cache, monkeypatch, answer, reason):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with closing(server):
        lead_s3_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", monkeypatch)
        cache = await open_cache("s3://models", timeout_seconds=1)
        with pytest.raises(StoreUnavailable) as failed:
            await cache.fetch("a.tar.gz")
    assert str(failed.value).endswith(reason)
