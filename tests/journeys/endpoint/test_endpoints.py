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


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    """`one` and `two` have a model of the same key, that answers with 1 and with 2."""
    root = tmp_path_factory.mktemp("stores")
    for number, name in enumerate(("one", "two"), 1):
        folder = root / name / "team-a" / "model"
        write_python_model(folder, answer=f"values = values * 0 + {number}")
    write_decoupled_model(root / "one" / "team-a" / "counting", answer=COUNTING)
    write_python_model(root / "two" / "large")
    packed = write_python_model(root / "packed", answer="values = values * 0 + 3")
    shutil.make_archive(str(root / "two" / "packed"), "gztar", packed)
    return root


@pytest.fixture(scope="module")
def named(stores, tmp_path_factory) -> Iterator[RunningAdapter]:
    folder = tmp_path_factory.mktemp("named")
    config = folder / "adapter.yaml"
    endpoints = {name: {"models": str(stores / name)} for name in ("one", "two")}
    config.write_text(json.dumps({"endpoints": endpoints, "cache_dir": str(folder / "cache")}))
    with embedded_adapter(f"--config={config}", COMPLETE) as adapter:
        yield adapter


@pytest.fixture(scope="module")
def runtime(named) -> Iterator[Any]:
    with closing(client_of(named.http)) as client:
        yield client


def told(runtime: Any, endpoint: str, target: str) -> tuple[float, str, str]:
    """The value, the name in the answer, and where the model was."""
    body = json.dumps(infer_body(7.0))
    answer = runtime.invoke_endpoint(EndpointName=endpoint, TargetModel=target, Body=body)
    found = json.loads(answer["Body"].read())
    use = answer["ResponseMetadata"]["HTTPHeaders"]["x-triton-adapter-cache"]
    return found["outputs"][0]["data"][0], found["model_name"], use


def test_each_endpoint_has_models_of_its_own(runtime):
    for number, endpoint in enumerate(("one", "two"), 1):
        name = f"{endpoint}/team-a/model"
        assert told(runtime, endpoint, "team-a/model") == (number, name, "miss")
        assert told(runtime, endpoint, "team-a/model") == (number, name, "hit")
    assert told(runtime, "two", "packed.tar.gz")[0] == 3


def test_streamed_body_waits_for_its_model(runtime):
    body, size = binary_request(2_000_000)
    kind = f"application/vnd.sagemaker-triton.binary+json;json-header-size={size}"
    answer = runtime.invoke_endpoint(
        EndpointName="two", TargetModel="large", ContentType=kind, Body=body
    )
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-triton-adapter-cache"] == "miss"
    assert answer["Body"].read().endswith(body[size:])


def test_a_stream_waits_for_its_model_too(runtime):
    answer = stream(runtime, "team-a/counting", infer_body(2.0), EndpointName="one")
    assert values(answer) == [2.0, 3.0]
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-triton-adapter-cache"] == "miss"


@pytest.mark.parametrize(
    ("endpoint", "target", "said"),
    [
        ("three", "team-a/model", "Endpoint three of account 000000000000 not found."),
        ("one", "packed.tar.gz", "Failed to download model data"),
    ],
)
def test_what_is_not_there_is_a_validation_error(runtime, endpoint, target, said):
    error = refusal(runtime, target, EndpointName=endpoint)
    assert error.response["Error"]["Code"] == "ValidationError"
    assert said in error.response["Error"]["Message"]
