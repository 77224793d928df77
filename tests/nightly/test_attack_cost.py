"""Callers who make their bytes as expensive as they can, one form after the other, beside small
requests whose answers are known and a probe of /ping, which a bare server on the same machine is
asked as well. A minute after all of them the adapter's memory is what it was.
"""

import gzip
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.triton.server.processes import resident_bytes
from tests.asking import binary_request
from tests.attack.test_bodies import PATH, RAW, TARGET, Slow, forged, invoke, store_of
from tests.frontends.grpc.proxy_listener import STREAM
from tests.grpc_calls import NO_LIMITS
from tests.running import Client, RunningAdapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

KIB, MIB = 2**10, 2**20
LATE_SECONDS, LEAST_SECONDS, REST_SECONDS = 0.2, 5.0, 60
GROWTH_BYTES = 64 * MIB
INVOKE, INFER = "/models/oracle/invoke", "/v2/models/oracle/infer"
STREAMED = f"{PATH}-response-stream"
# What small requests may be told besides their answers; the second is a body that was cut.
SHED = {"200, 429", "200, 503"}

TYPED = """\
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1, -1] }]
parameters { key: "adapter_content_types" value { string_value: "text/csv, application/x-npy" } }
"""

Pieces = Iterator[bytes]


def post(path: str, body: bytes, *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def get(target: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: localhost", *fields, "\r\n"]).encode()


def chunked(path: str, piece: bytes, *fields: str) -> Pieces:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked", *fields]
    many = piece * max(1, 2**18 // len(piece))
    return chain(["\r\n".join([*lines, "\r\n"]).encode()], repeat(many, 100), [b"0\r\n\r\n"])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def tensors(count: int) -> bytes:
    one = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
    return json.dumps({"inputs": [one] * count}).encode()


def many_binary_tensors() -> bytes:
    count = 3000
    parameters = {"binary_data_size": 4}
    one = {"name": "IN", "datatype": "FP32", "shape": [1], "parameters": parameters}
    head = json.dumps({"inputs": [one] * count}).encode()
    return post(INFER, head + bytes(4 * count), f"Inference-Header-Content-Length: {len(head)}")


def large_raw_tensors() -> bytes:
    body, size = binary_request(10 * MIB)
    return post(INVOKE, body, f"Content-Type: {RAW}{size}")


def large_json(size: int) -> bytes:
    values = size // 4
    head = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[%d],"data":[1.5' % values
    return head + b",1.5" * (values - 1) + b"]}]}"


def large_answer() -> bytes:
    body, size = binary_request(2 * MIB)
    return post(STREAMED, body, f"{TARGET}: one", f"Content-Type: {RAW}{size}")


def signed_heads() -> bytes:
    fields = [f"x-amz-{i:04}: 1" for i in range(110)]
    return get(PATH).replace(b"GET", b"POST") + post(PATH, b"{}", *forged(), *fields)


ESCAPED = b'["' + b'\\"' * (120 * KIB)
BEARER = {"Authorization": "Bearer canary-7f3a9c0e51d24b86"}  # as store_of sets it

# What one connection sends again and again. Floods of frames: test_proxy_floods.py.
HTTP: dict[str, Callable[[], Pieces]] = {
    "pings, pipelined": lambda: repeat(get("/ping") * 6000, 4),
    "pings of one byte each": lambda: (bytes([b]) for b in get("/ping") * 500),
    "refused calls, pipelined": lambda: repeat(post("/models/none/invoke", b"{}") * 3000, 4),
    "heads of 16 KiB": lambda: repeat(
        get("/ping", *(f"a{i}: {'x' * 100}" for i in range(120))), 200
    ),
    "heads of headers without end": lambda: repeat(b"a: b\r\n" * 1000, 100),
    "queries": lambda: repeat(get("/models?" + "a=b&" * 3900), 200),
    "accepts": lambda: repeat(
        post("/models/typed/invoke", b"1,2", "Content-Type: text/csv", f"Accept: {'*/*,' * 3900}"),
        200,
    ),
    "chunks of one byte": lambda: chunked(INVOKE, chunk(b"x")),
    "chunks with extensions": lambda: chunked(INVOKE, b"1;" + b"a=b;" * 1000 + b"\r\nx\r\n"),
    "trailers": lambda: chain(
        [next(chunked(INVOKE, b"x")), b"0\r\n"], repeat(b"a: b\r\n" * 9000, 20)
    ),
    "escaped quotes": lambda: repeat(post(INFER, ESCAPED), 8),
    "strings": lambda: chunked(INFER, chunk(b'"",' * 20_000)),
    "brackets": lambda: chunked(INFER, chunk(b"[]," * 20_000)),
    "shapes": lambda: repeat(post(INFER, b'{"shape":[1],' * 19_000), 8),
    "JSON of 1 MiB": lambda: repeat(post(INFER, b"[" + b'"\\n",[],' * 110_000), 4),
    "packed JSON": lambda: repeat(
        post(INFER, gzip.compress(b"[]," * 5 * MIB, 9), "Content-Encoding: gzip"), 4
    ),
    "wide JSON": lambda: repeat(
        post(
            "/v2/repository/models/zzz/load",
            b"[" + b"{}," * 10 * MIB + b"{}]",
            f"Authorization: {BEARER['Authorization']}",
        ),
        2,
    ),
    "tensors": lambda: repeat(post(INFER, tensors(4000)), 8),
    "binary tensors": lambda: repeat(many_binary_tensors(), 8),
    "forms": lambda: repeat(
        post(INVOKE, b"--x\r\n" * 50_000, "Content-Type: multipart/form-data; boundary=x"), 8
    ),
    "JSON of 40 MiB": lambda: repeat(post(INVOKE, large_json(40 * MIB)), 2),
    "raw tensors of 40 MiB": lambda: repeat(large_raw_tensors(), 2),
    "CSV": lambda: repeat(
        post("/models/typed/invoke", b"1," * (4 * MIB - 1) + b"1", "Content-Type: text/csv"), 2
    ),
    "CSV of rows": lambda: repeat(
        post(
            "/models/typed/invoke", b"1\n" * 4 * MIB, "Content-Type: text/csv", "Accept: text/csv"
        ),
        2,
    ),
    "tensors of a stream": lambda: repeat(post(STREAMED, tensors(1000), f"{TARGET}: one"), 4),
    "levels of a stream": lambda: repeat(
        post(
            STREAMED,
            b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":'
            + b"[" * 300
            + b"1," * 90_000
            + b"1"
            + b"]" * 300
            + b"}]}",
            f"{TARGET}: one",
        ),
        8,
    ),
    "numbers of a stream": lambda: repeat(
        post(STREAMED, b'{"inputs":[' + b",".join([b"1" * 4299] * 3000) + b"]}", f"{TARGET}: one"),
        4,
    ),
    "large answers of a stream": lambda: repeat(large_answer(), 2),
}
KEYED: dict[str, Callable[[], Pieces]] = {
    "signed headers": lambda: repeat(signed_heads(), 200),
}


class Oracle:
    """Asks one small thing again and again, on kept and on new connections."""

    def __init__(self, adapter: RunningAdapter) -> None:
        self._adapter = adapter
        self._is_over = threading.Event()
        self.seen: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(kept,)) for kept in (True, False)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, is_kept: bool) -> None:
        client = self._adapter.client(timeout=20)
        number = 0.0
        while not self._is_over.is_set():
            number += 1
            self.seen[self._verdict(client, number)] += 1
            if not is_kept:
                client.close()
            time.sleep(0.02)
        client.close()

    def _verdict(self, client: Client, number: float) -> str:
        try:
            ping = client.get("/ping").status
            reply = client.post("/models/oracle/invoke", infer_body(number))
        except OSError as error:
            return type(error).__name__
        if (ping, reply.status) != (200, 200):
            return f"{ping}, {reply.status}"
        right = reply.json()["outputs"][0]["data"] == [2 * number]
        return "right" if right else "WRONG"


@dataclass
class Attack:
    """What some callers do at once for a while."""

    address: str
    pieces: Callable[[], Pieces]
    callers: int = 4

    @contextmanager
    def going_on(self) -> Iterator[None]:
        is_over = threading.Event()
        threads = [
            threading.Thread(target=self._pour, args=(is_over,)) for _ in range(self.callers)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _pour(self, is_over: threading.Event) -> None:
        """Connect anew whenever the connection is ended, or all was said."""
        host, _, port = self.address.rpartition(":")
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection((host, int(port)), 5) as caller:
                reader = threading.Thread(target=self._read, args=(caller,))
                reader.start()
                with suppress(OSError):
                    for piece in self.pieces():
                        caller.sendall(piece)
                        if is_over.is_set():
                            break
                    is_over.wait(0.2)
                with suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)
                reader.join()

    def _read(self, caller: socket.socket) -> None:
        with suppress(OSError):
            while caller.recv(2**18):
                pass


@contextmanager
def slow_bodies(address: str, path: str, *fields: str) -> Iterator[None]:
    """Bodies that never end, and lengths that are only announced."""
    size = 64 * MIB
    with ExitStack() as stack:
        for count, length, first, more in (
            (4, size, bytes(size - 10), b" "),
            (3, 2**31 - 1, bytes(68_000), bytes(68_000)),
        ):
            for _ in range(count):
                slow = stack.enter_context(closing(Slow(address, path, length, *fields)))
                slow.send(first, more, 1)
        yield


@contextmanager
def refused_messages(address: str) -> Iterator[None]:
    """Six callers, whose large messages have more fields than may be, each on its own stream."""
    fields = pb.ModelInferRequest(model_name="oracle").SerializeToString() + b"\x12\0" * 2**16
    message = (
        fields + pb.ModelInferRequest(raw_input_contents=[bytes(62 * MIB)]).SerializeToString()
    )
    is_over = threading.Event()

    def call() -> None:
        with grpc.insecure_channel(address, NO_LIMITS) as channel:
            while not is_over.is_set():
                with pytest.raises(grpc.RpcError):
                    list(channel.stream_stream(STREAM)(iter([message])))

    with ThreadPoolExecutor(6) as callers:
        calls = [callers.submit(call) for _ in range(6)]
        try:
            yield
        finally:
            is_over.set()
    for one in calls:
        one.result()


BARE = """
import asyncio
async def serve(reader, writer):
    while await reader.readuntil(b"\\r\\n\\r\\n"):
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def bare_server() -> Iterator[str]:
    """An HTTP server that does nothing: what the machine itself makes a caller wait."""
    command = [sys.executable, "-c", BARE]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=null, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def felt(address: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.nightly.felt", str(seconds), address, "0.01", "/ping"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def p99(probe: subprocess.Popen[str]) -> float:
    found = sorted(map(float, probe.communicate()[0].split()))
    assert probe.returncode == 0
    return found[int(len(found) * 0.99)]


def late(adapter: RunningAdapter, bare: str, seconds: float) -> float:
    """How much longer /ping takes than the bare server, at the 99th percentile of each."""
    of_ping, of_bare = map(p99, [felt(one, seconds) for one in (adapter.http, bare)])
    return of_ping - of_bare


@pytest.mark.parametrize("keys", [False, True], ids=["open", "keyed"])
def test_ping_is_at_most_200_ms_late(keys: bool, seconds: float, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_python_model(folder / "oracle", answer="values = 2 * values")
    write_python_model(folder / "typed", config=TYPED)
    flags = (f"--model-roots={folder}", f"--max-inflight-body-bytes={256 * MIB}")
    with store_of(tmp_path, *flags, keys=keys) as adapter, bare_server() as bare:
        if keys:
            attacks = {n: Attack(adapter.http, p).going_on for n, p in KEYED.items()}
            slow = (PATH, f"{TARGET}: one", *forged())
        else:
            with closing(adapter.client()) as client:
                for name in ("oracle", "typed"):
                    given = {"model_name": name, "url": str(folder / name)}
                    assert client.post("/models", given, BEARER).status == 200
            attacks = {n: Attack(adapter.http, p).going_on for n, p in HTTP.items()}
            attacks["gRPC: refused messages"] = lambda: refused_messages(adapter.grpc)
            slow = (INVOKE,)
        attacks["slow bodies"] = lambda: slow_bodies(adapter.http, *slow)
        invoke(adapter, "one", 10)
        play(adapter, bare, attacks, seconds, keys=keys)


def play(
    adapter: RunningAdapter,
    bare: str,
    attacks: dict[str, Callable[[], object]],
    seconds: float,
    *,
    keys: bool,
) -> None:
    process = Path("/proc", str(adapter.process.pid))
    rest, faults = resident_bytes(process), list[str]()
    each = max(LEAST_SECONDS, seconds / len(attacks))
    for name, attack in attacks.items():
        oracle = None if keys else Oracle(adapter)
        with attack():  # type: ignore[attr-defined]
            took = late(adapter, bare, each)
            invoke(adapter, "two" if keys else "one", 10)
        seen = {}
        if oracle is not None:
            oracle.end()
            seen = {k: n for k, n in oracle.seen.items() if k != "right"}
        told = f"{name}: {1000 * took:.0f} ms late, {resident_bytes(process) // MIB} MiB, {seen}"
        print(told, flush=True)  # noqa: T201
        if took > LATE_SECONDS or not seen.keys() <= SHED:
            faults.append(told)
    begun = time.monotonic()
    wait_until(
        lambda: resident_bytes(process) < rest + GROWTH_BYTES,
        REST_SECONDS,
        f"{rest // MIB} MiB are resident again, and 64 MiB more at most",
    )
    print(f"at rest after {time.monotonic() - begun:.0f} s")  # noqa: T201
    assert not faults
