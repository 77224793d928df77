"""How these tests ask: raw bytes on a socket, binary bodies, work in the background."""

import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.processes import triton_client
from tests.running import Client, Reply, RunningAdapter, wait_until

BINARY = "application/vnd.sagemaker-triton.binary+json"
JSON = "application/json"


def quoted(name: str) -> str:
    """Percent-encoded to the last byte, so that nothing on the way can mistake it."""
    return "".join(f"%{byte:02X}" for byte in name.encode())


def refusal(reply: Reply) -> tuple[int, str, str | None]:
    """Status, code and model_name of an error answer, whose shape is checked."""
    body = reply.json()
    assert reply.headers["Content-Type"].partition(";")[0] == JSON
    assert {"error", "code", "model_name"} <= body.keys()
    assert isinstance(body["error"], str)
    assert body["error"]
    return reply.status, body["code"], body["model_name"]


def model_names(client: Client) -> list[str]:
    return [m["modelName"] for m in client.get("/models?limit=1000").json()["models"]]


def triton_index(adapter: RunningAdapter) -> dict[str, str]:
    """Name -> state, for what the raw Triton behind the adapter has or had."""
    with triton_client(adapter) as raw:
        index = raw.post("/v2/repository/index", {}).json()
    return {m["name"]: m.get("state", "") for m in index}


@dataclass(frozen=True)
class Gate:
    """A place in a model where it stands until the test lets it go on."""

    path: Path

    @property
    def statements(self) -> str:
        return f"""\
import pathlib, time
gate = pathlib.Path({str(self.path)!r})
gate.with_suffix(".reached").touch()
for _ in range(24_000):  # two minutes, the time of a test
    if gate.exists():
        break
    time.sleep(0.005)
"""

    @property
    def reached(self) -> Path:
        """There once the model stands there."""
        return self.path.with_suffix(".reached")

    def wait_reached(self) -> None:
        wait_until(self.reached.exists, 60, "the model stands at its gate")

    def open(self) -> None:
        self.path.touch()


class Background:
    """Requests in threads, each over a connection of its own."""

    def __init__(self, adapter: RunningAdapter, pool: ThreadPoolExecutor) -> None:
        self._adapter = adapter
        self._pool = pool

    def ask(self, call: Callable[[Client], Any]) -> "Future[Any]":
        def work() -> Any:
            with self._adapter.client() as client:
                return call(client)

        return self._pool.submit(work)


@contextmanager
def background(adapter: RunningAdapter, threads: int = 8) -> Iterator[Background]:
    with ThreadPoolExecutor(threads) as pool:
        yield Background(adapter, pool)


def binary_request(count: int, *, binary_output: bool = True) -> tuple[bytes, int]:
    """FP32 [count] for IN as raw bytes; the body and the length of its JSON part."""
    tensors = struct.pack("<f", 0.5) * count
    output = ', "outputs": [{"name": "OUT", "parameters": {"binary_data": true}}]'
    header = (
        f'{{"inputs": [{{"name": "IN", "datatype": "FP32", "shape": [{count}], '
        f'"parameters": {{"binary_data_size": {len(tensors)}}}}}]'
        f"{output if binary_output else ''}}}"
    ).encode()
    return header + tensors, len(header)


def sized(json_bytes: int | str) -> dict[str, str]:
    return {"Content-Type": f"{BINARY};json-header-size={json_bytes}"}


class RawConnection:
    """A socket, for what http.client will not do."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def post(self, path: str, body: object) -> None:
        """Send a request with JSON; `read_answer` reads its answer."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self.send(head.encode() + data)

    def read_head(self) -> bytes:
        """Up to the empty line, which ends a status line with its headers."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = self._socket.recv(1)
            assert byte, f"closed after {head!r}"
            head += byte
        return head

    def is_answered(self) -> bool:
        """Some of an answer has come, or the connection has ended."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def end(self) -> None:
        """Say that nothing more will come."""
        self._socket.shutdown(socket.SHUT_WR)

    def read_answer(self) -> tuple[int, bytes]:
        """Status and body of an answer that has a Content-Length."""
        head, body = self.read_whole()
        return int(head.split()[1]), body

    def read_whole(self) -> tuple[bytes, bytes]:
        """Head and body of such an answer."""
        head = self.read_head()
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        length = next(int(v) for k, v in fields.items() if k.lower() == b"content-length")
        body = b""
        while len(body) < length and (chunk := self._socket.recv(length - len(body))):
            body += chunk
        return head, body
