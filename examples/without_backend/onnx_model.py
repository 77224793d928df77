"""A model.py that serves the model.onnx beside it, by onnxruntime in Triton's Python."""

from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

FILE = Path(__file__).with_name("model.onnx")
SIZES = (8, 16, 32, 64)
TYPES = {"float16": "FP16", "float": "FP32", "double": "FP64", "bool": "BOOL", "string": "STRING"}
TYPES |= {f"{kind}{size}": f"{kind}{size}".upper() for kind in ("int", "uint") for size in SIZES}


def described(tensor):
    kind = tensor.type.removeprefix("tensor(").removesuffix(")")
    dims = [size if isinstance(size, int) else -1 for size in tensor.shape]
    return {"name": tensor.name, "data_type": "TYPE_" + TYPES[kind], "dims": dims}


def decoded(values):
    """Texts come as bytes, and onnxruntime would take their `repr`."""
    is_text = values.dtype == np.object_
    return np.vectorize(bytes.decode, otypes=[object])(values) if is_text else values


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        session = onnxruntime.InferenceSession(FILE)
        for tensor in session.get_inputs():
            config.add_input(described(tensor))
        for tensor in session.get_outputs():
            config.add_output(described(tensor))
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        self.session = onnxruntime.InferenceSession(FILE)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        inputs = {tensor.name(): decoded(tensor.as_numpy()) for tensor in request.inputs()}
        names = [tensor.name for tensor in self.session.get_outputs()]
        values = self.session.run(names, inputs)
        outputs = [pb_utils.Tensor(name, value) for name, value in zip(names, values, strict=True)]
        return pb_utils.InferenceResponse(outputs)
