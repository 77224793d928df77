import struct

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        png = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()[0]
        if not png.startswith(b"\x89PNG"):
            raise pb_utils.TritonModelException("the body is not a PNG")
        size = np.array(struct.unpack(">II", png[16:24]), np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SIZE", size)])
