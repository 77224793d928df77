"""examples/azureml: the deployment of the example as a process, by the routes that it names."""

import shutil
from pathlib import Path, PurePosixPath

import pytest
import yaml

from tests.running import EMBEDDED, EXAMPLES, RunningAdapter

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "azureml" / "deployment.yaml"
PORT = 8080  # of `http` in the image


@pytest.fixture(scope="module")
def deployment() -> dict:
    return yaml.safe_load(EXAMPLE.read_text())


def mounted_at(deployment: dict) -> str:
    """AZUREML_MODEL_DIR, as Azure ML has it without a model_mount_path."""
    model = deployment["model"]
    return f"/var/azureml-app/azureml-models/{model['name']}/{model['version']}"


def route(deployment: dict, name: str) -> str:
    return deployment["environment"]["inference_config"][f"{name}_route"]["path"]


def test_azure_ml_has_one_port_and_mount(deployment):
    model = PurePosixPath(deployment["environment_variables"]["ADAPTER_SINGLE_MODEL"])
    folder = (EXAMPLE.parent / deployment["model"]["path"]).resolve()
    assert str(model.parent) == mounted_at(deployment)
    assert (model.name, folder) == (folder.name, EXAMPLES / "digits")
    routes = deployment["environment"]["inference_config"]
    assert routes.keys() == {"liveness_route", "readiness_route", "scoring_route"}
    assert {each["port"] for each in routes.values()} == {PORT}


@pytest.mark.triton
def test_example_is_live_then_ready_and_scores(deployment, tmp_path):
    """The container, with the model's folder mounted elsewhere."""
    shutil.copytree(EXAMPLES / "digits", tmp_path / "digits")
    given = deployment["environment_variables"].items()
    mount = mounted_at(deployment)
    environ = {name: value.replace(mount, str(tmp_path)) for name, value in given}
    adapter = RunningAdapter(*EMBEDDED, environ=environ | {"AZUREML_MODEL_DIR": str(tmp_path)})
    try:
        adapter.wait_for("adapter.listening", listener="http")
        with adapter.client() as client:
            assert client.get(route(deployment, "liveness")).status == 200
            adapter.wait_for("adapter.started")
            assert client.get(route(deployment, "readiness")).status == 200
            sample = (EXAMPLES / "digits" / "sample.json").read_bytes()
            reply = client.post(route(deployment, "scoring"), sample)
        assert reply.status == 200
        assert len(reply.data) == 8
    finally:
        assert adapter.stop() == 0, adapter.errors
