"""Endpoints by name, each with a folder of its own; models are loaded when they are called."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.asking import binary_request
from tests.grpc_calls import write_decoupled_model
from tests.journeys.endpoint.conftest import client_of
from tests.journeys.endpoint.test_invoke import refusal
from tests.journeys.endpoint.test_streams import COUNTING, stream, values
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

KEY = {"aws_access_key_id": "AKIDTEAMA", "aws_secret_access_key": "the secret of team a"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two` have a model of the same key, that answers with 1 and with 2."""
    root = tmp_path_factory.mktemp("stores")
    for number, name in enumerate(("one", "two"), 1):
        folder = root / name / "team-a" / "model"
        write_python_model(folder, answer=f"values = values * 0 + {number}")
    write_decoupled_model(root / "one" / "team-a" / "counting", answer=COUNTING)
    shutil.copytree(root / "one" / "team-a", root / "one" / "team-b")
    write_python_model(root / "two" / "team-b" / "cold")
    write_python_model(root / "two" / "large")
    packed = write_python_model(root / "packed", answer="values = values * 0 + 3")
    shutil.make_archive(str(root / "two" / "packed"), "gztar", packed)
    (root / "two" / "broken").mkdir()
    (root / "two" / "broken" / "config.pbtxt").write_text("nonsense")
    return root


def started(stores: Path, tmp_path: Path, **settings: object) -> Any:
    config = tmp_path / "adapter.yaml"
    endpoints = {name: {"models": str(stores / name)} for name in ("one", "two")}
    given = {"endpoints": endpoints, "cache_dir": str(tmp_path / "cache"), **settings}
    config.write_text(json.dumps(given))
    flags = (f"--config={config}", f"--model-roots={tmp_path}/none", COMPLETE)
    return embedded_adapter(*flags, environ={"SECRET": KEY["aws_secret_access_key"]})


@pytest.fixture(scope="module")
def named(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    with started(stores, tmp_path_factory.mktemp("named")) as adapter:
        yield adapter


@pytest.fixture(scope="module")
def runtime(named: RunningAdapter) -> Iterator[Any]:
    with closing(client_of(named.http)) as client:
        yield client


def told(runtime: Any, endpoint: str, target: str) -> tuple[float, str, str]:
    """The value, the name in the answer, and where the model was."""
    body = json.dumps(infer_body(7.0))
    answer = runtime.invoke_endpoint(EndpointName=endpoint, TargetModel=target, Body=body)
    found = json.loads(answer["Body"].read())
    use = answer["ResponseMetadata"]["HTTPHeaders"]["x-triton-adapter-cache"]
    return found["outputs"][0]["data"][0], found["model_name"], use


def test_each_endpoint_has_models_of_its_own(runtime: Any) -> None:
    for number, endpoint in enumerate(("one", "two"), 1):
        name = f"{endpoint}/team-a/model"
        assert told(runtime, endpoint, "team-a/model") == (number, name, "miss")
        assert told(runtime, endpoint, "team-a/model") == (number, name, "hit")
    assert told(runtime, "two", "packed.tar.gz")[0] == 3


def test_streamed_body_waits_for_its_model(runtime: Any) -> None:
    body, size = binary_request(2_000_000)
    kind = f"application/vnd.sagemaker-triton.binary+json;json-header-size={size}"
    answer = runtime.invoke_endpoint(
        EndpointName="two", TargetModel="large", ContentType=kind, Body=body
    )
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-triton-adapter-cache"] == "miss"
    assert answer["Body"].read().endswith(body[size:])


def test_a_stream_waits_for_its_model_too(runtime: Any) -> None:
    answer = stream(runtime, "team-a/counting", infer_body(2.0), EndpointName="one")
    assert values(answer) == [2.0, 3.0]
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-triton-adapter-cache"] == "miss"


@pytest.mark.parametrize(
    ("endpoint", "target", "said"),
    [
        ("three", "team-a/model", "Endpoint three of account 000000000000 not found."),
        ("one", "packed.tar.gz", "Failed to download model data"),
        ("two", "team-a/model/1/../..", "has a part that is empty, '.' or '..'"),
    ],
)
def test_what_is_not_there_is_a_validation_error(
    runtime: Any, endpoint: str, target: str, said: str
) -> None:
    error = refusal(runtime, target, EndpointName=endpoint)
    assert error.response["Error"]["Code"] == "ValidationError"
    assert said in error.response["Error"]["Message"]


def test_unloadable_model_is_a_model_error(runtime: Any) -> None:
    found = refusal(runtime, "broken", EndpointName="two").response
    assert (found["Error"]["Code"], found["OriginalStatusCode"]) == ("ModelError", 400)
    assert "config.pbtxt" in found["OriginalMessage"]
