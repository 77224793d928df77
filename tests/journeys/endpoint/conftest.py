"""An adapter with a real Triton, whose store is a bucket on moto's server, and boto3."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.asking import quoted
from tests.buckets import Bucket, s3_server
from tests.journeys.endpoint.folder_store import Caller, Store
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

NAMES = ("plain", "team-a/digits.tar.gz")

KEYS = {"aws_access_key_id": "AKIDEXAMPLE", "aws_secret_access_key": "secret"}


ONE_TRY = Config(retries={"total_max_attempts": 1})


def client_of(
    address: str, service: str = "sagemaker-runtime", *, config: Any = ONE_TRY, **keys: str
) -> Any:
    """boto3's own, but for how often it tries."""
    return boto3.client(
        service,
        endpoint_url=f"http://{address}",
        region_name="eu-west-1",
        config=config,
        **KEYS | keys,
    )


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


_NUMBERS = count()


@pytest.fixture(scope="module")
def bucket(s3) -> Bucket:
    return Bucket(s3, f"models-{next(_NUMBERS)}")


@pytest.fixture(scope="module")
def served(bucket, tmp_path_factory) -> Iterator[RunningAdapter]:
    """An adapter in whose bucket NAMES are, loaded and pinned."""
    for name in NAMES:
        bucket.put_model(name, EXAMPLES / "identity")
    forward = "--http-header-forward-pattern=X-Amzn-SageMaker-Custom-Attributes"
    flags = (
        f"--model-store=s3://{bucket.name}/models",
        f"--cache-dir={tmp_path_factory.mktemp('cache')}",
        f"--model-roots={tmp_path_factory.mktemp('roots')}",
        "--on-demand",
        *(f"--{verb}={name}" for name in NAMES for verb in ("pin", "preload")),
        *(COMPLETE, f"--triton-args={forward}"),
    )
    with embedded_adapter(*flags, environ=bucket.environ) as adapter:
        with Client(adapter.admin) as admin:
            wait_until(lambda: admin.get("/readyz").status == 200, 60, "NAMES are loaded")
        yield adapter


@pytest.fixture(scope="module")
def runtime(served) -> Iterator[Any]:
    with closing(client_of(served.http)) as client:
        yield client


@pytest.fixture
def own_runtime(served) -> Iterator[Any]:
    """A client that a test may change or cut off."""
    with closing(client_of(served.http)) as client:
        yield client


@pytest.fixture
def caller(served) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def add_model(served, bucket, tmp_path) -> Iterator[Callable[..., str]]:
    """Put a model into the bucket and load it; a call does not evict it."""
    added: list[str] = []

    def add(name: str, write: Callable[..., Path] = write_python_model, **parts: str) -> str:
        bucket.put_model(name, write(tmp_path / name.replace("/", "-"), **parts))
        with served.client() as client:
            reply = client.post(f"/v2/repository/models/{quoted(name)}/load")
            assert reply.status == 200, reply.body
        added.append(name)
        return name

    yield add
    with served.client() as client:
        for name in added:
            client.unload(name)


@pytest.fixture
def store(tmp_path) -> Store:
    (path := tmp_path / "store").mkdir()
    return Store(path)


@pytest.fixture
def start(store, tmp_path) -> Iterator[Callable[..., Caller]]:
    """Start an adapter in front of the store; ended after the test."""
    with ExitStack() as stack:

        def start(*flags: str, constants: Mapping[str, float] | None = None) -> Caller:
            flags = (
                f"--model-store={store.path}",
                f"--cache-dir={tmp_path}/cache",
                f"--model-roots={tmp_path}/roots",
                *flags,
            )
            adapter = stack.enter_context(embedded_adapter(*flags, COMPLETE, constants=constants))
            return stack.enter_context(closing(Caller(adapter)))

        yield start
