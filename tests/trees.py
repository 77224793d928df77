"""Writes model packages for tests: python-backend models with the body a test wants."""

from pathlib import Path
from textwrap import dedent, indent

CONFIG = """\
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

_MODEL = """\
import triton_python_backend_utils as pb_utils
{imports}

class TritonPythonModel:
    def initialize(self, args):
{initialize}

    def execute(self, requests):
        return [self.answer(r) for r in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
{answer}
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)])

    def finalize(self):
{finalize}
"""


def write_python_model(
    folder: Path,
    *,
    initialize: str = "pass",
    answer: str = "pass",
    finalize: str = "pass",
    imports: str = "",
    config: str = CONFIG,
    version: str = "1",
) -> Path:
    """IN -> OUT, FP32 [-1]. The bodies are statements; `answer` sees `values` and `request`."""
    (folder / version).mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / version / "model.py").write_text(
        _MODEL.format(
            imports=dedent(imports),
            initialize=indent(dedent(initialize), " " * 8),
            answer=indent(dedent(answer), " " * 8),
            finalize=indent(dedent(finalize), " " * 8),
        )
    )
    return folder


def infer_body(*values: float) -> dict[str, object]:
    return {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [len(values)], "data": list(values)}]
    }
