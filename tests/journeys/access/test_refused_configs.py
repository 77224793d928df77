"""A config that names another's file, or asks for too much, is refused from every source."""

import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter._proto import model_runtime_pb2 as mesh
from tests.grpc_calls import calls_to
from tests.journeys.v2.calls import CONFIG, Repository
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import CONFIG as TEXT
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

# the name of a package, the fields that its config has besides, and what is said of them
FAULTS = {
    "label": (
        {"output": [{**CONFIG["output"][0], "label_filename": "../../etc/passwd"}]},
        "output.label_filename '../../etc/passwd' leaves the model's folder",
    ),
    "instances": (
        {"instance_group": [{"kind": "KIND_CPU", "count": 100_000}]},
        "instance_group: 100000 instances; at most 256",
    ),
    "group": (
        {"instance_group": [{"kind": "KIND_CPU", "name": "$(touch here)"}]},
        "instance_group.name '$(touch here)' has characters other than letters",
    ),
    "tag": ({"metric_tags": {"a b": "x"}}, "metric_tags 'a b': a key is letters"),
    "warmup": (
        {
            "max_batch_size": 4,
            "model_warmup": [
                {
                    "name": "w",
                    "batch_size": 5,
                    "inputs": {"IN": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}},
                }
            ],
        },
        "model_warmup 'w': batch_size 5 is above max_batch_size, which is 4",
    ),
}
TEXTS = {
    "label": TEXT.replace('name: "OUT"', 'name: "OUT" label_filename: "../../etc/passwd"'),
    "instances": TEXT + "instance_group { kind: KIND_CPU count: 100000 }\n",
    "group": TEXT + 'instance_group { kind: KIND_CPU name: "$(touch here)" }\n',
    "tag": TEXT + 'metric_tags { key: "a b" value: "x" }\n',
    "warmup": TEXT.replace("max_batch_size: 0", "max_batch_size: 4")
    + """model_warmup { name: "w" batch_size: 5
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [1] zero_data: true } } }
""",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "good")
    for name, text in TEXTS.items():
        folder = write_python_model(root / name, config=text)
        with tarfile.open(root / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(folder, ".")
    return root


@pytest.fixture(scope="module")
def adapter(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    flags = (
        f"--model-roots={root}",
        f"--model-store={root}",
        f"--cache-dir={tmp_path_factory.mktemp('cache')}",
        *(f"--load-at-start=wanted-{name}={root}/{name}" for name in FAULTS),
    )
    with embedded_adapter(*flags, COMPLETE) as adapter:
        yield adapter


def by_folder(adapter: RunningAdapter, root: Path, name: str) -> tuple[object, str]:
    with closing(adapter.client()) as client:
        reply = client.load("m", root / name)
    return reply.status, reply.json()["error"]


def by_archive(adapter: RunningAdapter, root: Path, name: str) -> tuple[object, str]:
    with closing(adapter.client()) as client:
        reply = client.load("m", root / f"{name}.tar.gz")
    return reply.status, reply.json()["error"]


def by_name(adapter: RunningAdapter, _: Path, name: str) -> tuple[object, str]:
    with closing(adapter.client()) as client:
        reply = Repository(client).load(name)
    return reply.status, reply.json()["error"]


def by_config(adapter: RunningAdapter, _: Path, name: str) -> tuple[object, str]:
    with closing(adapter.client()) as client:
        reply = Repository(client).load("good", config=json.dumps({**CONFIG, **FAULTS[name][0]}))
    return reply.status, reply.json()["error"]


def by_files(adapter: RunningAdapter, root: Path, name: str) -> tuple[object, str]:
    files = {"1/model.py": (root / "good/1/model.py").read_bytes()}
    with closing(adapter.client()) as client:
        reply = Repository(client).load_files("m", files, {**CONFIG, **FAULTS[name][0]})
    return reply.status, reply.json()["error"]


def by_grpc(adapter: RunningAdapter, _: Path, name: str) -> tuple[object, str]:
    request = pb.RepositoryModelLoadRequest(model_name="good")
    request.parameters["config"].string_param = json.dumps({**CONFIG, **FAULTS[name][0]})
    with calls_to(adapter.grpc) as calls:
        return calls.refused("RepositoryModelLoad", request)


def by_mesh(adapter: RunningAdapter, root: Path, name: str) -> tuple[object, str]:
    request = mesh.LoadModelRequest(modelId="m", modelPath=str(root / name))
    with grpc.insecure_channel(adapter.grpc) as channel:
        load = channel.unary_unary("/mmesh.ModelRuntime/loadModel")
        with pytest.raises(grpc.RpcError) as caught:
            load(request.SerializeToString(), timeout=60)
    return caught.value.code().name, caught.value.details()


def by_store(adapter: RunningAdapter, _: Path, name: str) -> tuple[object, str]:
    headers = {"X-Amzn-SageMaker-Target-Model": name, "Content-Type": "application/json"}
    with closing(adapter.client()) as client:
        body = json.dumps(infer_body(1.0))
        reply = client.request("POST", "/endpoints/any/invocations", body, headers)
    return reply.status, reply.body.decode()


Load = Callable[[RunningAdapter, Path, str], tuple[object, str]]
SOURCES: dict[Load, object] = {
    by_folder: 400,
    by_archive: 400,
    by_name: 400,
    by_config: 400,
    by_files: 400,
    by_grpc: "INVALID_ARGUMENT",
    by_mesh: "INVALID_ARGUMENT",
    by_store: 424,  # ModelError of SageMaker
}


@pytest.mark.parametrize("load", SOURCES)
@pytest.mark.parametrize("name", FAULTS)
def test_config_is_refused_from_every_source(adapter, root, name, load):
    status, text = load(adapter, root, name)

    assert status == SOURCES[load]
    assert FAULTS[name][1] in text
    # the models of the start are tried again now and then
    models = [model["model_id"] for model in adapter.state()["models"]]
    assert [model for model in models if not model.startswith("wanted-")] == []


@pytest.mark.parametrize("name", FAULTS)
def test_config_is_refused_at_the_start(adapter, name):
    refused = adapter.wait_for("model.load_refused", model_id=f"wanted-{name}")

    assert FAULTS[name][1] in refused["reason"]


def test_refusals_leave_triton_serving(adapter, root):
    with closing(adapter.client()) as client:
        assert client.load("good", root / "good").status == 200
        assert client.post("/models/good/invoke", infer_body(2.5)).status == 200
        assert client.delete("/models/good").status == 200
