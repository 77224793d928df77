"""Refusals of S3 by their code: what callers get, and what is said of the whole store."""

import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from adapter.errors import AdapterError, InvalidArtifact, StoreDenied
from adapter.runtime import clock
from tests.buckets import KEYS, Bucket
from tests.store.conftest import archive, files_of

_FILES = {"config.pbtxt": b"backend: 'python'"}


class Refusing:
    """A stand-in for S3 that refuses all requests with one status and code."""

    def __init__(self) -> None:
        self.status = 403
        self.code = ""
        self.asked: list[str] = []

    async def refuse(self, request: web.Request) -> web.Response:
        self.asked.append(request.method)
        body = f"<Error><Code>{self.code}</Code></Error>" if self.code else ""
        return web.Response(status=self.status, text=body)


@pytest.fixture
async def refusing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Refusing]:
    server = Refusing()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.refuse)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{runner.addresses[0][1]}")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    yield server
    await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        ((400, "ExpiredToken"), StoreDenied, "the session token has expired: 400 Bad Request"),
        ((400, "InvalidToken"), StoreDenied, "the store does not know the session token: 400"),
        ((403, "RequestTimeTooSkewed"), StoreDenied, "this machine's clock, which says "),
        ((403, "AccessDenied"), StoreDenied, "refuses access: 403 Forbidden, AccessDenied"),
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
    bucket.put({"p/a.tar.gz": archive(_FILES)})
    bucket.put_marker("p/old//x")
    cache = await open_cache(f"s3://{bucket.name}/p")
    assert cache.cache.unreachable_reason is None
    assert "artifact.store_unreachable" not in caplog.text
    artifact, _ = await cache.fetch("a.tar.gz")
    assert files_of(artifact) == _FILES
    with pytest.raises(InvalidArtifact, match="rename or delete it"):
        await cache.fetch("old")


async def test_check_of_a_store_mentions_no_download(open_cache, refusing: Refusing):
    refusing.code = "AccessDenied"
    cache = await open_cache("s3://models/p", timeout_seconds=1)
    assert cache.cache.unreachable_reason == (
        "store s3://models/p: Failed to look into the store (bucket: models, key: p):"
        " the store refuses access: 403 Forbidden, AccessDenied"
    )
