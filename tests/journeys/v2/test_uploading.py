"""--staging=upload: a Triton that shares no file system with the adapter."""

import shutil

import pytest

from tests.asking import model_names, refusal
from tests.journeys.v2.calls import Repository, uploading_adapter
from tests.running import Client, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

DOUBLING = "values = 2 * values"
CALLS_HELPER = """
inner = pb_utils.InferenceRequest(
    model_name="helper",
    requested_output_names=["OUT"],
    inputs=[pb_utils.Tensor("IN", values)],
).exec()
values = pb_utils.get_output_tensor_by_name(inner, "OUT").as_numpy() + 1
"""


def is_ready(raw_triton: Client, name: str) -> bool:
    return raw_triton.get(f"/v2/models/{name}/ready").status == 200


def test_a_model_is_loaded_invoked_listed_and_unloaded(uploading, raw_triton, triton, package):
    write_python_model(
        package,
        imports="import pathlib",
        initialize="folder = pathlib.Path(__file__).parents[1]\n"
        "self.add = len((folder / 'labels.txt').read_text() + (folder / '1/a/b').read_text())",
        answer="values = values + self.add",
    )
    (package / "labels.txt").write_text("cat")
    (package / "1" / "a").mkdir()
    (package / "1" / "a" / "b").write_text("dog")
    client = uploading.client
    client.load_model("team/fish", package)
    assert model_names(client) == ["team/fish"]
    assert uploading.infer("team/fish", 1.0) == [7.0]
    assert [(m["name"], m["version"], m["state"]) for m in uploading.index()] == [
        ("team/fish", "", "READY")
    ]
    assert is_ready(raw_triton, "ta.u.team_2ffish")
    assert not (triton.repository / "ta.u.team_2ffish").exists()
    client.unload_model("team/fish")
    assert not is_ready(raw_triton, "ta.u.team_2ffish")
    assert model_names(client) == []


def test_changed_package_is_served_anew(uploading, package):
    for body, expected in (("pass", 1.0), (DOUBLING, 2.0)):
        write_python_model(package, answer=body)
        assert uploading.load(package.name).status == 200
        assert uploading.infer(package.name, 1.0) == [expected]
        assert uploading.unload(package.name).status == 200


def test_a_package_with_helpers_is_uploaded_whole(uploading, raw_triton, package):
    write_python_model(package / "helper", answer=DOUBLING)
    write_python_model(package / "main", answer=CALLS_HELPER)
    uploading.client.load_model("pair", package)
    assert uploading.infer("pair", 1.0) == [3.0]
    assert is_ready(raw_triton, "helper")
    uploading.client.unload_model("pair")
    assert not is_ready(raw_triton, "helper")


def test_failed_load_says_why_and_leaves_nothing(uploading, raw_triton, package):
    write_python_model(package, initialize="raise ValueError('no such luck')")
    reply = uploading.client.load("bad", package)
    assert refusal(reply) == (400, "InvalidModel", "bad")
    assert "no such luck" in reply.error
    assert not is_ready(raw_triton, "bad")
    write_python_model(package, config='backend: "python"\nfuture_field: 7\n')
    reply = uploading.client.load("bad", package)
    assert refusal(reply)[:2] == (400, "InvalidModel")
    assert "bad/config.pbtxt:2: field 'future_field'" in reply.error
    assert uploading.index() == []


def test_only_the_model_triton_lost_is_forgotten(uploading, raw_triton, package):
    for name in ("one", "two"):
        uploading.client.load_model(name, write_python_model(package))
    assert raw_triton.post("/v2/repository/models/one/unload").status == 200
    assert uploading.client.invoke("one").status == 404
    wait_until(lambda: model_names(uploading.client) == ["two"], 30, "one is forgotten")
    assert uploading.infer("two", 1.0) == [1.0]


def test_models_of_tritons_repository_are_left_alone(
    uploading, raw_triton, triton, package, request
):
    own = write_python_model(triton.repository / "own", answer=DOUBLING)
    request.addfinalizer(lambda: shutil.rmtree(own))
    request.addfinalizer(lambda: raw_triton.post("/v2/repository/models/own/unload"))
    assert raw_triton.post("/v2/repository/models/own/load").status == 200
    reply = uploading.client.load("own", write_python_model(package))
    assert refusal(reply) == (400, "InvalidRequest", "own")
    assert "own repository has a model 'own'" in reply.error
    assert is_ready(raw_triton, "own")


def test_uploads_end_with_adapter_even_killed(triton, raw_triton, model_root, package):
    """What a killed one left serves no stale model."""
    write_python_model(package)
    adapter = uploading_adapter(triton, model_root)
    with adapter.client() as client:
        client.load_model("m", package)
    adapter.stop(9)
    assert is_ready(raw_triton, "m")
    write_python_model(package, answer=DOUBLING)
    adapter = uploading_adapter(triton, model_root)
    with adapter.client() as client:
        client.load_model("m", package)
        assert Repository(client).infer("m", 1.0) == [2.0]
    assert adapter.stop() == 0, adapter.errors
    assert not is_ready(raw_triton, "m")
    assert not adapter.repository.exists()
