"""What a platform does before a container is asked, when it fails: AWS's codes, and who retries."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.asking import Gate
from tests.constants import STORE
from tests.journeys.endpoint.conftest import client_of
from tests.journeys.endpoint.test_invoke import refusal
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

LARGE = CONFIG + 'parameters { key: "memory_bytes" value { string_value: "700MiB" } }'
SMALL = LARGE.replace("700MiB", "1MiB")


class Denying(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(403)

    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def denying() -> Iterator[str]:
    """A web server that gives nobody anything."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Denying)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return write_python_model(tmp_path_factory.mktemp("roots") / "own", config=LARGE)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def strict(models, denying, own, tmp_path_factory) -> Iterator[RunningAdapter]:
    """Of 1 GiB, with three stores, of which one refuses everybody and one is not there. The third
    is a folder, which is always there in time.
    """
    folder = tmp_path_factory.mktemp("strict")
    config = folder / "adapter.yaml"
    stores = {"any": str(models), "denied": denying, "gone": "http://127.0.0.1:1"}
    settings = {
        "endpoints": {name: {"models": url} for name, url in stores.items()},
        "cache_dir": str(folder / "cache"),
        "model_wait_seconds": 4,
        "infer_timeout_seconds": 2,
        "memory_source": "off",
        "memory_limit": "1GiB",
    }
    config.write_text(json.dumps(settings))
    write_python_model(models / "large", config=LARGE)
    (models / "broken").mkdir()
    (models / "broken" / "config.pbtxt").write_text("no_such_field: 1")
    flags = (f"--config={config}", f"--model-roots={own.parent}", COMPLETE)
    with embedded_adapter(*flags, constants={STORE: 1}) as adapter:
        yield adapter


@pytest.fixture
def runtime(strict) -> Iterator[Any]:
    with closing(client_of(strict.http)) as client:
        yield client


@pytest.fixture
def patient(strict) -> Iterator[Any]:
    """boto3 as it comes."""
    with closing(client_of(strict.http, config=None)) as client:
        yield client


@pytest.fixture
def full(strict, own) -> Iterator[None]:
    """A platform has loaded a model that leaves no room for `large`, and is not evicted. `large` is
    on disk: a refusal takes no time.
    """
    with strict.client() as client, closing(client_of(strict.http)) as runtime:
        wait_until(lambda: "refused" not in answered(runtime, "large"), 60, "it is on disk")
        client.load_model("own", own)
        yield
        client.unload_model("own")


def told(error: ClientError) -> tuple[int, str, int, str | None]:
    """Status, code, how often it was sent again, and when boto3 was told to."""
    found = error.response["ResponseMetadata"]
    wait = found["HTTPHeaders"].get("x-amz-retry-after")
    return found["HTTPStatusCode"], error.response["Error"]["Code"], found["RetryAttempts"], wait


@pytest.mark.usefixtures("full")
def test_no_room_is_a_503_that_boto3_retries(patient):
    """A minute later, as the model that has the memory is never evicted."""
    assert told(refusal(patient, "large")) == (503, "ServiceUnavailable", 2, "60000")


def test_absent_store_is_503_with_retry(patient):
    error = refusal(patient, "any.tar.gz", EndpointName="gone")
    assert told(error) == (503, "ServiceUnavailable", 2, "1000")


def test_refusing_store_is_530_without_retry(runtime, patient):
    def is_known() -> bool:
        return told(refusal(runtime, "any.tar.gz", EndpointName="denied"))[0] == 530

    wait_until(is_known, 30, "the store has answered in time")
    error = refusal(patient, "any.tar.gz", EndpointName="denied")
    assert told(error) == (530, "InternalDependencyException", 0, None)


def test_unservable_package_is_a_model_error(patient):
    error = refusal(patient, "broken")
    assert told(error) == (424, "ModelError", 0, None)
    assert error.response["OriginalStatusCode"] == 400
    assert "add a version folder" in error.response["OriginalMessage"]


@pytest.fixture
def gated(models, tmp_path) -> Iterator[Callable[..., Gate]]:
    """Put a model whose load, or answer, waits at a gate."""
    with ExitStack() as stack:

        def put(name: str, **where: str) -> Gate:
            gate = Gate(tmp_path / name)
            stack.callback(gate.open)
            parts = dict.fromkeys(where, gate.statements)
            draft = write_python_model(tmp_path / f"{name}-files", config=SMALL, **parts)
            shutil.copytree(draft, models / f".{name}")
            (models / f".{name}").rename(models / name)
            return gate

        yield put


def test_slow_load_is_a_429_and_goes_on(patient, gated):
    gate = gated("slow", initialize="")
    assert told(refusal(patient, "slow")) == (429, "ModelNotReadyException", 0, None)
    gate.open()
    wait_until(lambda: "refused" not in answered(patient, "slow"), 30, "the model is loaded")


def answered(runtime: Any, target: str) -> str:
    body = json.dumps(infer_body(1.0))
    try:
        answer = runtime.invoke_endpoint(EndpointName="any", TargetModel=target, Body=body)
        return str(answer["Body"].read())
    except ClientError as error:
        return f"refused: {error}"


def test_late_model_has_status_and_words_of_aws(runtime, gated):
    gated("silent", answer="")
    found: dict[str, Any] = {}

    def is_loaded() -> bool:
        found.update(refusal(runtime, "silent").response)
        return found["Error"]["Code"] != "ModelNotReadyException"

    wait_until(is_loaded, 60, "the model is loaded")
    assert (found["Error"]["Code"], found["OriginalStatusCode"]) == ("ModelError", 0)
    assert found["Error"]["Message"].startswith(
        'Received server error (0) from primary with message "Your invocation timed out while '
        "waiting for a response from container primary."
    )
