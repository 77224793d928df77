"""From ModelMesh to a store: examples/modelmesh/leave.py, and the manifests of docs/fleet.md.

The manifests of the mesh's side are the controller's own, of kserve/modelmesh-serving at 9c7a2b7.
"""

import json
from contextlib import closing

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import yaml

from adapter.settings import load_settings
from tests.chart.chart import containers, pod_spec, variables
from tests.chart.pod import adapter, pod_of
from tests.docs.pages import blocks
from tests.journeys.endpoint.conftest import client_of
from tests.journeys.modelmesh.leaving import ROOT, THEIRS, Object, keys, leave, service, services
from tests.running import Client, RunningAdapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.slow  # each run of what is copied imports boto3

PAGE = ROOT / "docs" / "fleet.md"


def test_each_controller_example_is_copied_or_explained(bucket, tmp_path):
    bucket.put(
        {
            "keras/mnist.h5": b"1",
            "lightgbm/mushroom.bst": b"2",
            "onnx/mnist.onnx": b"3",
            "pytorch/cifar/1/model.pt": b"4",
            "pytorch/cifar/config.pbtxt": b"5",
            "pytorch/cifar-of-another/1/model.pt": b"6",
            "tensorflow/mnist.savedmodel/saved_model.pb": b"7",
            "xgboost/mushroom-fil/1/xgboost.json": b"8",
            "xgboost/mushroom-fil/config.pbtxt": b"9",
            "xgboost/mushroom.json": b"0",
        }
    )

    code, lines = leave(bucket, services(), tmp_path, "--copy")

    wanted = "needs a config.pbtxt, and a backend of Triton"
    assert code == 1
    assert [line for line in lines if "left out" in line] == [
        f"example-keras-mnist: left out: keras {wanted}",
        f"example-lightgbm-mushroom: left out: lightgbm {wanted}",
        "example-sklearn-mnist-svm: left out: nothing is at s3://BUCKET/sklearn/mnist-svm.joblib",
        f"example-xgboost-mushroom: left out: xgboost {wanted}",
    ]
    assert keys(bucket, "by-name/") == {
        "by-name/example-onnx-mnist/mnist.onnx": b"3",
        "by-name/example-pytorch-cifar/1/model.pt": b"4",
        "by-name/example-pytorch-cifar/config.pbtxt": b"5",
        "by-name/example-tensorflow-mnist/saved_model.pb": b"7",
        "by-name/example-xgboost-mushroom-fil/1/xgboost.json": b"8",
        "by-name/example-xgboost-mushroom-fil/config.pbtxt": b"9",
    }


def test_dry_run_changes_nothing_and_prints_the_same(bucket, tmp_path):
    bucket.put({"onnx/mnist.onnx": b"1"})
    onnx = [each for each in services() if "onnx" in each["metadata"]["name"]]

    said = leave(bucket, onnx, tmp_path)

    assert list(keys(bucket)) == ["onnx/mnist.onnx"]
    assert said == leave(bucket, onnx, tmp_path, "--copy")
    target = "s3://BUCKET/by-name/example-onnx-mnist/mnist.onnx"
    assert said == (0, [f"example-onnx-mnist: s3://BUCKET/onnx/mnist.onnx -> {target}"])


# -- the page --------------------------------------------------------------------------------------


def on_the_page(kind: str) -> Object:
    """The one object of this kind in the blocks of the page; `values` are the chart's."""
    found = [yaml.safe_load(each.text) for each in blocks(PAGE) if each.language == "yaml"]
    if kind == "values":
        [values] = [
            each for each in found if "by-name" in each.get("settings", {}).get("model_store", "")
        ]
        return {**values, "checkApis": False}
    [wanted] = [each for each in found if each.get("kind") == kind]
    return wanted


def test_the_values_are_rendered_and_their_settings_understood():
    values = on_the_page("values")
    runtime = yaml.safe_load((THEIRS / "triton-2.x.yaml").read_text())
    loaded = load_settings({}, variables(values), None)

    assert loaded.warnings == []
    concurrency = runtime["metadata"]["annotations"]["maxLoadingConcurrency"]
    assert loaded.settings.load_concurrency == int(concurrency)
    milliseconds = runtime["spec"]["builtInAdapter"]["modelLoadingTimeoutMillis"]
    assert loaded.settings.load_timeout_seconds == milliseconds / 1000
    assert loaded.settings.on_demand
    [source] = containers(pod_spec(values))["adapter"]["envFrom"][-1:]
    assert source == {"secretRef": {"name": on_the_page("Secret")["metadata"]["name"]}}


def test_secret_holds_the_meshs_storage_config():
    theirs = yaml.safe_load((THEIRS / "minio-storage-secret.yaml").read_text())["stringData"]
    before, here = json.loads(theirs["localMinIO"]), on_the_page("Secret")["stringData"]

    assert here["AWS_ACCESS_KEY_ID"] == before["access_key_id"]
    assert here["AWS_SECRET_ACCESS_KEY"] == before["secret_access_key"]
    assert here["AWS_REGION"] == before["region"]


@pytest.mark.triton
def test_models_are_named_as_their_inference_services(bucket, tmp_path):
    folder = write_python_model(tmp_path / "model", answer="values = 2 * values")
    files = {f"python/twice/{p.relative_to(folder)}": p for p in folder.rglob("*") if p.is_file()}
    bucket.put({key: path.read_bytes() for key, path in files.items()})
    twice = service("my-twice", "python", storage={"key": "localMinIO", "path": "python/twice"})
    assert leave(bucket, [twice], tmp_path, "--copy")[0] == 0
    environ = {
        **bucket.environ,
        "ADAPTER_MODEL_STORE": f"s3://{bucket.name}/by-name",
        "ADAPTER_CACHE_DIR": str(tmp_path / "cache"),
        "ADAPTER_HTTP_DATA": "127.0.0.1:0",
    }

    with (
        pod_of(on_the_page("values"), environ=environ) as (given, flags),
        adapter(given, *flags, "--grpc-data=127.0.0.1:0") as pod,
    ):
        wait_until(lambda: is_ready(pod), 60, "it is ready")
        found = {
            "gRPC": over_grpc(pod.listeners["grpc_data"], "my-twice"),
            "REST": over_rest(pod.listeners["http_data"], "my-twice"),
            "boto3": over_boto3(pod.listeners["http_data"], "my-twice"),
        }

    assert found == {"gRPC": [3.0], "REST": [3.0], "boto3": [3.0]}


def is_ready(pod: RunningAdapter) -> bool:
    with Client(pod.listeners["metrics"]) as metrics:
        return metrics.get("/readyz").status == 200


def over_grpc(address: str, name: str) -> list[float]:
    """As a caller of the mesh does it, who also says the name where Envoy looks."""
    tensor = grpcclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([1.5], np.float32))
    with closing(grpcclient.InferenceServerClient(address)) as client:
        answer = client.infer(name, [tensor], headers={"mm-model-id": name})
    assert answer.get_response().model_name == name
    return answer.as_numpy("OUT").tolist()


def over_rest(address: str, name: str) -> list[float]:
    with Client(address) as client:
        answer = client.post(f"/v2/models/{name}/infer", infer_body(1.5)).json()
    assert answer["model_name"] == name
    return answer["outputs"][0]["data"]


def over_boto3(address: str, name: str) -> list[float]:
    with closing(client_of(address)) as client:
        answer = client.invoke_endpoint(
            EndpointName="any", TargetModel=name, Body=json.dumps(infer_body(1.5))
        )
    return json.loads(answer["Body"].read())["outputs"][0]["data"]
