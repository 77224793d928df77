"""The endpoint of compose.yaml: what is fetched lies in a volume that Triton only reads."""

import json
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker import DockerClient

from tests.e2e.conftest import ADAPTER
from tests.e2e.stack import Stack, running
from tests.journeys.endpoint.conftest import client_of
from tests.running import EXAMPLES, wait_until
from tests.trees import infer_body

PYTHON = "/opt/adapter/bin/python"
IS_UP = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000')"
WEB = {
    "image": ADAPTER,
    "profiles": ["cpu"],
    "entrypoint": [PYTHON, "-m", "http.server", "8000", "--directory=/store"],
    "command": [],
    "healthcheck": {"test": ["CMD", PYTHON, "-c", IS_UP]},
}


@pytest.fixture
def web(models: Path, tmp_path: Path) -> Path:
    """Write a file of compose, which adds a web server with an archive."""
    (store := tmp_path / "store").mkdir()
    with tarfile.open(store / "identity.tar.gz", "w:gz") as tar:
        tar.add(models / "identity", ".")
    path = tmp_path / "web.yaml"
    path.write_text(
        yaml.safe_dump({"services": {"web": WEB | {"volumes": [f"{store}:/store:ro"]}}})
    )
    return path


def invoke(stack: Stack, target: str, body: bytes) -> tuple[dict[str, list[Any]], str]:
    """Return the outputs by name, and what the cache had."""
    with closing(client_of(stack.http)) as client:
        answer = client.invoke_endpoint(EndpointName="any", TargetModel=target, Body=body)
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    outputs = json.loads(answer["Body"].read())["outputs"]
    return {each["name"]: each["data"] for each in outputs}, headers["x-triton-adapter-cache"]


def test_killed_adapter_finds_web_model_on_disk(
    engine: DockerClient, images: dict[str, str], web: Path
) -> None:
    call = "identity.tar.gz", json.dumps(infer_body(1.0, 2.0)).encode()
    with running(engine, images | {"ADAPTER_MODEL_STORE": "http://web:8000"}, web) as stack:
        assert invoke(stack, *call) == ({"OUT": [1.0, 2.0]}, "miss")
        assert invoke(stack, *call) == ({"OUT": [1.0, 2.0]}, "hit")

        before = stack.restarts("adapter")
        stack.kill("adapter")
        wait_until(lambda: stack.restarts("adapter") > before, 60, "it was started again")
        stack.wait_healthy()

        assert invoke(stack, *call) == ({"OUT": [1.0, 2.0]}, "disk")


def test_triton_cannot_write_to_the_examples_cache(
    engine: DockerClient, images: dict[str, str]
) -> None:
    sample = (EXAMPLES / "digits" / "sample.json").read_bytes()
    environ = images | {"MODELS_DIR": str(EXAMPLES), "ADAPTER_MODEL_STORE": "/models/local"}
    with running(engine, environ) as stack:
        outputs, cache = invoke(stack, "digits", sample)
        assert (outputs["LABEL"], cache) == (json.loads(sample)["labels"], "miss")

        command = ["touch", "/var/cache/triton-adapter/touched"]
        assert stack.container("adapter").exec_run(command).exit_code == 0
        refused = stack.container("triton-cpu").exec_run(command)
        assert b"Read-only file system" in refused.output
