"""The models that the clients are compared on."""

from pathlib import Path

from tests.trees import write_python_model

KINDS = {
    **{kind: kind for kind in ("BOOL", "BF16", "FP16", "FP32", "FP64")},
    "BYTES": "STRING",
    **{f"{sign}INT{bits}": f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
}

# Gives back what it gets, whatever is among the inputs.
_IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [self.copy("OUT" + given.name()[2:], given) for given in request.inputs()]
            )
            for request in requests
        ]

    def copy(self, name, given):
        if name == "OUT_BF16":  # numpy has no such type
            return pb_utils.Tensor.from_dlpack(name, given)
        return pb_utils.Tensor(name, given.as_numpy())
"""

# The sum of a sequence so far. One at a time.
_SUMS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given, start = (
            pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("IN", "START")
        )
        self.sum = given + (0 if start.item() else self.sum)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.sum)])
"""

# As many answers as the input says, 0 and below none at all; 13 fails after the first.
_COUNTS = """
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            for i in range(min(count, 5)):
                tensor = pb_utils.Tensor("OUT", numpy.array([i], numpy.float32))
                sender.send(pb_utils.InferenceResponse([tensor]))
                if count == 13:
                    error = pb_utils.TritonError("unlucky")
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_FP32 = """\
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
"""

_KINDS = 'backend: "python"\nmax_batch_size: 0\n' + "".join(
    f'input [{{ name: "IN_{name}" data_type: TYPE_{kind} dims: [-1] optional: true }}]\n'
    f'output [{{ name: "OUT_{name}" data_type: TYPE_{kind} dims: [-1] }}]\n'
    for name, kind in KINDS.items()
)
_CLASSES = """\
backend: "python"
max_batch_size: 2
input [{ name: "IN" data_type: TYPE_FP32 dims: [3] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }]
"""
_SEQUENCES = """\
backend: "python"
max_batch_size: 1
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
sequence_batching {
  control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] }
  ]
}
"""
_QUEUED = """\
backend: "python"
max_batch_size: 1
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
dynamic_batching { priority_levels: 2 default_priority_level: 1 }
"""
_OUTPUT = 'output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]\n'
_DECOUPLED = _FP32 + _OUTPUT + "model_transaction_policy { decoupled: true }\n"

_MOODS = """\
kind = int(values[0])
if kind == 1:
    raise ValueError("the model is in a mood")
if kind == 2:
    error = pb_utils.TritonError("too odd for me", pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)
if kind == 3:
    time.sleep(1)
"""


def write_client_models(root: Path) -> list[Path]:
    """One package for each thing that clients can ask for."""
    bodies = {
        "kinds": (_KINDS, _IDENTITY),
        "classes": (_CLASSES, _IDENTITY),
        "sums": (_SEQUENCES, _SUMS),
        "queued": (_QUEUED, _IDENTITY),
        "counts": (_DECOUPLED, _COUNTS),
    }
    for name, (config, code) in bodies.items():
        write_python_model(root / name, config=config)
        (root / name / "1" / "model.py").write_text(code)
    (root / "classes" / "labels.txt").write_text("cat\ndog\nfish\n")
    write_python_model(root / "moody", imports="import time", answer=_MOODS)
    return [root / name for name in (*bodies, "moody")]
