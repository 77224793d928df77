"""examples/modelmesh/leave.py with what clusters have beside the simple case: names that are there
twice, models that got another path, objects of older ways, and some that are wrong.
"""

import json
from typing import Any

import pytest

from tests.journeys.modelmesh.leaving import Object, keys, leave, run, service

pytestmark = pytest.mark.slow  # each run of it imports boto3

SCHEMA = "serving.kserve.io/schemaPath"
PYTHON = {"a/config.pbtxt": b"a", "a/1/model.py": b"a1"}


def at(path: str) -> dict[str, Any]:
    return {"storage": {"key": "localMinIO", "path": path}}


def in_namespace(namespace: str, given: Object) -> Object:
    given["metadata"]["namespace"] = namespace
    return given


def with_predictor(name: str, predictor: Object, **annotations: str) -> Object:
    given = service(name, "any")
    given["metadata"]["annotations"].update(annotations)
    given["spec"]["predictor"] = predictor
    return given


def predictor(name: str, **spec: Any) -> Object:
    return {"kind": "Predictor", "metadata": {"name": name}, "spec": spec}


def test_name_clashes_need_a_namespace(bucket, tmp_path):
    bucket.put({**PYTHON, "b/config.pbtxt": b"b"})
    found = [
        in_namespace("one", service("fraud", "python", **at("a"))),
        in_namespace("two", service("fraud", "python", **at("b"))),
        in_namespace("one", service("other", "python", **at("a"))),
    ]

    code, lines = leave(bucket, found, tmp_path, "--copy")

    assert code == 1
    assert [line for line in lines if "left out" in line] == [
        f"fraud: left out: InferenceService {own}/fraud and InferenceService {other}/fraud would"
        " have one key: take one of them, with --namespace or another list, to each --to"
        for own, other in (("one", "two"), ("two", "one"))
    ]
    assert list(keys(bucket, "by-name/")) == [
        "by-name/other/1/model.py",
        "by-name/other/config.pbtxt",
    ]
    assert leave(bucket, found, tmp_path, "--copy", "--namespace=two")[0] == 0
    assert keys(bucket, "by-name/fraud") == {"by-name/fraud/config.pbtxt": b"b"}


def test_leftovers_of_earlier_path_are_removed_alone(bucket, tmp_path):
    bucket.put({"old/config.pbtxt": b"old", "old/2/model.py": b"2", **PYTHON})
    bucket.put({"by-name/roll-2/config.pbtxt": b"not ours", "by-name/rol": b"not ours"})
    assert leave(bucket, [service("roll", "python", **at("old"))], tmp_path, "--copy")[0] == 0
    before, moved = keys(bucket), [service("roll", "python", **at("a"))]

    code, [line] = leave(bucket, moved, tmp_path, "--copy")
    would = leave(bucket, moved, tmp_path, "--remove")

    assert code == 1
    assert line.startswith("roll: left out: 1 there that its own place does not have")
    assert line.endswith("s3://BUCKET/by-name/roll/2/model.py: see --remove")
    assert keys(bucket) == before
    assert would[1][-1] == "roll: removed s3://BUCKET/by-name/roll/2/model.py"
    assert would == leave(bucket, moved, tmp_path, "--remove", "--copy")
    assert keys(bucket) == {
        **{key: content for key, content in before.items() if "by-name/roll/" not in key},
        "by-name/roll/config.pbtxt": b"a",
        "by-name/roll/1/model.py": b"a1",
    }


@pytest.mark.parametrize("path", ["by-name/a/1", "by-name", "by-name/a"])
def test_no_copy_is_put_where_the_mesh_reads(bucket, tmp_path, path):
    """Not even where another model does."""
    bucket.put({**PYTHON, "by-name/a/1/model.onnx": b"1"})
    found = [service("a", "python", **at("a")), service("b", "onnx", **at(path))]
    before = keys(bucket)

    code, lines = leave(bucket, found, tmp_path, "--copy", "--remove")

    mixed = f"its copy would be mixed up with s3://BUCKET/{path}, which the mesh reads"
    assert code == 1
    assert f"a: left out: {mixed}: choose another --to" in lines
    assert {key: value for key, value in keys(bucket).items() if key in before} == before
    assert not keys(bucket, "by-name/a/config")


def test_wrong_one_is_a_line_others_go_on(bucket, tmp_path):
    bucket.put({**PYTHON, "twice.py": b"1"})
    no_schema = at("a")
    no_schema["storage"]["schemaPath"] = "nowhere.json"
    pvc = {"type": "pvc", "name": "claim"}

    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    alone = with_predictor("alone", {"model": at("a")})
    alone["metadata"]["annotations"] = {}
    wrong = [
        (service("no-bucket", "python", storageUri="s3://nobody-has-this/a"), "NoSuchBucket"),
        (
            service("no-schema", "python", **no_schema),
            "its schema cannot be read at s3://BUCKET/nowhere.json",
        ),
        (with_predictor("no-format", {"model": at("a")}), "it has no modelFormat"),
        (with_predictor("no-model", {"model": None}), "its predictor has no model"),
        (
            service("no-path", "python", storageUri=f"s3://{bucket.name}"),
            "it names no path in a bucket",
        ),
        (
            service("both", "python", storageUri="s3://a/b", **at("a")),
            "a storageUri and a storage.path",
        ),
        (
            service("other-name", "python", **at("twice.py")),
            "no file of it is called model.py",
        ),
        (service("no/name", "python", **at("a")), "that is no name of a model"),
        (predictor("claim", storage=claim), "persistentVolumeClaim"),
        (
            service("no-key", "onnx", storage={"key": "other", "path": "a"}),
            "no bucket is known: say --bucket other=BUC",
        ),
        (service("no-ending", "onnx", **at("twice.py")), "no file of it ends with .onnx"),
        (
            service("volume", "onnx", storage={"path": "a", "parameters": pvc}),
            "its storage is of the type pvc",
        ),
        (service("gs", "onnx", storageUri="gs://models/a"), "gs://models/a is not in a bucket"),
        (alone, "no model of ModelMesh"),
    ]
    services = [given for given, _ in wrong]

    code, lines = leave(bucket, [*services, service("a", "python", **at("a"))], tmp_path, "--copy")

    left_out = [line.split(": left out: ") for line in lines if "left out" in line]
    assert code == 1
    assert [name for name, _ in left_out] == [given["metadata"]["name"] for given in services]
    for (_, words), (_, reason) in zip(wrong, left_out, strict=True):
        assert words in reason
    assert list(keys(bucket, "by-name/")) == ["by-name/a/1/model.py", "by-name/a/config.pbtxt"]


def test_single_object_is_a_list_of_one(bucket, tmp_path):
    bucket.put(PYTHON)

    code, _, said = run(bucket, json.dumps(service("a", "python", **at("a"))), tmp_path, "--copy")

    assert (code, said) == (0, "")
    assert len(keys(bucket, "by-name/a/")) == 2


@pytest.mark.parametrize(
    ("given", "flag", "error"),
    [
        ('{"items": [{}]}', "--to=s3://nobody-has-this/a", "NoSuchBucket"),
        ("no JSON", "--copy", "Expecting value"),
        ('{"items": []}', "--copy", "has no models"),
        ('{"items": [{}]}', "--namespace=x", "has no models of x"),
    ],
    ids=["to", "file", "empty", "namespace"],
)
def test_unusable_input_is_one_error(bucket, tmp_path, given, flag, error):
    code, out, said = run(bucket, given, tmp_path, flag)

    assert (code, out) == (2, "")
    assert error in said
    assert "Traceback" not in said


def test_schema_comes_from_storage_then_annotation(bucket, tmp_path):
    """Whichever way the model is named. It takes the place of a schema that is there."""
    bucket.put(
        {
            **PYTHON,
            "a/_schema.json": b"old",
            "s/storage.json": b"storage",
            "s/annotation.json": b"annotation",
        }
    )
    uri = {"storageUri": f"s3://{bucket.name}/a"}
    by_storage = {"schemaPath": "s/storage.json"}
    found = {
        "path-annotation": service("path-annotation", "python", **at("a")),
        "uri-annotation": service("uri-annotation", "python", **uri),
        "uri-storage": service("uri-storage", "python", **uri, storage=by_storage),
        "uri-both": service("uri-both", "python", **uri, storage=by_storage),
    }
    for name in ("path-annotation", "uri-annotation", "uri-both"):
        found[name]["metadata"]["annotations"][SCHEMA] = "s/annotation.json"

    assert leave(bucket, list(found.values()), tmp_path, "--copy")[0] == 0

    copied = keys(bucket, "by-name/")
    assert {name: copied[f"by-name/{name}/_schema.json"] for name in found} == {
        "path-annotation": b"annotation",
        "uri-annotation": b"annotation",
        "uri-storage": b"storage",
        "uri-both": b"storage",
    }


def test_models_of_older_forms_are_found(bucket, tmp_path):
    bucket.put({**PYTHON, "net.onnx": b"net", "s.json": b"schema"})
    old = {"secretKey": "localMinIO"}
    found = [
        with_predictor("framework", {"triton": {"storageUri": f"s3://{bucket.name}/a"}}),
        with_predictor(
            "annotated",
            {"onnx": {"storage": {"path": "net.onnx"}}},
            **{"serving.kserve.io/secretKey": "localMinIO"},
        ),
        predictor("by-key", modelType={"name": "onnx"}, path="net.onnx", storage={"s3": old}),
        predictor(
            "by-bucket",
            modelType={"name": "python"},
            path="a",
            schemaPath="s.json",
            storage={"s3": {"secretKey": "unknown", "bucket": bucket.name}},
        ),
        predictor("new", modelType={"name": "onnx"}, **at("net.onnx")),
    ]

    code, lines = leave(bucket, found, tmp_path, "--copy")

    assert (code, [line for line in lines if "left out" in line]) == (0, [])
    assert {key.removeprefix("by-name/"): v for key, v in keys(bucket, "by-name/").items()} == {
        "annotated/net.onnx": b"net",
        "by-bucket/1/model.py": b"a1",
        "by-bucket/_schema.json": b"schema",
        "by-bucket/config.pbtxt": b"a",
        "by-key/net.onnx": b"net",
        "framework/1/model.py": b"a1",
        "framework/config.pbtxt": b"a",
        "new/net.onnx": b"net",
    }
