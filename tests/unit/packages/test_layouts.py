"""The 48 cases of ModelMesh's own adapter, from a tree on disk to Triton's repository.

In the order of its adaptmodellayout_test.go; docs/modelmesh.md has which differ and why.
"""

import json
import os

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.errors import InvalidModel
from adapter.packages.contents import MARKER
from adapter.packages.staging import Packages

PYTORCH = 'backend: "pytorch"\n'
SAVED = ("saved_model.pb", "variables/index")
SCHEMA = {
    "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [3, 32, 32]}],
    "outputs": [{"name": "OUTPUT", "datatype": "INT64", "shape": [1]}],
}
TENSORS = """\
input [
  { name: "INPUT", data_type: TYPE_FP32, dims: [3, 32, 32] }
]
output [
  { name: "OUTPUT", data_type: TYPE_INT64, dims: [1] }
]
"""
CONFIG_45 = """\
name: "whatever"
backend: "tensorflow"
input [ { name: "SOME_INPUT" data_type: TYPE_FP32 dims: [ 1, 2 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
CONFIG_48 = """\
platform: "tensorflow_graphdef"
name: "REMOVE_ME"
max_batch_size: 1
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
SCHEMA_46 = {
    "inputs": [
        {"name": "INPUT", "datatype": "FP32", "shape": [-1, 64, 64]},
        {"name": "TYPE", "datatype": "INT8", "shape": [-1, 1]},
    ],
    "outputs": [{"name": "OUTPUT", "datatype": "INT64", "shape": [-1, 10]}],
}
SCHEMA_47 = SCHEMA_46 | {"outputs": [{"name": "OUTPUT", "datatype": "INT64", "shape": [10]}]}


class Row:
    """`files` are paths, or paths with contents; `shows` are staged paths and their targets.

    `path` and `schema` are below the model's folder, `config` what is staged or the words of the
    error.
    """

    def __init__(self, number, files, model_type, shows, *, path="", schema=None, config=None):
        self.number = number
        self.files = files if isinstance(files, dict) else dict.fromkeys(files, "x")
        self.model_type = model_type
        self.shows = shows
        self.path, self.schema, self.config = path, schema, config

    def __str__(self):
        return f"row {self.number}"

    @property
    def is_refused(self):
        return not self.shows

    def make(self, folder):
        folder.mkdir()
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))

    def source(self, folder):
        schema = None if self.schema is None else str(folder / self.schema)
        return ModelSource(str(folder / self.path), self.model_type, schema)


def under(*folders):
    return [f"{folder}/{file}" for folder in folders for file in SAVED]


ROWS = [
    *(
        Row(number, files, "unknown", {}, path=path, config="no model file of a known format")
        for number, files, path in (
            ("1", ["model.data"], "model.data"),
            ("2", ["modeldir/data"], "modeldir"),
            ("3", ["modeldir/data", "modeldir/file"], "modeldir"),
            ("4", ["modeldir/subdir/1", "modeldir/subdir/2"], "modeldir"),
            (
                "5",
                ["modeldir/subdir1/data", "modeldir/subdir2/data", "modeldir/file"],
                "modeldir",
            ),
            ("6", ["data/model.1", "data/model.2", "file", "meta.json"], ""),
            ("7", ["model/1/file", "model/3/file"], "model"),
            ("8", ["model/7/dir/file", "model/9/dir/file"], "model"),
            ("9", ["model/1/file", "model/2/file1", "model/2/file2"], "model"),
            ("10", ["model/1/file", "model/2/file1", "model/2/file2"], "model/2"),
        )
    ),
    Row("11", [], "tensorflow", {}, config="holds no files"),
    Row(
        "12",
        ["1/model.savedmodel/saved_model.pb"],
        "tensorflow",
        {"1/model.savedmodel": "1/model.savedmodel"},
    ),
    Row("13", ["1/model.graphdef"], "tensorflow", {"1/model.graphdef": "1/model.graphdef"}),
    Row("14", ["saved_model.pb"], "tensorflow", {"1/model.graphdef": "saved_model.pb"}),
    Row("15", ["saved_model.pb", "variables"], "tensorflow:1.5", {"1/model.savedmodel": ""}),
    Row(
        "16",
        ["saved_model/saved_model.pb", "saved_model/variables"],
        "tensorflow",
        {"1/model.savedmodel": "saved_model"},
    ),
    Row(
        "17",
        ["model.savedmodel/saved_model.pb"],
        "tensorflow",
        {"1/model.savedmodel": "model.savedmodel"},
    ),
    Row("18", ["1/saved_model.pb"], "tensorflow", {"1/model.graphdef": "1/saved_model.pb"}),
    Row("19", ["2/saved_model.pb", "2/variables"], "tensorflow", {"2/model.savedmodel": "2"}),
    Row(
        "20",
        ["1/saved_model/saved_model.pb", "1/saved_model/variables"],
        "tensorflow",
        {"1/model.savedmodel": "1/saved_model"},
    ),
    Row(
        "21",
        under("1/model.savedmodel", "NAN/model.savedmodel"),
        "tensorflow",
        {"1/model.savedmodel": ""},
    ),
    Row(
        "22",
        under("1/model.savedmodel", "2/model.savedmodel", "5/model.savedmodel"),
        "tensorflow",
        {"5/model.savedmodel": "5/model.savedmodel"},
    ),
    Row(
        "23",
        [*under("2/model.savedmodel"), "14/saved_model_14.pb", "14/variables/index_14"],
        "tensorflow",
        {"14/model.savedmodel": "14"},
    ),
    Row(
        "24",
        [*under("2/model.savedmodel"), "14/saved_model_14.pb"],
        "tensorflow",
        {"14/model.graphdef": "14/saved_model_14.pb"},
    ),
    Row(
        "25",
        {"1/model.savedmodel/saved_model.pb": "x", "config.pbtxt": "max_batch_size: 1\n"},
        "tensorflow",
        {"1": "1"},
        config="max_batch_size: 1\n",
    ),
    Row(
        "26",
        {
            **dict.fromkeys(("1/anything", "14/anything/at/all", "labels.txt"), "x"),
            "config.pbtxt": "max_batch_size: 1\n",
        },
        "tensorflow",
        {"1": "1", "14": "14", "labels.txt": "labels.txt"},
        config="max_batch_size: 1\n",
    ),
    Row("27", ["1/model.plan"], "tensorRT", {"1/model.plan": "1/model.plan"}),
    Row("28", ["2/model_2.plan"], "tensorRT:2x", {"2/model.plan": "2/model_2.plan"}),
    Row("29", ["model.plan"], "tensorRT", {"1/model.plan": "model.plan"}),
    Row("30, mended", ["myModel/model.plan"], "tensorRT", {"1/model.plan": "myModel/model.plan"}),
    Row("31", ["model.plan", "unexpectedFile"], "tensorRT", {"1": ""}),
    Row("32", ["myModel/model.plan", "myModel/unexpectedFile"], "tensorRT", {"1": "myModel"}),
    Row(
        "33, mended",
        ["myModel/model.plan", "unexpectedDir/unexpectedFile"],
        "tensorRT",
        {"1/model.plan": "myModel/model.plan"},
    ),
    Row("34", ["1/model.pt"], "PyTorch", {"1/model.pt": "1/model.pt"}, config=PYTORCH),
    Row("35", ["model.plan"], "PyTorch", {"1/model.pt": "model.plan"}, config=PYTORCH),
    Row("36", ["1/model.onnx"], "onnx", {"1/model.onnx": "1/model.onnx"}),
    Row("37, alone", ["1/model.onnx/model.onnx"], "onnx", {"1/model.onnx": "1/model.onnx"}),
    Row(
        "37",
        ["1/model.onnx/model.onnx", "1/model.onnx/modelfile.txt"],
        "onnx",
        {"1/model.onnx": "1/model.onnx"},
    ),
    Row("38", ["model.x"], "onnx", {"1/model.onnx": "model.x"}),
    Row("39", ["model.x", "variables"], "onnx", {}, config="expected *.onnx; found model.x"),
    Row("40, alone", ["myModel/model.onnx"], "onnx", {"1/model.onnx": "myModel"}),
    Row("40", ["myModel/model.onnx", "myModel/variables"], "onnx", {"1/model.onnx": "myModel"}),
    Row(
        "41",
        {"my-model.onnx": "x", "my-schema.json": {}},
        "onnx",
        {"1/model.onnx": "my-model.onnx"},
        path="my-model.onnx",
        schema="my-schema.json",
        config='backend: "onnxruntime"\n',
    ),
    Row(
        "42",
        {"my-model.onnx": "x", "_schema.json": {}},
        "onnx",
        {"1/model.onnx": "my-model.onnx"},
        schema="_schema.json",
        config='backend: "onnxruntime"\n',
    ),
    Row(
        "43",
        {"my-model.pt": "x", "schema.json": SCHEMA},
        "pytorch",
        {"1/model.pt": "my-model.pt"},
        path="my-model.pt",
        schema="schema.json",
        config=PYTORCH + TENSORS,
    ),
    Row(
        "44",
        {"saved_model.pb": "x", "variables": "x", "_schema.json": SCHEMA},
        "tensorflow",
        {"1/model.savedmodel": ""},
        schema="_schema.json",
        config='backend: "tensorflow"\n' + TENSORS,
    ),
    Row(
        "45",
        {
            "1/model.graphdef": "x",
            "some-other-file": "x",
            "config.pbtxt": CONFIG_45,
            "_schema.json": {
                "inputs": [{"name": "NEW_INPUT", "datatype": "FP32", "shape": [1, 64, 64]}]
            },
        },
        "tensorflow",
        {"1": "1", "some-other-file": "some-other-file"},
        schema="_schema.json",
        config=' \nbackend: "tensorflow"\n'
        'input [\n  { name: "NEW_INPUT", data_type: TYPE_FP32, dims: [1, 64, 64] }\n]\n'
        'output [ { name: "OUTPUT" data_type: TYPE_INT64 dims: [ 1 ] } ]\n',
    ),
    Row(
        "46",
        {
            "1/model.pt": "x",
            "config.pbtxt": f"{PYTORCH}max_batch_size: 100\n",
            "_schema.json": SCHEMA_46,
        },
        "pytorch",
        {"1": "1"},
        schema="_schema.json",
        config=f"{PYTORCH}max_batch_size: 100\n"
        "input [\n"
        '  { name: "INPUT", data_type: TYPE_FP32, dims: [64, 64] },\n'
        '  { name: "TYPE", data_type: TYPE_INT8, dims: [1] }\n'
        "]\n"
        'output [\n  { name: "OUTPUT", data_type: TYPE_INT64, dims: [10] }\n]\n',
    ),
    Row(
        "47",
        {
            "1/model.pt": "x",
            "config.pbtxt": f"{PYTORCH}max_batch_size: 100\n",
            "_schema.json": SCHEMA_47,
        },
        "pytorch",
        {},
        schema="_schema.json",
        config="conflicting model configuration",
    ),
    Row(
        "48",
        {"1/model.graphdef": "x", "config.pbtxt": CONFIG_48},
        None,
        {"1": "1"},
        config=CONFIG_48.replace('name: "REMOVE_ME"', " "),
    ),
]


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@pytest.fixture
def packages(tmp_path, repository):
    (tmp_path / "models").mkdir()
    return Packages(repository, [tmp_path / "models"])


def name_of(row):
    return TritonName("row-" + str(row.number).replace(", ", "-"))


async def stage(packages, row, folder):
    name, model_id = name_of(row), ModelId(str(row))
    package = await packages.prepare(name, model_id, row.source(folder))
    placement = await packages.place(name, model_id, package)
    assert placement.names == (name,)


def check(row, folder, staged):
    """Links and configuration, and that every one of the package's files is seen through them."""
    links = {
        os.path.relpath(path, staged): os.path.relpath(path.resolve(), folder)
        for path in staged.rglob("*")
        if path.is_symlink()
    }
    assert links == {path: target or "." for path, target in row.shows.items()}
    config = staged / "config.pbtxt"
    assert (config.read_text() if config.exists() else None) == row.config
    real = {p.name for p in staged.iterdir()} - {MARKER, "config.pbtxt"}
    assert real == {path.partition("/")[0] for path in row.shows}
    for path in row.shows:
        assert (staged / path).exists()


async def check_row(packages, row, folder, repository):
    row.make(folder)
    if row.is_refused:
        with pytest.raises(InvalidModel) as caught:
            await stage(packages, row, folder)
        assert row.config in str(caught.value)
    else:
        await stage(packages, row, folder)
        check(row, folder, repository / name_of(row))


def test_no_row_of_the_checklist_is_left_out():
    numbers = {int(row.number.partition(",")[0]) for row in ROWS}
    assert numbers == set(range(1, 49))


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_a_tree_is_staged_as_modelmesh_does(packages, row, tmp_path, repository):
    await check_row(packages, row, tmp_path / "models" / "m", repository)
    await packages.remove(name_of(row))
    assert list(repository.iterdir()) == []
