"""Calls for 50,000 models that the store lacks, at each door, leave nothing in memory.

Each name has 200 characters: one that stays costs 300 bytes, and one whose refusal stays 1.4 KB and
more. Python 3.12 and later keep interned strings for ever, and pathlib interns the parts of a path.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from adapter.triton.server.processes import resident_bytes
from tests.buckets import KEYS
from tests.grpc_calls import SERVICE, infer_request
from tests.running import COMPLETE, RunningAdapter, embedded_adapter

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1800)]

_NAMES = 50_000
_FIRST_NAMES = 5_000  # until caches of a fixed size are full
_LIMIT_BYTES = 12 * 2**20  # of growth; 250 bytes a name
_PIPELINED = 16
_MANY = 64  # gRPC calls in flight
_PADDING = "n" * 200
_BODY = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[0.5]}]}'

Door = Callable[[RunningAdapter, str, int], None]


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    """Run the empty bucket; yield the variables that lead an adapter to it."""
    command = (sys.executable, "-m", "tests.nightly.empty_bucket")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield {**KEYS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}
        finally:
            process.kill()


@pytest.fixture(scope="module", params=["folder", "bucket"])
def adapter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningAdapter]:
    folder = tmp_path_factory.mktemp("absent")
    (folder / "store").mkdir()
    environ = {}
    url = str(folder / "store")
    if request.param == "bucket":
        environ = request.getfixturevalue("bucket")
        url = "s3://models/production"
    flags = (f"--model-store={url}", f"--cache-dir={folder / 'cache'}")
    with embedded_adapter(*flags, "--on-demand", COMPLETE, environ=environ) as running:
        yield running


def call_sagemaker(adapter: RunningAdapter, prefix: str, count: int) -> None:
    call_http(adapter, "/models/{}/invoke", None, prefix, count)


def call_v2(adapter: RunningAdapter, prefix: str, count: int) -> None:
    call_http(adapter, "/v2/models/{}/infer", None, prefix, count)


def call_endpoint(adapter: RunningAdapter, prefix: str, count: int) -> None:
    call_http(
        adapter, "/endpoints/any/invocations", "X-Amzn-SageMaker-Target-Model: {}", prefix, count
    )


def call_http(
    adapter: RunningAdapter, path: str, header: str | None, prefix: str, count: int
) -> None:
    """Call so many names over one connection, some at a time; each answer must be a refusal."""
    host, _, port = adapter.http.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=300) as raw,
        raw.makefile("rb") as file,
    ):
        for first in range(0, count, _PIPELINED):
            names = [f"{prefix}{first + step}-{_PADDING}" for step in range(_PIPELINED)]
            requests = ""
            for name in names:
                named = f"{header.format(name)}\r\n" if header else ""
                requests += f"POST {path.format(name)} HTTP/1.1\r\nHost: {host}\r\n{named}"
                requests += f"Content-Length: {len(_BODY)}\r\n\r\n{_BODY.decode()}"
            raw.sendall(requests.encode())
            for _ in names:
                expect_refusal(file)


def expect_refusal(file: socket.SocketIO) -> None:
    """Read one answer, which is 400 or 404."""
    status = file.readline().split(b" ", 2)[1]
    length = 0
    while (line := file.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    body = file.read(length)
    assert status in {b"400", b"404"}, (status, body)


def call_grpc(adapter: RunningAdapter, prefix: str, count: int) -> None:
    asyncio.run(call_grpc_at_once(adapter.grpc, prefix, count))


async def call_grpc_at_once(address: str, prefix: str, count: int) -> None:
    slots = asyncio.Semaphore(_MANY)
    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")

        async def call(number: int) -> None:
            async with slots:
                request = infer_request(f"{prefix}{number}-{_PADDING}", 0.5).SerializeToString()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await infer(request)
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND, refused.value

        await asyncio.gather(*map(call, range(count)))


@pytest.mark.parametrize(
    "call", [call_sagemaker, call_v2, call_grpc, call_endpoint], ids=lambda call: call.__name__
)
def test_absent_names_leave_no_memory_behind(adapter: RunningAdapter, call: Door) -> None:
    call(adapter, "first", _FIRST_NAMES)
    process = Path("/proc", str(adapter.process.pid))
    before = resident_bytes(process)
    call(adapter, "absent", _NAMES)
    growth = resident_bytes(process) - before
    assert growth < _LIMIT_BYTES
