"""A config that names another's file, or asks for too much, is refused from every source."""

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from adapter._proto import model_runtime_pb2 as mesh
from tests.cases import rows
from tests.grpc_calls import calls_to, load_request
from tests.journeys.v2.calls import CONFIG, Repository
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import CONFIG as TEXT
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

LABELLED = {**CONFIG, "output": [{**CONFIG["output"][0], "label_filename": "../../etc/passwd"}]}
# the name of a package, its config, and what is said of it
FAULTS = {
    "label": (
        TEXT.replace('name: "OUT"', 'name: "OUT" label_filename: "../../etc/passwd"'),
        "output.label_filename '../../etc/passwd' leaves the model's folder",
    ),
    "instances": (
        TEXT + "instance_group { kind: KIND_CPU count: 100000 }\n",
        "instance_group: 100000 instances; at most 256",
    ),
    "group": (
        TEXT + 'instance_group { kind: KIND_CPU name: "$(touch here)" }\n',
        "instance_group.name '$(touch here)' has characters other than letters",
    ),
    "tag": (
        TEXT + 'metric_tags { key: "a b" value: "x" }\n',
        "metric_tags 'a b': a key is letters",
    ),
    "warmup": (
        TEXT.replace("max_batch_size: 0", "max_batch_size: 4")
        + """model_warmup { name: "w" batch_size: 5
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [1] zero_data: true } } }
""",
        "model_warmup 'w': batch_size 5 is above max_batch_size, which is 4",
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "good")
    for name, (text, _) in FAULTS.items():
        folder = write_python_model(root / name, config=text)
        with tarfile.open(root / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(folder, ".")
    return root


@pytest.fixture(scope="module")
def adapter(root, tmp_path_factory) -> Iterator[RunningAdapter]:
    flags = (
        f"--model-roots={root}",
        f"--model-store={root}",
        f"--cache-dir={tmp_path_factory.mktemp('cache')}",
        *(f"--load-at-start=wanted-{name}={root}/{name}" for name in FAULTS),
    )
    with embedded_adapter(*flags, COMPLETE) as adapter:
        yield adapter


def by_folder(adapter: RunningAdapter, root: Path, name: str = "label") -> tuple[object, str]:
    with adapter.client() as client:
        reply = client.load("m", root / name)
    return reply.status, reply.error


def by_archive(adapter: RunningAdapter, root: Path) -> tuple[object, str]:
    return by_folder(adapter, root, "label.tar.gz")


def by_name(adapter: RunningAdapter, _: Path) -> tuple[object, str]:
    with adapter.client() as client:
        reply = Repository(client).load("label")
    return reply.status, reply.error


def by_config(adapter: RunningAdapter, _: Path) -> tuple[object, str]:
    with adapter.client() as client:
        reply = Repository(client).load("good", config=json.dumps(LABELLED))
    return reply.status, reply.error


def by_files(adapter: RunningAdapter, root: Path) -> tuple[object, str]:
    files = {"1/model.py": (root / "good/1/model.py").read_bytes()}
    with adapter.client() as client:
        reply = Repository(client).load_files("m", files, LABELLED)
    return reply.status, reply.error


def by_grpc(adapter: RunningAdapter, _: Path) -> tuple[object, str]:
    with calls_to(adapter.grpc) as calls:
        request = load_request("good", config=json.dumps(LABELLED))
        return calls.refused("RepositoryModelLoad", request)


def by_mesh(adapter: RunningAdapter, root: Path) -> tuple[object, str]:
    request = mesh.LoadModelRequest(modelId="m", modelPath=str(root / "label"))
    with grpc.insecure_channel(adapter.grpc) as channel:
        load = channel.unary_unary("/mmesh.ModelRuntime/loadModel")
        with pytest.raises(grpc.RpcError) as caught:
            load(request.SerializeToString(), timeout=60)
    return caught.value.code().name, caught.value.details()


def by_store(adapter: RunningAdapter, _: Path) -> tuple[object, str]:
    with adapter.client() as client:
        reply = client.call_endpoint("label")
    return reply.status, reply.body.decode()


Load = Callable[[RunningAdapter, Path], tuple[object, str]]
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


@rows("load", SOURCES)
def test_config_is_refused_from_every_source(adapter, root, load):
    status, text = load(adapter, root)

    assert status == SOURCES[load]
    assert FAULTS["label"][1] in text
    # the models of the start are tried again now and then
    models = [model["model_id"] for model in adapter.state()["models"]]
    assert [model for model in models if not model.startswith("wanted-")] == []


@pytest.mark.parametrize("name", FAULTS)
def test_config_is_refused_as_at_the_start(adapter, root, name):
    status, text = by_folder(adapter, root, name)
    refused = adapter.wait_for("model.load_refused", model_id=f"wanted-{name}")

    assert (status, FAULTS[name][1] in text) == (400, True)
    assert FAULTS[name][1] in refused["reason"]


def test_refusals_leave_triton_serving(adapter, root):
    with adapter.client() as client:
        client.load_model("good", root / "good")
        assert client.invoke("good", 2.5).status == 200
        client.unload_model("good")
