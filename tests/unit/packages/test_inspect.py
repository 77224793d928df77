"""What a package must be to be served, on real trees."""

import pytest

from adapter.core.model import Link, Role
from adapter.errors import InvalidModel
from tests.cases import rows
from tests.packages.staged import ensemble
from tests.unit.packages.looking import PYTHON, look, make, refusal

# --- which folder is the model


@pytest.mark.parametrize(("name", "asks"), [("a-main", True), ("z-helper", False)])
def test_only_callers_model_asks_for_response_cache(root, name, asks):
    """A helper is staged without the cache, so its package keeps the model's own name."""
    for own_name in ("a-main", "z-helper"):
        cache = "response_cache { enable: true }" if own_name == name else ""
        make(root / "m" / own_name, PYTHON + cache)
    (root / "m" / "a-main" / "1" / "model.py").write_text("NAMES = ['z-helper']")
    assert look(root / "m", root).asks_for_cache == asks


def test_the_folder_itself_may_be_the_model(root):
    folder = make(root / "m", files=["1/model.py", "1/weights/w.bin", "labels.txt"])
    package = look(folder, root)
    assert package.root == str(folder)
    (part,) = package.parts
    assert (part.own_name, part.role, part.config_text) == ("", Role.ENTRY, PYTHON)
    assert set(part.links) == {
        Link("1", str(folder / "1")),
        Link("labels.txt", str(folder / "labels.txt")),
    }
    assert package.size_bytes == len(PYTHON) + 3 * len("weights")
    assert package.declared_bytes is None
    assert package.backends == {"python"}


TELLING = 'backend: "python" input { name: "IN" } output { name: "OUT" }'


@pytest.mark.parametrize("config", [None, 'backend: "python"'], ids=["no config", "bare config"])
def test_python_model_without_tensors_is_odd(root, config):
    model = make(root / "m", config or "", files=["1/model.py"])
    if config is None:
        (model / "config.pbtxt").unlink()
    [warning] = look(model, root).warnings
    assert warning.startswith(
        f"{root}/m: name the inputs and outputs, in config.pbtxt or in _schema."
    )
    assert "or in auto_complete_config of its Python" in warning
    (model / "1" / "base.py").write_text("def auto_complete_config(config): ...")
    assert look(model, root).warnings == ()


@pytest.mark.parametrize("config", [None, 'platform: "pytorch_libtorch"'])
def test_torchscript_is_odd_when_nothing_names_its_tensors(root, config):
    """Triton says of it that its configuration expects 0 inputs."""
    model = make(root / "m", config or "", files=["1/model.pt"])
    if config is None:
        (model / "config.pbtxt").unlink()
    [warning] = look(model, root).warnings
    assert "in config.pbtxt or in _schema.json (docs/packages.md#schemas): Triton can" in warning
    if config is None:
        (model / "_schema.json").write_text('{"inputs": [], "outputs": []}')
    else:
        (model / "config.pbtxt").write_text(config + 'input { name: "IN__0" dims: 1 }')
    assert look(model, root).warnings == ()


def test_runtime_in_python_is_not_odd_without_tensors(root):
    config = 'backend: "pytorch" runtime: "model.py"'
    assert look(make(root / "m", config, files=["1/model.py"]), root).warnings == ()


def test_lone_python_file_without_tensors_is_odd(root):
    (root / "model.py").write_text("class TritonPythonModel: ...")
    [warning] = look(root / "model.py", root).warnings
    assert "Triton will refuse every inference" in warning


@pytest.mark.parametrize("name", ["config.pbtext", "config.pbtx", "Config.pbtxt"])
def test_a_config_of_a_misspelt_name_is_odd(root, name):
    make(root / "m", TELLING, files=["1/model.py"]).joinpath("config.pbtxt").rename(
        root / "m" / name
    )
    [warning] = look(root / "m", root).warnings
    assert warning.endswith(f"m/{name} is not read; did you mean config.pbtxt?")


@pytest.mark.parametrize(
    "name", ["adapter_content_type", "Adapter_Content_Types", "adapter-content-types"]
)
def test_an_almost_known_parameter_is_odd(root, name):
    given = f'{TELLING}\nparameters {{ key: "{name}" value {{ string_value: "text/csv" }} }}'
    [warning] = look(make(root / "m", given, files=["1/model.py"]), root).warnings
    assert warning.endswith(
        f"config.pbtxt: parameter {name!r} says nothing to the adapter; "
        "did you mean adapter_content_types?"
    )


@pytest.mark.parametrize("name", ["content", "adapter_path", "EXECUTION_ENV_PATH", "memory_bytes"])
def test_parameter_of_model_s_own_is_not_odd(root, name):
    given = f'{TELLING}\nparameters {{ key: "{name}" value {{ string_value: "1MiB" }} }}'
    assert look(make(root / "m", given, files=["1/model.py"]), root).warnings == ()


def test_a_config_is_not_a_package(root):
    path = make(root / "m", TELLING, files=["1/model.py"]) / "config.pbtxt"
    with pytest.raises(
        InvalidModel, match=r"config\.pbtxt: name its folder; it is a config and no model"
    ):
        look(path, root)


def test_only_folder_with_config_is_model(root):
    folder = make(root / "archive" / "m")
    (root / "archive" / "README.md").write_text("loose")
    make(root / "archive" / "__MACOSX")
    make(root / "archive" / ".cache")
    (root / "archive" / "notes").mkdir()
    (part,) = look(root / "archive", root).parts
    assert part.links == (Link("1", str(folder / "1")),)


def test_one_folder_around_several_models_does_not_count(root):
    make(root / "m" / "all" / "one")
    make(root / "m" / "all" / "two", ensemble("one"), files=())
    (root / "m" / "__MACOSX").mkdir()
    package = look(root / "m", root)
    assert [part.own_name for part in package.parts] == ["one", "two"]


# --- several models


def roles(package):
    return [(part.own_name, part.role) for part in package.parts]


def test_ensemble_is_entry_and_others_steps(root):
    make(root / "m" / "one")
    make(root / "m" / "two")
    make(root / "m" / "whole", ensemble("one", "two"), files=())
    package = look(root / "m", root)
    assert roles(package) == [("one", Role.STEP), ("two", Role.STEP), ("whole", Role.ENTRY)]
    assert package.parts[-1].folders == ("1",)
    assert package.parts[0].folders == ()
    assert package.backends == {"python"}


def test_version_folder_of_ensemble_is_not_made_twice(root):
    make(root / "m" / "one")
    make(root / "m" / "whole", ensemble("one"), files=())
    (root / "m" / "whole" / "3").mkdir()
    assert look(root / "m", root).parts[-1].folders == ()


def test_model_named_by_code_is_a_helper(root):
    make(root / "m" / "a-main")
    (root / "m" / "a-main" / "1" / "model.py").write_text("NAMES = ['z-helper', \"other\"]")
    make(root / "m" / "z-helper")
    assert roles(look(root / "m", root)) == [("z-helper", Role.HELPER), ("a-main", Role.ENTRY)]


def test_model_without_config_is_a_part(root):
    make(root / "m" / "whole", ensemble("net"), files=())
    (root / "m" / "net" / "1").mkdir(parents=True)
    (root / "m" / "net" / "1" / "model.onnx").write_text("x")
    (root / "m" / "docs").mkdir()
    package = look(root / "m", root)
    assert roles(package) == [("net", Role.STEP), ("whole", Role.ENTRY)]
    assert package.backends == {"onnxruntime"}


def test_what_the_models_declare_is_added_up(root):
    size = 'parameters {{ key: "memory_bytes" value {{ string_value: "{}" }} }}'
    make(root / "m" / "one", PYTHON + size.format(100))
    make(root / "m" / "two", PYTHON + size.format(23))
    make(root / "m" / "whole", ensemble("one", "two"), files=())
    assert look(root / "m", root).declared_bytes == 123


# --- the schema


def test_a_schema_that_is_no_file_is_refused(root):
    folder = make(root / "m")
    (root / "folder").mkdir()
    assert "folder: Is a directory" in refusal(folder, root, schema=str(root / "folder"))
    assert "absent: No such file" in refusal(folder, root, schema=str(root / "absent"))


# --- hints


def test_each_hint_gives_another_key(root):
    folder = make(root / "m" / "one").parent
    make(folder / "two")
    keys = {look(folder, root, entry=name).content_key for name in ("one", "two")}
    assert len(keys) == 2


# --- the config


@pytest.mark.parametrize(
    ("size", "expected"), [("700MiB", 700 * 2**20), ("1.5 GiB", 3 * 2**29), ("12", 12)]
)
def test_memory_bytes_are_declared_in_the_parameters(size, expected, root):
    config = f'{PYTHON}parameters {{ key: "memory_bytes" value {{ string_value: "{size}" }} }}'
    assert look(make(root / "m", config), root).declared_bytes == expected


@pytest.mark.parametrize("size", ["", "lots", "-1", "1" * 400 + ".0", "1" * 5000])
def test_memory_bytes_that_are_no_size_are_refused(size, root):
    config = f'{PYTHON}parameters {{ key: "memory_bytes" value {{ string_value: "{size}" }} }}'
    assert "config.pbtxt: parameter memory_bytes: " in refusal(make(root / "m", config), root)


def test_the_callers_word_beats_what_the_config_declares(root):
    config = PYTHON + 'parameters { key: "memory_bytes" value { string_value: "12" } }'
    make(root / "m", config)
    assert look(root / "m", root, declared_bytes=0).declared_bytes == 0
    assert look(root / "m", root, declared_bytes=99).declared_bytes == 99
    make(root / "silent")
    assert look(root / "silent", root, declared_bytes=99).declared_bytes == 99
    with_word, without = (look(root / "m", root, declared_bytes=n) for n in (99, None))
    assert with_word.content_key == without.content_key


# --- where it runs


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", None),
        ("instance_group [{ count: 2 }]", None),
        ("instance_group [{ kind: KIND_GPU }]", None),
        ("instance_group [{ kind: KIND_MODEL }]", None),
        ("instance_group [{ kind: KIND_CPU }]", set()),
        ("instance_group [{ kind: KIND_GPU gpus: [0, 2] }]", {0, 2}),
        ("instance_group [{ gpus: 1 }]", {1}),
        ("instance_group [{ kind: KIND_CPU }, { gpus: [1] }, { gpus: [3, 1] }]", {1, 3}),
        ("instance_group [{ kind: KIND_CPU }, { count: 1 }, { gpus: [3] }]", None),
    ],
)
def test_gpus_are_those_that_instance_groups_name(groups, expected, root):
    found = look(make(root / "m", PYTHON + groups), root).gpus
    assert found == expected
    assert found is None or isinstance(found, frozenset)


@pytest.mark.parametrize(
    ("groups", "is_open"),
    [
        ("", True),
        ("instance_group [{ count: 2 }]", True),
        ("instance_group [{ kind: KIND_CPU }, { kind: KIND_GPU }]", True),
        ("instance_group [{ kind: KIND_CPU }]", False),
        ("instance_group [{ kind: KIND_MODEL }]", False),
        ("instance_group [{ count: 1 }, { gpus: [0] }]", False),
    ],
)
def test_gpus_are_open_unless_named(groups, is_open, root):
    assert look(make(root / "m", PYTHON + groups), root).leaves_gpu_open is is_open


def test_gpus_are_closed_where_some_are_named(root):
    for name, group in (("one", "gpus: [0]"), ("two", "count: 1")):
        make(root / "m" / name, f"{PYTHON}instance_group [{{ {group} }}]")
    make(root / "m" / "whole", ensemble("one", "two"), files=())
    assert not look(root / "m", root).leaves_gpu_open


def test_gpus_are_closed_for_cpu_backends(root):
    package = look(make(root / "m", 'backend: "openvino"', files=("1/model.xml",)), root)
    assert not package.leaves_gpu_open


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ("gpus: [0]", "gpus: [1]", {0, 1}),
        ("gpus: [0]", "kind: KIND_CPU", {0}),
        ("kind: KIND_CPU", "kind: KIND_CPU", set()),
        ("gpus: [0]", "count: 1", None),
    ],
)
def test_all_models_gpus_count_but_ensembles(one, two, expected, root):
    for name, group in (("one", one), ("two", two)):
        make(root / "m" / name, f"{PYTHON}instance_group [{{ {group} }}]")
    make(root / "m" / "whole", ensemble("one", "two"), files=())
    assert look(root / "m", root).gpus == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PYTHON, 1),
        (f"{PYTHON}instance_group [{{ count: 2 }}, {{ count: 1 kind: KIND_CPU }}]", 2),
        (f"{PYTHON}instance_group [{{ kind: KIND_CPU }}]", 0),
        (f"{PYTHON}instance_group [{{ kind: KIND_GPU }}]", 1),
        ('backend: "onnxruntime" instance_group [{ count: 3 }]', 1),
        ('backend: "vllm"', None),
    ],
)
def test_processes_are_tritons_plus_python_instances(config, expected, root):
    files = ("1/model.onnx",) if "onnx" in config else ("1/model.py", "1/model.json")
    package = look(make(root / "m", config, files=files), root)
    assert package.processes == expected


def test_model_without_config_may_run_on_any_gpu(root):
    (root / "m").mkdir()
    (root / "m" / "net.onnx").write_text("x")
    assert look(root / "m", root).gpus is None
    assert look(root / "m", root).leaves_gpu_open


WHOLE = """platform: "ensemble"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "step" %s
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }
"""


@rows(
    ("version", "policy", "reason"),
    [
        ("", "", "set model_version to -1, for the latest; it has none"),
        ("model_version: 0", "", "it has none"),
        ("model_version: 3", "", "for the latest; it is 3, and served are 2"),
        ("model_version: 1", "", "it is 1, and served are 2"),
        ("model_version: 2", "specific { versions: [1] }", "it is 2, and served are 1"),
        ("model_version: -1", "", None),
        ("model_version: 2", "", None),
        ("model_version: 1", "all { }", None),
    ],
)
def test_step_of_unserved_version_is_refused(root, version, policy, reason):
    """Triton names such a step by its private name, which nobody has seen."""
    step = PYTHON + (f"version_policy {{ {policy} }}" if policy else "")
    make(root / "m" / "step", step, files=["1/model.py", "2/model.py"])
    make(root / "m" / "whole", WHOLE % version, files=[])
    if reason is None:
        assert look(root / "m", root)
        return
    text = refusal(root / "m", root)
    assert text.startswith(f"{root}/m/whole/config.pbtxt: step 'step': set")
    assert reason in text


def test_step_without_config_has_version_of_its_folder(root):
    (make(root / "m" / "step", "", files=["3/model.py"]) / "config.pbtxt").unlink()
    make(root / "m" / "whole", WHOLE % "model_version: 3", files=[])
    assert look(root / "m", root)


def declaring(value):
    entry = f'parameters {{ key: "adapter_entry" value {{ string_value: "{value}" }} }}'
    return TELLING + entry


def test_entry_is_the_model_whose_config_says_so(root):
    """SageMaker, ModelMesh and stores cannot name it in the load."""
    make(root / "m" / "a", TELLING, files=["1/model.py"])
    make(root / "m" / "b", declaring("true"), files=["1/model.py"])
    make(root / "m" / "c", declaring("false"), files=["1/model.py"])
    assert look(root / "m", root).parts[-1].own_name == "b"
    (root / "m" / "b" / "config.pbtxt").write_text(declaring("yes"))
    assert "parameter adapter_entry: 'yes' is neither true nor false" in refusal(root / "m", root)


def test_entry_is_the_model_whose_code_calls_others(root):
    for name in ("a", "b", "c"):
        make(root / "m" / name, TELLING, files=["1/model.py"])
    (root / "m" / "b" / "1" / "model.py").write_text("pb_utils.InferenceRequest(model_name=x)")
    assert look(root / "m", root).parts[-1].own_name == "b"
