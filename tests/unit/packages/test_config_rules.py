"""Values of a config.pbtxt that no Triton takes; tests/packages/test_inspect_agrees.py asks one."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.errors import InvalidModel
from adapter.packages.config_rules import find_config_faults, served_versions
from adapter.packages.messages import refuse_faults
from tests.cases import rows

PATH = Path("m/config.pbtxt")


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


@rows(
    ("text", "fault"),
    [
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }", "size 0 is not between"),
        ('metric_tags { key: "a b" value: "x" }', "metric_tags 'a b': a key is letters"),
        ('metric_tags { key: "a-b" value: "x" }', "metric_tags 'a-b': a key is letters"),
        ('metric_tags { key: "_a" value: "x" }', "metric_tags '_a': a key is letters"),
        (r'metric_tags { key: "\303\251" value: "x" }', "metric_tags 'é': a key is letters"),
        (r'metric_tags { key: "a\n" value: "x" }', "a key is letters"),
        (f'input {{ name: "a" dims: [{", ".join(["0"] * 50)}] }}', "0, 0 and 40 more]: each must"),
    ],
)
def test_an_impossible_value_is_refused_by_its_field(text, fault):
    with pytest.raises(InvalidModel) as caught:
        refuse_faults(PATH, find_config_faults(config(text)))
    assert str(caught.value).startswith("m/config.pbtxt: ")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'input { name: "a" }',  # a backend may complete it
        'input { name: "a" dims: [-1, 3] reshape { shape: [-1] } }',
        'input { name: "a" dims: [6] reshape { shape: [2, 3] } }',
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: [1, 4] }",
        "instance_group { kind: KIND_GPU gpus: [7] }",
        "instance_group { gpus: [7] }",
        'metric_tags { key: "a_1_" value: "a b\\n" } metric_tags { key: "1" value: "" }',
        'metric_tags { key: "" value: "x" }',
    ],
)
def test_what_some_triton_may_take_is_let_through(text):
    refuse_faults(PATH, find_config_faults(config(text)))


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["9", "10"]),
        ("version_policy { latest { num_versions: 9 } }", ["2", "9", "10"]),
        ("version_policy { all { } }", ["2", "9", "10"]),
        ("version_policy { specific { versions: [9, 3] } }", ["9"]),
    ],
)
def test_policy_or_latest_number_chooses_versions(policy, served):
    assert served_versions(config(policy), ["10", "2", "9"]) == served


@pytest.mark.parametrize("policy", ["latest { num_versions: 0 }", "specific { versions: [3] }"])
def test_policy_for_absent_version_says_so(policy):
    with pytest.raises(ValueError, match="there is 2, 9, 10"):
        served_versions(config(f"version_policy {{ {policy} }}"), ["10", "2", "9"])
