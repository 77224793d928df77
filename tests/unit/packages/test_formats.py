"""Models without a config: what the cases of test_layouts.py leave out."""

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.errors import InvalidModel
from adapter.packages.formats import Layout, layout
from tests.cases import rows


def folder(*paths):
    """The tree of these files; a path that ends with a slash is an empty folder."""
    tree = {}
    for path in paths:
        *parents, last = path.split("/")
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
        if last:
            below[last] = None
    return tree


def links(*pairs):
    """Targets as the checklist writes them; `.` is the root."""
    return tuple(
        (path, () if target == "." else tuple(target.split("/"))) for path, target in pairs
    )


PYTHON = 'backend: "python"\n'
PYTORCH = 'backend: "pytorch"\n'
DALI = 'backend: "dali"\n'
VLLM = 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'


def onnx(file):
    return f'backend: "onnxruntime"\ndefault_model_filename: "{file}"\n'


def fil(model_type):
    value = f'{{ string_value: "{model_type}" }}'
    return f'backend: "fil"\nparameters {{ key: "model_type" value {value} }}\n'


@pytest.mark.parametrize(
    ("files", "expected", "backend", "config"),
    [
        ("net.onnx", [("1/model.onnx", "net.onnx")], "onnxruntime", None),
        ("model.onnx model.onnx_data", [("1/model.onnx", ".")], "onnxruntime", None),
        ("2/model.onnx 2/weights.bin", [("2/model.onnx", "2")], "onnxruntime", None),
        ("net.onnx weights.bin", [("1", ".")], "onnxruntime", onnx("net.onnx")),
        ('3/a"b\\c.onnx 3/w', [("3", "3")], "onnxruntime", onnx('a\\"b\\\\c.onnx')),
        ("saved_model.pb variables/x", [("1/model.savedmodel", ".")], "tensorflow", None),
        ("saved_model.pb fingerprint.pb", [("1/model.savedmodel", ".")], "tensorflow", None),
        ("frozen.pb labels.txt", [("1/model.graphdef", "frozen.pb")], "tensorflow", None),
        ("model.graphdef labels.txt", [("1", ".")], "tensorflow", None),
        ("net.graphdef", [("1/model.graphdef", "net.graphdef")], "tensorflow", None),
        ("net.pth", [("1/model.pt", "net.pth")], "pytorch", PYTORCH),
        ("4/net.pt 4/classes", [("4/model.pt", "4/net.pt")], "pytorch", PYTORCH),
        ("any/net.plan", [("1/model.plan", "any/net.plan")], "tensorrt", None),
        (
            "net.xml net.bin",
            [("1/model.xml", "net.xml"), ("1/model.bin", "net.bin")],
            "openvino",
            None,
        ),
        (
            "2/model.xml 2/model.bin",
            [("2/model.xml", "2/model.xml"), ("2/model.bin", "2/model.bin")],
            "openvino",
            None,
        ),
        ("model.py", [("1/model.py", "model.py")], "python", PYTHON),
        ("model.py net.onnx saved_model.pb", [("1", ".")], "python", PYTHON),
        ("1/model.py 1/net.pt", [("1", "1")], "python", PYTHON),
        ("xgboost.json", [("1/xgboost.json", "xgboost.json")], "fil", fil("xgboost_json")),
        ("net.ubj", [("1/xgboost.ubj", "net.ubj")], "fil", fil("xgboost_ubj")),
        ("xgboost.model", [("1/xgboost.model", "xgboost.model")], "fil", fil("xgboost")),
        ("model.txt", [("1/model.txt", "model.txt")], "fil", fil("lightgbm")),
        (
            "checkpoint.tl",
            [("1/checkpoint.tl", "checkpoint.tl")],
            "fil",
            fil("treelite_checkpoint"),
        ),
        ("1/model.json", [("1/model.json", "1/model.json")], "vllm", VLLM),
        ("model.json lora.json", [("1", ".")], "vllm", VLLM),
        ("pipe.dali", [("1/model.dali", "pipe.dali")], "dali", DALI),
        ("2/dali.py 2/model.dali", [("2", "2")], "dali", DALI),
        (
            "any/1/net.onnx any/2/net.onnx",
            [("2/model.onnx", "any/2/net.onnx")],
            "onnxruntime",
            None,
        ),
        ("README any/7/a.plan", [("7/model.plan", "any/7/a.plan")], "tensorrt", None),
        ("net.plan other/net.onnx", [("1/model.plan", "net.plan")], "tensorrt", None),
        (
            ".git/x.onnx __MACOSX/net.plan net.plan",
            [("1/model.plan", "net.plan")],
            "tensorrt",
            None,
        ),
        ("1/.DS_Store 1/a.onnx", [("1/model.onnx", "1/a.onnx")], "onnxruntime", None),
    ],
    ids=str,
)
def test_files_decide_where_the_type_is_unknown(files, expected, backend, config):
    for model_type in (None, "", "triton", "Custom:2"):
        found = layout("m", folder(*files.split()), model_type)
        assert found == Layout(links(*expected), backend, config), model_type


@pytest.mark.parametrize(
    ("name", "path", "backend"),
    [
        ("net.onnx", "1/model.onnx", "onnxruntime"),
        ("net.engine", "1/model.plan", "tensorrt"),
        ("model.py", "1/model.py", "python"),
        ("net.ubj", "1/xgboost.ubj", "fil"),
    ],
)
def test_file_name_decides_for_unknown_types(name, path, backend):
    found = layout(name, None, None)
    assert (found.links, found.backend) == (((path, ()),), backend)


@rows(
    "files",
    [
        "net.xml",
        "data.json notes.txt",
        "subdir/1 subdir/2",
        "subdir1/data subdir2/data file",
        "1/file 2/file1 2/file2",
    ],
)
def test_files_of_no_known_format_have_no_layout(files):
    for model_type in (None, "unknown", "Custom:2"):
        assert layout("m", folder(*files.split()), model_type) is None
    assert layout("net.xml", None, None) is None


@rows(
    ("files", "model_type", "path", "target", "config"),
    [
        ("main.py", "Python:3.11", "1/model.py", "main.py", PYTHON),
        ("net.json", "xgboost", "1/xgboost.json", "net.json", fil("xgboost_json")),
        ("net.model notes.txt", "xgboost", "1/xgboost.model", "net.model", fil("xgboost")),
        ("net.txt", "lightgbm", "1/model.txt", "net.txt", fil("lightgbm")),
        ("net", "lightgbm", "1/model.txt", "net", fil("lightgbm")),
        ("net.tl", "fil", "1/checkpoint.tl", "net.tl", fil("treelite_checkpoint")),
        ("net.onnx net.plan", "TensorRT", "1/model.plan", "net.plan", None),
        ("1/saved_model.pb 1/variables", "keras", "1/model.savedmodel", "1", None),
    ],
)
def test_the_type_says_what_a_file_is(files, model_type, path, target, config):
    found = layout("m", folder(*files.split()), model_type)
    assert (found.links, found.config) == (links((path, target)), config)


def test_openvino_in_the_words_of_kserve():
    assert layout("m", folder("a.xml", "a.bin", "b.onnx"), "openvino_ir").backend == "openvino"


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ("9/a.onnx 10/b.onnx", "10"),
        ("1/a.onnx 2/b.onnx readme", "2"),
        (f"1/a.onnx {'9' * 18}/b.onnx", "9" * 18),
    ],
)
def test_the_highest_number_wins(files, version):
    found = layout("m", folder(*files.split()), "onnx")
    assert found.links == links((f"{version}/model.onnx", f"{version}/b.onnx"))


@pytest.mark.parametrize("name", ["0", "01", "-1", "+2", "1.0", "9" * 19, "\N{SUPERSCRIPT TWO}"])
def test_folder_unlike_a_version_is_any_folder(name):
    found = layout("m", folder(f"{name}/net.onnx"), "onnx")
    assert found.links == links(("1/model.onnx", f"{name}/net.onnx"))


@pytest.mark.parametrize(
    ("files", "model_type", "message"),
    [
        pytest.param(
            "model.x variables",
            "onnx",
            "m: expected *.onnx; found model.x, variables",
            id="row 39",
        ),
        ("", None, "m: it holds no files"),
        (".hidden __MACOSX/x", None, "m: it holds no files"),
        ("1/", None, "m/1: it holds no files"),
        ("1/x.onnx 2/", "onnx", "m/2: it holds no files"),
        (
            "b.onnx a.onnx",
            "onnx",
            "folder with a config.pbtxt; it holds several models: a.onnx, b.onnx",
        ),
        ("a.onnx b.plan", None, "it holds several models: a.onnx, b.plan"),
        ("x/a.onnx y/a.onnx", None, "it holds several models: x/a.onnx, y/a.onnx"),
        ("2/a.onnx 2/b.onnx", None, "it holds several models: 2/a.onnx, 2/b.onnx"),
        ("net.h5", "keras", "m: expected saved_model.pb beside variables; found net.h5"),
        ("net.xml other.bin", "openvino", "m: expected *.xml beside its .bin; found net.xml,"),
        ("1/main.py 1/x", "python", "m/1: expected model.py; found main.py, x"),
        ("a b", "tensorflow", "beside variables or *.graphdef or *.pb; found a, b"),
        ("1/2/x 1/y", "tensorflow", "m/1: expected saved_model.pb beside variables or"),
        (
            "bad\udc80.onnx w",
            "onnx",
            "call it model.onnx; a config cannot hold this name",
        ),
        (" ".join(f"f{i:02}" for i in range(12)), "onnx", "f08, f09 and 2 more"),
    ],
)
def test_unservable_package_is_refused_with_its_file(files, model_type, message):
    with pytest.raises(InvalidModel) as caught:
        layout("m", folder(*files.split()), model_type)
    assert message in str(caught.value)
    assert str(caught.value).encode()


NAMES = st.sampled_from(
    [
        *("1", "2", "10", "0", "9" * 19, "NAN", "any", "variables", "x.bin", "x.xml", ".hidden"),
        *("model.onnx", "x.onnx", "bad\udc80.onnx", "model.plan", "x.engine", "x.pt", "model.py"),
        *("saved_model.pb", "x.pb", "model.savedmodel", "model.graphdef", "model.json", "dali.py"),
        *("xgboost.json", "model.txt", "x.ubj", "x.tl", "_schema.json", "__MACOSX", "a b", '"'),
    ]
)
TREES = st.recursive(
    st.none(), lambda below: st.dictionaries(NAMES, below, max_size=4), max_leaves=8
)
TYPES = st.sampled_from(
    [None, "", ":", "unknown", "tensorflow:1", "keras", "ONNX", "tensorrt", "pytorch", "openvino"]
) | st.sampled_from(["python", "xgboost", "lightgbm", "fil", "vllm", "dali", "openvino_ir"])


def exists(tree, target):
    for name in target:
        if tree is None or name not in tree:
            return False
        tree = tree[name]
    return True


@given(name=NAMES, tree=TREES, model_type=TYPES)
def test_every_link_leads_to_something_in_the_package(name, tree, model_type):
    try:
        found = layout(name, tree, model_type)
    except InvalidModel:
        return
    if found is None:
        return
    assert found.links
    assert all(exists(tree, target) for _, target in found.links)
    assert all(path.partition("/")[0] in {"1", "2", "10"} for path, _ in found.links)
    if found.config is not None:
        config = text_format.Parse(found.config, ModelConfig())
        assert config.backend == found.backend
