"""Paths in a config stay in the model's folder, or within the model roots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.errors import InvalidModel
from adapter.packages.config_paths import (
    FILES,
    LIBRARIES,
    NAMES,
    NO_PATHS,
    PARAMETER,
    SHELL_WORDS,
    VALUES,
    find_path_faults,
)
from adapter.packages.messages import refuse_faults
from tests.cases import rows

PATH = Path("m/config.pbtxt")
OUTSIDE = "is outside the model roots, and the config of a load call may name no such path"


def label(name: str) -> str:
    return f'output {{ name: "a" label_filename: "{name}" }}'


def warmup(name: str) -> str:
    return f'model_warmup {{ inputs {{ key: "a" value {{ input_data_file: "{name}" }} }} }}'


def state(name: str) -> str:
    return f'sequence_batching {{ state {{ initial_state {{ data_file: "{name}" }} }} }}'


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def library(name: str) -> str:
    return f'model_operations {{ op_library_filename: "{name}" }}'


def accelerator(value: str, name: str = "tensorrt", kind: str = "gpu") -> str:
    given = f'name: "{name}" parameters {{ key: "cache" value: "{value}" }}'
    field = f"{kind}_execution_accelerator"
    return f"optimization {{ execution_accelerators {{ {field} {{ {given} }} }} }}"


def group(name: str) -> str:
    return f'instance_group {{ name: "{name}" kind: KIND_CPU }}'


def agent(name: str, value: str = "x") -> str:
    given = f'name: "{name}" parameters {{ key: "k" value: "{value}" }}'
    return f"model_repository_agents {{ agents {{ {given} }} }}"


def refuse(text: str, call_roots: list[str] | None = None) -> None:
    config = text_format.Parse(text, ModelConfig())
    refuse_faults(PATH, find_path_faults(config, call_roots))


def refusal(text: str, call_roots: list[str] | None = None) -> str:
    with pytest.raises(InvalidModel) as caught:
        refuse(text, call_roots)
    return str(caught.value)


@rows(
    ("text", "fault"),
    [
        (label("../../etc/passwd"), "output.label_filename '../../etc/passwd' leaves the model's"),
        (label("/etc/passwd"), "'/etc/passwd' leaves the model's folder"),
        (label("1/../../../x"), "'1/../../../x' leaves the model's folder"),
        (label("link/.."), "'link/..' leaves the model's folder"),
        (label(r"a\000b"), "leaves the model's folder"),
        (warmup("../x"), "input_data_file '../x' leaves the model's folder warmup"),
        (state("../x"), "data_file '../x' leaves the model's folder initial_state"),
        ('default_model_filename: "../x"', "leaves the version folder"),
        ('default_model_filename: "/etc/passwd"', "leaves the version folder"),
        ('default_model_filename: "a/.."', "leaves the version folder"),
        ('cc_model_filenames { key: "8.0" value: "../x" }', "leaves the version folder"),
        ('backend: "../x"', "backend '../x' is not a name"),
        ('backend: ".."', "backend '..' is not a name"),
        ('runtime: "/opt/x.so"', "runtime '/opt/x.so' is not a name"),
        ('platform: "a/b"', "platform 'a/b' is not a name"),
        (agent("../x"), "model_repository_agents.agents.name '../x' is not a name"),
        (group("$(touch x)"), "instance_group.name '$(touch x)' has characters other than letters"),
        (group("a b"), "instance_group.name 'a b' has characters"),
        (group("a;b"), "instance_group.name 'a;b' has characters"),
        (group(r"a\nb"), "has characters"),
        (group("../x"), "instance_group.name '../x' has characters"),
        (accelerator("", "/../../x"), "gpu_execution_accelerator.name '/../../x' is not a name"),
        (accelerator("", "a/b", "cpu"), "cpu_execution_accelerator.name 'a/b' is not a name"),
        (library("../x.so"), "model_operations.op_library_filename '../x.so' has a part '..'"),
        (library("/opt/../x.so"), "has a part '..'"),
        (
            parameter("TRITON_BATCH_STRATEGY_PATH", "../x.so"),
            "TRITON_BATCH_STRATEGY_PATH '../x.so' has a part '..'",
        ),
        (
            parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/../env"),
            "EXECUTION_ENV_PATH leaves the model's folder: '$$TRITON_MODEL_DIRECTORY/../env'",
        ),
    ],
)
def test_path_is_refused_whatever_the_source(text, fault):
    for call_roots in (None, ["/"]):
        message = refusal(text, call_roots)
        assert message.startswith("m/config.pbtxt: ")
        assert fault in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        label("labels.txt"),
        label("words/./en/labels.txt"),
        label("a..b/..c"),
        label(""),
        warmup("raw"),
        state("zeros/raw"),
        'default_model_filename: "a/..b" cc_model_filenames { key: "8.0" value: "b..c" }',
        'backend: "onnxruntime" runtime: "libown.so"',
        'platform: "onnxruntime_onnx"',
        agent("checksum", "MD5:d41d8cd98f00b204e9800998ecf8427e"),
        library("libops.so"),
        parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env"),
        parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/a/../env.tar.gz"),
        parameter("tokenizer", "a/b"),
        'backend: "python"' + parameter("tokenizer", "/opt/tokenizer"),
        'metric_tags { key: "a" value: "/b/../c" }',
        'input { name: "a/../b" }',
        group("cpu-0_a.b"),
        group(""),
        'instance_group { host_policy: "numa/0" }',
    ],
)
def test_ordinary_path_passes_whatever_the_source(text):
    for call_roots in (None, [], ["/models"]):
        refuse(text, call_roots)


ABSOLUTE = [
    library("%s/x.so"),
    parameter("TRITON_BATCH_STRATEGY_PATH", "%s/x.so"),
    parameter("EXECUTION_ENV_PATH", "%s/env.tar.gz"),
    'backend: "tensorrtllm"' + parameter("engine", "%s/engine"),
    'backend: "python"' + parameter("EXECUTION_ENV_PATH", "%s/env.tar.gz"),
    accelerator("%s/cache"),
    agent("checksum", "%s/x"),
]


@pytest.mark.parametrize("text", ABSOLUTE)
def test_absolute_path_is_package_s_or_within_roots(text, tmp_path):
    """A package brings code anyway; the `config` of a call may come without any."""
    root = tmp_path.resolve() / "models"
    root.mkdir()
    (root / "out").symlink_to("/etc")

    refuse(text % "/opt")
    refuse(text % root, [str(root)])
    for outside in ("/opt", f"{root}/out", f"{root}2"):
        assert OUTSIDE in refusal(text % outside, [str(root)])
    assert refusal(text % f"{root}/..", [str(root)])


@pytest.mark.parametrize(
    "text", [parameter("engine", "../x"), accelerator("a/../../x"), agent("checksum", "..")]
)
def test_relative_value_cannot_lead_up(text):
    refuse(text)
    assert OUTSIDE in refusal(text, ["/"])


@pytest.mark.parametrize("text", [library("lib/x.so"), parameter("EXECUTION_ENV_PATH", "env/x")])
def test_relative_library_of_call_is_name_alone(text):
    """It would be relative to the folder that Triton runs in, which may be /."""
    refuse(text)
    assert OUTSIDE in refusal(text, ["/models"])


def string_fields(message: Any, above: str, parents: tuple[Any, ...]) -> Iterator[str]:
    for field in message.fields:
        place = above + field.name
        if field.type == FieldDescriptor.TYPE_STRING:
            yield place
        elif field.message_type is not None and field.message_type not in parents:
            yield from string_fields(
                field.message_type, f"{place}.", (*parents, field.message_type)
            )


def test_every_string_field_is_in_one_table():
    """Decide of a new field whether Triton makes a path of it, and add it to its table."""
    tables = [*FILES, *NAMES, *SHELL_WORDS, *LIBRARIES, *VALUES, PARAMETER, *NO_PATHS]

    assert sorted(tables) == sorted(string_fields(ModelConfig.DESCRIPTOR, "", ()))


def test_field_of_no_table_is_taken_for_file(monkeypatch):
    """A newer schema may be installed than the one that the tables are of."""
    monkeypatch.setattr("adapter.packages.config_paths.NO_PATHS", NO_PATHS - {"name"})

    refuse('name: "a"')
    assert "name '../a' leaves the model's folder" in refusal('name: "../a"')
