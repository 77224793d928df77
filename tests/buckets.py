"""Buckets on a real server: moto's, which speaks S3, in a process of its own."""

import http.client
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from tests.running import wait_until

# The server checks no keys; who signs wants some.
KEYS_A_PAGE = 25  # of a listing; 1000 at AWS
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class Bucket:
    """A bucket at a server of S3. `environ` is what leads an adapter to it."""

    def __init__(self, endpoint: str, name: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(endpoint).netloc)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()
        self.endpoint = endpoint
        self.name = name
        self._objects = S3Store(
            name,
            endpoint=endpoint,
            access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region=KEYS["AWS_REGION"],
            client_options={"allow_http": True},
        )

    @property
    def environ(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL_S3": self.endpoint}

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            obstore.put(self._objects, key, content)

    def put_model(self, key: str, folder: Path) -> None:
        """Put a package below the prefix `models/`, packed where the key says so."""
        if key.endswith(".tar.gz"):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz") as tar:
                tar.add(folder, ".")
            self.put({f"models/{key}": packed.getvalue()})
            return
        files = [path for path in folder.rglob("*") if path.is_file()]
        self.put({f"models/{key}/{p.relative_to(folder)}": p.read_bytes() for p in files})

    def put_marker(self, key: str) -> None:
        """Put an empty object whose key ends with a slash, as consoles do for a folder."""
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc)
        connection.request("PUT", f"/{self.name}/{key}", body=b"")
        assert connection.getresponse().status == 200
        connection.close()

    def delete(self, *keys: str) -> None:
        obstore.delete(self._objects, list(keys))


@contextmanager
def s3_server() -> Iterator[str]:
    """Run the server; yield its URL."""
    with tempfile.NamedTemporaryFile() as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        pages = {"MOTO_S3_DEFAULT_MAX_KEYS": f"{KEYS_A_PAGE}"}
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | pages
        )
        found: list[str] = []

        def is_up() -> bool:
            said = Path(log.name).read_text()
            assert process.poll() is None, said
            found[:] = re.findall(r"Running on (http://127\.0\.0\.1:\d+)", said)
            return bool(found)

        try:
            wait_until(is_up, 60, "moto's server listens")
            yield found[0]
        finally:
            process.kill()
            process.wait()
