"""A server of S3 that checks signatures: versitygw over a folder."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from adapter.core.artifacts import CacheUse
from adapter.errors import StoreDenied
from adapter.frontends.status import AWS, lookup
from tests.builds import go_program
from tests.ports import free_ports
from tests.running import wait_until
from tests.store.conftest import archive, files_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

PROGRAM = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
_BUILD_SECONDS = 1200  # on two cores that others use as well it took two to seven minutes
_ACCESS, _SECRET = "gateway", "the gateway's secret"
_CONTENT = {"model.bin": os.urandom(9 * 2**20)}


@pytest.fixture
def objects(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, S3Store]]:
    """The URL of a server with a bucket `models`, which this process finds, and that bucket."""
    (tmp_path / "gateway/models").mkdir(parents=True)
    (tmp_path / "sidecar").mkdir()
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    versitygw = go_program(pytestconfig, "versitygw", PROGRAM, _BUILD_SECONDS)
    command = [versitygw, f"--port={address}", "--quiet", "posix", f"--sidecar={tmp_path}/sidecar"]
    environ = {**os.environ, "ROOT_ACCESS_KEY": _ACCESS, "ROOT_SECRET_KEY": _SECRET}
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [*command, str(tmp_path / "gateway")], env=environ, stdout=log, stderr=log
    )

    def is_up() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    for name, value in (("ACCESS_KEY_ID", _ACCESS), ("SECRET_ACCESS_KEY", _SECRET)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{address}")
    try:
        wait_until(is_up, 60, "versitygw listens")
        yield f"http://{address}", S3Store("models", client_options={"allow_http": True})
    finally:
        process.kill()
        process.wait()
        log.close()


async def test_wrong_secret_is_denied_with_530(objects, open_cache, monkeypatch):
    obstore.put(objects[1], "team/a.tar.gz", archive(_CONTENT))
    cache = await open_cache("s3://models/team")
    artifact, use = await cache.fetch("a.tar.gz")
    assert (files_of(artifact), use) == (_CONTENT, CacheUse.MISS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    other = await open_cache("s3://models/team", at=cache.cache.root.parent / "other")
    with pytest.raises(StoreDenied, match="403") as denied:
        await other.fetch("a.tar.gz")
    assert lookup(AWS, denied.value) == (530, "InternalDependencyException")
    assert "another" not in str(denied.value)
