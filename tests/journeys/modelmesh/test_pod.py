"""What examples and chart run in a pod of ModelMesh's controller leaves its ports to the others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart import runtime_spec, values_of
from tests.journeys.modelmesh.pod import TAKEN, Pod, running_pod

ROOT = Path(__file__).resolve().parents[3]
RUNTIMES = ("example", "serving-runtime", "serving-runtime-gpu", "serving-runtime-monitored")


def spec_of(name: str) -> dict[str, Any]:
    if name == "example":
        text = (ROOT / "examples" / "modelmesh" / "runtime.yaml").read_text(encoding="utf-8")
        return yaml.safe_load(text)["spec"]
    return runtime_spec(values_of(name))


# Those of the controller's own triton-2.x (config/runtimes/triton-2.x.yaml at 0.12). Keras is left
# out: nothing converts its files.
TRITONS = {
    ("tensorflow", "1"),
    ("tensorflow", "2"),
    ("tensorrt", "7"),
    ("onnx", "1"),
    ("pytorch", "1"),
    ("sklearn", "0"),
    ("xgboost", "1"),
    ("lightgbm", "3"),
}


@pytest.mark.parametrize("name", RUNTIMES)
def test_what_the_controllers_triton_offers_is_offered_here(name):
    formats = spec_of(name)["supportedModelFormats"]
    offered = {(one["name"], one["version"]): one["autoSelect"] for one in formats}

    assert offered.keys() >= TRITONS
    # a tree model needs a config.pbtxt, and the others are of versions that Triton may not have
    by_itself = {model_format for model_format, is_chosen in offered.items() if is_chosen}
    assert by_itself == {
        ("onnx", "1"),
        ("pytorch", "1"),
        ("tensorflow", "2"),
        ("tensorrt", "8"),
        ("python", "1"),
    }


@pytest.fixture(scope="module", params=["example", "serving-runtime-monitored"])
def runtime(request) -> Iterator[tuple[dict[str, Any], Pod]]:
    spec = spec_of(request.param)
    with running_pod({one["name"]: one for one in spec["containers"]}) as pod:
        yield spec, pod


@pytest.mark.triton
def test_runtime_avoids_the_pods_other_ports(runtime):
    spec, pod = runtime
    own = {8085} if spec["grpcEndpoint"] == "port:8085" else set()

    assert {8000, 8001, 8081} < pod.ports  # Triton and the adapter are there
    assert {port: TAKEN[port] for port in pod.ports & TAKEN.keys() - own} == {}


@pytest.mark.triton
def test_outsiders_reach_mesh_ports_and_metrics(runtime):
    spec, pod = runtime
    own = {8085} if spec["grpcEndpoint"] == "port:8085" else set()
    declared = {port["containerPort"] for c in spec["containers"] for port in c.get("ports", [])}

    assert pod.open_ports == own | declared
