"""The real command, and callers whose bodies hardly ever end: others are answered meanwhile."""

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import grpc
import pytest
from botocore.config import Config

from tests.asking import binary_request
from tests.grpc_calls import NO_LIMITS, SERVICE, infer_request
from tests.journeys.memory.models import counted
from tests.running import COMPLETE, EXAMPLES, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

MIB = 2**20
KEY, SECRET = "AKIDHONEST", "of the honest one"
TARGET = "X-Amzn-SageMaker-Target-Model"
PATH = "/endpoints/any/invocations"
# Others are answered within this time; on an idle machine at once, or in 3 s where bodies are cut.
SOON = 20
RAW = "application/vnd.sagemaker-triton.binary+json;json-header-size="


@contextmanager
def store_of(folder: Path, *flags: str, keys: bool) -> Iterator[RunningAdapter]:
    for name in ("one", "two"):
        shutil.copytree(EXAMPLES / "identity", folder / "store" / name)
    config = folder / "adapter.yaml"
    config.write_text(json.dumps({"endpoint_keys": [f"{KEY} env:SECRET *"] if keys else []}))
    with embedded_adapter(
        *(f"--config={config}", f"--model-store={folder}/store", f"--cache-dir={folder}/cache"),
        *(COMPLETE, *flags),
        environ={"SECRET": SECRET, "ADAPTER_CONTROL_TOKEN": "canary-7f3a9c0e51d24b86"},
    ) as adapter:
        yield adapter


def invoke(adapter: RunningAdapter, name: str, values: int) -> bytes:
    body, size = binary_request(values)
    kind = f"{RAW}{size}"
    config = Config(retries={"total_max_attempts": 1}, read_timeout=SOON)
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=f"http://{adapter.http}",
        region_name="eu-west-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=config,
    )
    with closing(client):
        given = {"EndpointName": "any", "TargetModel": name, "ContentType": kind, "Body": body}
        answer = client.invoke_endpoint(**given)["Body"].read()
    assert answer.endswith(body[size:])
    return bytes(answer)


def forged() -> list[str]:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{KEY}/{now[:8]}/eu-west-1/sagemaker/aws4_request"
    signed = f"host;x-amz-date;{TARGET.lower()}"
    signature = hashlib.sha256(b"guessed").hexdigest()
    text = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={signed}, Signature={signature}"
    return [f"Authorization: {text}", f"X-Amz-Date: {now}"]


class Slow:
    """A connection that announces `length` bytes, sends some, and then hardly any more."""

    def __init__(self, address: str, path: str, length: int, *fields: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=SOON)
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *fields]
        self._socket.sendall("\r\n".join([*lines, "\r\n"]).encode())
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: None)

    def send(self, first: bytes, more: bytes, seconds: float) -> None:
        self._thread = threading.Thread(target=self._send, args=(first, more, seconds))
        self._thread.start()

    def _send(self, first: bytes, more: bytes, seconds: float) -> None:
        with suppress(OSError):  # it is cut
            self._socket.sendall(first)
            self._has_begun.set()
            while not self._is_over.wait(seconds):
                self._socket.sendall(more)

    def sent_all(self) -> None:
        """Wait until the first bytes are sent, or the adapter reads no more of them."""
        self._has_begun.wait(5)

    def close(self) -> None:
        self._is_over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    flag = f"--max-inflight-body-bytes={256 * MIB}"
    with store_of(tmp_path_factory.mktemp("signed"), flag, keys=True) as adapter:
        invoke(adapter, "one", 10)
        yield adapter


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    flag = f"--max-inflight-body-bytes={256 * MIB}"
    with store_of(tmp_path_factory.mktemp("plain"), flag, keys=False) as adapter:
        invoke(adapter, "one", 10)
        invoke(adapter, "two", 10)
        yield adapter


@pytest.mark.parametrize(
    ("how", "count", "size"),
    [("unsigned", 4, 64 * MIB), ("forged", 4, 64 * MIB), ("forged", 9, 31 * MIB)],
)
def test_signed_call_is_answered_beside_endless_calls(
    signed: RunningAdapter, how: str, count: int, size: int
) -> None:
    fields = [f"{TARGET}: one", *(forged() if how == "forged" else [])]
    with ExitStack() as stack:
        for _ in range(count):
            slow = stack.enter_context(closing(Slow(signed.http, PATH, size, *fields)))
            slow.send(bytes(size - 10), b"1", 3)
            slow.sent_all()
        invoke(signed, "one", 10)
        invoke(signed, "two", 100_000)  # a model that is fetched and loaded first


def test_large_call_is_answered_beside_endless_calls(plain: RunningAdapter) -> None:
    with ExitStack() as stack:
        size, path = 64 * MIB, f"{PATH}-response-stream"
        for _ in range(4):
            slow = stack.enter_context(closing(Slow(plain.http, path, size, f"{TARGET}: one")))
            slow.send(bytes(size - 10), b"1", 3)
            slow.sent_all()
        invoke(plain, "two", 1_000_000)
    assert counted(plain, "triton_adapter_bodies_cut_total") > 0


@pytest.mark.parametrize("way", ["v2", "invoke", "grpc"])
def test_what_is_only_announced_keeps_nobody_waiting(plain: RunningAdapter, way: str) -> None:
    names = {model["model_id"] for model in plain.state()["models"]}
    one, two = (next(name for name in names if name.endswith(end)) for end in ("one", "two"))
    with ExitStack() as stack:
        for _ in range(3):
            slow = Slow(plain.http, f"/models/{one}/invoke", 2**31 - 1)
            stack.enter_context(closing(slow)).send(bytes(68_000), bytes(68_000), 1)
        stack.enter_context(closing(plain.client())).get("/ping")
        ask(plain, way, two)


def ask(adapter: RunningAdapter, way: str, name: str) -> Any:
    if way == "grpc":
        request = infer_request(name, *[1.0] * 150_000)
        with grpc.insecure_channel(adapter.grpc, options=NO_LIMITS) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            return call(request.SerializeToString(), timeout=SOON)
    body, size = binary_request(150_000)
    path = f"/models/{name}/invoke" if way == "invoke" else f"/v2/models/{name}/infer"
    headers = {"Inference-Header-Content-Length": str(size)}
    if way == "invoke":
        kind = f"{RAW}{size}"
        headers = {"Content-Type": kind}
    with closing(adapter.client(SOON)) as client:
        answer = client.post(path, body, headers)
    assert answer.status == 200
    assert answer.body.endswith(body[size:])
    return answer
