"""The real command, a real Triton, a bucket on moto's server, and boto3."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.constants import STORE
from tests.journeys.endpoint.conftest import client_of
from tests.running import COMPLETE, EMBEDDED, Client, RunningAdapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module", autouse=True)
def models(bucket, tmp_path_factory) -> None:
    """`plain` is a model as a folder, `packed.tar.gz` the same as an archive."""
    folder = write_python_model(tmp_path_factory.mktemp("model"))
    bucket.put_model("packed.tar.gz", folder)
    bucket.put_model("plain", folder)


def end(adapter: RunningAdapter) -> None:
    if adapter.process.poll() is None:
        adapter.stop()


Start = Callable[..., RunningAdapter]


@pytest.fixture
def start(bucket, tmp_path) -> Iterator[Start]:
    """Start an adapter in front of the bucket; ended after the test."""
    with ExitStack() as stack:

        def start(
            *flags: str, constants: Mapping[str, float] | None = None, **environ: str
        ) -> RunningAdapter:
            adapter = RunningAdapter(
                *EMBEDDED,
                COMPLETE,
                f"--model-roots={tmp_path}/none",
                f"--model-store=s3://{bucket.name}/models",
                f"--cache-dir={tmp_path}/cache",
                *flags,
                environ={**bucket.environ, **environ},
                constants=constants,
            )
            stack.callback(end, adapter)
            return adapter

        yield start


def invoke(adapter: RunningAdapter, target: str) -> tuple[bytes, str]:
    """Return the body, and what the cache had."""
    with closing(client_of(adapter.http)) as client:
        answer: Any = client.invoke_endpoint(
            EndpointName="any", TargetModel=target, Body=json.dumps(infer_body(1.0, 2.0))
        )
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        return answer["Body"].read(), headers["x-triton-adapter-cache"]


def test_bucket_models_survive_a_killed_adapter(start):
    first = start()
    first.wait_for("adapter.started")
    for target in ("packed.tar.gz", "plain"):
        body, use = invoke(first, target)
        assert b"2.0" in body
        assert use == "miss"
        assert invoke(first, target)[1] == "hit"
        first.wait_for("artifact.fetched", key=target)
    assert {line["key"] for line in first.events("artifact.fetched")} == {"packed.tar.gz", "plain"}
    first.stop(signal.SIGKILL)
    second = start()
    second.wait_for("adapter.started")
    for target in ("packed.tar.gz", "plain"):
        assert invoke(second, target)[1] == "disk"
    assert not second.events("artifact.fetch_begun")


@pytest.fixture
def versions(tmp_path) -> list[Path]:
    """Two versions of a model: one adds 1 to what it is sent, the other 2."""
    return [
        write_python_model(tmp_path / str(number), answer=f"values = values + {number}")
        for number in (1, 2)
    ]


def added(adapter: RunningAdapter, target: str) -> float:
    """Return what the model adds to 1."""
    [first, _] = json.loads(invoke(adapter, target)[0])["outputs"][0]["data"]
    return first - 1


def restart_without_store(start: Start, adapter: RunningAdapter) -> RunningAdapter:
    """Kill the adapter, and start another with its cache while the store is unreachable."""
    adapter.stop(signal.SIGKILL)
    other = start(constants={STORE: 1}, AWS_ENDPOINT_URL_S3="http://127.0.0.1:1")
    other.wait_for("adapter.started")
    return other


def test_restart_in_outage_serves_the_renewed_version(start, bucket, versions):
    """The older version is still on disk: it was in use when the new one came."""
    bucket.put_model("renewed.tar.gz", versions[0])
    adapter = start("--revalidate-seconds=0.2")
    adapter.wait_for("adapter.started")
    assert added(adapter, "renewed.tar.gz") == 1
    bucket.put_model("renewed.tar.gz", versions[1])
    wait_until(lambda: added(adapter, "renewed.tar.gz") == 2, 60, "the new version")
    adapter.wait_for("model.unloaded")
    other = restart_without_store(start, adapter)
    assert added(other, "renewed.tar.gz") == 2
    other.wait_for("artifact.not_checked", key="renewed.tar.gz")


def test_restart_in_outage_serves_no_withdrawn_version(start, bucket, versions):
    adapter = start()
    adapter.wait_for("adapter.started")
    for number in (1, 2, 1):
        bucket.put_model("rolled-back.tar.gz", versions[number - 1])
        assert added(adapter, "rolled-back.tar.gz") == number
        with adapter.client() as client:
            client.unload_model("rolled-back.tar.gz")
    other = restart_without_store(start, adapter)
    assert added(other, "rolled-back.tar.gz") == 1


def test_second_adapter_of_one_cache_is_refused(start):
    first = start()
    first.wait_for("adapter.started")
    second = start()
    second.process.wait(60)
    assert second.stop() == 2
    assert f"is in use by another triton-adapter (process {first.process.pid})" in second.errors


def test_unreachable_store_is_warned_of_at_start(start):
    adapter = start(constants={STORE: 1}, AWS_ENDPOINT_URL_S3="http://127.0.0.1:1")
    adapter.wait_for("adapter.started")
    adapter.wait_for("artifact.store_unreachable")
    with Client(adapter.admin) as admin:
        wait_until(lambda: b"connection refused" in admin.get("/readyz").body, 30, "the reason")
        assert admin.get("/readyz").status == 200
    with pytest.raises(ClientError, match="connection refused") as failed:
        invoke(adapter, "plain")
    assert "key: models/plain" in str(failed.value)
