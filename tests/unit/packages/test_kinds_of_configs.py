"""Configs of forty kinds are staged as they are, but for what docs/packages.md lists.

They are as people and tools write them: with comments, in every spelling of the text format, for
every backend, with each field that public configs have.
"""

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.packages.config_text import without_name
from adapter.packages.staging import Packages
from tests.unit.packages.looking import make

TENSORS = """input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
"""
PYTHON = f'backend: "python"\n{TENSORS}'
ONNX = f'name: "m"\nplatform: "onnxruntime_onnx"\n{TENSORS}'
PLAN = f'platform: "tensorrt_plan"\n{TENSORS}'
SEQUENCE = """sequence_batching {
  max_sequence_idle_microseconds: 5000000
  control_input [ {
    name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } ]
  } ]
%s}
"""

CONFIGS = {
    # -- spellings of the text format
    "with comments": f'# a model\nname: "m"  # its name\n{PYTHON}# the end',
    "of Windows": PYTHON.replace("\n", "\r\n"),
    "with colons before braces": 'backend: "python" input: { name: "IN" data_type: 11, dims: 1 };',
    "with angle brackets": 'backend: "python" input < name: "IN" data_type: TYPE_FP32 dims: 1 >',
    "with escapes": PYTHON + 'parameters { key: "a\\"b" value { string_value: "\\303\\251\\n" } }',
    "with a blank behind the minus": PYTHON.replace("-1", "- 1"),
    "with a byte order mark": "\ufeff" + PYTHON,
    "with a field of a newer Triton": PYTHON + 'tomorrow { a: [ 1, 2 ] b: "c" }\n',
    # -- backends
    "of onnxruntime by platform": ONNX,
    "of tensorrt": PLAN,
    "of pytorch": 'platform: "pytorch_libtorch"\n' + TENSORS,
    "of pytorch in Python": 'backend: "pytorch"\nruntime: "model.py"\n' + TENSORS,
    "of vllm": 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n',
    "of a backend of its own": 'backend: "own"\nruntime: "libtriton_own.so"\n' + TENSORS,
    # -- fields
    "with dynamic batching": f"max_batch_size: 8\n{PYTHON}"
    "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }\n",
    "with ragged batching": PLAN.replace("dims:", "allow_ragged_batch: true dims:"),
    "with sequences": f"max_batch_size: 4\n{PYTHON}" + SEQUENCE % "  direct { }\n",
    "with states": f"max_batch_size: 4\n{PYTHON}"
    + SEQUENCE
    % '  state [ { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] } ]\n',
    "decoupled": PYTHON + "model_transaction_policy { decoupled: True }\n",
    "with instances on CPUs": PYTHON + "instance_group [ { kind: KIND_CPU count: 2 } ]\n",
    "with versions": PYTHON + "version_policy: { all { } }\n",
    "with labels": PYTHON.replace('"OUT"', '"OUT" label_filename: "labels.txt"'),
    "with warm-up": PYTHON + 'model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN"'
    " value { data_type: TYPE_FP32 dims: [ 1, 3 ] zero_data: true } } } ]\n",
    "with the response cache": PYTHON + "response_cache { enable: true }\n",
    "with an environment": PYTHON + 'parameters { key: "EXECUTION_ENV_PATH"'
    ' value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }\n',
    "with a reshape": PYTHON.replace("dims: [ -1, 2 ]", "dims: [ 2 ] reshape { shape: [ 1, 2 ] }"),
    "with what the adapter reads": PYTHON
    + 'parameters { key: "memory_bytes" value { string_value: "1MiB" } }\n',
}
FILES = (
    *("1/model.py", "1/model.onnx", "1/net.onnx", "1/model.plan", "1/model.pt", "1/model.graphdef"),
    *("1/model.xml", "1/xgboost.json", "1/model.dali", "1/model.json", "libtriton_own.so"),
    *("labels.txt", "env.tar.gz"),
)


def parsed(text: str) -> ModelConfig:
    # Python's parser knows no blank behind a minus
    plain = text.removeprefix("\ufeff").replace("- 1", "-1")
    return text_format.Parse(plain, ModelConfig(), allow_unknown_field=True)


@pytest.mark.parametrize("kind", CONFIGS)
async def test_config_is_staged_as_it_is(kind, tmp_path):
    text = CONFIGS[kind]
    package = make(tmp_path / "models" / "m", text, files=FILES)
    (tmp_path / "repository").mkdir()
    packages = Packages(tmp_path / "repository", [tmp_path / "models"])
    name = TritonName("staged")
    found = await packages.prepare(name, ModelId("staged"), ModelSource(str(package)))
    await packages.place(name, ModelId("staged"), found)
    staged = (tmp_path / "repository" / "staged" / "config.pbtxt").read_bytes().decode()
    assert staged == without_name(text)
    expected = parsed(text)
    expected.ClearField("name")
    assert parsed(staged) == expected
